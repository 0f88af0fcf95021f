"""The programs that a plan can be for: what they set of a load and what they take beside it."""
