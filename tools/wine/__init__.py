"""fitter on Windows, without a Windows: its Python under wine, with this tree's fitter (``python -m tools.wine``)."""
