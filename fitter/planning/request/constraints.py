"""Check the user's parameters, overrides, margins, levers and workload, and convert them for a fit. Bytes."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fitter.errors import UsageError
from fitter.llama.types import DeviceInfo, Lora, Params, TensorBuftOverride, TensorInfo, VirtualDevice
from fitter.model.header import Model
from fitter.model.location import local_name
from fitter.parameters.table import FORMER_LEVERS, PARAMETERS, Measuring, of_a_load, taken_by
from fitter.parameters.values import MAX_SCALE
from fitter.planning.placing.host_flags import host_overrides
from fitter.planning.request import request_limits
from fitter.planning.request.request import DEFAULT_MARGIN, LEVERS, OBJECTIVES, STRATEGIES, DeviceLimit
from fitter.planning.request.session import Session
from fitter.planning.request.shared import HOST_NAME
from fitter.planning.request.summary import Problem
from fitter.planning.speed.caches import least_size
from fitter.planning.speed.cost import Workload
from fitter.planning.speed.model_facts import facts_of
from fitter.text import MIB, mib, mib_up

if TYPE_CHECKING:
    from typing_extensions import Unpack

SLACK = 512 * MIB
"""Margin beyond the measured bytes outside llama.cpp's count: work spaces of larger models, other programs."""


def default_margin(outside: int | None) -> int:
    """Return the larger of upstream's margin and ``auto_margin``. ``outside``: bytes outside llama.cpp's count."""
    return max(DEFAULT_MARGIN, auto_margin(outside))


def auto_margin(outside: int | None) -> int:
    """Return the measured bytes ``outside`` llama.cpp's count plus ``SLACK``; upstream's margin if there are none."""
    return DEFAULT_MARGIN if outside is None else outside + SLACK


def params_of(devices: Sequence[str] | None, /, **given: Unpack[Measuring]) -> Params:
    """Build the parameters of one load that need no model; ``for_model`` adds the others.

    ``cpu_moe``, ``n_cpu_moe`` and ``n_cpu_ffn`` need the model, so they are only checked here. ``None`` is not set.

    Raises:
        UsageError: A parameter makes no sense.
    """
    checked: dict[str, Any] = {
        each.name: each.check(given[each.name])  # type: ignore[literal-required]
        for each in taken_by(Measuring)
        if given.get(each.name) is not None
    }
    values = {key: each.kind.planned(checked[each.name]) for key, each in of_a_load().items() if each.name in checked}
    # llama.cpp cuts n_ubatch to n_batch; a larger micro batch alone means a larger batch too
    values.setdefault("n_batch", max(Params.n_batch, values.get("n_ubatch", Params.n_ubatch)))
    # llama-server does so without -c
    if (each_slot := checked.get("kv_unified_per_slot")) and "n_ctx" not in checked:
        values["n_ctx"] = PARAMETERS["n_ctx"].check(each_slot * values.get("n_seq_max", Params.n_seq_max))
    values["lora"] = adapters(checked.get("lora", ()), checked.get("lora_scaled", ()))
    if devices is not None:
        values["devices"] = tuple(devices)
    return Params.of(values)


def context_of_a_sequence(params: Params, n_ctx_train: int) -> int:
    """Return the most tokens of one sequence; a context of 0 is the model's own."""
    streams = 1 if params.kv_unified else params.n_seq_max
    context = params.n_ctx // streams or n_ctx_train
    each_slot = params.of_parameter(PARAMETERS["kv_unified_per_slot"])
    return context if each_slot is None else min(context, int(each_slot))


def adapters(plain: Iterable[str], scaled: Iterable[str]) -> tuple[Lora, ...]:
    """Parse the LoRA adapters of ``--lora`` and ``--lora-scaled``. Raises ``UsageError``."""
    loras = [Lora(path) for path in plain]
    for text in scaled:
        path, _, scale = text.rpartition(":")
        try:
            loras.append(Lora(path, float(scale)))
        except ValueError:
            path = ""
        if not path or not abs(loras[-1].scale) <= MAX_SCALE:
            raise UsageError(f"'{text}' is not a scaled adapter: write FILE:SCALE, such as style.gguf:0.5")
    for lora in loras:
        # llama.cpp will see the name of the downloaded file, not the address
        check_adapter_name(local_name(lora.path), lora.scale)
    return tuple(loras)


