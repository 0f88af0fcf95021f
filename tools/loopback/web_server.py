"""Start ``fitter serve``, ask it for plans, and ask as many pages at once do."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

MODEL = "shape://qwen3-30b-a3b"
SLOW = ("shape://kimi-k2", ["4x rtx-5090", "4x rtx-3090"])
CARDS = (["rtx-4090"], ["rtx-3090"], ["2x rtx-3060-12gb"], ["24GiB"])
_PATIENCE = 120.0
"""Seconds for an end, however busy the machine is."""
_SAYS = "serving at http://"
_JSON = {"Content-Type": "application/json"}


@dataclass
class Served:
    """A server that was started: its process, and where it listens."""

    process: subprocess.Popen[str]
    host: str
    port: int

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.host}:{self.port}/"

    def children(self) -> list[psutil.Process]:
        """The processes of llama.cpp that it has."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def connection(self) -> http.client.HTTPConnection:
        """A new connection to it."""
        return http.client.HTTPConnection(self.host, self.port, timeout=120)

    def stop(self) -> tuple[int, list[psutil.Process]]:
        """Interrupt it as Ctrl-C does: its exit status, and processes that are left."""
        had = self.children()
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(_PATIENCE)
        return status, psutil.wait_procs(had, _PATIENCE)[1]


@contextmanager
def serving(*words: str, **environment: str | None) -> Iterator[Served]:
    """``fitter serve`` with these options, at a port that is free; ``None`` removes a variable of the environment."""
    variables = {**os.environ, **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "fitter", "serve", "--port", "0", *words],
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in variables.items() if value is not None},
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        if _SAYS not in line:
            raise RuntimeError(line + process.stderr.read())
        host, _, port = line.partition(_SAYS)[2].partition("/")[0].rpartition(":")
        yield Served(process, host, int(port))
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ask(connection: http.client.HTTPConnection, path: str, question: dict[str, Any]) -> tuple[int, str]:
    """Status and body of a question."""
    connection.request("POST", path, json.dumps(question), _JSON)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@dataclass
class Load:
    """What many clients had: seconds of each answer, and what was no plan."""

    taken: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    processes: int = 0


def load(served: Served, clients: int, seconds: float) -> Load:
    """``clients`` that each ask one question after another; the first one about a model that takes a while."""
    found = Load()
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        connection, changes = served.connection(), random.Random(number)
        model, cards = (SLOW[0], SLOW[1]) if number == 0 else (MODEL, CARDS[number % len(CARDS)])
        while True:
            question = {"model": model, "gpus": cards, "n_ctx": changes.randrange(2048, 32768), "session": f"c{number}"}
            start = time.perf_counter()
            try:
                status, body = ask(connection, "/panel/a", question)
            except (OSError, http.client.HTTPException) as error:
                status, body = 0, repr(error)
            found.taken.append(time.perf_counter() - start)
            if status != 200 or not json.loads(body)["html"]:
                found.errors.append(f"{status}: {body[:200]}")
                return
            if time.monotonic() >= end:
                return

    threads = [threading.Thread(target=client, args=[number]) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.processes = len(served.children())
    return found
