"""A plan has room when it is loaded for real, where that takes more than the dummy load says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from fitter.errors import TimeLimitError
from fitter.llama.types import Breakdown, Params, Row
from fitter.planning.plan.plan import ModelSummary, Plan
from fitter.planning.request.request import DeviceLimit, Request
from fitter.planning.search.best_plan import fit
from fitter.planning.search.load_reserve import reserve_for, with_reserve
from tests.support.cases import cases, named_cases
from tests.support.synthetic import MIB, SyntheticLlama, SyntheticModel, limits, load_calls, request

MODEL = SyntheticModel()
SUMMARY = ModelSummary("model.gguf", "model", "llama", 0)


@dataclass
class Greedy(SyntheticLlama):
    """A model that takes so much ``more`` MiB of a device, or of the ``CPU``, when it is loaded for real."""

    more: Mapping[str, int] = field(default_factory=dict)

    def measure(self, params: Params) -> Breakdown:
        found = super().measure(params)
        return replace(found, rows=tuple(replace(row, reserved=self._real(row)) for row in found.rows))

    def _real(self, row: Row) -> int:
        return max(0, row.compute + self.more.get(row.buffer_type, 0) * MIB) if row.used else row.compute


def run(asked: Request, more: Mapping[str, int]) -> tuple[Plan, Greedy]:
    llama = Greedy(MODEL, asked.devices, more=more)
    calls = load_calls(SyntheticLlama(MODEL, asked.devices), confirm=llama.measure)
    return fit(asked, SUMMARY, calls, lambda progress: None, True), llama


def left_in_a_real_load(plan: Plan, name: str) -> int:
    """Bytes."""
    if name == "host":
        return (plan.host.free or 0) - plan.breakdown.most.host.used
    use = next(use for use in plan.devices if use.name == name)
    return use.free - plan.breakdown.most.on(name).used


MACHINES: dict[str, tuple[Request, Mapping[str, int], bool]] = {
    # how much more, and whether the plan is another one for it
    "one device": (request(MODEL, limits(900)), {"CUDA0": 30}, True),
    "the first of two": (request(MODEL, limits(700, 500)), {"CUDA0": 30}, True),
    "the second of two": (request(MODEL, limits(900, 500)), {"CUDA1": 100}, True),
    "all of three": (request(MODEL, limits(400, 300, 500)), {"CUDA0": 16, "CUDA1": 16, "CUDA2": 16}, True),
    "with room for it": (request(MODEL, limits(8000)), {"CUDA0": 30}, False),
    "as much as the margin": (request(MODEL, limits(930, margin=30)), {"CUDA0": 30}, False),
    "more than the margin": (request(MODEL, limits(920, margin=20)), {"CUDA0": 30}, True),
    "less": (request(MODEL, limits(900, 500)), {"CUDA0": -30, "CUDA1": -30}, False),
    "the same": (request(MODEL, limits(900, 500)), {}, False),
    "the host, with room for it": (request(MODEL, limits(900), host_mib=700), {"CPU": 180}, False),
}


@cases(MACHINES)
def test_there_is_room(asked: Request, more: Mapping[str, int], is_another: bool) -> None:
    plan, _ = run(asked, more)
    plain, _ = run(asked, {})
    assert plan.fits and plain.fits
    assert all(left_in_a_real_load(plan, use.name) >= 0 and use.left >= use.margin for use in plan.devices)
    assert plan.host.free is None or left_in_a_real_load(plan, "host") >= 0
    assert (plan.params != plain.params) == is_another
    assert [(use.free, use.margin) for use in plan.devices] == [(use.free, use.margin) for use in plain.devices]


def test_a_plan_that_cannot_be_another_does_not_fit() -> None:
    (device,) = limits(8000)
    plain, _ = run(request(MODEL, (device,)), {})
    asked = request(
        MODEL,
        (replace(device, free=plain.devices[0].used + 10 * MIB),),
        host_mib=111,  # nothing but what is always there
        params=replace(plain.params, devices=None),
        fixed=("n_ctx", "n_gpu_layers"),
    )
    assert run(asked, {"CUDA0": 10})[0].fits
    plan, _ = run(asked, {"CUDA0": 11})
    assert [(problem.device, problem.missing) for problem in plan.problems] == [("CUDA0", MIB)]
    assert "MiB are needed plus up to 11 MiB more in use, but " in plan.problems[0].message


def test_a_host_without_room_for_it() -> None:
    plan, _ = run(request(MODEL, limits(900), host_mib=700), {"CPU": 200})
    (problem,) = plan.problems
    assert problem.device == "host" and 18 * MIB < problem.missing < 20 * MIB
    assert " plus up to 200 MiB more in use, but " in problem.message


def test_what_was_measured_is_not_measured_again() -> None:
    """``SyntheticLlama`` refuses the same question twice, and there are two searches."""
    plan, llama = run(*MACHINES["the second of two"][:2])
    assert plan.fits and len(set(llama.asked)) == len(llama.asked) > 1


def row(name: str, compute: int, reserved: int | None) -> Row:
    return Row(name, None if name == "CPU" else name, name == "CPU", 10, 5, compute, reserved)


def bytes_of(name: str, free: int, margin: int = 0) -> DeviceLimit:
    return replace(limits(1, 1)[int(name[-1])], free=free, margin=margin)


@named_cases(
    # compute and reserved of two devices with 100 bytes each
    ("nothing is known", (85, None), (85, None), {}),
    ("just enough", (80, 85), (80, 85), {}),
    ("a byte too much", (80, 86), (80, 80), {"CUDA0": 6, "CUDA1": 6, "host": 0}),
    ("the most needy one", (80, 90), (70, 95), {"CUDA0": 25, "CUDA1": 25, "host": 0}),
    ("less", (85, 20), (85, 20), {}),
)
def test_room(first: tuple[int, int | None], second: tuple[int, int | None], expected: dict[str, int]) -> None:
    asked = request(MODEL, (bytes_of("CUDA0", 100), bytes_of("CUDA1", 100)))
    found = Breakdown((row("CUDA0", *first), row("CUDA1", *second), row("CPU", 1, 1)), ("CUDA0", "CUDA1"), 256)
    room = reserve_for(asked, found, Params())
    assert room == expected
    assert [device.target for device in with_reserve(asked, room).devices] == [100 - room.get("CUDA0", 0)] * 2


def test_a_larger_margin_stays() -> None:
    asked = request(MODEL, (bytes_of("CUDA0", 100, margin=7), bytes_of("CUDA1", 100, margin=5)))
    raised = with_reserve(asked, {"CUDA0": 6, "CUDA1": 6, "host": 3})
    assert [device.margin for device in raised.devices] == [7, 6]
    assert raised.host.margin == max(asked.host.margin, 3)


@dataclass
class Greedier(Greedy):
    """Takes more for real with every load that was asked about, and ever more so: search after search is too little."""

    def _real(self, row: Row) -> int:
        return row.compute + len(self.asked) ** 2 // 2 * MIB if row.device else row.compute


def test_no_plan_goes_out_that_a_real_load_has_no_room_for() -> None:
    asked = request(MODEL, limits(900, 500, 700))
    llama = Greedier(MODEL, asked.devices)
    said: list[str] = []
    calls = load_calls(llama)
    plan = fit(asked, SUMMARY, calls, lambda progress: said.append(progress.text), True)
    assert plan.fits and plan.params.n_gpu_layers == MODEL.n_layer + 1
    assert all(left_in_a_real_load(plan, use.name) >= 0 for use in plan.devices)
    assert sum("searching again" in text for text in said) > 3, "so few searches are no test"


def test_a_time_limit_leaves_no_plan_that_a_real_load_has_no_room_for() -> None:
    asked, more, _ = MACHINES["the second of two"]
    counted = run(asked, {})[1]

    class Late(Greedy):
        def measure(self, params: Params) -> Breakdown:
            if len(self.asked) == len(counted.asked):
                raise TimeLimitError("too late")
            return super().measure(params)

    llama = Late(MODEL, asked.devices, more=more)
    calls = load_calls(llama)
    with pytest.raises(TimeLimitError, match="no plan that fits was found within the time limit"):
        fit(asked, SUMMARY, calls, lambda _: None, True)
