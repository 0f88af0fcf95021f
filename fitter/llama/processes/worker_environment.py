"""What a worker's environment says, and whether this process is a worker. Imports nothing, so that it can be early."""

from __future__ import annotations

LLAMA_CPP = "FITTER_LLAMA_CPP"
"""The environment variable that names the llama.cpp of a worker."""

CPU = "FITTER_LLAMA_CPU"
"""The environment variable that names the file of the CPU backend of a worker, where its llama.cpp has several."""

_is_worker = False
_is_canary = False


def of_llama_cpp(where: str | None, cpu: str = "") -> dict[str, str]:
    """The variables of a worker with the llama.cpp that ``where`` names; ``None``: that of the environment.

    ``cpu``: the name of the file of its CPU backend, empty for the best one on this machine.
    """
    return {**({} if where is None else {LLAMA_CPP: where}), **({CPU: cpu} if cpu else {})}


def is_worker() -> bool:
    """Whether this process is a worker."""
    return _is_worker


def is_canary() -> bool:
    """Whether this process finds out whether a llama.cpp can be trusted."""
    return _is_canary


def become_worker(is_canary: bool = False) -> None:
    """Know that this process is a worker, or one that finds out whether a llama.cpp can be trusted."""
    global _is_worker, _is_canary
    _is_worker, _is_canary = True, is_canary
