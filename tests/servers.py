"""rpc-servers on loopback, upstream's own, and one that can be cut off in the middle of something."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

from tests import upstream

SECONDS = 30.0
"""For a server to begin to listen."""


class RpcServer:
    """An ``rpc-server`` with the CPU as its device, on a port that was free; ``address`` is ``host:port``."""

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._start()

    def __enter__(self) -> RpcServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [str(upstream.tool("rpc-server")), "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + SECONDS
        while not is_listening(self.port):
            assert self._process.poll() is None, "rpc-server has ended"
            assert time.monotonic() < end, "rpc-server does not listen"
            time.sleep(0.02)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """End it, and start another one on the same port."""
        self.kill()
        self._start()

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
        self._thread.join(SECONDS)
        self._listener.close()

    def revive(self, limit: int = 1 << 62, connections: int = 1 << 62, stalls: bool = False) -> None:
        """Serve again, at the same address, with other limits."""
        self.__exit__()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._start(limit, connections, stalls)

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


@contextlib.contextmanager
def rpc_servers(count: int) -> Iterator[list[RpcServer]]:
    """``count`` of them, ended at the end."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RpcServer()) for _ in range(count)]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def is_listening(port: int) -> bool:
    """Whether somebody listens there, seen from outside: a connection would be one of its clients."""
    with open("/proc/net/tcp", encoding="ascii") as file:
        lines = [line.split() for line in file][1:]
    return any(line[3] == "0A" and int(line[1].split(":")[1], 16) == port for line in lines)
