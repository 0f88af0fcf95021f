"""The preset of a fleet in the real llama-server as a router: what it loads, what it unloads, and its memory."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import fitter
from examples.tiny_moe import TinyModel
from fitter.output.formats import render_fleet
from fitter.planning.fleet.fleet import Fleet
from fitter.programs.running_server import resident
from tests.support.patience import SECONDS, all_end, is_running, until
from tools.comparisons import upstream
from tools.loopback.rpc_servers import free_port
from tools.models.tiny import write_tiny

MIB = 2**20
WIDE = TinyModel("tiny wide", n_layer=4, n_embd=64, n_head=8, n_head_kv=8, n_embd_head=128, n_ff=64, n_expert=0)
"""A model with few weights and 32 KiB of f32 cache for each token."""
NAMES = {"chat": "chat", "code": "code", "modèle": "modèle", "a:b": "a-b"}
"""The models, and what their sections are called."""
OF_ITS_CODE = 16 * MIB
"""More than a llama-server has of its own beside what is counted: 7 MiB here, its vocabulary and threads."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Four models of 256 MiB, any three of which fit; the first one is loaded at the start."""
    model = write_tiny(tmp_path_factory.mktemp("models") / "wide.gguf", WIDE)
    words: dict[str, Any] = {
        "n_ctx": 8192,
        "n_seq_max": 1,
        "cache_ram": 0,
        "type_k": "f32",
        "type_v": "f32",
        "gpus": "none",
    }
    plan = fitter.fit(model, program="llama-server", **words)
    assert plan.breakdown.host.context == 256 * MIB
    models: dict[str, dict[str, Any]] = {name: {"model": model} for name in NAMES}
    models["chat"]["resident"] = True
    # three and a half of them
    made = fitter.fleet(models, host_memory=plan.host.margin + plan.host.used * 7 // 2, **words)
    assert made.any_together == 3
    assert {len(each.models) for each in made.sets} == {3}
    return made


@dataclass(frozen=True)
class Router:
    """A running router."""

    process: subprocess.Popen[bytes]
    port: int

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """The status and the JSON of an answer; 0 where nobody answers yet."""
        assert self.process.poll() is None, "the router ended"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except ConnectionError:
            return 0, None
        finally:
            connection.close()

    def generate(self, name: str) -> None:
        """Ask a model for two tokens; returns once they are there."""
        status, answer = self.ask("POST", "/completion", {"model": name, "prompt": "ba lu mi", "n_predict": 2})
        assert status == 200, answer
        assert answer["tokens_predicted"] == 2

    @property
    def states(self) -> Mapping[str, str]:
        """The state of each model."""
        status, answer = self.ask("GET", "/models")
        return {each["id"]: each["status"]["value"] for each in answer["data"]} if status == 200 else {}

    @property
    def loaded(self) -> set[str]:
        """The models that are in memory."""
        return {name for name, state in self.states.items() if state != "unloaded"}

    @property
    def servers(self) -> list[psutil.Process]:
        """The processes that have the models."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def router(words: list[str], folder: Path) -> Iterator[Router]:
    """Start a router by its command, and end all of its processes."""
    port = free_port()
    # no models of this machine's cache, and one thread each: many wait for each other where processors are shared
    environment = {**os.environ, "LLAMA_CACHE": str(folder), "HF_HOME": str(folder), "LLAMA_ARG_THREADS": "1"}
    command = [str(upstream.tool(words[0])), *words[1:], "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    started, children = Router(process, port), list[psutil.Process]()
    try:
        until(lambda: started.ask("GET", "/health")[0] == 200, "the router never answers")
        yield started
    finally:
        if process.poll() is None:
            children = started.servers
            process.terminate()
        try:
            process.wait(SECONDS)
            assert all_end(children), "a llama-server is left"
        finally:
            for each in filter(is_running, children):
                each.kill()
            process.kill()


def test_the_router_keeps_as_many_models_as_fit(fleet: Fleet, tmp_path: Path) -> None:
    text = render_fleet(fleet, "ini")
    file = tmp_path / "models.ini"
    file.write_text(text, encoding="utf-8")
    words = text.splitlines()[0].removeprefix("# ").split()
    assert words == ["llama-server", "--models-preset", "FILE", "--models-max", "3"]
    words[words.index("FILE")] = str(file)

    with router(words, tmp_path) as running:
        assert set(running.states) == set(NAMES.values())
        until(lambda: running.states["chat"] == "loaded", "what is loaded at the start never is")
        assert running.loaded == {"chat"}
        for name in ("code", "modèle"):
            running.generate(name)
        assert running.loaded == {"chat", "code", "modèle"}

        # the least recently used one is not the first one that was loaded
        running.generate("chat")
        running.generate("a-b")
        assert running.loaded == {"chat", "modèle", "a-b"}
        assert {running.states[name] for name in running.loaded} == {"loaded"}

        servers = running.servers
        assert len(servers) == 3
        memory = [resident(each.pid) for each in servers]
        own = sum(each.own for each in memory if each is not None)
        needs = [model.needs["host"] for model in fleet.models if model.name != "code"]
        caches = [model.plan.breakdown.host.context for model in fleet.models]
        # a fourth model would exceed it
        assert sum(caches[1:]) <= own <= sum(need + OF_ITS_CODE for need in needs) < sum(caches)
    assert not any(map(psutil.pid_exists, (each.pid for each in servers)))
