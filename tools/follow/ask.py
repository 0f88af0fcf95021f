"""``python -m tools.follow.ask WHERE``: what a build's own libraries say, as JSON on the last line."""

from __future__ import annotations

import ctypes
import json
import sys

from fitter.errors import LibraryError
from fitter.llama.build import layouts
from fitter.llama.build.build_folder import find
from fitter.llama.build.functions import epoch_of, ggml_version, open_build
from fitter.llama.build.layouts import layout_of
from tools.follow.facts import names_of_operations


def main(where: str) -> None:
    """Load the libraries, and print the written defaults, their values by field, and the operations."""
    build = find(where)
    llama = open_build(build)
    llama.library.ggml_op_name.restype = ctypes.c_char_p

    def probe(name: str, memory: ctypes.Array[ctypes.c_char]) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)((name, llama.library))(ctypes.addressof(memory))

    written = layouts.written_by(probe)
    try:
        _, layout = layout_of(probe, build.headers)
        defaults = dict(_defaults(layout, written))
    except LibraryError:
        defaults = {}
    ggml, _ = ggml_version(llama.library)
    answer = {
        "written": {name: [each.hex() for each in both] for name, both in written.items()},
        "defaults": defaults,
        "operations": names_of_operations(llama.library.ggml_op_name, epoch_of(ggml).last_op),
        "libraries": [build.libllama, *build.libraries],
    }
    print(json.dumps(answer))


def _defaults(layout: layouts.Layout, written: dict[str, layouts.Written]) -> list[tuple[str, str]]:
    values = []
    for name, shape in layouts.structs_of(layout).items():
        params = shape.from_buffer_copy(written[name][0])
        for field, kind in layout[name].items():
            if not kind.endswith("*"):
                values.append((f"{name}.{field}", f"{getattr(params, field):g}"))
    return values


if __name__ == "__main__":
    main(sys.argv[1])
