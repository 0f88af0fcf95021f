"""What is beside a model, put together: rows by place, arguments that take what was measured, devices to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fitter.llama.types import Breakdown, DeviceInfo, Lora, Params, Row
from fitter.machine.speed import DeviceSpeed
from fitter.planning.request.request import DeviceLimit
from fitter.planning.request.shared import Companions, Mtp, Projector, places, reservation
from fitter.planning.request.summary import SharedUse
from fitter.text import MIB
from tests.support.cases import named_cases

CUDA = Row("CUDA0", "CUDA0", False, 100, 20, 3)
SPLIT = Row("CUDA0_Split", "CUDA0", False, 400, 10, 6)
PINNED = Row("CUDA_Host", "CUDA0", True, 5, 7, 9)
CPU = Row("CPU", None, True, 1000, 2000, 3000)
REPACK = Row("CPU_REPACK", None, False, 10, 20, 30)

ON_CUDA = Row("CUDA0", "CUDA0", False, 500, 30, 9)
ON_HOST = Row("Host", None, True, 1015, 2027, 3039)


@named_cases(
    ("nothing", (), ()),
    ("a device", (CUDA,), (CUDA,)),
    ("two buffer types of a device", (CUDA, SPLIT), (ON_CUDA,)),
    ("the host, whichever way", (CPU, PINNED, REPACK), (ON_HOST,)),
    ("both", (CPU, CUDA, PINNED, SPLIT, REPACK), (ON_HOST, ON_CUDA)),
)
def test_a_row_for_each_place(rows: tuple[Row, ...], expected: tuple[Row, ...]) -> None:
    asked: list[str | None] = []

    def measure(device: str | None) -> Sequence[Row]:
        asked.append(device)
        return rows

    use = Projector("p.gguf", "CUDA0", ("--image-max-tokens", "64"), measure).use()
    words = ("--mmproj", "p.gguf", "-mmdev", "CUDA0", "--image-max-tokens", "64")
    assert (use, asked) == (SharedUse("projector", "p.gguf", expected, words), ["CUDA0"])


def test_a_projector_on_the_host() -> None:
    use = Projector("p.gguf", None, (), lambda device: [CPU]).use()
    assert use.arguments == ("--mmproj", "p.gguf", "-mmdev", "none")


def test_adapters_are_each_of_their_own() -> None:
    params = Params(lora=(Lora("a.gguf"), Lora("b.gguf", 0.5)))
    own = Breakdown((CPU,), (), 4096, lora=((CUDA, SPLIT), (REPACK,)))
    assert Companions().uses(params, own, lambda _: own) == (
        SharedUse("lora", "a.gguf", (ON_CUDA,), ("--lora", "a.gguf")),
        SharedUse(
            "lora", "b.gguf", (replace(REPACK, buffer_type="Host", is_host=True),), ("--lora-scaled", "b.gguf:0.5")
        ),
    )


def test_a_second_context_has_no_weights_and_no_adapters() -> None:
    asked: list[Params] = []

    def measure(params: Params) -> Breakdown:
        asked.append(params)
        return Breakdown((CUDA, Row("CPU", None, True, 9, 0, 0)), ("CUDA0",), params.n_ctx)

    params = Params(n_ctx=0, n_seq_max=3, lora=(Lora("a.gguf"),))
    own = Breakdown((CPU,), (), 4096, lora=((),))
    found = Companions(mtp=Mtp("m.gguf")).uses(params, own, measure)
    assert found[1:] == (SharedUse("mtp", "m.gguf", (replace(CUDA, model=0),), ("--spec-type", "draft-mtp")),)
    (second,) = asked
    assert (second.lora, second.ctx_type, second.n_ctx, second.n_outputs_max) == ((), "mtp", 4096, 3)


@named_cases(
    ("as it is", Mtp("m"), ()),
    ("quantized keys", Mtp("m", type_k="q8_0"), ("-ctkd", "q8_0")),
    ("quantized values", Mtp("m", type_v="q4_0"), ("-ctvd", "q4_0")),
    ("more tokens", Mtp("m", n_max=7), ("--spec-draft-n-max", "7")),
    ("all of it", Mtp("m", "q8_0", "q4_0", 1), ("-ctkd", "q8_0", "-ctvd", "q4_0", "--spec-draft-n-max", "1")),
)
def test_arguments_of_a_second_context(mtp: Mtp, words: tuple[str, ...]) -> None:
    assert mtp.arguments() == ("--spec-type", "draft-mtp", *words)


def limit(name: str, free: int = 100, description: str = "a card") -> DeviceLimit:
    return DeviceLimit(name, description, 100 * MIB, free, 0, name)


def speed(bandwidth: float) -> DeviceSpeed:
    return DeviceSpeed(bandwidth, 1e12, 1e9, "cuda", "8.9", "test", True)


SPEEDS = {"A": speed(1.0), "B": speed(3.0), "C": speed(2.0)}


@named_cases(
    ("the fastest first", [limit("A"), limit("B", description="b"), limit("C", description="c")], 3, ("B", "C", "A")),
    ("no more than asked for", [limit("A"), limit("B", description="b"), limit("C", description="c")], 2, ("B", "C")),
    ("no room", [limit("A", 0), limit("B", -1, "b"), limit("C", 1, "c")], 3, ("C",)),
    ("the first and the last of a kind", [limit("A"), limit("B"), limit("C")], 3, ("C", "A")),
    ("one of a kind", [limit("A")], 3, ("A",)),
    ("what has no speed is last", [limit("X", description="x"), limit("A")], 3, ("A", "X")),
)
def test_places(devices: list[DeviceLimit], n_max: int, expected: tuple[str, ...]) -> None:
    assert places(devices, SPEEDS, n_max) == expected


def test_a_reservation_is_on_a_device_or_the_host() -> None:
    card = DeviceInfo("CUDA0", "a card", "gpu", "CUDA", 100, 90)
    assert reservation({"CUDA0": 100, "host": 50, "nothing": 0}, [card, replace(card, name="nothing")], 50) == (
        SharedUse(
            "reserve", "reserved", (Row("reserved", "CUDA0", False, 0, 0, 100), Row("reserved", None, True, 0, 0, 50))
        ),
    )
    assert reservation({"CUDA0": 0}, [card], None) == ()
    assert reservation({"host": 2**50}, [card], None)[0].on(None) == 2**50, "a host without end"
