"""This process's connections to rpc-servers: ggml-rpc keeps one per server, alive or dead, for all that is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from fitter.errors import RemoteError
from fitter.llama import guarded, rpc

users: dict[int, tuple[str, ...]] = {}
"""The rpc-servers of what is loaded now: they talk to this process alone, and would not answer another question."""

_lost: dict[str, int] = {}
"""Servers that were lost while something was loaded there, and how often.

ggml-rpc keeps the connection that is dead, under the name of its server, for as long as somebody waits for it.
"""
_is_broken = False


def lose(servers: Sequence[str], is_connected: bool) -> None:
    """Give up the connections to ``servers`` that nothing else needs, so that those that live can serve others."""
    global _is_broken
    # who is stopped while it connects holds locks that every other connection needs
    _is_broken = _is_broken or (bool(servers) and not is_connected)
    used = {server for others in users.values() for server in others}
    free = [server for server in servers if server not in used]
    guarded.disconnect(free)
    for server in free:
        _lost[server] = _lost.get(server, 0) + 1


def name_of(server: str) -> str:
    """What ggml-rpc is to call ``server``: a dead connection under one name is in nobody's way under another."""
    host, _, port = server.rpartition(":")
    return f"{host}:{'0' * _lost.get(server, 0)}{port}"


def check(servers: Sequence[str], timeout: float | None) -> None:
    """See that ``servers`` can be loaded on, within ``timeout`` seconds. Raises ``RemoteError`` and ``UsageError``."""
    if _is_broken:
        raise RemoteError(
            "an RPC server was lost while llama.cpp connected to it, and now this process can connect to none: "
            "load the plan in another process"
        )
    busy = {server for others in users.values() for server in others}
    if idle := [server for server in servers if server not in busy]:
        rpc.check(idle, rpc.ANSWER_SECONDS if timeout is None else timeout)
