"""Several models on one machine: which are in memory together, and which makes room for which. Numbers only."""

GOALS = ("time", "resident", "alone")
"""Least time of a request; most models in memory; each as fast as alone, in turns."""
