"""One model on several machines, each plan made twice: searched for on a skeleton of the header, and on the file."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest import mock

from gguf import GGUFReader

from fitter import api
from fitter.errors import FitterError, LibraryError
from fitter.llama.client import Worker
from fitter.llama.types import Params, Skeleton, TensorBuftOverride, VirtualDevice
from fitter.machine.gpu import NO_GPU, parse_gpus
from fitter.storage import TemporaryDirectory
from tools.comparisons.cases import CASES

_T = TypeVar("_T")

TIMEOUT = 1200.0
"""Seconds for a dummy load: however busy the machine is, what differs is to be the plan."""


@dataclass(frozen=True)
class Machine:
    """Virtual GPUs (none of them: a machine without a GPU), and what ``fit`` is told beside them."""

    name: str
    gpus: tuple[VirtualDevice, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """A plan made with the skeleton and without it. ``difference`` is empty where both are the same.

    ``refused``: both ways ended in that error. ``dummy_loads`` and ``seconds`` are of the two searches in that order.
    """

    machine: str
    difference: str
    refused: str = ""
    dummy_loads: tuple[int, int] = (0, 0)
    seconds: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Checked:
    """All comparisons of a model. ``useless`` says how its skeleton differs from it; it is empty where it does not."""

    name: str
    comparisons: tuple[Comparison, ...]
    n_placements: int
    useless: str

    @property
    def verdict(self) -> Literal["equal", "fell back", "refused", "differs"]:
        """What to report of the model."""
        if any(comparison.difference for comparison in self.comparisons):
            return "differs"
        if all(comparison.refused for comparison in self.comparisons):
            return "refused"
        return "fell back" if self.useless else "equal"

    def __str__(self) -> str:
        loads = [sum(comparison.dummy_loads[i] for comparison in self.comparisons) for i in (0, 1)]
        lines = [
            f"{self.name:24} {self.verdict:9} {len(self.comparisons)} machines, {self.n_placements} placements; "
            f"dummy loads {loads[0]} with the skeleton, {loads[1]} without"
        ]
        lines += [f"  skeleton, {self.useless}"] * bool(self.useless)
        for refused, count in Counter(comparison.refused for comparison in self.comparisons).items():
            lines += [f"  refused on {count}: {refused}"] * bool(refused)
        lines += [
            f"  {comparison.machine}: {comparison.difference}"
            for comparison in self.comparisons
            if comparison.difference
        ]
        return "\n".join(lines)


class _Workers:
    """Worker processes that go from one fit to the next: to start one takes longer than to fit a tiny model."""

    def __init__(self) -> None:
        self.idle: list[Worker] = []

    def lend(self, virtual_devices: Sequence[VirtualDevice] = (), **options: Any) -> _Lent:
        """What ``Worker`` would make with these arguments."""
        try:
            worker = self.idle.pop()
        except IndexError:
            return _Lent(self, Worker(virtual_devices, **options))
        worker.configure(virtual_devices)
        return _Lent(self, worker)


class _Lent:
    """A worker whose process stays when it is closed."""

    def __init__(self, workers: _Workers, worker: Worker) -> None:
        self._workers = workers
        self._worker = worker
        self._loads = worker.dummy_loads

    def __enter__(self) -> _Lent:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def dismiss(self) -> None:
        """Not yet: the next fit takes it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    @property
    def dummy_loads(self) -> int:
        return self._worker.dummy_loads - self._loads

    def close(self) -> None:
        self._workers.idle.append(self._worker)


@contextlib.contextmanager
def kept_workers() -> Iterator[None]:
    """Let all fits and measurements of this process use the same few worker processes."""
    workers = _Workers()
    try:
        with mock.patch("fitter.api.call_worker.Worker", workers.lend):
            yield
    finally:
        for worker in workers.idle:
            worker.close()


def check(name: str, wanted: Sequence[tuple[Path, Machine]]) -> Checked:
    """Fit each model to its machine both ways, and measure plain placements on it both ways."""
    comparisons = tuple(compare_plans(path, machine) for path, machine in wanted)
    n_placements, useless = 0, ""
    with Worker(timeout=TIMEOUT) as worker:
        for path, machine in wanted:
            count, difference = compare_placements(worker, path, machine.gpus)
            n_placements += count
            useless = useless or (f"{machine.name}: {difference}" if difference else "")
    return Checked(name, comparisons, n_placements, useless)


def compare_plans(path: Path, machine: Machine) -> Comparison:
    """Fit ``path`` to ``machine`` with the skeleton and without it; all but the search itself must be the same."""
    answers = [_fit(path, machine, True), _fit(path, machine, False)]
    searches = [answer.pop("search", {"dummy_loads": 0, "seconds": 0.0}) for answer in answers]
    texts = [json.dumps(answer) for answer in answers]
    difference = (
        "" if texts[0] == texts[1] else "; ".join(_differences(answers[0], answers[1])) or "the order of the keys"
    )
    refused = "" if difference else answers[0].get("error", "")
    return Comparison(
        machine.name,
        difference,
        refused,
        (searches[0]["dummy_loads"], searches[1]["dummy_loads"]),
        (searches[0]["seconds"], searches[1]["seconds"]),
    )


def _fit(path: Path, machine: Machine, skeleton: bool) -> dict[str, Any]:
    try:
        plan = api.fit(
            path,
            gpus=machine.gpus or (NO_GPU,),
            skeleton=skeleton,
            timeout=TIMEOUT,
            **machine.options,
        )
        return plan.to_dict()
    except LibraryError:
        raise
    except FitterError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _differences(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict) and ("error" in ours) == ("error" in theirs):
        for key in {**ours, **theirs}:
            yield from _differences(ours.get(key), theirs.get(key), f"{where}.{key}" if where else key)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(one, other, f"{where}[{i}]")
    elif ours != theirs:
        yield f"{where or 'the answer'} is {_short(ours)} with the skeleton, {_short(theirs)} without"


