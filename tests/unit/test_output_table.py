from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest

from fitter.cli.answers import Step, progress
from fitter.llama.build.virtual_backends import SIMULATED
from fitter.llama.types import DeviceInfo, Params, TensorBuftOverride
from fitter.machine.gpu_catalogue import CatalogueGpu, Sources
from fitter.output.tables import plan_table
from fitter.output.tables.checked_tables import calibration_table
from fitter.output.tables.plan_facts import pool_lines
from fitter.planning.plan.plan import Alternative, Plan, Problem, with_real_load
from fitter.planning.pricing.pricing import SpeedSource
from fitter.planning.request.request import Progress
from fitter.planning.request.summary import PoolUse, Setting, SharedUse
from fitter.planning.speed.cost import Workload
from fitter.programs.later import Later
from fitter.text import speed
from tests.support.answers import CALIBRATION, INSPECTION, Terminal
from tests.support.cases import cases, named_cases
from tests.support.plans import GIB, MIB, make_plan, make_price, reserving, shared_use


def printed(table: Any, out: io.StringIO | None = None) -> str:
    out = out or io.StringIO()
    plan_table.print_to(out, table)
    return out.getvalue()


def rendered(plan: Plan, *, verbose: bool = False) -> str:
    return printed(plan_table.plan_table(plan, verbose=verbose))


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns without colours."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")


def test_plan_on_virtual_devices() -> None:
    plan = make_plan(
        Params(
            n_ctx=4096,
            n_gpu_layers=33,
            tensor_split=(20.0, 13.0),
            tensor_buft_overrides=(TensorBuftOverride("^blk.1.", "CPU"),),
        )
    )
    assert rendered(plan) == (
        "Model 8B (llama, 4.0 GiB of weights) fits\n"
        "  MiB    total  free  model  context  compute  used  left  margin\n"
        "  CUDA0   8192  8192   2048      256      100  2404  5788    1024  Card of CUDA0\n"
        "  CUDA1   8192  8192   2048      256      100  2404  5788    1024  Card of CUDA1\n"
        "  host       -     -    300        0       20   320     -       -\n"
        "  context   4096 tokens\n"
        "  weights   33 of 33 layers on 2 devices, 300.0 MiB on the host\n"
        "  KV cache  512.0 MiB of f16\n"
    )
    assert rendered(plan, verbose=True).endswith(
        "  a machine with these devices needs 320.0 MiB of host memory for llama.cpp\n"
        "  context 4096 · 33 of 33 layers on devices · split 20,13\n"
        "  batch 2048/512 · KV cache f16/f16 · flash attention on\n"
        "  ^blk.1. in CPU\n"
        "  measured with 5 dummy loads in 1.2 s\n"
    )


HOST_EXPERTS = (TensorBuftOverride(r"blk\.1\.ffn_down_exps", "CPU"),)
OTHERS = (TensorBuftOverride("exps", "CUDA1"),)
FACTS = {
    "one slot": (Params(), "context   8192 tokens"),
    "slots with a cache each": (Params(n_seq_max=4), "context   8192 tokens, 2048 for each of 4 slots"),
    "slots with one cache": (Params(n_seq_max=4, kv_unified=True), "context   8192 tokens, which 4 slots share"),
    "every layer": (Params(), "weights   33 of 33 layers on CUDA0"),
    "more layers than there are": (Params(n_gpu_layers=99), "weights   33 of 33 layers on CUDA0"),
    "all but the output": (Params(n_gpu_layers=32), "weights   32 of 33 layers on CUDA0, 300.0 MiB on the host"),
    "experts on the host": (
        Params(tensor_buft_overrides=HOST_EXPERTS),
        "weights   33 of 33 layers on CUDA0, 300.0 MiB (experts) on the host",
    ),
    "other tensors too": (
        Params(tensor_buft_overrides=(*HOST_EXPERTS, TensorBuftOverride("attn", "CPU"))),
        "weights   33 of 33 layers on CUDA0, 300.0 MiB on the host",
    ),
    "a cache in one type": (Params(type_k="q8_0", type_v="q8_0"), "KV cache  256.0 MiB of q8_0"),
    "a cache in two types": (Params(type_k="q8_0"), "KV cache  256.0 MiB of q8_0/f16"),
    "for experts": (Params(moe_cache_size=96 * MIB), "caches   256.0 MiB of f16 and of experts (at most 96.0 MiB)"),
    "another batch": (Params(n_ubatch=128), "KV cache  256.0 MiB of f16 · batch 2048/128"),
}


