"""From what a user says to what a fit keeps: parameters, overrides, margins, the levers, the workload. Bytes."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fitter.errors import UsageError
from fitter.llama.types import DeviceInfo, Lora, Params, TensorBuftOverride, TensorInfo, VirtualDevice
from fitter.model.header import Model
from fitter.model.location import local_name
from fitter.model.tensors import layer_of
from fitter.parameters.table import PARAMETERS, Measuring, of_a_load, taken_by
from fitter.parameters.values import MAX_SCALE
from fitter.planning.request import request_limits
from fitter.planning.request.request import DEFAULT_MARGIN, LEVERS, OBJECTIVES, STRATEGIES, DeviceLimit
from fitter.planning.request.shared import HOST_NAME
from fitter.planning.request.summary import Problem
from fitter.planning.speed.cost import Workload
from fitter.text import MIB, mib, mib_up

if TYPE_CHECKING:
    from typing_extensions import Unpack

_EXPERTS = ".ffn_(up|down|gate|gate_up)_(ch|)exps"
"""What ``--cpu-moe`` moves (``LLM_FFN_EXPS_REGEX`` upstream); the dot stands for itself."""

SLACK = 512 * MIB
"""Beside what was measured outside of llama.cpp's accounting: work spaces that a larger model needs, other programs."""


def default_margin(outside: int | None) -> int:
    """Upstream's margin; what was measured ``outside`` of llama.cpp's accounting and ``SLACK`` where that is more."""
    return max(DEFAULT_MARGIN, auto_margin(outside))


def auto_margin(outside: int | None) -> int:
    """What was measured ``outside`` of llama.cpp's accounting and ``SLACK``; upstream's margin where nothing was."""
    return DEFAULT_MARGIN if outside is None else outside + SLACK


def params_of(devices: Sequence[str] | None, /, **given: Unpack[Measuring]) -> Params:
    """Parameters of one load, as far as they are known without the model; ``for_model`` says the rest.

    What ``cpu_moe`` and ``n_cpu_moe`` stand for is such a rest, and here they are only checked. ``None`` is not set.
    Raises ``UsageError`` where one makes no sense.
    """
    checked: dict[str, Any] = {
        each.name: each.check(given[each.name])  # type: ignore[literal-required]
        for each in taken_by(Measuring)
        if given.get(each.name) is not None
    }
    values = {key: each.kind.planned(checked[each.name]) for key, each in of_a_load().items() if each.name in checked}
    # llama.cpp cuts n_ubatch to n_batch; a larger micro batch alone means a larger batch too
    values.setdefault("n_batch", max(Params.n_batch, values.get("n_ubatch", Params.n_ubatch)))
    # as llama-server does, where it is not told -c
    if (each_slot := checked.get("kv_unified_per_slot")) and "n_ctx" not in checked:
        values["n_ctx"] = PARAMETERS["n_ctx"].check(each_slot * values.get("n_seq_max", Params.n_seq_max))
    values["lora"] = adapters(checked.get("lora", ()), checked.get("lora_scaled", ()))
    if devices is not None:
        values["devices"] = tuple(devices)
    return Params.of(values)


def context_of_a_sequence(params: Params, n_ctx_train: int) -> int:
    """Tokens that one sequence may have, in a context that the model's own takes the place of where it is 0."""
    streams = 1 if params.kv_unified else params.n_seq_max
    context = params.n_ctx // streams or n_ctx_train
    each_slot = params.of_parameter(PARAMETERS["kv_unified_per_slot"])
    return context if each_slot is None else min(context, int(each_slot))


def adapters(plain: Iterable[str], scaled: Iterable[str]) -> tuple[Lora, ...]:
    """The LoRA adapters of ``--lora`` and of ``--lora-scaled``. Raises ``UsageError`` for what those cannot say."""
    found = [Lora(path) for path in plain]
    for text in scaled:
        path, _, scale = text.rpartition(":")
        try:
            found.append(Lora(path, float(scale)))
        except ValueError:
            path = ""
        if not path or not abs(found[-1].scale) <= MAX_SCALE:
            raise UsageError(f"'{text}' is not a scaled adapter: write FILE:SCALE, such as style.gguf:0.5")
    for lora in found:
        # of an address, it is the name of the downloaded file that llama.cpp will see
        check_adapter_name(local_name(lora.path), lora.scale)
    return tuple(found)


def check_adapter_name(path: str, scale: float) -> None:
    """Raise ``UsageError`` for the path of an adapter that llama.cpp's options cannot name."""
    for char in ",:" if scale != 1 else ",":
        if char in path:
            raise UsageError(f"llama.cpp would cut the adapter's path '{path}' at the '{char}': rename the file")


def for_model(params: Params, model: Model, cpu_moe: bool, n_cpu_moe: int | None) -> Params:
    """``params`` held against what ``model`` has, and what ``--cpu-moe`` and ``--n-cpu-moe`` stand for there.

    Raises ``UsageError`` for a context beyond all reason, or one with less than a token for each sequence.
    """
    request_limits.check_context(params.n_ctx, model.n_ctx_train, params.n_seq_max)
    is_causal = model.metadata.get(f"{model.architecture}.attention.causal") is not False
    request_limits.check_sequences(params, params.n_ctx if is_causal and params.n_ctx else None)
    experts = expert_overrides(cpu_moe, n_cpu_moe, (tensor.name for tensor in model.tensors))
    return replace(
        params,
        n_gpu_layers=request_limits.layers_on_devices(params.n_gpu_layers, model.n_layer),
        tensor_buft_overrides=(*params.tensor_buft_overrides, *experts),
    )


