"""Tests that need wine: skipped without it, unless CI says that it has to be there."""

from __future__ import annotations

import os

import pytest

from tools.wine import place

NEEDED = "FITTER_NEEDS_WINE"
"""The environment variable that CI sets: without wine these tests fail then, and are not skipped."""

with_wine = pytest.mark.skipif(
    not place.is_installed() and os.environ.get(NEEDED, "") in ("", "0"), reason="wine is not installed"
)
