"""Write a plan as a Modelfile of Ollama, which starts a llama-server of its own with a few of its options.

Mapped from its source at commit fb30760 (``llm/llama_server.go``, ``server/sched.go``, ``parser/parser.go``) and its
documentation; Ollama was not run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from fitter.errors import PlanError
from fitter.output.arguments import (
    OptionValue,
    check_is_for,
    check_line,
    option_values,
    split_files,
    with_absolute_paths,
)
from fitter.planning.plan.plan import Plan
from fitter.planning.request.shared import DRAFT_MAX
from fitter.programs.llama_server.text import section
from fitter.programs.ollama import HEADROOM, LARGE_IMAGES

_VERSION = "0.30.0"
"""First version that runs every GGUF model with llama-server."""
_PLACING = ("PARAMETER num_gpu", "PARAMETER main_gpu")
_CACHE_TYPES = ("f16", "q8_0", "q4_0")
_VISIBLE = {"CUDA": "CUDA_VISIBLE_DEVICES", "ROCm": "ROCR_VISIBLE_DEVICES", "Vulkan": "GGML_VK_VISIBLE_DEVICES"}
"""Variables that limit Ollama to some devices of a backend, by their numbers."""


def ollama_text(plan: Plan) -> str:
    """Write instructions for the plan, and comments with the variables of Ollama's server that it needs.

    Raises:
        PlanError: The plan is for another program, or Ollama cannot be told a parameter.
    """
    return _modelfile(plan, anyway=False)


def ollama_anyway(plan: Plan) -> str:
    """Write the same without what Ollama cannot be told, which a comment says; Ollama then places the layers."""
    return _modelfile(plan, anyway=True)


def _modelfile(plan: Plan, *, anyway: bool) -> str:
    check_is_for(plan, "ollama", "instructions of a Modelfile")
    instructions, variables, missing = [f"REQUIRES {_VERSION}"], list[str](), list[str]()
    # Ollama chooses among all devices that it sees
    for argument in with_absolute_paths(replace(plan, default_devices=())):
        check_line(argument.words)
        option = argument.option.name
        try:
            if option in _VARIABLES:
                variables += _VARIABLES[option](argument, plan)
            else:
                instructions += _INSTRUCTIONS.get(option, _refused)(argument, plan)
        except PlanError:
            if not anyway:
                raise
            missing.append(f"# Ollama cannot be told this part of the plan: {' '.join(argument.words)}")
    if missing:
        # with a part of the placement, more layers would be on devices than fit
        instructions = [line for line in instructions if not line.startswith(_PLACING)]
        missing.append("# so Ollama itself chooses the layers on devices, and its memory is not the plan's")
    # llama.cpp takes no more than -b at a time
    instructions.append(f"PARAMETER num_batch {min(plan.params.n_batch, plan.params.n_ubatch)}")
    head = [f"# ollama create {section(plan.model.path).lower()} -f Modelfile"]
    if variables:
        head.append(f"# start the server with {' '.join(dict.fromkeys(variables))}, which holds for all its models")
    return "\n".join([*head, *missing, *instructions])


def _refused(argument: OptionValue, _: Plan) -> list[str]:
    raise PlanError(
        f"Ollama has no parameter like llama.cpp's {argument.option.name}, which this plan needs: use another format, "
        "or --anyway (in Python: anyway=True) to have Ollama place the layers"
    )


def _nothing(_: OptionValue, __: Plan) -> list[str]:
    return []


def _from(argument: OptionValue, _: Plan) -> list[str]:
    return [f"FROM {_path(each)}" for each in split_files(argument.value)]


def _path(path: str) -> str:
    """Quote a path whose last characters Ollama would strip."""
    return f'"{path}"' if path != path.strip() else path


def _num_ctx(argument: OptionValue, plan: Plan) -> list[str]:
    """Write the context of one slot, which Ollama multiplies by their number."""
    return [f"PARAMETER num_ctx {int(argument.value) // plan.params.n_seq_max}"]


def _num_gpu(argument: OptionValue, plan: Plan) -> list[str]:
    if not plan.breakdown.devices:
        return ["PARAMETER num_gpu 0"]
    return [f"PARAMETER num_gpu {plan.n_layer + 1 if argument.value == 'all' else argument.value}"]


def _split_mode(argument: OptionValue, plan: Plan) -> list[str]:
    return [f"PARAMETER main_gpu {plan.params.main_gpu}"] if argument.value == "none" else _refused(argument, plan)


def _use_mmap(argument: OptionValue, plan: Plan) -> list[str]:
    if argument.value not in ("none", "mmap"):
        return _refused(argument, plan)
    return [f"PARAMETER use_mmap {'true' if argument.value == 'mmap' else 'false'}"]


def _adapter(argument: OptionValue, _: Plan) -> list[str]:
    return [f"ADAPTER {_path(each)}" for each in argument.value.split(",")]


def _visible(argument: OptionValue, plan: Plan) -> list[str]:
    """Write the variable that limits Ollama to the plan's devices, and the one with which it takes all of several."""
    if argument.value in ("none", "MTL0"):
        return []
    names = argument.value.split(",")
    kind = names[0].rstrip("0123456789")
    numbers = [name.removeprefix(kind) for name in names]
    if kind not in _VISIBLE or not all(map(str.isdecimal, numbers)):
        return _refused(argument, plan)
    return [f"{_VISIBLE[kind]}={','.join(numbers)}", *(["OLLAMA_SCHED_SPREAD=1"] if len(names) > 1 else [])]