@cases(FACTS)
def test_facts(params: Params, line: str) -> None:
    plan = make_plan(params, devices=("CUDA0",), n_ctx=8192)
    assert f"  {line}\n" in rendered(replace(plan, program="llama-server"))


def test_facts_of_other_plans() -> None:
    assert "  4096 tokens, which 2 sequences share\n" in rendered(make_plan(Params(n_seq_max=2, kv_unified=True)))
    on_a_device = make_plan(Params(tensor_buft_overrides=OTHERS), devices=("CUDA0", "CUDA1"))
    assert "weights   33 of 33 layers on 2 devices\n" in rendered(on_a_device)
    uneven = make_plan(Params(tensor_split=(100, 0)), devices=("CUDA0", "CUDA1"))
    rows = [replace(row, model=0 if row.device == "CUDA1" else row.model) for row in uneven.breakdown.rows]
    uneven = replace(uneven, breakdown=replace(uneven.breakdown, rows=tuple(rows)))
    assert "weights   33 of 33 layers on CUDA0\n" in rendered(uneven)
    assert "weights   300.0 MiB in host memory\n" in rendered(make_plan(devices=()))
    half = make_plan(devices=("CUDA0",), flash_attn=False)
    half = replace(half, host=replace(half.host, context=256 * MIB))
    assert "KV cache  512.0 MiB of f16, 256.0 MiB of it on the host · flash attention off\n" in rendered(half)
    on_host = replace(half, devices=(replace(half.devices[0], context=0),))
    assert "KV cache  256.0 MiB of f16 on the host · flash attention off\n" in rendered(on_host)


def test_facts_about_what_is_beside_the_model() -> None:
    uses = (
        SharedUse("draft", "d/draft.gguf", shared_use(CUDA0=9).rows, ()),
        shared_use("projector", host=7),
        SharedUse("ngram", "ngram-mod", (), ()),
        shared_use("reserve", CUDA1=5),
    )
    text = rendered(replace(make_plan(), shared=uses))
    assert (
        "  draft      draft.gguf: 9.0 MiB on CUDA0\n"
        "  projector  mmproj.gguf: 7.0 MiB on the host\n"
        "  draft      ngram-mod\n"
        "  reserved   5.0 MiB on CUDA1\n"
    ) in text


@pytest.mark.usefixtures("narrow")
def test_ten_lines_of_80_columns_for_one_card() -> None:
    card = replace(make_plan(devices=("CUDA0",)).devices[0], description="NVIDIA GeForce RTX 4090", total=24564 * MIB)
    host = SpeedSource("host", "40 GB/s, assumed (two channels): --host-bandwidth sets another", True)
    plan = replace(of_a_server(), estimate=make_price(host), devices=(replace(card, free=23608 * MIB),))
    table = plan_table.plan_table(replace(plan, breakdown=make_plan(devices=("CUDA0",)).breakdown))
    # with 'run it:' and the command, ten
    assert [line.rstrip() for line in printed(table, Terminal()).splitlines()] == [
        "Model 8B (llama, 4.0 GiB of weights) fits",
        "  MiB     free  model  context  compute  later  used   left  margin",
        "  CUDA0  23608   2048      256      100      -  2404  21204    1024  RTX 4090",
        "  host       -    300        0       20   2208  2528      -       -",
        "  context   4096 tokens",
        "  weights   33 of 33 layers on CUDA0",
        "  KV cache  256.0 MiB of f16",
        "  estimate  38 t/s generation · 1,240 t/s prompt (host: 40 GB/s, assumed)",
    ]


