"""Every format of ``fitter fit --format``, read by a program that it is written for.

llama-server's own parser and preset reader (upstream's libcommon), ``llama-fit-params``, a shell, Python; for
ik_llama.cpp a parser by the list of its options.
"""

from __future__ import annotations

import json
import subprocess
import types
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fitter
from fitter.api import Plan
from fitter.errors import PlanError
from fitter.llama.processes import wire
from fitter.llama.types import Breakdown, Lora, Params, Row, TensorBuftOverride
from fitter.machine.gpu import parse_gpus
from fitter.output import arguments, formats
from fitter.parameters.targets import FORMATS, PROGRAMS
from fitter.parameters.values import plain_pattern
from fitter.planning.placing.host_flags import flags_among
from fitter.planning.plan.plan import DeviceUse, HostUse, ModelSummary, Search
from fitter.planning.request.constraints import params_of
from tests.formats import ik_llama
from tests.formats import upstream as server
from tests.support.cases import named_cases
from tests.support.command import Command, json_of_python, run_fitter
from tests.support.plans import for_format
from tools.models import shapes
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny

pytestmark = pytest.mark.usefixtures("one_worker")

MIB = 1024 * 1024
GPUS = parse_gpus(["3x 24GiB"])
NAMES = tuple(gpu.name for gpu in GPUS)
PATTERNS = (r"blk\.\d+\.ffn_.*_exps", "^blk.(1|2|13).ffn_(up|gate)_exps.weight$", "exps", "a b'c")
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
DRAWN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("kv_unified", "offload_kqv", "op_offload", "swa_full", "embeddings"), (False, True)),
    "type_k": CACHE_TYPES,
    "type_v": CACHE_TYPES,
    "flash_attn": ("auto", "on", "off"),
    "n_ctx": (0, 512, 1000, 131072),
    "n_gpu_layers": (-1, 0, 1, 33),
    "n_seq_max": (1, 4),
    "n_batch": (64, 2048, 4096),
    "n_ubatch": (64, 512, 1024),
    "split_mode": ("none", "layer"),
    "main_gpu": (0, 1, 2),
}
"""Values of parameters that are drawn each on their own."""
QUICK = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def plan_with(params: Params, devices: Sequence[str] = NAMES, path: str = "/models/a model.gguf") -> Plan:
    uses = tuple(DeviceUse(name, "Card", 24 << 30, 24 << 30, 1 << 30, 1, 1, 1) for name in devices)
    rows = tuple(Row(name, name, False, 1, 1, 1) for name in devices)
    return Plan(
        model=ModelSummary(path, "A model", "llama", 1),
        params=params,
        breakdown=Breakdown(rows, tuple(devices), params.n_ctx or 8192, True),
        devices=uses,
        host=HostUse(None, None, 0, 1, 1, 1),
        search=Search(1, 0.1),
        problems=(),
        n_layer=32,
        virtual=True,
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of every kind of parameter, each drawn on its own."""
    devices = draw(st.sampled_from([None, (), ("CUDA1",), ("CUDA2", "CUDA0"), NAMES]))
    used = NAMES if devices is None else devices
    shares = st.lists(st.integers(0, 160).map(lambda quarters: quarters / 4), min_size=len(used), max_size=len(used))
    targets = st.sampled_from(["CPU", *NAMES])
    override = st.builds(TensorBuftOverride, st.sampled_from(PATTERNS), targets)
    values: dict[str, Any] = {name: draw(st.sampled_from(each)) for name, each in DRAWN.items()}
    params = Params(
        tensor_split=draw(st.none() | shares.filter(any).map(tuple)),
        tensor_buft_overrides=tuple(draw(st.lists(override, max_size=3))),
        devices=devices,
        **values,
    )
    plan = plan_with(params, used)
    return replace(plan, default_devices=draw(st.sampled_from([(), NAMES])) if params.split_mode == "layer" else ())


SPILLED = plan_with(
    Params(
        n_ctx=32768,
        n_gpu_layers=33,
        n_batch=4096,
        n_ubatch=1024,
        n_seq_max=4,
        kv_unified=True,
        type_k="q8_0",
        type_v="q4_0",
        flash_attn="on",
        offload_kqv=False,
        swa_full=True,
        embeddings=True,
        split_mode="none",
        main_gpu=2,
        devices=NAMES,
        tensor_split=(20.0, 13.0, 0.5),
        tensor_buft_overrides=tuple(TensorBuftOverride(pattern, "CPU") for pattern in PATTERNS),
    )
)
"""Every parameter at another value than llama.cpp's default, but the one that has no environment variable."""


def said(plan: Plan) -> Params:
    """The parameters of ``plan`` as llama.cpp's options can say them: other words for the same."""
    params = plan.params
    split = None
    if params.tensor_split is not None and len(plan.breakdown.devices) > 1:
        split = params.tensor_split
        while split[-1] == 0:
            split = split[:-1]
    return replace(
        params,
        n_ctx=params.n_ctx or plan.breakdown.n_ctx,
        tensor_split=split,
        tensor_buft_overrides=tuple(_overrides(params)),
        devices=None if params.devices == plan.default_devices != () else params.devices,
        kv_unified=params.kv_unified and params.n_seq_max > 1,
    )


def _overrides(params: Params) -> Iterator[TensorBuftOverride]:
    """The overrides that upstream's parser makes of a plan's words."""
    flags = flags_among(params.tensor_buft_overrides)
    for each in params.tensor_buft_overrides:
        if each not in flags:
            yield TensorBuftOverride(plain_pattern(each.pattern), each.buffer_type)
    for name, value in flags.values():
        names = r"(up|down|gate)\." if name == "n_cpu_ffn" else "(up|down|gate|gate_up)_(ch|)exps"
        for layer in ("",) if name == "cpu_moe" else [rf"blk\.{layer}" for layer in range(value)]:
            yield TensorBuftOverride(rf"{layer}\.ffn_{names}", "CPU")


def variables_of(text: str, directory: Path) -> dict[str, str]:
    """Read an environment file with a shell, and return the variables that it exports."""
    file = directory / "llama.env"
    file.write_text(text + "\n")
    words = ["sh", "-c", 'set -a; . "$1"; env -0', "sh", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={})
    variables = dict(pair.split("=", 1) for pair in done.stdout.split("\0") if pair)
    return {name: value for name, value in variables.items() if name.startswith(("LLAMA_ARG_", "MTMD_"))}


def test_the_plans_here_have_every_parameter() -> None:
    default, spilled = Params(), SPILLED.params
    same = {field.name for field in fields(Params) if getattr(spilled, field.name) == getattr(default, field.name)}
    # what shares the memory has tests of its own, and the pinned llama.cpp has no cache of experts
    assert same == {"moe_cache_size", "op_offload", "load_mtp", "ctx_type", "n_rs_seq", "n_outputs_max", "lora", "more"}


@QUICK
@given(plan=plans())
@example(plan=SPILLED)
def test_llama_server_reads_every_parameter_of_the_arguments(reader: Path, plan: Plan) -> None:
    reading = server.read(reader, GPUS, plan.arguments())
    assert reading == server.Reading("", said(plan), fits_itself=False)
    if not any(" " in word for word in plan.arguments()):
        assert plan.format("args").split(" ") == plan.arguments()


@QUICK
@given(plan=plans())
@example(plan=SPILLED)
def test_llama_server_reads_every_parameter_of_a_preset(reader: Path, directory: Path, plan: Plan) -> None:
    file = directory / "models.ini"
    file.write_text(plan.format("ini") + "\n")
    name, words = server.preset(reader, file)
    assert name == "a-model"
    assert server.read(reader, GPUS, words) == server.Reading(plan.model.path, said(plan), fits_itself=False)


@QUICK
@given(plan=plans())
@example(plan=SPILLED)
def test_llama_server_reads_every_parameter_of_the_environment(reader: Path, directory: Path, plan: Plan) -> None:
    if not plan.params.op_offload:
        with pytest.raises(PlanError, match="no environment variable for --no-op-offload"):
            plan.format("env")
        return
    text = plan.format("env")
    variables = variables_of(text, directory)
    expected = server.Reading(plan.model.path, said(plan), fits_itself=False)
    assert server.read(reader, GPUS, variables=variables) == expected
    # docker takes lines as they stand, and llama.cpp must not take a quoted value for another one
    lines = dict(line.split("=", 1) for line in text.splitlines() if not line.startswith("#"))
    quoted = {name for name, value in lines.items() if value != variables[name]}
    assert quoted == {name for name in lines if text.startswith("# not for docker") and name in text.splitlines()[0]}


@QUICK
@given(plan=plans())
@example(plan=SPILLED)
def test_json_has_every_parameter(plan: Plan) -> None:
    document = json.loads(plan.format("json"))["params"]
    overrides = tuple(TensorBuftOverride(**each) for each in document.pop("tensor_buft_overrides"))
    split = document.pop("tensor_split")
    devices = tuple(document.pop("devices"))
    document["lora"] = tuple(Lora(**each) for each in document["lora"])
    document |= {"tensor_buft_overrides": overrides, "devices": devices}
    read = Params.of({**document, "tensor_split": None if split is None else tuple(split)})
    params = replace(plan.params, n_ctx=plan.breakdown.n_ctx, devices=plan.breakdown.devices)
    assert read == params


@QUICK
@given(plan=plans())
@example(plan=SPILLED)
def test_python_passes_every_parameter(plan: Plan) -> None:
    args, kwargs = called(plan.format("python"))
    assert args == (plan.model.path,)
    if "type_k" in kwargs and isinstance(kwargs["type_k"], int):
        assert kwargs == plan.llama_kwargs()
        return
    margins = {"margin": kwargs.pop("margin", []), "host_margin": kwargs.pop("host_margin")}
    devices = tuple(kwargs.pop("devices"))
    assert margins == {"margin": [1 << 30] * len(plan.breakdown.devices), "host_margin": 0}
    overrides = said(plan).tensor_buft_overrides
    expected = replace(plan.params, n_ctx=plan.breakdown.n_ctx, devices=plan.breakdown.devices)
    passed = params_of(devices if devices != ("none",) else (), **kwargs)
    assert passed == replace(expected, tensor_buft_overrides=overrides)


def called(script: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run a script of the format ``python`` with stand-ins for its modules, and return the arguments of its call."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    loaded: list[bool] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return types.SimpleNamespace(load=lambda: loaded.append(True))

    modules = {"fitter": types.SimpleNamespace(fit=record), "llama_cpp": types.SimpleNamespace(Llama=record)}
    builtins = {"__import__": lambda name, *_: modules[name]}
    exec(compile(script, "script", "exec"), {"__builtins__": builtins})
    assert len(calls) == 1
    assert bool(loaded) == ("import fitter" in script)
    return calls[0]


@QUICK
@given(plan=plans())
@example(plan=replace(SPILLED, params=replace(SPILLED.params, kv_unified=False, op_offload=False)))
def test_ik_llama_has_an_option_for_every_parameter(plan: Plan) -> None:
    own = tuple(100.0 * device for device in range(len(plan.breakdown.devices)))
    plan = replace(plan, program="ik_llama", own_split=own)
    params = replace(said(plan), devices=plan.params.devices)
    if params.n_gpu_layers == 1 or (params.kv_unified and params.n_seq_max > 1):
        with pytest.raises(PlanError, match=r"no -ngl for the output alone|no option like llama\.cpp's -kvu"):
            plan.format("ik_llama")
        return
    found = ik_llama.parse(formats.words(plan, "ik_llama"))
    split = tuple(map(float, found["-ts"].split(","))) if "-ts" in found else None
    overrides = [part.split("=") for part in found["-ot"].split(",")] if "-ot" in found else []
    layers = int(found["-ngl"])
    devices = found.get("-dev")
    read = Params(
        n_ctx=int(found["-c"]),
        # without all layers it leaves the output out
        n_gpu_layers=params.n_gpu_layers if layers > plan.n_layer else layers + bool(layers),
        tensor_split=split,
        tensor_buft_overrides=tuple(TensorBuftOverride(*each) for each in overrides),
        n_batch=int(found.get("-b", "2048")),
        n_ubatch=int(found.get("-ub", "512")),
        n_seq_max=int(found.get("-np", "1")),
        kv_unified=params.kv_unified,
        type_k=found.get("-ctk", "f16"),
        type_v=found.get("-ctv", "f16"),
        # llama.cpp said that it is on
        flash_attn=params.flash_attn if found["-fa"] == "on" else "off",
        offload_kqv="-nkvo" not in found,
        op_offload=found.get("-op") != "-1,0",
        # it always is, and has no option
        swa_full=params.swa_full,
        embeddings="--embedding" in found,
        split_mode=found.get("-sm", "layer"),
        main_gpu=int(found.get("-mg", "0")),
        devices=None if devices is None else () if devices == "none" else tuple(devices.split(",")),
    )
    assert read == replace(params, tensor_split=None if params.tensor_split is None else own)
    assert "--fit" not in found


def test_upstream_has_every_option_by_every_name(reader: Path, tmp_path: Path) -> None:
    """The key and the variable of each option in the table name the same option in upstream's parser."""
    values = {"device": "none", "tensor-split": "3,1", "override-tensor": "a=CPU", "split-mode": "none", "fit": "off"}
    values |= {"cache-type-k": "q8_0", "cache-type-v": "q8_0", "flash-attn": "off", "spec-type": "draft-mtp"}
    values |= {"rpc": "127.0.0.1:1", "device-draft": "none", "mmproj-device": "none", "cache-type-k-draft": "q8_0"}
    values |= {"load-mode": "none", "cache-type-v-draft": "q8_0", "lora-scaled": "a.gguf:2"}
    # the pinned llama.cpp lacks three of them
    newer = ("moe-cache-mib", "n-cpu-ffn", "spec-draft-n-ubatch")
    for option in (each for each in arguments.options().values() if each.key not in newer):
        value = option.value or values.get(option.key, "7")
        for key in filter(None, (option.key, option.env)):
            file = tmp_path / "one.ini"
            file.write_text(f"[model]\n{key} = {value}\n")
            _, words = server.preset(reader, file)
            # the flag or the option and its value, by the last of its names
            assert len(words) == (1 if option.value else 2), (key, words)
            again = tmp_path / "again.ini"
            again.write_text(f"[model]\n{option.name.lstrip('-')} = {'true' if option.value else value}\n")
            assert server.preset(reader, again)[1] == words


CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "whole on one": ("llama-3.1-8b", ("rtx-4090",), {}),
    "spilled over two": ("qwen3-30b-a3b", ("8GiB", "6GiB"), {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}),
    "four sequences": ("gpt-oss-20b", ("8GiB",), {"n_seq_max": 4, "kv_unified": True, "n_ubatch": 1024}),
    "cache on the host": ("llama-3.1-8b", ("6GiB", "3GiB"), {"offload_kqv": False, "op_offload": False}),
    "one of two": ("llama-3.1-8b", ("24GiB", "12GiB"), {"split_mode": "none", "main_gpu": 1, "margin": 100 * MIB}),
    "what was given up": ("llama-3.1-8b", ("4GiB",), {"n_ctx": 32768, "allow": ["kv-q8_0", "context"]}),
    "no GPU": ("llama-3.1-8b", ("none",), {"n_ctx": 4096}),
    "first experts, with biases": ("gpt-oss-20b", ("8GiB",), {"n_ctx": 8192, "n_cpu_moe": 16}),
    "first experts after a dense layer": ("glm45-air", ("2x rtx-3090",), {"n_ctx": 4096, "n_cpu_moe": 30}),
    "all experts": ("gpt-oss-120b", ("8GiB",), {"n_ctx": 4096, "cpu_moe": True}),
    "experts that the fit chose": ("gpt-oss-20b", ("rtx-3060-12gb",), {}),
}
FLAGS = {
    "first experts, with biases": "-ncmoe 16",
    "first experts after a dense layer": "-ncmoe 30",
    "all experts": "-cmoe",
    "experts that the fit chose": "-ncmoe 2",
}
"""Their words in place of -ot."""


@pytest.mark.parametrize("case", CASES)
def test_a_fitted_plan_in_every_format(case: str, reader: Path, directory: Path, tmp_path: Path) -> None:
    shape, specs, pins = CASES[case]
    gpus = () if specs == ("none",) else parse_gpus(specs)
    model = shapes.write(shape, directory)
    plan = fitter.fit(model, gpus=specs, **pins)
    assert plan.fits
    words = plan.arguments()
    if case in FLAGS:
        assert f" {FLAGS[case]} " in " ".join(words) and "-ot" not in words
    is_default = bool(gpus) and plan.params.devices == tuple(gpu.name for gpu in gpus) and "split_mode" not in pins
    assert ("-dev" in words) != is_default

    expected = said(plan)
    assert server.read(reader, gpus, plan.arguments()).params == expected
    file = tmp_path / "models.ini"
    file.write_text(plan.format("ini"))
    name, words = server.preset(reader, file)
    assert name == model.stem
    found = server.read(reader, gpus, words)
    if case == "what was given up":
        # a preset sorts its options, so -ncffn is before -ot there; both are for the host
        overrides = sorted(found.params.tensor_buft_overrides, key=expected.tensor_buft_overrides.index)
        assert {each.buffer_type for each in overrides} == {"CPU"}
        found = replace(found, params=replace(found.params, tensor_buft_overrides=tuple(overrides)))
    assert found == server.Reading(str(model), expected, fits_itself=False)
    if "kv_unified" not in pins:
        ik_llama.parse(for_format(plan, "ik_llama").format("ik_llama").split(" "))

    # llama-fit-params knows no -kvu, and loads virtual devices for -dev alone
    named = replace(plan, default_devices=())
    plain = [word for word in named.arguments() if word != "-kvu"]
    measured = server.fit_print(gpus, ["-m", str(model), *plain], {})
    # a line for each device, and the host: its name, then MiB of weights, context and compute
    taken = {name: [int(size) for size in sizes] for name, *sizes in map(str.split, measured)}
    assert list(taken) == [*plan.breakdown.devices, "Host"]
    for name in plan.breakdown.devices if "-kvu" not in named.arguments() else ():
        row = plan.breakdown.on(name)
        assert taken[name] == [size // MIB for size in (row.model, row.context, row.compute)]
    if plan.params.op_offload:
        variables = variables_of(named.format("env"), tmp_path)
        assert server.fit_print(gpus, [], variables) == measured

    (path,), kwargs = called(plan.format("python"))
    again = fitter.fit(path, gpus=specs, **kwargs)
    assert again.params == plan.params
    assert again.breakdown.rows == plan.breakdown.rows


CHECK = """
import json
from fitter.llama.processes import wire
from fitter.llama.load.breakdown import breakdown_of
real = breakdown_of(llm._ctx.ctx)
text = llm.create_completion("ba lu mi", max_tokens=4, temperature=0)
print(json.dumps({"rows": wire.encode(real), "tokens": text["usage"]["completion_tokens"],
                  "kind": type(llm).__name__, "n_seq_max": llm.context_params.n_seq_max, "n_ctx": llm.n_ctx()}))
"""


QUANTIZED = {"n_ctx": 512, "type_k": "q8_0", "type_v": "q8_0", "n_ubatch": 128}
OVERRIDDEN = {"n_ctx": 512, "override_tensor": ["exps=CPU"], "op_offload": False}
FOUR = {"n_ctx": 1024, "n_seq_max": 4, "offload_kqv": False}


@named_cases(
    ("Llama", TINY_DENSE, "-c 512 -ctk q8_0 -ctv q8_0 -ub 128", QUANTIZED),
    ("overrides", TINY_MOE, "-c 512 -ot exps=CPU --no-op-offload", OVERRIDDEN),
    ("four sequences", TINY_MOE, "-c 1024 -np 4 -nkvo", FOUR),
)
def test_the_script_loads_what_was_measured(shape: Any, words: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", shape)
    done = run_fitter(model, "--format", "python", *words.split())
    assert done.returncode == 0, done.stderr
    plan = fitter.fit(model, **options)

    # without mmap host weights are allocated, as they are when they are measured
    is_own = "llama_cpp" in done.stdout
    place, option = ("    n_ctx=", "    use_mmap=False,\n    n_ctx=") if is_own else ("load(", "load(use_mmap=False")
    script = done.stdout.replace(place, option)
    answer = json_of_python(script + CHECK)
    assert answer["tokens"] > 0
    assert (answer["n_seq_max"], answer["n_ctx"]) == (options.get("n_seq_max", 1), options["n_ctx"])
    real = wire.decode(Breakdown, answer["rows"])
    assert {row.buffer_type: row for row in real.rows} == {row.buffer_type: row for row in plan.breakdown.rows}


@pytest.mark.parametrize("name", FORMATS)
def test_the_command_writes_what_the_plan_says(name: str, tiny: Path, command: Command) -> None:
    program = "llama-server" if name in ("kubernetes", "llmkube") else name if name in PROGRAMS else "any"
    words = (tiny, "--gpu", "cuda:8.9:1200MiB", "-c", "512", "--for", program)
    done = command(*words, "--format", name)
    plan = fitter.fit(tiny, gpus=["cuda:8.9:1200MiB"], n_ctx=512, program=program)
    if name == "json":
        assert done.document == {**plan.to_dict(), "search": done.document["search"]}
        assert command(*words, "--json", "--format", "json").status == 0
    else:
        assert (done.status, done.out) == (0, plan.format(name) + "\n")