def _cache_type(argument: OptionValue, plan: Plan) -> list[str]:
    types = {plan.params.type_k, plan.params.type_v}
    if len(types) > 1 or not types <= set(_CACHE_TYPES):
        raise PlanError(
            f"Ollama has one type for both KV caches, {', '.join(_CACHE_TYPES)}, and this plan has "
            f"{' '.join(argument.words)}: plan with one of them for -ctk and -ctv"
        )
    return [f"OLLAMA_KV_CACHE_TYPE={argument.value}"]


def _flash_attn(argument: OptionValue, _: Plan) -> list[str]:
    return {"on": ["OLLAMA_FLASH_ATTENTION=1"], "off": ["OLLAMA_FLASH_ATTENTION=0"]}.get(argument.value, [])


def _num_parallel(argument: OptionValue, _: Plan) -> list[str]:
    return [] if argument.value == "1" else [f"OLLAMA_NUM_PARALLEL={argument.value}"]


def _inherited(argument: OptionValue, _: Plan) -> list[str]:
    """Write a variable that Ollama's llama-servers inherit, for an option that Ollama does not set."""
    return [f"{argument.option.env}={argument.value}"]


def _image_min_tokens(argument: OptionValue, plan: Plan) -> list[str]:
    return [] if plan.model.architecture in LARGE_IMAGES else _inherited(argument, plan)


def _device_of_images(argument: OptionValue, plan: Plan) -> list[str]:
    """Refuse a place of the projector that Ollama does not choose; see ``Ollama.attempts``."""
    devices, layers = plan.breakdown.devices, plan.params.n_gpu_layers
    size = sum(row.model for use in plan.shared if use.kind == "projector" for row in use.rows)
    is_limited = any(use.free < size + HEADROOM for use in plan.devices if use.name in devices)
    is_on_first = bool(devices) and (layers < 0 or layers > plan.n_layer) and not is_limited
    if argument.value != (devices[0] if is_on_first else "none"):
        raise PlanError(
            "Ollama puts a projector on the first device with all layers, and on the host without, where the plan has "
            f"it on {'the host' if argument.value == 'none' else argument.value}: leave -mmdev out"
        )
    return []


def _drafting(argument: OptionValue, plan: Plan) -> list[str]:
    """Write the tokens that the model's own layers draft at a time; without them Ollama does not draft."""
    if argument.value != "draft-mtp":
        raise PlanError(
            "Ollama drafts with a model's own layers (--mtp) or with heads made for it, and this plan with "
            f"--spec-type {argument.value}: leave it out"
        )
    sizes = [each.value for each in option_values(plan) if each.option.name == "--spec-draft-n-max"]
    return [f"PARAMETER draft_num_predict {sizes[0] if sizes else DRAFT_MAX}"]


def _draft_model(argument: OptionValue, _: Plan) -> list[str]:
    raise PlanError(
        f"Ollama runs a DRAFT file as heads of the model, and {os.path.basename(argument.value)} is a model of its "
        "own: leave -md out"
    )


_Writer = Callable[[OptionValue, Plan], list[str]]
_VARIABLES: dict[str, _Writer] = {
    "-dev": _visible,
    "-ctk": _cache_type,
    "-ctv": _cache_type,
    "-fa": _flash_attn,
    "-np": _num_parallel,
    "--image-min-tokens": _image_min_tokens,
    **dict.fromkeys(("-cram", "-ctxcp", "-cms", "--no-cache-idle-slots", "--image-max-tokens"), _inherited),
}
"""Options that are variables of Ollama's server."""
_INSTRUCTIONS: dict[str, _Writer] = {
    "-m": _from,
    "-c": _num_ctx,
    "-ngl": _num_gpu,
    "-sm": _split_mode,
    "-mg": _nothing,
    "-b": _nothing,
    "-ub": _nothing,
    "-lm": _use_mmap,
    "--embedding": _nothing,
    "--mmproj": _from,
    "-mmdev": _device_of_images,
    "--spec-type": _drafting,
    "--spec-draft-n-max": _nothing,
    "-md": _draft_model,
    "--lora": _adapter,
    "-fit": _nothing,
}
"""Options that are instructions, or that Ollama sets in the same way itself."""
