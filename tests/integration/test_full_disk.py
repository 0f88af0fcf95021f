"""The tests of a full disk, on Linux; Windows' Python runs them in test_under_wine.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.full_disk import VARIABLE, with_full_disk

TESTS = Path(__file__).with_name("test_every_system.py")


def test_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    within = with_full_disk(disk)
    if not within:
        pytest.skip("this machine lets nobody mount a disk of their own")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "full_disk", str(TESTS))
    environment = {**os.environ, VARIABLE: str(disk)}
    done = subprocess.run([*within, sys.executable, *words], env=environment, capture_output=True, text=True)
    assert (done.returncode, "skipped" in done.stdout) == (0, False), done.stdout[-5000:]