def check_adapter_name(path: str, scale: float) -> None:
    """Raise ``UsageError`` if llama.cpp's options cannot name this path."""
    for char in ",:" if scale != 1 else ",":
        if char in path:
            raise UsageError(f"llama.cpp would cut the adapter's path '{path}' at the '{char}': rename the file")


def for_model(
    params: Params, model: Model, cpu_moe: bool, n_cpu_moe: int | None, n_cpu_ffn: int | None = None
) -> Params:
    """Check ``params`` against ``model``, and add the overrides of ``-cmoe``, ``-ncmoe`` and ``-ncffn``.

    Raises:
        UsageError: The context is far beyond the model's, or has less than one token for each sequence.
    """
    request_limits.check_context(params.n_ctx, model.n_ctx_train, params.n_seq_max)
    request_limits.check_sequences(params, params.n_ctx if model.is_causal and params.n_ctx else None)
    check_expert_cache(params, model)
    overrides = host_overrides(cpu_moe, n_cpu_moe, n_cpu_ffn, [tensor.name for tensor in model.tensors])
    return replace(
        params,
        n_gpu_layers=request_limits.layers_on_devices(params.n_gpu_layers, model.n_layer),
        tensor_buft_overrides=(*params.tensor_buft_overrides, *overrides),
    )


def check_expert_cache(params: Params, model: Model) -> None:
    """Raise ``UsageError`` where llama.cpp refuses the cache of experts (``llama_moe_cache``)."""
    if not params.moe_cache_size:
        return
    if params.split_mode == "tensor":
        raise UsageError("split mode 'tensor' has no cache of experts: leave --moe-cache-mib out, or use -sm layer")
    least = least_size(facts_of(model))
    if not least:
        raise UsageError(f"{model.path.name} has no experts to cache: leave --moe-cache-mib out")
    if params.moe_cache_size < least:
        raise UsageError(
            f"a cache of {params.moe_cache_size // MIB} MiB has no room for the experts of one token of "
            f"{model.path.name}: give --moe-cache-mib {mib_up(least)} or more"
        )


def check_split_mode(split_mode: str) -> None:
    """Raise ``UsageError`` for a split mode that cannot be planned."""
    if split_mode == "row":
        raise UsageError(
            "split mode 'row' cannot be fitted: llama.cpp's programs list it, but its CUDA, ROCm, Vulkan and Metal "
            "backends load no model with it. Use 'tensor', which splits every tensor over all devices, or 'layer'"
        )


def check_split_tensors(params: Params, drafts: str | None = None) -> None:
    """Raise ``UsageError`` if split mode ``tensor`` has parameters that llama.cpp refuses or that are not compared.

    Args:
        params: Parameters of the load.
        drafts: The option that adds a second model or context, if any.
    """
    if params.split_mode == "auto":
        raise UsageError("split mode 'auto' is chosen by a fit: name 'layer' or 'tensor' for one load")
    if params.split_mode != "tensor":
        return
    if params.flash_attn == "off":
        raise UsageError("split mode 'tensor' needs flash attention: leave -fa off out, or use --split-mode layer")
    if not params.offload_kqv:
        raise UsageError(
            "with split mode 'tensor' and a KV cache in host memory llama.cpp ends its process: leave -nkvo out, or "
            "use --split-mode layer"
        )
    other = "--lora" if params.lora else drafts
    if other is not None:
        raise UsageError(f"no plan can be made for split mode 'tensor' with {other}: leave one of the two out")


def check_paging(params: Params, allow: Collection[str]) -> None:
    """Raise ``UsageError`` if ``paging`` is allowed and the load mode keeps weights in memory."""
    mode = params.of_parameter(PARAMETERS["load_mode"])
    if "paging" in allow and mode not in ("auto", "mmap"):
        does = "keeps weights in memory" if "mlock" in str(mode) else "reads weights into memory of their own"
        raise UsageError(
            f"--allow paging needs weights that are mapped from the file, and --load-mode {mode} {does}: leave one of "
            "the two out"
        )


def check_split_devices(split_mode: str, names: Sequence[str]) -> None:
    """Raise ``UsageError`` if split mode ``tensor`` has fewer than two devices."""
    if split_mode == "tensor" and len(names) < 2:
        there = f"there is only {names[0]}" if names else "there is none"
        raise UsageError(f"split mode 'tensor' needs two devices or more, and {there}: use --split-mode layer")


