"""How much of everything a user may ask for: one table, which every entrance holds its words against.

``held`` does so at the door of the API, before anything is built; what only the model tells is asked once it is known.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ParamSpec, TypeVar, get_args

from fitter.errors import UsageError
from fitter.llama.types import MAX_DEVICES, FlashAttn, Params, VirtualDevice
from fitter.values import MOST_BYTES, shown

_P = ParamSpec("_P")
_R = TypeVar("_R")

LARGEST = 2**31 - 1
"""The largest number that llama.cpp's own programs read."""

MAX_SEQUENCES = 256
"""``LLAMA_MAX_SEQ``: sequences in one context."""

MAX_TOKENS = 2**22
"""Tokens of a context or a batch, where the model was not trained for more.

llama.cpp keeps some 55 bytes of its own for each token of a cache, in a dummy load too.
"""

MAX_OWN_TOKENS = 2**25
"""Tokens of all contexts together, whatever a model says that it was trained for: 128 Ki for 256 sequences."""

MAX_DRAFTED = 64
"""Tokens drafted at a time: a recurrent model's state is there once for each, and allocated in a dummy load too."""

MAX_IMAGE_TOKENS = 2**14
"""Tokens of one image: libmtmd makes one of that size when it measures, and counts its pixels in an ``int``."""

MAX_OVERRIDES = 512
"""Tensor overrides: llama.cpp compiles each one's pattern again for every tensor."""

MAX_PATTERNS = 2**13
"""Characters of all patterns together: ``std::regex`` takes seconds for more of them, and overflows its stack."""

_LEAST_SHARE, _MOST_SHARE = 1e-30, 1e30
"""llama.cpp has them as ``float``, and adds them up."""

MAX_SCALE = 1e30
"""The scale of an adapter, a ``float`` too."""

MOST_SPEED = 1e15
"""Tokens per second that nothing reaches."""

_LONGEST = 1e6
"""Seconds; what the system counts waits in ends at twice that."""


@dataclass(frozen=True)
class Count:
    """A whole number: its option on the command line, the least and the most; ``None`` where more than all is all."""

    option: str
    least: int
    most: int | None

    def holds(self, number: int) -> bool:
        """Whether ``number`` is within it."""
        return self.least <= number and (self.most is None or number <= self.most)

    @property
    def range(self) -> str:
        """What may be given, as people say it."""
        return f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"


COUNTS: Mapping[str, Count] = {
    "n_ctx": Count("-c", 0, LARGEST),
    "fit_ctx": Count("-fitc", 1, LARGEST),
    "n_batch": Count("-b", 1, MAX_TOKENS),
    "n_ubatch": Count("-ub", 1, MAX_TOKENS),
    "n_seq_max": Count("-np", 1, MAX_SEQUENCES),
    "n_gpu_layers": Count("-ngl", -1, None),
    "n_gpu_layers_draft": Count("-ngld", -1, None),
    "n_cpu_moe": Count("-ncmoe", 0, None),
    "main_gpu": Count("-mg", -1, MAX_DEVICES - 1),
    "prompt": Count("--prompt", 1, LARGEST),
    "generate": Count("--generate", 1, LARGEST),
    "live_tokens": Count("", 0, LARGEST),
    "draft_max": Count("--spec-draft-n-max", 1, MAX_DRAFTED),
    "image_min_tokens": Count("--image-min-tokens", 1, MAX_IMAGE_TOKENS),
    "image_max_tokens": Count("--image-max-tokens", 1, MAX_IMAGE_TOKENS),
    "n_rs_seq": Count("", 0, MAX_DRAFTED),
    "n_outputs_max": Count("", 0, MAX_TOKENS),
}
"""Numbers of tokens, layers and the like, by the names that they have in the API and in ``fitter.toml``."""


