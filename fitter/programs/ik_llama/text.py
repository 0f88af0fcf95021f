"""Write a plan as arguments of ik_llama.cpp.

Mapped from its source at commit 8337e4c (``common/common.cpp``, ``common/common.h``, ``docs/parameters.md``); the fork
was not run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from fitter.errors import PlanError
from fitter.llama.types import TensorBuftOverride
from fitter.output.arguments import OptionValue, check_is_for, option_values
from fitter.parameters.table import PARAMETERS
from fitter.planning.plan.layer_map import placement_of
from fitter.planning.plan.plan import Plan
from fitter.planning.request.shared import DRAFT_MAX

_EVERY_LAYER = 999
"""More layers than any model has: the fork accepts only a number."""

_DEVICE = re.compile(r"none|(CUDA|ROCm|Vulkan)\d+")


def ik_llama_words(plan: Plan) -> list[str]:
    """Write the arguments of ``plan`` for ik_llama.cpp.

    What the fork always does needs no option: caches of whole size, and no fitting of its own.

    Raises:
        PlanError: The plan is for another program, or the fork has no option for a parameter.
    """
    check_is_for(plan, "ik_llama", "arguments of ik_llama.cpp")
    args: list[str] = []
    # it may use other devices by itself
    options = option_values(replace(plan, default_devices=()))
    for argument in options:
        write = _WRITERS.get(argument.option.name)
        if write is None:
            raise PlanError(
                f"ik_llama.cpp has no option like llama.cpp's {argument.option.name}, which this plan needs: "
                "use another format"
            )
        args += write(argument, plan)
    args += [*_overrides(plan), *_drafting(options), "-fa", _flash_attn(plan)]
    return args


def _unchanged(argument: OptionValue, _: Plan) -> list[str]:
    return argument.words


def _named(name: str) -> Callable[[OptionValue, Plan], list[str]]:
    return lambda argument, _: [name, argument.value]


def _nothing(_: OptionValue, __: Plan) -> list[str]:
    return []


def _device(argument: OptionValue, plan: Plan) -> list[str]:
    for name in argument.value.split(","):
        if not _DEVICE.fullmatch(name):
            raise PlanError(f"ik_llama.cpp has no device called {name}, which this plan uses: leave it out with -dev")
    return _unchanged(argument, plan)


def _device_draft(argument: OptionValue, plan: Plan) -> list[str]:
    if "," in argument.value:
        raise PlanError(
            f"ik_llama.cpp splits a draft model by bytes, in a way that no plan holds: give one of {argument.value} "
            "with -devd"
        )
    return _device(argument, plan)


def _device_of_images(argument: OptionValue, _: Plan) -> list[str]:
    if argument.value == "none":
        return ["--no-mmproj-offload"]
    if not re.fullmatch(r"[A-Za-z]+0", argument.value):
        raise PlanError(
            f"ik_llama.cpp computes images on the first device, or on the host, and this "
            f"plan on {argument.value}: leave -mmdev out"
        )
    return []


def _layers(argument: OptionValue, plan: Plan) -> list[str]:
    """Write the number of layers without the output, which it puts on devices beside all layers only."""
    every = max(_EVERY_LAYER, plan.n_layer + 1)
    number = every if argument.value == "all" else int(argument.value)
    if number == 1:
        raise PlanError("ik_llama.cpp has no -ngl for the output alone, which is 1 in llama.cpp: use another -ngl")
    return ["-ngl", str(every if number > plan.n_layer else max(0, number - 1))]


def _layers_of_draft(argument: OptionValue, _: Plan) -> list[str]:
    return ["-ngld", str(_EVERY_LAYER) if argument.value == "all" else argument.value]


def _overrides(plan: Plan) -> list[str]:
    """Write all overrides as patterns: with its own ``-ncmoe`` the fork splits layers in another way, and biases stay.

    Of a plan without all layers, the last one has the output on its device.
    """
    overrides, layers = list(plan.params.tensor_buft_overrides), plan.params.n_gpu_layers
    if 1 < layers <= plan.n_layer:
        homes = placement_of(plan, plan.n_layer + 1).homes
        overrides.append(TensorBuftOverride("^output", plan.breakdown.devices[homes[-1]]))
    return ["-ot", PARAMETERS["override_tensor"].kind.word(overrides)] if overrides else []


def _tensor_split(_: OptionValue, plan: Plan) -> list[str]:
    if not plan.own_split:
        raise PlanError(
            "ik_llama.cpp cuts layers by bytes, and no -ts of its own is known for this plan: use fewer devices (-dev)"
        )
    return ["-ts", ",".join(f"{share:.0f}" for share in plan.own_split)]


def _flash_attn(plan: Plan) -> str:
    """Resolve ``auto`` to llama.cpp's choice, because the fork would read it as ``on``."""
    resolved = plan.breakdown.flash_attn
    return plan.params.flash_attn if resolved is None else "on" if resolved else "off"