def test_warnings_are_said_and_sources_are_not() -> None:
    simulated = f"{SIMULATED} /x/libggml-cuda.so, a CUDA backend of llama.cpp"
    notes = ("model.gguf is the shape of a model", simulated, "GPU0 is not used: it is slow")
    plan = replace(make_plan(levers=("KV cache q8_0/q8_0 instead of f16/f16",), is_cut_short=True), notes=notes)
    assert rendered(plan).splitlines()[8:] == [
        "  given up, as --allow permits: KV cache q8_0/q8_0 instead of f16/f16",
        "  GPU0 is not used: it is slow",
        "  the time limit ended the search: there may be a better plan",
    ]
    assert all(note in rendered(plan, verbose=True) for note in notes)


PRICED = make_plan(estimate=make_price())


@named_cases(
    ("fits", PRICED, "or", "about 31.2 t/s (now 4096: 38 t/s)", "1,230 t/s (now 38 t/s)"),
    (
        "fast prompts",
        replace(PRICED, fit_keywords={"objective": "prompt"}),
        *("or", "about 500 t/s prompt (now 4096: 1,240 t/s prompt)", "500 t/s prompt (now 1,240 t/s prompt)"),
    ),
    (
        "does not fit",
        make_plan(problems=(Problem("host", MIB, "too little"),)),
        *("fits with", "about 31.2 t/s", "1,230 t/s"),
    ),
)
def test_alternatives(plan: Plan, head: str, first: str, second: str) -> None:
    words = (("-c 8192                  ", first), ("-ctk q8_0 -ctv q8_0 -np 1", second))
    lines = [f"{head}    {arguments}    {said}" for arguments, said in words]
    found = (
        Alternative(("-c", "8192"), 8192, 500.0, 31.21, False),
        Alternative(("-ctk", "q8_0", "-ctv", "q8_0", "-np", "1"), 4096, 500.0, 1234.0, True),
    )
    text = rendered(replace(plan, alternatives=found)).splitlines()
    assert [line.strip() for line in text if line.startswith(("  or ", "  fits with "))] == lines
    assert rendered(plan).splitlines() == [line for line in text if line.strip() not in lines]


OF_A_SERVER = (
    Later("prompt cache", 2 * GIB, 100 * MIB, 20),
    Later("idle slots", 0, 100 * MIB, 4, 1),
    Later("checkpoints", 160 * MIB, 5 * MIB, 32, 8),
)


def of_a_server(
    params: Params | None = None, host_free: int | None = None, later: tuple[Later, ...] = OF_A_SERVER
) -> Plan:
    plan = make_plan(replace(params or Params(), n_ctx=4096, n_gpu_layers=33), host_free=host_free)
    host = replace(plan.host, later=sum(each.bytes or 0 for each in later))
    return replace(plan, program="llama-server", host=host, later=later)


def test_what_a_server_keeps_later() -> None:
    text = rendered(of_a_server(), verbose=True)
    assert (
        "  MiB    total  free  model  context  compute  later  used  left  margin\n"
        "  CUDA0   8192  8192   2048      256      100      -  2404  5788    1024  Card of CUDA0\n"
        "  CUDA1   8192  8192   2048      256      100      -  2404  5788    1024  Card of CUDA1\n"
        "  host       -     -    300        0       20   2208  2528     -       -\n"
    ) in text
    assert (
        "  a machine with these devices needs 2.5 GiB of host memory for llama.cpp, 2.2 GiB of it later\n"
        "  later, in host memory: up to 2.0 GiB of prompt cache (a full slot is 100.0 MiB), up to 160.0 MiB of "
    ) in text
    assert "up to 160.0 MiB of checkpoints (8 of 5.0 MiB for each slot)" in " ".join(text.split())
    assert "no room" not in text and "prompt cache" not in rendered(of_a_server())


def test_what_a_server_keeps_is_made_smaller() -> None:
    smaller = Params(more=(("cache_ram", 2048), ("ctx_checkpoints", 8)))
    said = "reduced to fit host memory: -cram 2048 -ctxcp 8\n"
    for verbose in (False, True):
        assert said in rendered(of_a_server(smaller, 16 * GIB), verbose=verbose)
    given = replace(of_a_server(smaller, 16 * GIB), fit_keywords={"cache_ram": 2048, "ctx_checkpoints": 8})
    assert "reduced" not in rendered(given), "the user said so"


