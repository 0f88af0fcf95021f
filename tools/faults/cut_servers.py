"""An rpc-server that can be limited and ended, and a way to one that is cut off in the middle of something."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import threading

from tools.loopback import rpc_servers

_SECONDS = 30.0


class RpcServer:
    """An ``rpc-server`` with the CPU as its device; ``address`` is ``host:port``."""

    def __init__(self) -> None:
        self._process, self.address = rpc_servers.start()
        self.port = int(self.address.rpartition(":")[2])

    def __enter__(self) -> RpcServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        rpc_servers.stop(self._process)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def resident(self) -> int:
        """Bytes of memory that it has now."""
        with open(f"/proc/{self._process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    def limit_memory(self, extra: int) -> None:
        """Let it have so many bytes more than it has now."""
        with open(f"/proc/{self._process.pid}/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.prlimit(self._process.pid, resource.RLIMIT_AS, (used + extra, resource.RLIM_INFINITY))


class Proxy:
    """Passes on what is said to a server, until a connection has said ``limit`` bytes: then it dies, or stalls.

    It also dies once it had so many ``connections``.
    """

    def __init__(self, server: int, limit: int = 1 << 62, connections: int = 1 << 62, stalls: bool = False) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._start(limit, connections, stalls)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(_SECONDS)
        self._listener.close()

    def revive(self, limit: int = 1 << 62, connections: int = 1 << 62, stalls: bool = False) -> None:
        """Serve again, at the same address, with other limits."""
        self.__exit__()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._start(limit, connections, stalls)

    def limit_to(self, limit: int) -> None:
        """From now on, and for connections that are there too."""
        self._limit = limit

    def _start(self, limit: int, connections: int, stalls: bool) -> None:
        self._limit, self._connections, self._stalls = limit, connections, stalls
        self.has_stalled = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while self._connections and not self._closing.is_set():
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            client, _ = self._listener.accept()
            self._connections -= 1
            if not self._connections:
                self._listener.close()
            with client, socket.create_connection(("127.0.0.1", self._server)) as server:
                if not self._pass_on(client, server):
                    break
        self._listener.close()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> bool:
        said = 0
        while not self._closing.is_set():
            for source in select.select([client, server], [], [], 0.05)[0]:
                data = b""
                with contextlib.suppress(ConnectionError):
                    data = source.recv(1 << 16)
                if not data:
                    return True
                if source is client:
                    said += len(data)
                    if said > self._limit and self._stalls:
                        self.has_stalled = True
                        self._closing.wait()
                        return False
                    if said > self._limit:
                        return False
                with contextlib.suppress(ConnectionError):
                    (server if source is client else client).sendall(data)
        return False