def _no_op_offload(_: OptionValue, __: Plan) -> list[str]:
    """Turn offloading off (0) for all operations (-1)."""
    return ["-op", "-1,0"]


def _load_mode(argument: OptionValue, _: Plan) -> list[str]:
    if argument.value not in _LOAD_MODES:
        raise PlanError(f"ik_llama.cpp has no load mode {argument.value}, which this plan has: leave --load-mode out")
    return _LOAD_MODES[argument.value]


_LOAD_MODES = {
    "none": ["--no-mmap"],
    "mmap": [],
    "mlock": ["--no-mmap", "--mlock"],
    "mmap+mlock": ["--mlock"],
}


def _adapters(argument: OptionValue, _: Plan) -> list[str]:
    return [word for path in argument.value.split(",") for word in ("--lora", path)]


def _scaled_adapters(argument: OptionValue, _: Plan) -> list[str]:
    return [word for each in argument.value.split(",") for word in ("--lora-scaled", *each.rsplit(":", 1))]


def _drafting(options: list[OptionValue]) -> list[str]:
    """Write each way to draft as a stage with the tokens that it drafts."""
    values = {argument.option.name: argument.value for argument in options}
    words = []
    for way in values["--spec-type"].split(",") if "--spec-type" in values else ():
        if way not in _STAGES:
            raise PlanError(f"ik_llama.cpp does not draft like llama.cpp's --spec-type {way}: leave it out")
        name, key, option = _STAGES[way]
        size = values.get(option, str(DRAFT_MAX) if key == "n_max" and way.startswith("draft-") else "")
        words += ["--spec-type", f"{name}:{key}={size}" if size else name]
    return words


_STAGES = {
    "draft-simple": ("draft", "n_max", "--spec-draft-n-max"),
    "draft-mtp": ("mtp", "n_max", "--spec-draft-n-max"),
    "ngram-simple": ("ngram-simple", "ngram_size_m", "--spec-ngram-simple-size-m"),
    "ngram-map-k": ("ngram-map-k", "ngram_size_m", "--spec-ngram-map-k-size-m"),
    "ngram-map-k4v": ("ngram-map-k4v", "ngram_size_m", "--spec-ngram-map-k4v-size-m"),
    "ngram-mod": ("ngram-mod", "n_max", "--spec-ngram-mod-n-max"),
    "ngram-cache": ("ngram-cache", "n_max", ""),
}
"""Its names for ways to draft and for the tokens of each, with llama.cpp's option for these."""

_WRITERS: dict[str, Callable[[OptionValue, Plan], list[str]]] = {
    **dict.fromkeys(
        ("-c", "-mg", "-b", "-ub", "-ctk", "-ctv", "-np", "--pooling", "-cram", "--mmproj", "-md", "-ctkd", "-ctvd"),
        _unchanged,
    ),
    **dict.fromkeys(("--image-min-tokens", "--image-max-tokens", "-sm", "-nkvo", "--embedding"), _unchanged),
    **dict.fromkeys(("-fa", "-fit", "--swa-full", "-ot", "-cmoe", "-ncmoe", "-ncffn", "--spec-type"), _nothing),
    **dict.fromkeys((option for _, _, option in _STAGES.values() if option), _nothing),
    "-dev": _device,
    "-devd": _device_draft,
    "-mmdev": _device_of_images,
    "-ngl": _layers,
    "-ngld": _layers_of_draft,
    "-ts": _tensor_split,
    "--no-op-offload": _no_op_offload,
    "-lm": _load_mode,
    "-ctxcp": _named("--ctx-checkpoints"),
    "-cms": _named("--ctx-checkpoints-interval"),
    "--lora": _adapters,
    "--lora-scaled": _scaled_adapters,
}
