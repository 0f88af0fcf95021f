"""Run llama-server in exactly the memory that ``fitter claim`` says, under requests, and in 10 % less.

    python -m tools.measurements.claimed            small models of several kinds, 200 requests each
    python -m tools.measurements.claimed --requests 40 dense

Linux's own memory cgroup is the limit, as in Kubernetes: what takes more is killed. Where none can be made, the most
that the process had resident is compared with the claim instead. With a CUDA card, ``card`` serves a model that is on
it whole.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fitter
from fitter.errors import LlamaCppError
from fitter.planning.plan.claims import PodClaim, pod_claim
from fitter.planning.plan.plan import Plan
from fitter.programs.later import ENVIRONMENT
from fitter.programs.running_server import running
from fitter.programs.server_requests import feed
from tools.comparisons import upstream
from tools.models.tiny import TINY_DENSE, TinyModel, write_tiny
from tools.models.tiny_kinds import write_hybrid, write_swa

MIB = 2**20
REQUESTS = 200
LESS = 0.9
WIDE = TinyModel("tiny wide", n_layer=4, n_embd=64, n_head=8, n_head_kv=8, n_embd_head=128, n_ff=64, n_expert=0)
"""Few weights, and 32 KiB of f32 cache for each token: contexts and prompt caches are most of its memory."""
EXPERTS = TinyModel("experts", n_layer=4, n_embd=256, n_head=4, n_head_kv=4, n_ff=512, n_expert=256, n_expert_used=2)
"""230 MiB of weights, of which a token reads little."""
_N_VOCAB = 430
"""Tokens that every tiny model has."""


@dataclass(frozen=True)
class Load:
    """A model and what it is served with; host weights are read, so that their pages cannot be given back."""

    write: Callable[[Path], Path]
    keywords: dict[str, Any]
    is_on_card: bool = False


_WIDE = {"type_k": "f32", "type_v": "f32"}
LOADS = {
    "weights": Load(lambda path: write_tiny(path, EXPERTS), {"n_ctx": 512, "n_seq_max": 2, "cache_ram": 16}),
    "cache": Load(lambda path: write_tiny(path, WIDE), {"n_ctx": 1024, "n_seq_max": 4, "cache_ram": 256, **_WIDE}),
    "slots": Load(lambda path: write_tiny(path, WIDE), {"n_ctx": 8192, "n_seq_max": 64, "cache_ram": 0, **_WIDE}),
    "dense": Load(lambda path: write_tiny(path, TINY_DENSE), {"n_ctx": 1024, "n_seq_max": 2, "cache_ram": 8}),
    "swa": Load(write_swa, {"n_ctx": 1024, "n_seq_max": 2, "cache_ram": 8, "ctx_checkpoints": 8}),
    "hybrid": Load(write_hybrid, {"n_ctx": 1024, "n_seq_max": 4, "cache_ram": 8}),
    "card": Load(lambda path: write_tiny(path, EXPERTS), {"n_ctx": 4096, "n_seq_max": 4, "cache_ram": 16}, True),
}
"""The first three are mostly what the plan counts; of the others, the process itself is the most."""


@dataclass(frozen=True)
class Outcome:
    """How a server ended. Bytes.

    Attributes:
        limit: The memory that it had.
        answered: Requests with an answer.
        was_killed: Whether it was killed, or could not load.
        most: The most memory that the cgroup counted, or that was resident without a cgroup.
        own: The most that was not pages of files.
    """

    limit: int
    answered: int
    was_killed: bool
    most: int
    own: int


def plan_of(load: Load, folder: Path) -> Plan:
    """Write the model into ``folder``, and plan it for this machine's processor, or its first card."""
    path = load.write(folder / "model.gguf")
    device = "CUDA0" if load.is_on_card else "none"
    return fitter.fit(path, program="llama-server", devices=[device], load_mode="none", **load.keywords)


