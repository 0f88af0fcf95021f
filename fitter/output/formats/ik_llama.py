"""Write a plan as arguments of ik_llama.cpp, a fork of llama.cpp with own options.

Mapped from its source (``common/common.cpp``, ``common/common.h`` and ``docs/parameters.md``); the fork was not run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from fitter.errors import PlanError
from fitter.output.formats.format_options import OptionValue, option_values
from fitter.parameters.table import PARAMETERS
from fitter.planning.placing.host_flags import flags_among
from fitter.planning.plan.plan import Plan

_EVERY_LAYER = 999
"""More layers than any model has: the fork accepts only a number."""


def words(plan: Plan) -> list[str]:
    """Write the arguments of ``plan`` for ik_llama.cpp.

    Two parameters need no option, because the fork always behaves so: one KV cache for all sequences, and no fitting of
    its own.

    Raises:
        PlanError: The fork has no option for a parameter.
    """
    args: list[str] = []
    # it may use other devices by itself
    for argument in option_values(replace(plan, default_devices=())):
        write = _WRITERS.get(argument.option.name)
        if write is None:
            raise PlanError(
                f"ik_llama.cpp has no option like llama.cpp's {argument.option.name}, which this plan needs: "
                "use another format"
            )
        args += write(argument, plan)
    return [*args, "-fa", _flash_attn(plan)]


def _unchanged(argument: OptionValue, _: Plan) -> list[str]:
    return [argument.option.name, argument.value]


def _flag(argument: OptionValue, _: Plan) -> list[str]:
    return [argument.option.name]


def _nothing(_: OptionValue, __: Plan) -> list[str]:
    return []


def _patterns(argument: OptionValue, plan: Plan) -> list[str]:
    """Write a flag as patterns: with its own ``-ncmoe`` the fork splits layers in another way, and biases stay."""
    flags = flags_among(plan.params.tensor_buft_overrides).items()
    overrides = [override for override, (name, _) in flags if PARAMETERS[name].option == argument.option.name]
    return ["-ot", PARAMETERS["override_tensor"].kind.word(overrides)]


def _device(argument: OptionValue, plan: Plan) -> list[str]:
    for name in argument.value.split(","):
        if not re.fullmatch(r"none|(CUDA|ROCm|Vulkan)\d+", name):
            raise PlanError(f"ik_llama.cpp has no device called {name}, which this plan uses: leave it out with -dev")
    return _unchanged(argument, plan)


def _n_gpu_layers(argument: OptionValue, plan: Plan) -> list[str]:
    value = str(max(_EVERY_LAYER, plan.n_layer + 1)) if argument.value == "all" else argument.value
    return [argument.option.name, value]


def _split_mode(argument: OptionValue, plan: Plan) -> list[str]:
    if argument.value not in ("none", "layer"):
        raise PlanError(f"ik_llama.cpp has no split mode {argument.value}, which this plan needs: use another format")
    return _unchanged(argument, plan)


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


_WRITERS: dict[str, Callable[[OptionValue, Plan], list[str]]] = {
    "-c": _unchanged,
    "-dev": _device,
    "-ngl": _n_gpu_layers,
    "-sm": _split_mode,
    "-mg": _unchanged,
    "-ts": _unchanged,
    "-ot": _unchanged,
    "-cmoe": _patterns,
    "-ncmoe": _patterns,
    "-ncffn": _patterns,
    "-b": _unchanged,
    "-ub": _unchanged,
    "-ctk": _unchanged,
    "-ctv": _unchanged,
    "-fa": _nothing,
    "-nkvo": _flag,
    "--no-op-offload": _no_op_offload,
    "--embedding": _flag,
    "-np": _unchanged,
    "-kvu": _nothing,
    "-lm": _load_mode,
    "-fit": _nothing,
}