def test_a_cache_without_a_limit() -> None:
    text = rendered(of_a_server(later=(Later("prompt cache", None, 100 * MIB, None),)), verbose=True)
    assert "later, in host memory: no limit of prompt cache (a full slot is 100.0 MiB)\n" in text
    assert "of it later" not in text


def test_the_estimate_says_which_speeds_are_defaults() -> None:
    known = SpeedSource("CUDA0", "catalogue: NVIDIA GeForce RTX 4090", False)
    other = SpeedSource("host", "40 GB/s, assumed (two channels)", True)
    plan = make_plan(estimate=make_price(known, other))
    assert rendered(plan).endswith("  estimate  38 t/s generation · 1,240 t/s prompt (host: 40 GB/s, assumed)\n")
    like = "default: as Apple M3 Max, which has the most similar memory"
    pool = replace(POOL, members=("CUDA0", "host"))
    both = make_price(SpeedSource("CUDA0", like, True), SpeedSource("host", f"as CUDA0 ({like})", True))
    equal = make_price(SpeedSource("CUDA0", like, True), SpeedSource("CUDA1", like, True), other)
    said = "(CUDA0, CUDA1: default: as Apple M3 Max; host: 40 GB/s, assumed)\n"
    assert rendered(replace(plan, estimate=equal)).endswith(said)
    text = rendered(replace(plan, estimate=both, pools=(pool,)))
    assert text.endswith("  estimate  38 t/s generation · 1,240 t/s prompt (CUDA0: default: as Apple M3 Max)\n")
    text = rendered(plan, verbose=True)
    assert "  estimated 1,240 t/s prompt · 38 t/s generation (2048 + 512 tokens: 15.1 s)\n" in text
    assert "  speed of host: 40 GB/s, assumed (two channels)\n" in text


@named_cases(
    ("slower", 30.74, ", 30.7 at 4096 tokens", "  with a full context (4096 tokens): 30.7 t/s generation\n"),
    ("the same in three digits", 38.02, "", ""),
    ("unknown", None, "", ""),
)
def test_the_estimate_says_the_speed_with_a_full_context(full: float | None, estimate: str, verbose: str) -> None:
    plan = make_plan(estimate=make_price(full=full))
    assert rendered(plan).endswith(f"  estimate  38 t/s generation{estimate} · 1,240 t/s prompt\n")
    said = f"  estimated 1,240 t/s prompt · 38 t/s generation (2048 + 512 tokens: 15.1 s)\n{verbose}  prompt: "
    assert said in rendered(plan, verbose=True)


def test_the_speed_with_a_full_context_of_several_users() -> None:
    price = replace(make_price(full=20.0), workload=Workload(users=3))
    text = rendered(make_plan(estimate=price), verbose=True)
    assert "  with a full context (4096 tokens of each user): 20 t/s generation\n" in text


@pytest.mark.usefixtures("narrow")
def test_a_narrow_terminal_folds_a_long_estimate_and_cuts_no_number() -> None:
    host = SpeedSource("host", "40 GB/s, assumed (two channels): --host-bandwidth sets another", True)
    text = printed(plan_table.plan_table(make_plan(estimate=make_price(host, full=30.0))), Terminal())
    assert [line.rstrip() for line in text.splitlines()[-2:]] == [
        "  estimate  38 t/s generation, 30 at 4096 tokens · 1,240 t/s prompt (host: 40",
        "            GB/s, assumed)",
    ]
    assert "…" not in text and "8192   2048      256      100  2404  5788    1024" in text


@cases(
    (12345.6, "12,300"),
    (1240.4, "1,240"),
    (999.6, "1,000"),
    (140.78, "141"),
    (99.95, "100"),
    (38.04, "38"),
    (2.194, "2.19"),
    (0.5601, "0.56"),
)
def test_speeds_have_three_digits(value: float, text: str) -> None:
    assert speed(value) == text