def _short(value: Any) -> str:
    text = value["error"] if isinstance(value, dict) and "error" in value else repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def placements(n_devices: int) -> Iterator[Params]:
    """Parameters that reach what llama.cpp counts: weights, caches and graphs, on the devices and on the host."""
    if not n_devices:
        yield Params(n_ctx=512, devices=())
        yield Params(n_ctx=4096, n_seq_max=2, flash_attn="off", devices=())
        return
    yield Params(n_ctx=512)
    yield Params(n_ctx=4096, n_gpu_layers=2, n_seq_max=2)
    yield Params(n_ctx=1024, n_gpu_layers=0, flash_attn="off", n_ubatch=64)
    yield Params(n_ctx=512, tensor_buft_overrides=(TensorBuftOverride(r"ffn_(up|down|gate)", "CPU"),), type_k="q8_0")
    if n_devices > 1:
        yield Params(n_ctx=512, tensor_split=tuple(map(float, range(n_devices, 0, -1))), kv_unified=True, n_seq_max=4)


def compare_placements(worker: Worker, path: Path, gpus: Sequence[VirtualDevice]) -> tuple[int, str]:
    """How many placements were measured both ways, and the first difference, if there is one."""
    worker.configure(gpus)
    count = 0
    with TemporaryDirectory() as directory:
        # a file of its own: llama.cpp would load the model in place of a skeleton that it refuses
        skeleton = Path(directory, "skeleton.gguf")
        try:
            worker.write_skeleton(Skeleton(tuple(map(str, _files(path)))), skeleton)
        except FitterError as error:
            return count, str(error)
        models = str(skeleton), str(path)
        for params in placements(len(gpus)):
            answers = [_try(worker.measure, model, params) for model in models]
            count += 1
            if answers[0] != answers[1]:
                return count, f"{answers[0]} instead of {answers[1]} for {params}"
        layouts = [_try(worker.layout, model, Params(n_ctx=512)) for model in models]
    return count, "" if layouts[0] == layouts[1] else "another layout"


def _files(path: Path) -> list[Path]:
    """All files of a split model, of which ``path`` is the first."""
    name, mark, count = path.stem.partition("-00001-of-")
    return [path.with_name(f"{name}-{i + 1:05d}-of-{count}.gguf") for i in range(int(count))] if mark else [path]


def _try(ask: Callable[[str, Params], _T], model: str, params: Params) -> _T | str:
    try:
        return ask(model, params)
    except FitterError as error:
        return f"{type(error).__name__}: {error}".replace(model, "the model")


def with_context(path: Path, copy: Path, n_ctx_train: int) -> Path:
    """A copy of the model whose own context length is ``n_ctx_train``."""
    shutil.copyfile(path, copy)
    reader = GGUFReader(copy, "r+")
    architecture = reader.fields["general.architecture"].contents()
    context_length = reader.fields[f"{architecture}.context_length"]
    context_length.parts[context_length.data[0]][0] = n_ctx_train
    return copy


def machines_for_size(path: Path) -> list[Machine]:
    """Machines on which the model fits as a whole, in part, and not at all, by what llama.cpp measures for it."""
    size = _size(path, 0)
    return [
        size.machine("all", 130),
        size.machine("half", 50),
        size.machine("half, short host", 50, host_margin=size.margin, host_memory=size.moved // 4),
        size.machine("two", 45, 22),
        size.machine("eight", 16, 12, 12, 10, 10, 8, 8, 6),
        Machine("none", ()),
    ]


def machine_for_context(path: Path, n_ctx: int) -> Machine:
    """A machine on which the model fits as a whole with a context of about ``n_ctx``."""
    return _size(path, n_ctx).machine(f"all, context near {n_ctx}", 100)


@dataclass(frozen=True)
class _Size:
    """Bytes of a model on one device: weights and caches, which can be moved, and what is computed with."""

    moved: int
    compute: int

    @property
    def margin(self) -> int:
        return self.moved // 64

    def machine(self, name: str, *percent: int, **options: Any) -> Machine:
        """Devices that have room for so much of the model."""
        sizes = [self.compute + self.margin + self.moved * share // 100 for share in percent]
        return Machine(
            name,
            tuple(_gpu(i, size) for i, size in enumerate(sizes)),
            {"margin": self.margin, "fit_ctx": 512, **options},
        )


def _size(path: Path, n_ctx: int) -> _Size:
    try:
        whole = api.measure(path, gpus=[_gpu(0, 2**44)], n_ctx=n_ctx, timeout=TIMEOUT).on("CUDA0")
    except FitterError:
        # llama.cpp is to refuse it both ways.
        return _Size(path.stat().st_size, 0)
    return _Size(whole.model + whole.context, whole.compute)


def _gpu(index: int, size: int) -> VirtualDevice:
    return VirtualDevice(f"CUDA{index}", "a card", "cuda", 890, size, size)


def machines_for_shape(name: str, path: Path) -> list[Machine]:
    """The shape's machines in tools/comparisons/cases.py; others of one, two and eight devices without one."""
    words = {"-c": "n_ctx", "--fit-ctx": "fit_ctx"}
    machines = []
    for case in CASES:
        if case.shape == name:
            pairs = zip(case.options[::2], case.options[1::2], strict=True)
            options = {words[word]: int(value) for word, value in pairs}
            machines.append(Machine(case.name, parse_gpus(case.gpus), options))
    counts = {len(machine.gpus) for machine in machines}
    derived = [machine for machine in machines_for_size(path) if machine.name in ("half", "two", "eight")]
    return machines + [machine for machine in derived if len(machine.gpus) not in counts]
