"""Compare bytes and layers of fitter with those of real backends and of other programs."""
