"""Several models on one machine: which are in memory together, and which makes room for which. Numbers only."""
