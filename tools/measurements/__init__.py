"""Measure on real machines: loads, speeds, memory in use, and what a server answers."""
