"""The local planner: a page and a JSON API over sessions of ``fitter.Planner``. Its packages are an extra, ``web``."""