def check_split_targets(
    split_mode: str,
    caught: Iterable[tuple[TensorInfo, TensorBuftOverride]],
    devices: Sequence[DeviceInfo | DeviceLimit],
) -> None:
    """Raise ``UsageError`` if an override puts a tensor on one of the devices that split every tensor."""
    names = {device.buffer_type for device in devices} if split_mode == "tensor" else set()
    for tensor, override in caught:
        if override.buffer_type in names:
            raise UsageError(
                f"-ot '{override.pattern}={override.buffer_type}' puts {tensor.name} on one device, and split mode "
                "'tensor' splits it over all of them: use CPU as its buffer type, or leave that override out"
            )


def workload_of(
    prompt: int | None, generate: int | None, context: int, *, is_set: bool, is_deep: bool = False
) -> Workload:
    """Build the request to price; missing numbers are defaults, cut to the room in the context.

    Args:
        prompt: Tokens of the prompt, if set.
        generate: Tokens to generate, if set.
        context: Tokens of one sequence.
        is_set: Whether the user chose the context, or the model has no larger one.
        is_deep: Whether a missing prompt follows the context: it is the geometric mean of ``Workload.prompt`` and the
            context, or a quarter of a context in which that is less. A conversation passes through all depths up to its
            context, a doubling as likely as another, and most are not longer than some doublings.

    Raises:
        UsageError: A number is below 1, or both exceed the context.
    """
    for name, value in (("prompt", prompt), ("generate", generate)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}: it must be 1 or more")
    if (prompt or 1) + (generate or 1) > context:
        remedy = "ask for fewer, or for a larger -c" if is_set else "it has no larger one, so ask for fewer"
        whose = "the context" if is_set else "the model's own context"
        asked = " and ".join(
            text
            for text, value in ((f"{prompt} tokens of prompt", prompt), (f"{generate} to generate", generate))
            if value is not None
        )
        if asked:
            raise UsageError(f"{asked} are more than {whose} of {context} tokens: {remedy}")
    if generate is None:
        room = context - prompt if prompt else max(1, context // 5)
        generate = min(Workload.generate, room)
    if prompt is None:
        usual = min(math.isqrt(Workload.prompt * context), max(1, context // 4)) if is_deep else Workload.prompt
        prompt = min(usual, max(0, context - generate))
    return Workload(prompt, generate)


def check_session(session: Session, context: int, *, is_set: bool) -> None:
    """Raise ``UsageError`` if a context, of one sequence, does not hold a conversation to its end.

    ``is_set``: whether the user chose the context.
    """
    if session.longest > context:
        fitting = replace(session, reused=round(session.reused, 5)).scaled_to(context)
        less = f"ask for less, such as --workload {fitting.words}"
        larger = f"{less}, or for a larger -c, {session.longest} for each user"
        remedy = larger if is_set else f"the model has no larger one, so {less}"
        raise UsageError(
            f"a conversation of {session.longest} tokens at its end is more than a context of {context} for each user: "
            f"{remedy}"
        )


def check_live_tokens(live_tokens: int | None, context: int) -> None:
    """Raise ``UsageError`` if the context cannot hold ``live_tokens``."""
    if live_tokens is not None and not 0 <= live_tokens <= context:
        raise UsageError(f"{live_tokens} live tokens do not fit in a context of {context}: give 0 to {context}")


def check_choices(objective: str, strategy: str) -> None:
    """Raise ``UsageError`` for an unknown objective or strategy."""
    for name, value, choices in (("objective", objective, OBJECTIVES), ("strategy", strategy, STRATEGIES)):
        if value not in choices:
            raise UsageError(f"unknown {name} '{value}': choose from {', '.join(choices)}")


def check_profile(profile: str | None, virtual: Sequence[VirtualDevice]) -> None:
    """Raise ``UsageError`` for an unknown profile, or one that the ``virtual`` devices cannot have."""
    if profile is None:
        return
    name = profile.partition(":")[0]
    if name != "library" and profile != "cuda":
        raise UsageError(
            f"unknown profile '{profile}': use library, library:DIRECTORY or cuda; other profiles are part of a GPU's "
            "description, such as --gpu metal:64GiB"
        )
    other = next((device for device in virtual if device.profile != "cuda"), None)
    if other is not None and (name == "library" or all(device.profile != "cuda" for device in virtual)):
        raise UsageError(f"the profile '{name}' is for NVIDIA cards, but {other.name} is '{other.description}'")
    if not virtual:
        raise UsageError(f"the profile '{name}' is for virtual cards: describe them, such as --gpu rtx-4090")


def check_pins(n_gpu_layers: int | None, tensor_split: Sequence[float] | None) -> None:
    """Raise ``UsageError`` if ``n_gpu_layers`` and ``tensor_split`` contradict each other."""
    if n_gpu_layers == 0 and tensor_split and any(tensor_split):
        raise UsageError(
            "-ngl 0 keeps every layer on the host, but -ts splits layers over devices: leave one of the two out"
        )


def check_targets(
    caught: Iterable[tuple[TensorInfo, TensorBuftOverride]],
    used: Sequence[DeviceInfo | DeviceLimit],
    every: Sequence[DeviceInfo],
) -> None:
    """Raise ``UsageError`` if an override puts a tensor on a device that cannot hold it: llama.cpp would abort.

    Args:
        caught: Tensors, each with the override that matches it.
        used: Devices that the model may use.
        every: All devices.
    """
    allowed = {device.buffer_type: device for device in used}
    others = {device.buffer_type: device for device in every if device.type in ("gpu", "igpu")}
    for tensor, override in caught:
        device = allowed.get(override.buffer_type)
        said = f"-ot '{override.pattern}={override.buffer_type}' puts {tensor.name}"
        if device is None and override.buffer_type in others:
            raise UsageError(
                f"{said} on {others[override.buffer_type].name}, and -dev, -sm none or -mg keeps the model off that "
                "device: choose another buffer type, or let the model use the device"
            )
        most = device.largest_tensor if device is not None else None
        if device is not None and most is not None and tensor.bytes > most:
            raise UsageError(
                f"{said} of {mib_up(tensor.bytes)} MiB on {device.name}, which takes tensors of {mib(most)} MiB "
                "at most: choose another buffer type for it"
            )


def device_limits(
    devices: Sequence[DeviceInfo], margin: int | Sequence[int] | None, defaults: Sequence[int] | None = None
) -> tuple[DeviceLimit, ...]:
    """Give each device its margin: one for all, one per device, or ``defaults`` if the user sets none.

    A margin may exceed its device, which then stays empty.

    Raises:
        UsageError: A margin is negative, or their number is wrong.
    """
    if margin is None:
        margins = [DEFAULT_MARGIN] * len(devices) if defaults is None else list(defaults)
    elif isinstance(margin, int):
        margins = [margin] * len(devices)
    elif len(margin) == 1:
        margins = list(margin) * len(devices)
    else:
        margins = list(margin)
        if len(margins) != len(devices):
            raise UsageError(f"{len(margins)} margins for {len(devices)} devices: give one for all, or one per device")
    for size in margins:
        if size < 0:
            raise UsageError(f"a margin of {mib(size)} MiB is negative: give 0 or more, which must stay free")
    return tuple(
        DeviceLimit(
            device.name,
            device.description,
            device.total,
            device.free,
            size,
            device.buffer_type or device.name,
            device.largest_tensor,
        )
        for device, size in zip(devices, margins, strict=True)
    )


def check_margins(devices: Sequence[DeviceLimit], problems: Sequence[Problem]) -> None:
    """Raise ``UsageError`` if nothing fits because every margin exceeds its device."""
    if not problems or not devices or any(device.margin <= device.total for device in devices):
        return
    margins = ", ".join(f"{mib(device.margin)} MiB of {device.name} with {mib(device.total)} MiB" for device in devices)
    host = next((problem.missing for problem in problems if problem.device == HOST_NAME), None)
    why = "-ngl, -ts or -ot needs a device" if host is None else f"without a device the host lacks {mib_up(host)} MiB"
    raise UsageError(
        f"the margin is larger than the device ({margins}), so nothing can be placed there, but {why}: "
        "use a smaller --fit-target"
    )


def levers(allow: Collection[str]) -> frozenset[str]:
    """Check the names of levers, and leave out former ones. Raises ``UsageError`` for an unknown one."""
    for lever in allow:
        if lever not in LEVERS and lever not in FORMER_LEVERS:
            close = difflib.get_close_matches(lever.lower(), LEVERS, n=2)
            meant = f"did you mean {' or '.join(close)}? The" if close else "the"
            raise UsageError(f"unknown lever '{lever}': {meant} levers are {', '.join(LEVERS)}")
    return frozenset(allow) - FORMER_LEVERS