def whole(name: str, value: object) -> int:
    """``value`` as a whole number, whatever type it has. Raises ``UsageError`` where it is none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{_called(name)} is {shown(value)}: give a whole number") from None


def count(name: str, value: object) -> int:
    """``value``, held against the row of ``name`` in ``COUNTS``. Raises ``UsageError``."""
    limit, number = COUNTS[name], whole(name, value)
    if not limit.holds(number):
        raise UsageError(f"{_called(name)} is {shown(number)}: give {limit.range}")
    return number


def check_context(n_ctx: int, n_ctx_train: int, n_seq_max: int) -> None:
    """Raise ``UsageError`` for a context that the model was not made for and that is beyond all reason."""
    most = max(MAX_TOKENS, own_context(n_ctx_train, n_seq_max))
    if n_ctx > most:
        raise UsageError(f"n_ctx (-c) is {shown(n_ctx)}: give {most} at most; the model was trained for {n_ctx_train}")


def own_context(n_ctx_train: int, n_streams: int) -> int:
    """The model's own context for so many caches, as far as llama.cpp gets through that."""
    alignment = 256 * n_streams
    return min(n_ctx_train * n_streams, MAX_OWN_TOKENS // alignment * alignment)


def layers_on_devices(n_gpu_layers: int, n_layer: int) -> int:
    """``n_gpu_layers`` as llama.cpp can be told: more than a model of ``n_layer`` has are all of them."""
    return n_gpu_layers if n_gpu_layers <= LARGEST else n_layer + 1


def size(name: str, value: object) -> int:
    """A number of bytes. Raises ``UsageError``."""
    number = whole(name, value)
    if number < 0:
        raise UsageError(f"{_called(name)} is {shown(number)} bytes: it must be 0 or more")
    if number > MOST_BYTES:
        raise UsageError(
            f"{_called(name)} is {shown(number // 2**20)} MiB, which is more memory than any machine has: "
            f"give {MOST_BYTES // 2**20} MiB at most"
        )
    return number


def check_timeout(timeout: float, what: str = "timeout") -> None:
    """Raise ``UsageError`` for a time that is none."""
    if not timeout > 0:
        raise UsageError(f"a {what} of {timeout:g} seconds is too short")
    if timeout > _LONGEST:
        raise UsageError(f"a {what} of {timeout:g} seconds is too long: give {_LONGEST:g} or less")


def check_overrides(patterns: Collection[str]) -> None:
    """Raise ``UsageError`` for more patterns, or longer ones, than llama.cpp gets through."""
    if len(patterns) > MAX_OVERRIDES:
        raise UsageError(f"{len(patterns)} tensor overrides (-ot) are given: give {MAX_OVERRIDES} at most")
    length = sum(map(len, patterns))
    if length > MAX_PATTERNS:
        raise UsageError(f"the tensor overrides (-ot) have {length} characters: give {MAX_PATTERNS} at most")


def shares(name: str, value: object) -> tuple[float, ...]:
    """A tensor split. Raises ``UsageError``."""
    found = tuple(_number(name, share) for share in _items(name, value, "numbers such as [3, 1]"))
    if len(found) > MAX_DEVICES:
        raise UsageError(f"{_called(name)} has {len(found)} shares: llama.cpp has room for {MAX_DEVICES} devices")
    for share in found:
        if not share >= 0:
            raise UsageError(f"{_called(name)} has a share below 0: give each device a share of 0 or more")
        if share and not _LEAST_SHARE <= share <= _MOST_SHARE:
            raise UsageError(
                f"{_called(name)} has a share of {share:g}: give 0, or {_LEAST_SHARE:g} to {_MOST_SHARE:g}"
            )
    return found


def check_params(params: Params) -> None:
    """Raise ``UsageError`` for parameters, of a file, that ``fit`` would not have taken."""
    for field in fields(params):
        if field.name in COUNTS:
            count(field.name, getattr(params, field.name))
    if params.tensor_split is not None:
        shares("tensor_split", params.tensor_split)


def hold(name: str, value: Any) -> Any:
    """``value`` of the parameter ``name`` as planning takes it. Raises ``UsageError`` where it makes no sense."""
    read = _READERS.get(name)
    return value if read is None else read(name, value)


def held(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function`` with every keyword held against its limits. ``None`` is not set: the keyword has its default."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        given = {name: hold(name, value) for name, value in kwargs.items() if value is not None}
        return function(*args, **given)

    return call


def _called(name: str) -> str:
    """The name of a parameter, and of its option."""
    option = COUNTS[name].option if name in COUNTS else _OPTIONS.get(name, "")
    return f"{name} ({option})" if option else name


def _number(name: str, value: object) -> float:
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{_called(name)} is {shown(value)}: give a number") from None


def _items(name: str, value: object, what: str) -> list[Any]:
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)):
        return list(value)
    raise UsageError(f"{_called(name)} is {shown(value)}: give a list of {what}")


