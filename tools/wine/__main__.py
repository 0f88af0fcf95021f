"""``python -m tools.wine SCRIPT …`` runs Python for Windows with this tree's fitter, under wine; alone, it makes ready.

Its arguments are Python's own: ``python -m tools.wine -m fitter --version``.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import IO

from tools.builds.llama_builds import FetchError
from tools.wine import place


def main(arguments: list[str]) -> int:
    """Run it with these arguments, its streams copied to this process's: files would not do."""
    try:
        place.prepare()
        if not arguments:
            print(f"wine, Python for Windows and its packages are in {place.PLACE}")
            print("\n".join(f"llama.cpp {name} is in {place.build(name)}" for name in place.BUILDS))
            return 0
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            place.command(*arguments), env=place.environment(), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
    except FetchError as error:
        print(f"wine: {error}", file=sys.stderr)
        return 1
    copies = [
        threading.Thread(target=_copy, args=streams)
        for streams in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer))
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.join()
    return process.wait()


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    while data := source.read1():  # type: ignore[attr-defined]
        target.write(data)
        target.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
