"""A disk without room, in a place of files that only one command and what it starts see."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.patience import SECONDS

VARIABLE = "FITTER_FULL_DISK"
"""Names the folder that is such a disk to the tests within the command."""

_MOUNT = """\
for sockets in /tmp/.wine-* /tmp/wine-*; do
  [ ! -d "$sockets" ] || mount -t tmpfs -o mode=700 none "$sockets" || exit 120
done
mount -t tmpfs -o size=16k none "$1" || exit 120
head -c 16k /dev/zero >"$1/filler"
shift
exec "$@"
"""
"""wine's server opens the files of its programs, so that a server that runs already would not see the disk."""


def with_full_disk(folder: Path) -> list[str]:
    """Return the command that runs another one where the folder is a full disk; nothing if nobody may mount one."""
    folder.mkdir()
    command = ["unshare", "-rm", "sh", "-c", _MOUNT, "sh", str(folder)]
    try:
        can_mount = subprocess.run([*command, "true"], capture_output=True, timeout=SECONDS).returncode == 0
    except OSError:
        can_mount = False
    return command if can_mount else []