def test_plan_that_does_not_fit_a_real_host() -> None:
    plan = make_plan(devices=[], host_free=GIB, problems=(Problem("host", 320 * MIB, "too little"),), virtual=False)
    assert rendered(plan) == (
        "Model 8B (llama, 4.0 GiB of weights) does not fit\n"
        "  MiB   total  free  model  context  compute  used  left  margin\n"
        "  host   1024  1024    300        0       20   320   704    1024\n"
        "  context   4096 tokens\n"
        "  weights   300.0 MiB in host memory\n"
        "  KV cache  0 B of f16\n"
    )


def test_verbose_shows_the_compute_buffers_of_a_real_load() -> None:
    plan = make_plan()
    (first, *others) = plan.breakdown.rows

    def text(reserved: int) -> str:
        rows = (replace(first, reserved=reserved), *(replace(row, reserved=row.compute) for row in others))
        return rendered(replace(plan, breakdown=replace(plan.breakdown, rows=rows)), verbose=True)

    note = "\n  loaded: the compute buffer when the model is loaded for real\n"
    assert note not in text(first.compute) and "loaded  used" not in text(first.compute)
    for reserved in (first.compute + 16 * MIB, first.compute - 16 * MIB):
        assert note in text(reserved) and "compute  loaded  used\n" in text(reserved)
        (line,) = re.findall(rf"^  {first.buffer_type} .*$", text(reserved).partition("buffer type")[2], re.M)
        assert line.split()[3:5] == [str(first.compute // MIB), str(reserved // MIB)]


@pytest.mark.parametrize(
    ("more", "fits", "line"),
    [
        (0, True, "CUDA0 8192 8192 2048 256 100 2404 5788 1024 Card of CUDA0"),
        (-16, True, "CUDA0 8192 8192 2048 256 100 2404 5788 1024 Card of CUDA0"),
        (16, True, "CUDA0 8192 8192 2048 256 116 2420 5772 1024 Card of CUDA0"),
        (4800, True, "CUDA0 8192 8192 2048 256 4900 7204 988 1024 Card of CUDA0; compute takes 36 MiB of the margin"),
        # its problem has the figures of the dummy load
        (16, False, "CUDA0 8192 8192 2048 256 100 2404 5788 1024 Card of CUDA0"),
    ],
    ids=["as much", "less", "more", "some of the margin", "a plan that does not fit"],
)
def test_the_larger_compute_buffer_counts(more: int, fits: bool, line: str) -> None:
    problems = () if fits else (Problem("host", MIB, "too little"),)
    plan = with_real_load(reserving(make_plan(devices=("CUDA0",), problems=problems), CUDA0=more * MIB))
    assert line in " ".join(rendered(plan).split())
    assert all(use.fits for use in plan.devices)


def test_verbose_shows_buffer_types() -> None:
    assert "buffer type  MiB: model  context  compute  used\n  CUDA0 " in rendered(make_plan(), verbose=True)
    assert "buffer type" not in rendered(make_plan())


@cases(
    (Params(n_ctx=0), "context 8192"),
    (Params(n_gpu_layers=-1), "33 of 33 layers"),
    (Params(n_gpu_layers=99), "33 of 33 layers"),
    (Params(n_gpu_layers=5), "5 of 33 layers"),
    (Params(type_k="q8_0", offload_kqv=False), "KV cache q8_0/f16 on the host"),
    (Params(n_seq_max=4), "4 sequences, a KV cache each"),
    (Params(n_seq_max=4, kv_unified=True), "4 sequences, one KV cache"),
)
def test_parameters(params: Params, expected: str) -> None:
    assert expected in rendered(make_plan(params, n_ctx=8192), verbose=True)


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;32mfits" in printed(plan_table.plan_table(make_plan()), Terminal())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in rendered(make_plan())


def test_devices() -> None:
    card = DeviceInfo("CUDA0", "Card", "gpu", "CUDA", 8 * GIB, 7 * GIB)
    described = DeviceInfo("CUDA1", "Other", "gpu", "fitter", 4 * GIB, 4 * GIB, virtual=True)
    host = DeviceInfo("CPU", "Processor", "cpu", "CPU", 32 * GIB, 30 * GIB)
    assert printed(plan_table.devices_table((card, described), host)) == (
        "device  MiB: total   free  type          backend  description\n"
        "CUDA0         8192   7168  gpu           CUDA     Card\n"
        "CUDA1         4096   4096  gpu, virtual  fitter   Other\n"
        "host         32768  30720  cpu           CPU      Processor\n"
    )


def test_catalogue() -> None:
    one = CatalogueGpu(
        "one", "One", "cuda", 890, 8 * GIB, None, 7 * GIB, Sources("a page", "a log", None, "estimated"), 1008e9
    )
    sources = Sources(None, "x", "a log", "y", "a page", "z", "a log")
    two = CatalogueGpu("two", "Two", "vulkan-anv", 0, 9 * GIB, 8 * GIB, 7 * GIB, sources, 89.6e9, 116.4e12, 15.752e9)
    assert printed(plan_table.catalogue_table([one, two])) == (
        "GPU  arch  MiB: total  usable  free  GB/s  PCIe  TFLOPS  profile     sources\n"
        "one   8.9        8192       -  7168  1008     -       -  cuda        1 2 - 3 - - -\n"
        "two     -        9216    8192  7168  89.6  15.8     116  vulkan-anv  - 4 2 5 1 2 6\n"
        "\n"
        "total: the card's memory. usable: what the driver leaves of it. free: what an idle card has free.\n"
        "GB/s: memory bandwidth. PCIe: bandwidth from the host, also in GB/s. TFLOPS: dense fp16.\n"
        "sources: of arch, total, usable, free, GB/s, PCIe and TFLOPS, by number:\n"
        "  1  a page\n"
        "  2  a log\n"
        "  3  estimated\n"
        "  4  x\n"
        "  5  y\n"
        "  6  z\n"
    )


def test_calibration() -> None:
    assert printed(calibration_table(CALIBRATION)) == (
        "device  MiB: total  free  context  outside  margin  twin      description\n"
        "CUDA0         8192  7168      400      600    1112  cuda 8.9  Card\n"
        "RPC0          8192  7168        -        -    1024  -         Card\n"
        "context: memory that a process takes just by using the device. outside: memory that a loaded model takes\n"
        "beyond that and beyond llama.cpp's own count. margin: memory that a fit leaves free by default.\n"
        "\n"
        "CUDA0 and virtual twin: 96 loads, bytes differ in 2\n"
        "CUDA0, loaded for real and as a dummy: 1 load, no byte differs\n"
        "\n"
        "devices  against  model  configuration  what             bytes: real      other  difference\n"
        "CUDA0    twin     dense  defaults       CUDA0 compute              5          3          -2\n"
        "CUDA0    twin     dense  defaults       CUDA_Host model            5          7          +2\n"
        "CUDA0    twin     dense  long           load                   loads  no memory\n"
        "\n"
        "stored in kept.json\n"
    )


def test_inspection() -> None:
    assert printed(plan_table.inspection_table(INSPECTION)) == (
        "M (llama, 3.0 MiB of weights)\n"
        "general.name  M\n"
        "a.list        [1, 2]\n"
        "tokens        9 × str\n"
        "\n"
        "tensors    count  MiB\n"
        "attention      2    2\n"
        "output         1    1\n"
        "\n"
        "layer  MiB: weights  output  attention  KV cache\n"
        "none              1       1                    0\n"
        "0                 2                  2         5\n"
        "\n"
        "one dummy load with a context of 4096 tokens:\n"
        "buffer type  MiB: model  context  compute  used\n"
        "CPU                   3        5        7    15\n"
    )


def progressed(*steps: Progress, out: io.StringIO | None = None, **words: bool) -> str:
    """What is printed of these steps."""
    out = out or io.StringIO()
    with progress(out, **words) as on_progress:
        assert on_progress is not None
        for step in steps:
            on_progress(step)
    return out.getvalue()


def test_progress_is_silent_where_nobody_watches() -> None:
    with progress(io.StringIO()) as on_progress:
        assert on_progress is None


def test_progress_of_minutes_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 14.9, 15.1, 15.2, 16.0, 29.0, 31.0, 31.0])
    monkeypatch.setattr("fitter.cli.answers.time.monotonic", lambda: next(clock))
    steps = [Progress(0, f"run 1: the plan ({left} s left)", 0.1) for left in (599, 585, 584, 580, 570, 568)]
    assert progressed(*steps, is_long=True) == "run 1: the plan (584 s left)\nrun 1: the plan (568 s left)\n"


