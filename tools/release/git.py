"""git, asked about a repository."""

from __future__ import annotations

import subprocess
from pathlib import Path


class GitError(Exception):
    """What git refused, in one line."""


def git(root: Path, *words: str | Path) -> str:
    """Run a git command in the repository at ``root`` and return what it prints. Raises ``GitError``."""
    done = subprocess.run(
        ["git", "-C", str(root), *map(str, words)], capture_output=True, text=True, encoding="utf-8", check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or "nothing was said").splitlines()[-1]
        raise GitError(f"git {words[0]}: {last.removeprefix('fatal: ').removeprefix('error: ')}")
    return done.stdout.rstrip("\n")
