"""Headers with one value at an extreme, through every way into fitter: ``python -m tools.mutated_headers``."""
