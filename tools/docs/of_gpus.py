"""Reference pages of the catalogue of GPUs, of profiles, and of output formats."""

from __future__ import annotations

import re
from dataclasses import replace

from fitter.errors import PlanError
from fitter.llama.types import Breakdown, Params, Row, TensorBuftOverride
from fitter.machine import gpu, gpu_catalogue
from fitter.machine.gpu_catalogue import CatalogueGpu, capability_text
from fitter.output.formats import render
from fitter.parameters.kinds import DeviceNames, Flag, Kind, Layers, OneOf, Overrides, Shares, Size, Whole
from fitter.parameters.table import LEVERS, PARAMETERS, SHARED, SPECULATION, Parameter
from fitter.parameters.targets import FORMATS, OWN_FORMATS
from fitter.planning.plan.plan import Plan
from fitter.planning.request.summary import DeviceUse, HostUse, ModelSummary, Search, SharedUse
from fitter.programs.later import Later
from tools.docs.markdown import code, page, paragraphs, plain, table
from tools.docs.of_options import option_link

MIB = 2**20
_FIGURES = ("total", "usable", "free", "bandwidth", "compute", "pcie", "compute_capability")


def gpus_page() -> str:
    """The GPUs that ``--gpu`` knows by name, with their figures and the source of each."""
    known = list(gpu_catalogue.gpus().values())
    numbers: dict[str, int] = {}
    for card in known:
        for figure in _FIGURES:
            if source := getattr(card.sources, figure):
                numbers.setdefault(source, len(numbers) + 1)
    head = ("`--gpu`", "card", "architecture", "MiB", "usable", "free", "GB/s", "TFLOPS", "PCIe GB/s", "sources")
    parts = []
    for profile in dict.fromkeys(card.profile for card in known):
        rows = [_card(card, numbers) for card in known if card.profile == profile]
        parts.append(f"## {profile} {{ #{profile} }}\n\n{table(head, rows)}")
    listed = "\n".join(f'{number}. <a id="source-{number}"></a>{_linked(text)}' for text, number in numbers.items())
    return page(
        "GPUs",
        f"The {len(known)} GPUs that `--gpu` and `gpus=` know by name. `fitter devices --catalogue` lists them too, "
        "with `--json` for programs. Upper case, spaces and the maker's name do not matter: `RTX 4090`, "
        "`NVIDIA GeForce RTX 4090` and `rtx-4090` are the same card.",
        "- *MiB*: the card's memory, as its driver's tool reports it. *usable*: what the driver leaves of it. *free*: "
        "what llama.cpp finds free on an idle card, which is what a plan has.\n"
        "- *GB/s*: bandwidth of its memory, 10⁹ bytes per second. *TFLOPS*: dense fp16 with accumulation in fp32, 10¹² "
        "operations per second. *PCIe GB/s*: from the host to the card.\n"
        "- *sources*: numbers of the [list below](#sources), for " + ", ".join(_FIGURES[:-2]) + ", PCIe and "
        "architecture, in this order; – where there is none.",
        "## Other GPUs",
        *paragraphs(gpu.parse_gpus.__doc__)[1:4],
        f"Drivers of Vulkan: {', '.join(f'{code(name)} ({text})' for name, text in gpu.VULKAN_DRIVERS.items())}.",
        _profiles(),
        *parts,
        "## Sources\n\n" + listed,
    )


def _profiles() -> str:
    """The profiles, and what their devices are called."""
    specs = {"cuda": "cuda:8.9:24GiB", "rocm": "rocm:gfx1100:24GiB", "vulkan": "vulkan:24GiB", "metal": "metal:64GiB"}
    rows = [(code(name), code(specs[name]), code(gpu.parse_gpus([specs[name]])[0].name)) for name in gpu.PROFILES]
    return "\n\n".join(
        [
            "## Profiles { #profiles }",
            "A profile says how a virtual device behaves: how tensors are sized and aligned, which operations it "
            "supports and takes over from the host. [Validation](../explanation/validation.md) says "
            "against what each was compared.",
            table(("profile", "such as", "its devices are called"), rows),
        ]
    )