def test_progress_on_a_terminal_is_a_line_that_goes_away_or_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    text = progressed(Progress(3, "context [4096]"), out=Terminal())
    assert "[3 dummy loads] context [4096]" in text and text.endswith("\x1b[2K")
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", progressed(Progress(0, "fetching 3 of 9 files", 0.5), out=Terminal()))
    assert f"{'━' * 12}╺{'━' * 11} fetching 3 of 9 files" in plain


def test_progress_counts_the_seconds_of_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.9, 75.0])
    monkeypatch.setattr("fitter.cli.answers.time.monotonic", lambda: next(clock))
    step = Step("[3 dummy loads] loading")
    assert [str(step.__rich__()), str(step.__rich__())] == ["[3 dummy loads] loading", "[3 dummy loads] loading (75 s)"]


def test_progress_with_a_line_for_each_step() -> None:
    steps = [Progress(0, f"fetching {part:.0%}", part) for part in (0.0, 0.5, 1.0)]
    assert progressed(*steps, every_step=True) == "fetching 100%\n"
    assert progressed(Progress(3, "context 4096"), every_step=True) == "[3 dummy loads] context 4096\n"


POOL = PoolUse("CUDA0+host", 64 * GIB, 60 * GIB, GIB, 3 * GIB, ("CUDA0", "host"))


