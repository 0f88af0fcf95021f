"""``python -m fitter`` is the command ``fitter``."""

from fitter.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
