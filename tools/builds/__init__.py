"""Builds of llama.cpp to test with, beside the installed one, and what their sources declare."""
