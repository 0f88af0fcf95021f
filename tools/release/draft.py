"""A copy of the repository in which a release is made, so that the repository itself changes in the last step alone."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from tools.release.git import GitError, git
from tools.release.project import ReleaseError

BRANCH = "main"


def check_repository(root: Path, tag: str) -> list[str]:
    """Return why no release can be made of the repository at ``root``, a line each; empty if one can."""
    wrong = []
    if changed := git(root, "status", "--porcelain").splitlines():
        wrong.append(f"{changed[0][3:]} is not committed: commit it or take it away")
    if (branch := git(root, "branch", "--show-current")) != BRANCH:
        wrong.append(f"the branch is {branch or 'none'}: git switch {BRANCH}")
    if git(root, "tag", "--list", tag):
        wrong.append(f"the tag {tag} is there: give a newer version")
    return wrong


def open_draft(root: Path) -> Path:
    """Return a work tree of the last commit of ``root``, in ``build/release/tree``.

    What earlier drafts compiled is kept in it, since git ignores it; everything else is as committed.
    """
    tree = root / "build" / "release" / "tree"
    try:
        is_there = Path(git(tree, "rev-parse", "--show-toplevel")) == tree.resolve()
    except GitError:
        is_there = False
    if not is_there:
        shutil.rmtree(tree, ignore_errors=True)
        git(root, "worktree", "prune")
        git(root, "worktree", "add", "--quiet", "--detach", tree)
    git(tree, "checkout", "--quiet", "--force", "--detach", git(root, "rev-parse", "HEAD"))
    git(tree, "clean", "--quiet", "-ffd")
    return tree


def adopt(root: Path, tree: Path, tag: str, message: str) -> None:
    """Commit the draft in ``tree``, tag it, and move the branch of ``root`` there: all of it or nothing."""
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", message)
    commit = git(tree, "rev-parse", "HEAD")
    try:
        git(root, "tag", "--annotate", tag, "--message", message, commit)
        git(root, "merge", "--quiet", "--ff-only", commit)
    except BaseException as error:
        with contextlib.suppress(GitError):
            git(root, "tag", "--delete", tag)
        if isinstance(error, GitError):
            raise ReleaseError(f"{error}: see whether {BRANCH} has changed meanwhile, and release it again") from None
        raise