def check_split_mode(split_mode: str) -> None:
    """Raise ``UsageError`` for a split mode that is not planned."""
    if split_mode == "row":
        raise UsageError(
            "split mode 'row' cannot be fitted, since llama.cpp has given it up: use 'tensor', which splits every "
            "tensor over all devices too, or 'layer'"
        )


def check_split_tensors(params: Params, drafts: str | None = None) -> None:
    """Raise ``UsageError`` for what llama.cpp does not do, or nobody has compared, where ``params`` split every tensor.

    ``drafts``: the option that asks for a second model or context.
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
    """Raise ``UsageError`` where weights are to be read from disk again and again, and the load mode keeps them."""
    mode = params.of_parameter(PARAMETERS["load_mode"])
    if "paging" in allow and mode not in ("auto", "mmap"):
        does = "keeps weights in memory" if "mlock" in str(mode) else "reads weights into memory of their own"
        raise UsageError(
            f"--allow paging needs weights that are mapped from the file, and --load-mode {mode} {does}: leave one of "
            "the two out"
        )


def check_split_devices(split_mode: str, names: Sequence[str]) -> None:
    """Raise ``UsageError`` where every tensor is to be split over the only device that there is."""
    if split_mode == "tensor" and len(names) < 2:
        there = f"there is only {names[0]}" if names else "there is none"
        raise UsageError(f"split mode 'tensor' needs two devices or more, and {there}: use --split-mode layer")


def check_split_targets(
    split_mode: str,
    caught: Iterable[tuple[TensorInfo, TensorBuftOverride]],
    devices: Sequence[DeviceInfo | DeviceLimit],
) -> None:
    """Raise ``UsageError`` where an override puts a tensor on one of the devices that share every tensor."""
    names = {device.buffer_type for device in devices} if split_mode == "tensor" else set()
    for tensor, override in caught:
        if override.buffer_type in names:
            raise UsageError(
                f"-ot '{override.pattern}={override.buffer_type}' puts {tensor.name} on one device, and split mode "
                "'tensor' splits it over all of them: use CPU as its buffer type, or leave that override out"
            )


def workload_of(prompt: int | None, generate: int | None, context: int, *, is_set: bool) -> Workload:
    """The request to price: what is not given has its default, cut to what a ``context`` of so many tokens has left.

    ``is_set`` tells whether the user chose that context or the model has no larger one. Raises ``UsageError`` for
    numbers below 1, and where they are more than the context.
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
        prompt = min(Workload.prompt, max(0, context - generate))
    return Workload(prompt, generate)


def check_live_tokens(live_tokens: int | None, context: int) -> None:
    """Raise ``UsageError`` for tokens that a ``context`` of so many tokens cannot have."""
    if live_tokens is not None and not 0 <= live_tokens <= context:
        raise UsageError(f"{live_tokens} live tokens do not fit in a context of {context}: give 0 to {context}")


def check_choices(objective: str, strategy: str) -> None:
    """Raise ``UsageError`` for an objective or a strategy that there is not."""
    for name, value, choices in (("objective", objective, OBJECTIVES), ("strategy", strategy, STRATEGIES)):
        if value not in choices:
            raise UsageError(f"unknown {name} '{value}': choose from {', '.join(choices)}")


def check_profile(profile: str | None, virtual: Sequence[VirtualDevice]) -> None:
    """Raise ``UsageError`` for a profile that there is not, or that the ``virtual`` devices cannot have."""
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
    """Raise ``UsageError`` for pinned parameters that contradict one another."""
    if n_gpu_layers == 0 and tensor_split and any(tensor_split):
        raise UsageError(
            "-ngl 0 keeps every layer on the host, but -ts splits layers over devices: leave one of the two out"
        )


def expert_overrides(cpu_moe: bool, n_cpu_moe: int | None, names: Iterable[str]) -> tuple[TensorBuftOverride, ...]:
    """What ``--cpu-moe`` and ``--n-cpu-moe`` stand for in a model with tensors of these ``names``.

    Layers that it does not have are left out, however many are asked for. Raises ``UsageError`` for a negative number.
    """
    if n_cpu_moe is not None:
        n_cpu_moe = PARAMETERS["n_cpu_moe"].check(n_cpu_moe)
    if cpu_moe:
        return (TensorBuftOverride(_EXPERTS, "CPU"),)
    if n_cpu_moe:
        there = {layer for name in names if (layer := layer_of(name)) is not None and layer < n_cpu_moe}
        if there:
            layers = "|".join(map(str, sorted(there)))
            return (TensorBuftOverride(f"^blk.({layers}){_EXPERTS}", "CPU"),)
    return ()


def check_targets(
    caught: Iterable[tuple[TensorInfo, TensorBuftOverride]],
    used: Sequence[DeviceInfo | DeviceLimit],
    every: Sequence[DeviceInfo],
) -> None:
    """Raise ``UsageError`` where an override puts a tensor on a device that cannot have it: llama.cpp would abort.

    ``caught`` pairs tensors with the overrides that are theirs. The model may be on the devices ``used`` of ``every``.
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
    """Devices with the margin of each: one for all, or one per device; without a word of the user's, ``defaults``.

    A margin may be larger than its device, which then has no room for anything. Raises ``UsageError`` for a negative
    margin, or a list of the wrong length.
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
    """Raise ``UsageError`` where nothing fits, and no device has as much memory as the user wants free of it."""
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
    """What the user lets a fit do. Raises ``UsageError`` for a lever that there is not."""
    for lever in allow:
        if lever not in LEVERS:
            close = difflib.get_close_matches(lever.lower(), LEVERS, n=2)
            meant = f"did you mean {' or '.join(close)}? The" if close else "the"
            raise UsageError(f"unknown lever '{lever}': {meant} levers are {', '.join(LEVERS)}")
    return frozenset(allow)