def serve(plan: Plan, limit: int, requests: int) -> Outcome:
    """Run llama-server with ``plan`` in ``limit`` bytes of memory, and send it ``requests``."""
    program = str(upstream.tool("llama-server"))
    with memory_group(limit) as group:
        words = [program, "-m", plan.model.path, *plan.arguments()]
        if group is not None:
            words = ["/bin/sh", "-c", f'echo $$ > "{group.folder}/cgroup.procs" && exec "$0" "$@"', *words]
        answered, was_killed, most, own = 0, False, 0, 0
        slots = plan.params.n_seq_max
        try:
            with running(words, 300.0, None, ENVIRONMENT) as server:
                room = (plan.params.n_ctx or 0) // slots
                fed = feed(server, slots=slots, room=room, n_vocab=_N_VOCAB, number=requests)
                answered = fed.answered
                if server.most is not None:
                    most, own = server.most.total, server.most.own
        except LlamaCppError:
            was_killed = True
        if group is not None:
            most = int((group.folder / group.peak).read_text())
    return Outcome(limit, answered, was_killed, most, own)


@dataclass(frozen=True)
class MemoryGroup:
    """A memory cgroup: its folder, and the file there with the most that it counted."""

    folder: Path
    peak: str


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup | None]:
    """Make a memory cgroup of ``limit`` bytes; ``None`` where that is not possible."""
    group = None
    try:
        group = _group()
        if group is not None:
            group.folder.mkdir()
            for name, value in _LIMITS[group.peak].items():
                # without a limit on swap, the system's takes what the first refuses; a kernel without swap has none
                with contextlib.suppress(FileNotFoundError):
                    (group.folder / name).write_text(str(limit if value is None else value))
    except OSError:
        group = None
    try:
        yield group
    finally:
        for _ in range(100 if group is not None else 0):
            with contextlib.suppress(OSError):
                group.folder.rmdir()
                break
            time.sleep(0.05)


_LIMITS: dict[str, dict[str, int | None]] = {
    "memory.max_usage_in_bytes": {"memory.limit_in_bytes": None, "memory.memsw.limit_in_bytes": None},
    "memory.peak": {"memory.max": None, "memory.swap.max": 0},
}
"""What limits a group of each version, by its file with the most; ``None`` is the claim."""


def _group() -> MemoryGroup | None:
    """Name the group to make: inside this process's own (version 1), or beside all others (version 2)."""
    name = f"fitter-claimed-{os.getpid()}"
    lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    mine = [line.split(":", 2)[2] for line in lines if ":memory:" in line]
    if mine:
        return MemoryGroup(Path(f"/sys/fs/cgroup/memory{mine[0]}") / name, "memory.max_usage_in_bytes")
    root = Path("/sys/fs/cgroup")
    if "memory" not in (root / "cgroup.controllers").read_text(encoding="ascii").split():
        return None
    with contextlib.suppress(OSError):
        (root / "cgroup.subtree_control").write_text("+memory")
    return MemoryGroup(root / name, "memory.peak")


def row(name: str, claim: PodClaim, full: Outcome, less: Outcome) -> str:
    """Write the outcomes of one load."""
    figures = (claim.memory, claim.process, full.most, full.own)
    sizes = " ".join(f"{size / MIB:9.1f}" for size in figures)
    ends = " ".join("killed" if each.was_killed else f"{each.answered:3} ok" for each in (full, less))
    return f"{name:10} {sizes}   {ends}"


def main(arguments: list[str] | None = None) -> int:
    """Serve every load in its claim and in 10 % less; return 1 if the first is killed or leaves a request out."""
    parser = argparse.ArgumentParser(prog="python -m tools.measurements.claimed", description=__doc__)
    parser.add_argument("loads", nargs="*", choices=[[], *LOADS], metavar="LOAD", help=", ".join(LOADS))
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--less", type=float, default=LESS, help="the share of the claim for the second run")
    asked = parser.parse_args(arguments)
    is_kept = True
    print(f"{'':10} {'claim':>9} {'process':>9} {'peak':>9} {'own':>9}   claim {asked.less:g} of it     (MiB)")
    for name in asked.loads or [name for name, load in LOADS.items() if not load.is_on_card]:
        with tempfile.TemporaryDirectory() as folder:
            plan = plan_of(LOADS[name], Path(folder))
            claim = pod_claim(plan)
            full = serve(plan, claim.memory, asked.requests)
            less = serve(plan, int(claim.memory * asked.less), asked.requests)
        is_kept &= not full.was_killed and full.answered == asked.requests
        print(row(name, claim, full, less), flush=True)
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