def _flag(name: str, value: object) -> bool:
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise UsageError(f"{_called(name)} is {shown(value)}: give True or False")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{_called(name)} is {shown(value)}: give a text")
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else _items(name, value, "texts")
    return tuple(_text(name, item) for item in found)


def _path(name: str, value: object) -> str | os.PathLike[str]:
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{_called(name)} is {shown(value)}: give the path of a file")
    return value


def _flash_attn(name: str, value: object) -> str:
    text = _text(name, value)
    if text not in get_args(FlashAttn):
        raise UsageError(f"{_called(name)} is {shown(value)}: give {', '.join(get_args(FlashAttn))}")
    return text


def _paths(name: str, value: object) -> str | os.PathLike[str] | tuple[str | os.PathLike[str], ...]:
    if isinstance(value, Iterable) and not isinstance(value, (str, os.PathLike)):
        return tuple(_path(name, item) for item in value)
    return _path(name, value)


def _reserve(name: str, value: object) -> Mapping[str, int | str] | tuple[str, ...]:
    if not isinstance(value, Mapping):
        return _texts(name, value)
    given = {_text(name, key): amount for key, amount in value.items()}
    return {key: _size_or_text(f"{name} of {shown(key)}", amount) for key, amount in given.items()}


def _size_or_text(name: str, value: object) -> int | str:
    return value if isinstance(value, str) else size(name, value)


def _sizes(name: str, value: object) -> int | tuple[int, ...]:
    if isinstance(value, Iterable):
        return tuple(size(name, item) for item in _items(name, value, "bytes, or one number for all"))
    return size(name, value)


def _speed(name: str, value: object) -> float | str:
    return value if isinstance(value, str) else _number(name, value)


def _speeds(name: str, value: object) -> float | str | tuple[float | str, ...]:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(_speed(name, item) for item in value)
    return _speed(name, value)


def _seconds(name: str, value: object) -> float:
    seconds = _number(name, value)
    check_timeout(seconds, name.replace("_", " "))
    return seconds


def _gpus(name: str, value: object) -> tuple[str | VirtualDevice, ...]:
    found = [value] if isinstance(value, (str, VirtualDevice)) else _items(name, value, "GPUs")
    for gpu in found:
        if isinstance(gpu, VirtualDevice):
            if not size(f"{gpu.name}.free", gpu.free) <= size(f"{gpu.name}.total", gpu.total) > 0:
                raise UsageError(f"{gpu.name} has {gpu.free} of {gpu.total} bytes free: give no more than it has")
        elif not isinstance(gpu, str):
            raise UsageError(f"{_called(name)} has {shown(gpu)}: describe a GPU, such as 'rtx-4090'")
    return tuple(found)


_OPTIONS = {
    "margin": "-fitt",
    "host_margin": "--host-margin",
    "host_memory": "--host-memory",
    "tensor_split": "-ts",
    "override_tensor": "-ot",
    "timeout": "--timeout",
    "time_limit": "--time-limit",
    "gpus": "--gpu",
    "flash_attn": "-fa",
    "lora": "--lora",
    "lora_scaled": "--lora-scaled",
    "reserve": "--reserve",
}

_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(COUNTS, count),
    "margin": _sizes,
    "host_margin": size,
    **dict.fromkeys(("host_memory", "tolerance"), _size_or_text),
    "tensor_split": shares,
    **dict.fromkeys(("timeout", "time_limit"), _seconds),
    "gpus": _gpus,
    "host_bandwidth": _speed,
    "rpc_bandwidth": _speeds,
    **dict.fromkeys(("devices", "devices_draft", "override_tensor", "allow", "rpc", "lora_scaled"), _texts),
    **dict.fromkeys(("model_draft", "mmproj"), _path),
    **dict.fromkeys(
        ("cpu_moe", "kv_unified", "offload_kqv", "op_offload", "swa_full", "load_mtp", "mtp", "embedding", "skeleton"),
        _flag,
    ),
    **dict.fromkeys(
        ("type_k", "type_v", "type_k_draft", "type_v_draft", "split_mode", "objective", "strategy"),
        _text,
    ),
    **dict.fromkeys(("profile", "mmproj_device"), _text),
    "flash_attn": _flash_attn,
    "lora": _paths,
    "reserve": _reserve,
}