def _card(card: CatalogueGpu, numbers: dict[str, int]) -> tuple[str, ...]:
    sources = [getattr(card.sources, figure) for figure in _FIGURES]
    links = [f"[{numbers[source]}](#source-{numbers[source]})" if source else "–" for source in sources]
    return (
        code(card.key),
        card.description,
        capability_text(card.compute_capability) if card.compute_capability else "",
        str(card.total // MIB),
        str(card.usable // MIB) if card.usable else "",
        str(card.free // MIB),
        f"{card.bandwidth / 1e9:g}",
        f"{card.compute / 1e12:g}" if card.compute else "",
        f"{card.pcie / 1e9:g}" if card.pcie else "",
        " ".join(links),
    )


def _linked(text: str) -> str:
    return re.sub(r"https://[^\s]*[^\s,]", r"<\g<0>>", text)


# --- formats


def formats_page() -> str:
    """Output formats, and which of them cannot express which parameter."""
    rows = [(code(name), plain(text)) for name, text in FORMATS.items()]
    refused = []
    for each in PARAMETERS.values():
        if each.options and not each.is_ours and (each.key or each.section == SHARED) and each.name != "rpc":
            refused += [(each, name, said) for name in FORMATS if (said := _refusal(each, name))]
    listed = [(option_link(each, each.option), code(name), plain(said)) for each, name, said in refused]
    return page(
        "Formats",
        "`fitter MODEL --format NAME`, and `plan.format(NAME)` in Python. Every format but `json` is meant to be run, "
        "and is refused for a plan that does not fit, unless `--anyway` (`anyway=True`) is given.",
        table(("format", "what it is"), rows),
        "## What a format cannot express",
        "A format has every parameter of the plan, or says which one it cannot express. These are those that a plan "
        "may have, with the error:",
        table(("parameter", "format", "error"), listed),
        "A path with control characters, or another text that a format would change, is refused as well.",
    )


def _refusal(each: Parameter, name: str) -> str:
    """What a format says of a plan with ``each``; empty if it can express it."""
    plan = _plan(each)
    program = name if name in OWN_FORMATS else "llama-server"
    try:
        render(replace(plan, program=program, own_split=plan.params.tensor_split or ()), name)
    except PlanError as error:
        return str(error)
    return ""


def _plan(each: Parameter) -> Plan:
    """A plan for two devices in which ``each`` has not its default."""
    value = (SPECULATION[0],) if each.name == "spec_type" else _value(each.kind, each.default)
    values: dict[str, object] = {}
    shared: tuple[SharedUse, ...] = ()
    if each.section == SHARED and each.name != "lora":
        shared = (SharedUse("draft", "draft.gguf", (), (each.option, each.kind.word(value))),)
    elif each.name == "lora":
        shared = (SharedUse("lora", "adapter.gguf", (), (each.option, "adapter.gguf")),)
    elif each.key:
        values = {each.key: value}
    names = ("CUDA0", "CUDA1")
    params = Params.of({"n_ctx": 4096, "n_gpu_layers": 33, "devices": names, **values})
    rows = tuple(Row(name, name, False, MIB, MIB, MIB) for name in names)
    devices = tuple(DeviceUse(name, "Card", 4 * MIB, 4 * MIB, 0, MIB, MIB, MIB) for name in names)
    return Plan(
        model=ModelSummary("model.gguf", "Model", "llama", MIB),
        params=params,
        breakdown=Breakdown(rows, names, 4096),
        devices=devices,
        host=HostUse(None, None, 0, MIB, 0, MIB),
        search=Search(1, 0.0),
        problems=(),
        n_layer=32,
        shared=shared,
        later=(Later("logits", MIB, MIB, 1),),
    )


def _value(kind: Kind, default: object) -> object:
    """A value that is not the default."""
    if isinstance(kind, Flag):
        return not default
    if isinstance(kind, Layers):
        return 10
    if isinstance(kind, Size):
        return 2048 * MIB
    if isinstance(kind, Whole):
        return 2 if default != 2 else 3
    if isinstance(kind, OneOf):
        return next(word for word in kind.words if word != default)
    if isinstance(kind, Shares):
        return (3.0, 1.0)
    if isinstance(kind, DeviceNames):
        return ("CUDA0", "CUDA1")
    if isinstance(kind, Overrides):
        return (TensorBuftOverride("exps", "CPU"),)
    return "file.gguf" if kind.is_file else "CUDA0"


def levers_page() -> str:
    """What ``--allow`` may name."""
    return page(
        "Levers",
        "Nothing is given up unless `--allow` names it (Python: `allow=[…]`, `fitter.toml`: `allow = […]`). It is then "
        "given up if no plan fits otherwise, if the plan is estimated to be more than 2 % faster by its `--objective`, "
        "or if it gets more context with `--objective context`.",
        table(("lever", "what it lets fitter do"), [(code(name), plain(text)) for name, text in LEVERS.items()]),
        "They are tried in this order, each in addition to those that have helped so far. If a later one makes an "
        "earlier one unnecessary, the earlier one is undone. What you set stays (`-ub`, `-ctk`, `-ctv`, "
        "`--op-offload`, `-fa off`); only `context` changes one, `-c`. The table and `levers` in the [JSON](json.md) "
        "say what was given up.",
    )
