"""A plan as llama.cpp's command-line arguments, accepted by llama-server, llama-cli and llama-fit-params alike."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from fitter.errors import PlanError, UsageError
from fitter.llama.types import MAX_DEVICES, Params, TensorBuftOverride
from fitter.planning.plan import PlanData, SharedUse

_DEFAULT = Params()
_WITHOUT_BACKSLASH = {
    **{f"\\{char}": f"[{char}]" for char in ".$*+?()[{}|/-"},
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[A-Za-z0-9_]",
    r"\W": "[^A-Za-z0-9_]",
}


def arguments(plan: PlanData) -> list[str]:
    """The arguments that make a llama.cpp program allocate what was measured for ``plan``.

    Whatever decides about memory is there, unless it equals a default that all three programs share. Raises
    :class:`PlanError` where llama.cpp has no argument for what the plan needs.
    """
    params = plan.params
    args = ["-c", str(params.n_ctx or plan.breakdown.n_ctx)]
    if plan.rpc:
        # before -dev, which names their devices
        args += ["--rpc", ",".join(plan.rpc)]
    if plan.params.devices is not None:
        args += ["-dev", ",".join(params.devices or ()) or "none"]
    args += ["-ngl", str(params.n_gpu_layers) if params.n_gpu_layers >= 0 else "all"]
    if params.split_mode != _DEFAULT.split_mode:
        args += ["-sm", params.split_mode]
    if params.main_gpu != _DEFAULT.main_gpu:
        args += ["-mg", str(params.main_gpu)]
    if params.tensor_split is not None and len(plan.breakdown.devices) > 1:
        args += ["-ts", _tensor_split(params.tensor_split)]
    if params.tensor_buft_overrides:
        args += ["-ot", ",".join(_override(override) for override in params.tensor_buft_overrides)]
    if params.n_batch != _DEFAULT.n_batch:
        args += ["-b", str(params.n_batch)]
    if params.n_ubatch != _DEFAULT.n_ubatch:
        args += ["-ub", str(params.n_ubatch)]
    if params.type_k != _DEFAULT.type_k:
        args += ["-ctk", params.type_k]
    if params.type_v != _DEFAULT.type_v:
        args += ["-ctv", params.type_v]
    if params.flash_attn != _DEFAULT.flash_attn:
        args += ["-fa", params.flash_attn]
    if not params.offload_kqv:
        args += ["-nkvo"]
    if not params.op_offload:
        args += ["--no-op-offload"]
    if params.swa_full:
        args += ["--swa-full"]
    if params.embeddings:
        args += ["--embedding"]
    # llama-server takes four slots with a unified KV cache unless it is told a number; told one, it keeps the cache
    # split by default. Only llama-server knows -kvu, and one sequence takes the same memory with it and without.
    args += ["-np", str(params.n_seq_max)]
    if params.kv_unified and params.n_seq_max > 1:
        args += ["-kvu"]
    return [*args, *_shared(plan.shared), "-fit", "off"]


def _shared(shared: Sequence[SharedUse]) -> list[str]:
    """The arguments of what shares the memory; of several adapters llama.cpp takes the files with commas."""
    args: list[str] = []
    for use in shared:
        if use.kind == "lora" and (option := use.arguments[0]) in args:
            place = args.index(option) + 1
            args[place] += f",{use.arguments[1]}"
        else:
            args += use.arguments
    return args


def command_line(args: Sequence[str], *, quoted: bool) -> str:
    """``args`` as one line.

    ``quoted`` is for a person who copies it into a shell. Without it the line holds no quotes, which is what
    ``$(fitter ...)`` needs, since a shell does not take quotes away there, and ``xargs`` reads the same.
    """
    return shlex.join(args) if quoted else " ".join(args)


def unsafe_arguments(args: Sequence[str]) -> list[str]:
    """Those of ``args`` that ``$(...)`` or ``xargs`` would change when they are not quoted."""
    return [arg for arg in args if re.search(r"[\s'\"\\]", arg)]


def check_line(args: Sequence[str]) -> None:
    """Raise :class:`PlanError` where one of ``args`` would break the line that they are on, or act on a terminal."""
    for arg in args:
        if not arg.isprintable():
            raise PlanError(
                f"'{arg}' has control characters, which cannot be part of a command line: rename it, or use --json"
            )


def shell_word(arg: str) -> str:
    """``arg`` as a word for ``eval`` in sh, bash, zsh and fish.

    In single quotes only fish takes a backslash for an escape, so both of ``\\`` and ``'`` stand outside of them.
    """
    if re.fullmatch(r"[A-Za-z0-9_+:,./-]+", arg):
        return arg
    parts = re.findall(r"[^'\\]+|['\\]", arg)
    return "".join(f"\\{part}" if part in ("'", "\\") else f"'{part}'" for part in parts) or "''"


def plain_pattern(pattern: str) -> str:
    """``pattern`` without backslashes where the same regular expression can be said without them.

    ``blk\\.1\\.`` becomes ``blk[.]1[.]``: a backslash does not survive ``xargs``.
    """
    out: list[str] = []
    in_class = False
    for token in re.findall(r"\\.|.", pattern, re.DOTALL):
        if token == "[":
            in_class = True
        elif token == "]":
            in_class = False
        out.append(token if in_class else _WITHOUT_BACKSLASH.get(token, token))
    return "".join(out)


def _override(override: TensorBuftOverride) -> str:
    """One ``pattern=buffer type``. llama.cpp cuts at every comma and at the first equals sign."""
    for char in ",=":
        if char in override.pattern:
            raise UsageError(
                f"tensor pattern '{override.pattern}' has '{char}' in it, which llama.cpp's -ot cannot take: "
                "write '.' instead"
            )
    return f"{plain_pattern(override.pattern)}={override.buffer_type}"


def _tensor_split(split: tuple[float, ...]) -> str:
    """Proportions, without trailing zeros: llama.cpp fills up with zeros, and takes one entry less than devices."""
    length = len(split)
    while length > 1 and split[length - 1] == 0:
        length -= 1
    if length >= MAX_DEVICES:
        raise PlanError(
            f"llama.cpp's -ts takes at most {MAX_DEVICES - 1} devices, this plan splits over {length}: "
            "leave one out with -dev"
        )
    return ",".join(f"{value:.9g}" for value in split[:length])