def test_memory_that_is_shared() -> None:
    # what both map is counted once, in the parts as in their sum
    pool = replace(POOL, used=2224 * MIB, mapped_twice=500 * MIB)
    plan = replace(make_plan(devices=("CUDA0",), host_free=60 * GIB), pools=(pool,))
    lines = rendered(plan).splitlines()
    assert lines[1:5] == [
        "  MiB         total   free  model  context  compute  used   left  margin",
        "  CUDA0        8192   8192   2048      256      100  2404   5788    1024  Card of CUDA0",
        "  host        61440  61440    300        0       20   320  61120    1024",
        "  CUDA0+host  65536  61440   1848      256      120  2224  59216    1024  both together",
    ]


SAID = {
    "both map the same": (
        replace(POOL, mapped_twice=500 * MIB),
        "CUDA0+host: 500.0 MiB of weights are mapped by both, and counted once in their sum",
    ),
    "mapped by the device alone": (
        replace(POOL, mapped_between=300 * MIB),
        "CUDA0: 300.0 MiB of its margin are for weights of the host that lie between its own in the file, since it "
        "maps those as well",
    ),
    "not mapped": (
        replace(POOL, load_mode="none"),
        "the file must not be mapped: the GPU would map what the host has of the layers as well (--load-mode none, in "
        "older builds of llama.cpp --no-mmap)",
    ),
    "setting": (replace(POOL, setting=Setting("sudo x", GIB, "it is better with sudo x")), "it is better with sudo x"),
}


@cases(SAID)
def test_what_is_said_of_a_pool(pool: PoolUse, line: str) -> None:
    plan = replace(make_plan(devices=("CUDA0",)), pools=(pool,))
    assert pool_lines(plan) == [line]
    assert line in " ".join(rendered(plan, verbose=True).split())
    assert (line in " ".join(rendered(plan).split())) is (pool.setting is not None)


def test_a_plan_that_does_not_fit_says_nothing_of_how_to_load_it() -> None:
    plan = make_plan(devices=("CUDA0",), problems=(Problem("CUDA0+host", GIB, "too little"),))
    assert pool_lines(replace(plan, pools=(replace(POOL, load_mode="none"),))) == []
