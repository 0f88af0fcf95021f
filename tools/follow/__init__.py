"""Follow llama.cpp: what differs between a build and the newest known one, and the entries that make it known."""
