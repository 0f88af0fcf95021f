"""llama.cpp's options by each of their names, and a plan's arguments as settings of them.

The formats are made from the arguments that ``fitter.output.arguments`` writes, so that none can leave one out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from fitter.errors import PlanError
from fitter.output.arguments import arguments
from fitter.planning.plan import PlanData


@dataclass(frozen=True)
class Option:
    """An option of llama.cpp (``common/arg.cpp``) as a plan uses it.

    ``name`` is what ``arguments`` writes, ``key`` its long name, positive and without dashes. ``env`` is the variable
    that llama.cpp's programs read, ``None`` where there is none. ``value`` is what a flag sets ``key`` to, ``None``
    where the option takes a value. ``is_files``: that value is a file, or several with commas.
    """

    name: str
    key: str
    env: str | None
    value: str | None = None
    is_files: bool = False


@dataclass(frozen=True)
class Setting:
    """An option and its value; ``true`` or ``false`` where it is a flag."""

    option: Option
    value: str


MODEL = Option("-m", "model", "LLAMA_ARG_MODEL", is_files=True)

OPTIONS = (
    MODEL,
    Option("-c", "ctx-size", "LLAMA_ARG_CTX_SIZE"),
    Option("--rpc", "rpc", "LLAMA_ARG_RPC"),
    Option("-dev", "device", "LLAMA_ARG_DEVICE"),
    Option("-ngl", "n-gpu-layers", "LLAMA_ARG_N_GPU_LAYERS"),
    Option("-sm", "split-mode", "LLAMA_ARG_SPLIT_MODE"),
    Option("-mg", "main-gpu", "LLAMA_ARG_MAIN_GPU"),
    Option("-ts", "tensor-split", "LLAMA_ARG_TENSOR_SPLIT"),
    Option("-ot", "override-tensor", "LLAMA_ARG_OVERRIDE_TENSOR"),
    Option("-b", "batch-size", "LLAMA_ARG_BATCH"),
    Option("-ub", "ubatch-size", "LLAMA_ARG_UBATCH"),
    Option("-ctk", "cache-type-k", "LLAMA_ARG_CACHE_TYPE_K"),
    Option("-ctv", "cache-type-v", "LLAMA_ARG_CACHE_TYPE_V"),
    Option("-fa", "flash-attn", "LLAMA_ARG_FLASH_ATTN"),
    Option("-nkvo", "kv-offload", "LLAMA_ARG_KV_OFFLOAD", "false"),
    Option("--no-op-offload", "op-offload", None, "false"),
    Option("--swa-full", "swa-full", "LLAMA_ARG_SWA_FULL", "true"),
    Option("-np", "parallel", "LLAMA_ARG_N_PARALLEL"),
    Option("-kvu", "kv-unified", "LLAMA_ARG_KV_UNIFIED", "true"),
    Option("-fit", "fit", "LLAMA_ARG_FIT"),
    Option("--embedding", "embedding", "LLAMA_ARG_EMBEDDINGS", "true"),
    Option("--mmproj", "mmproj", "LLAMA_ARG_MMPROJ", is_files=True),
    Option("-mmdev", "mmproj-device", "MTMD_BACKEND_DEVICE"),
    Option("--image-min-tokens", "image-min-tokens", "LLAMA_ARG_IMAGE_MIN_TOKENS"),
    Option("--image-max-tokens", "image-max-tokens", "LLAMA_ARG_IMAGE_MAX_TOKENS"),
    Option("-md", "model-draft", "LLAMA_ARG_SPEC_DRAFT_MODEL", is_files=True),
    Option("-devd", "device-draft", None),
    Option("-ngld", "n-gpu-layers-draft", "LLAMA_ARG_N_GPU_LAYERS_DRAFT"),
    Option("-ctkd", "cache-type-k-draft", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K"),
    Option("-ctvd", "cache-type-v-draft", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V"),
    Option("--spec-type", "spec-type", "LLAMA_ARG_SPEC_TYPE"),
    Option("--spec-draft-n-max", "spec-draft-n-max", "LLAMA_ARG_SPEC_DRAFT_N_MAX"),
    Option("--lora", "lora", None, is_files=True),
    Option("--lora-scaled", "lora-scaled", None, is_files=True),
)

_BY_NAME = {option.name: option for option in OPTIONS}


def settings(plan: PlanData) -> list[Setting]:
    """The arguments of ``plan``, option by option. Raises :class:`PlanError` for one that is not in ``OPTIONS``."""
    words = iter(arguments(plan))
    found = []
    for word in words:
        option = _BY_NAME.get(word)
        if option is None:
            raise PlanError(f"only --format args and --format json can express {word}, which this plan needs")
        found.append(Setting(option, next(words) if option.value is None else option.value))
    return found


def anywhere(plan: PlanData) -> list[Setting]:
    """The model and the settings of ``plan`` for a file that is read in another directory: with whole paths."""
    found = [Setting(MODEL, os.path.abspath(plan.model.path))]
    for setting in settings(plan):
        if setting.option.is_files:
            setting = Setting(setting.option, ",".join(map(os.path.abspath, setting.value.split(","))))
        found.append(setting)
    return found
