"""Differences between two plans."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fitter.output.documents.plan_document import read_plan, to_dict
from fitter.planning.plan.plan import Plan
from fitter.planning.request.summary import PoolUse, Problem
from fitter.regression import check_report, compare
from fitter.regression.regression_documents import DIFF as DIFF_DOCUMENT
from tests.support.cases import cases
from tests.support.plans import make_plan

DOCUMENT = to_dict(make_plan())


def read(directory: Path, document: Any) -> Plan:
    path = directory / "plan.json"
    path.write_text(json.dumps(document))
    return read_plan(path)


def changed(*changes: Callable[[Any], object]) -> Any:
    document = copy.deepcopy(DOCUMENT)
    for change in changes:
        change(document)
    return document


def set_key(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return change


DEVICE = DOCUMENT["devices"][0]
NAME, OTHER = (device["name"] for device in DOCUMENT["devices"])

DIFFERENCES: dict[str, tuple[Any, list[str], list[str]]] = {
    "nothing": (DOCUMENT, [], []),
    "where the model is": (changed(set_key("model", "path", to="/elsewhere/a.gguf")), [], []),
    "how long it took": (changed(set_key("search", "seconds", to=99.0)), [], []),
    "a byte": (changed(set_key("devices", 0, "compute", to=DEVICE["compute"] + 1)), [f"{NAME}: compute +1 B"], []),
    "what shares a device": (changed(set_key("devices", 0, "shared", to=2**20)), [f"{NAME}: shared +1.0 MiB"], []),
    "the host": (changed(set_key("host", "model", to=DOCUMENT["host"]["model"] + 1024)), ["host: model +1.0 KiB"], []),
    "what comes later": (changed(set_key("host", "later", to=2**20)), ["host: later +1.0 MiB"], []),
    "another program": (changed(set_key("program", to="llama-server")), [], ["parameter: program any → llama-server"]),
    "a parameter": (changed(set_key("params", "n_ubatch", to=64)), [], ["parameter: n_ubatch 512 → 64"]),
    "an override": (
        changed(set_key("params", "tensor_buft_overrides", to=[{"pattern": "a", "buffer_type": "CPU"}])),
        [],
        ["parameter: tensor_buft_overrides none → a=CPU"],
    ),
    "the size of a device": (
        changed(set_key("devices", 0, "total", to=DEVICE["total"] + 1)),
        [],
        [f"{NAME}: total {DEVICE['total']} B → {DEVICE['total'] + 1} B"],
    ),
    "the host's limit": (changed(set_key("host", "free", to=2**30)), [], ["host: free unlimited → 1.0 GiB"]),
    "whether it fits": (to_dict(make_plan(problems=(Problem("host", 1, "full"),))), ["fits: "], []),
    "a device less": (
        changed(set_key("devices", to=DOCUMENT["devices"][1:]), set_key("params", "devices", to=[OTHER])),
        [f"{NAME}: "],
        [f"{NAME}: description"],
    ),
}


@cases(DIFFERENCES)
def test_differences(document: Any, moves: list[str], changes: list[str], tmp_path: Path) -> None:
    found = compare.diff(read(tmp_path, DOCUMENT), read(tmp_path, document))
    assert len(found.moves) == len(moves)
    for move, expected in zip(found.moves, moves, strict=True):
        assert f"{move.what}: {move.detail}".startswith(expected)
    said = list(map(str, found.changes))
    assert all(any(line.startswith(expected) for line in said) for expected in changes)
    assert bool(said) == bool(changes)
    assert found.is_empty == (not moves and not changes)
    shown = io.StringIO()
    check_report.print_diff(shown, found)
    assert (shown.getvalue() == "the plans are the same\n") == found.is_empty
    assert DIFF_DOCUMENT.write(found)["equal"] == found.is_empty


def test_keys_that_older_plans_lack(tmp_path: Path) -> None:
    def remove(document: Any) -> None:
        for use in (*document["devices"], document["host"]):
            del use["shared"]
        del document["host"]["later"], document["program"]

    assert compare.diff(read(tmp_path, changed(remove)), read(tmp_path, DOCUMENT)).is_empty


def test_memory_that_is_shared(tmp_path: Path) -> None:
    def shared(used: int, free: int) -> Any:
        pool = PoolUse("CUDA0+host", 64 * 2**30, free, 2**30, used, ("CUDA0", "host"))
        return to_dict(replace(make_plan(), pools=(pool,)))

    a, b = (read(tmp_path, shared(used, free)) for used, free in ((2**30, 60 * 2**30), (2**31, 50 * 2**30)))
    found = compare.diff(a, b)
    assert [f"{move.what}: {move.detail}" for move in found.moves] == ["CUDA0+host: used +1.0 GiB"]
    assert list(map(str, found.changes)) == ["CUDA0+host: free 60.0 GiB → 50.0 GiB"]
    assert compare.diff(a, read(tmp_path, DOCUMENT)).moves[0].what == "CUDA0+host"
