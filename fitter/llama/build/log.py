"""llama.cpp's log: its lines, facts in them, and errors with llama.cpp's own messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fitter.errors import LlamaCppError
from fitter.llama.build import library as native

_ERROR = 4


class LogLine(NamedTuple):
    """A line of llama.cpp's log, with ggml's level (2 information, 3 warning, 4 error)."""

    level: int
    text: str


def captured_log() -> tuple[LogLine, ...]:
    """Return the lines since the log was cleared, if this process captures it."""
    return log_lines(native.libraries().fitter.fitter_log_lines)


def log_lines(fill: Callable[[Any], bool]) -> tuple[LogLine, ...]:
    """Return the lines that ``fill`` writes into a ``fitter_columns_t``; none if it fails."""
    library = native.libraries()
    out = library.ffi.new("fitter_columns_t *")
    if not fill(out):
        return ()
    (texts,), (levels,) = library.columns(out, 1, 1)
    return tuple(map(LogLine, levels, texts))


# lines that only repeat a failure; an earlier line has its cause
_CONSEQUENCES = re.compile(
    r"failed to load model( from .*)?$|failed to read (header|key-value pairs|tensor info|tensor data)$"
)
_PREFIXES = re.compile(r"^(\w+: )?(error loading model: |failed to initialize the context: )?(llama_model_loader: )?")


def reason(lines: Sequence[LogLine]) -> str | None:
    """Return llama.cpp's reason for a failure: its last error that is not a consequence of another one."""
    errors = [line.text.strip() for line in lines if line.level == _ERROR and line.text.strip()]
    causes = [text for text in errors if not _CONSEQUENCES.search(text)]
    if not errors:
        return None
    return _PREFIXES.sub("", (causes or errors)[-1], count=1) or errors[-1]


_NOT_SPLIT = re.compile(r"SPLIT_MODE_TENSOR not implemented for architecture '([^']*)'")


def failure(path: str, what: str) -> LlamaCppError:
    """Make the error for ``path`` with llama.cpp's message, or ``what`` if the log has none."""
    lines = captured_log()
    why = reason(lines) or what
    if refused := _NOT_SPLIT.search(why):
        why = (
            f"this llama.cpp cannot split the tensors of architecture '{refused[1]}' over several devices: use "
            "--split-mode layer"
        )
    return LlamaCppError(f"{path}: {why}", tuple(line.text for line in lines))


# lines with the same fact in different builds; some builds have none
_CHOSEN = re.compile(r": flash_attn\s+= (\w+)")
_RESOLVED = (
    re.compile(r": Flash Attention (enabled|not supported)"),  # from b10068 on
    re.compile(r": Flash Attention was auto, set to (enabled|disabled)"),
)
_SPLITS = (
    re.compile(r": graph.*: nodes = .*, splits = (\d+)(?: / (\d+))?,"),  # from v0.5.0 on
    re.compile(r": graph splits = (\d+)(?: \(with bs=\d+\), (\d+) \(with bs=\d+\))?"),
)


def flash_attn_from(log: Iterable[str]) -> bool | None:
    """Read from llama.cpp's log whether a context uses flash attention."""
    answer: bool | None = None
    for line in log:
        if chosen := _CHOSEN.search(line):
            answer = {"enabled": True, "disabled": False}.get(chosen[1])
        elif resolved := _first(_RESOLVED, line):
            answer = resolved[1] == "enabled"
    return answer


def n_splits_from(log: Iterable[str]) -> tuple[int, int] | None:
    """Read the graph splits of prompts and of generation from llama.cpp's log."""
    answer: tuple[int, int] | None = None
    for line in log:
        if match := _first(_SPLITS, line):
            answer = (int(match[1]), int(match[2] or match[1]))
    return answer


_UNUSED = re.compile(r"model has unused tensor (\S+) \(size = ")


def unused_from(log: Iterable[str]) -> tuple[str, ...]:
    """Read from llama.cpp's log which tensors of a model it does not load."""
    return tuple(dict.fromkeys(match[1] for line in log if (match := _UNUSED.search(line))))


_CONTEXT = ": constructing llama_context"


def lines_of_context(log: Sequence[str]) -> Sequence[str]:
    """Return the lines since the last context was started."""
    begun = [index for index, line in enumerate(log) if line.rstrip().endswith(_CONTEXT)]
    return log[begun[-1] :] if begun else log


def _first(patterns: Iterable[re.Pattern[str]], line: str) -> re.Match[str] | None:
    return next((match for pattern in patterns if (match := pattern.search(line))), None)
