"""This process's connections to rpc-servers: ggml-rpc keeps one per server for all loaded models."""

from __future__ import annotations

from collections.abc import Sequence

from fitter.errors import RemoteError
from fitter.llama.processes import rpc
from fitter.llama.this_process import guarded

users: dict[int, tuple[str, ...]] = {}
"""rpc-servers of each loaded model: they serve one connection at a time, so others would wait forever."""

_lost: dict[str, int] = {}
"""Number of losses of each server while a model was loaded there. ggml-rpc keeps a dead connection under its server's
name as long as a thread waits for it.
"""
_is_broken = False


def lose(servers: Sequence[str], is_connected: bool) -> None:
    """Close the connections to ``servers`` that no other model uses, so that they can serve other clients."""
    global _is_broken
    # a thread that was stopped while connecting holds locks that every other connection needs
    _is_broken = _is_broken or (bool(servers) and not is_connected)
    used = {server for others in users.values() for server in others}
    free = [server for server in servers if server not in used]
    guarded.disconnect(free)
    for server in free:
        _lost[server] = _lost.get(server, 0) + 1


def name_of(server: str) -> str:
    """A name for ``server`` without a dead connection in ggml-rpc: a zero before the port for each time it was lost."""
    host, _, port = server.rpartition(":")
    return f"{host}:{'0' * _lost.get(server, 0)}{port}"


def check(servers: Sequence[str], timeout: float | None) -> None:
    """Check, within ``timeout`` seconds, that ``servers`` can be used. Raises ``RemoteError`` and ``UsageError``."""
    if _is_broken:
        raise RemoteError(
            "an RPC server was lost while llama.cpp connected to it, so this process cannot connect to any server now: "
            "load the plan in a new process"
        )
    busy = {server for others in users.values() for server in others}
    if idle := [server for server in servers if server not in busy]:
        rpc.check(idle, rpc.ANSWER_SECONDS if timeout is None else timeout)
