"""``python -m tools.measurements.service_load``: what ``fitter serve`` answers a second, and when it is asked too much.

Every model is asked about once; then some clients ask about all of them in turn, for a bounded time, on loopback alone.
``--new-files`` asks about files with whole tokenizers instead: new ones, fine-tunes of those, and all of them again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil

from fitter.model.shapes.catalogue import shapes
from tools.loopback.web_server import Served, ask, serving
from tools.models.shapes import SHAPES, write_shape

TYPES = ("Q4_K_M", "Q8_0")
FILES = ("gpt-oss-20b", "qwen3-30b-a3b", "gemma3-12b", "llama-3.1-8b", "nemotron-h-9b", "glm45-air")
_PAUSE = 1.5
"""Seconds between questions, in which planners start as they do between those of a few users."""


def main() -> None:
    """Start a server, ask it, and print what it took."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.measurements.service_load", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--new-files", action="store_true")
    options = parser.parse_args()
    if options.new_files:
        with tempfile.TemporaryDirectory() as directory:
            _ask_about_files(Path(directory))
        return
    named = [f"shape://{shape.name}:{each}" for each in TYPES for shape in shapes()][: options.models]
    with serving() as served:
        before = _memory(served)
        first = [_asked(served, model) for model in named]
        print(f"{len(named)} models for the first time: {_seconds(first)}, the slowest {max(first) * 1000:.0f} ms")
        answered, errors = _asked_at_once(served, named, options.clients, options.seconds)
        rate = len(answered) / options.seconds
        print(f"{options.clients} clients: {rate:.0f} a second, {_seconds(answered)}, {errors} errors")
        after = _memory(served)
        print(f"memory of all processes: {before / 2**20:.0f} MiB, then {after / 2**20:.0f} MiB")
        many, refused = _asked_at_once(served, [f"{model}#" for model in named], 300, 3.0)
        print(f"300 clients for 3 s, about models that there are not: {len(many)} answers, {refused} of them no plan")
        print(f"after that: {_asked(served, named[0]) * 1000:.0f} ms for a known one")
        print(f"its end: status {served.stop()[0]}")


def _ask_about_files(directory: Path) -> None:
    """Ask about files of ``FILES``, and print what each answer took."""
    for name in FILES:
        write_shape(SHAPES[name], directory / f"{name}.gguf")
        write_shape(replace(SHAPES[name], title=f"a fine-tune of {name}"), directory / f"{name}-tuned.gguf")
    with serving("--root", str(directory)) as served:
        while not _is_ready(served):
            time.sleep(0.1)
        for what, end in (("a tokenizer that is new", ""), ("one that is known", "-tuned"), ("a known question", "")):
            print(f"{what}:")
            for name in FILES:
                time.sleep(_PAUSE)
                print(f"  {name}: {_asked(served, f'{name}{end}.gguf') * 1000:.0f} ms")


def _is_ready(served: Served) -> bool:
    connection = served.connection()
    connection.request("GET", "/health")
    return bool(json.load(connection.getresponse())["ready"])


def _question(model: str) -> dict[str, object]:
    return {"model": model, "gpus": ["rtx-4090"], "n_ctx": 4096}


def _asked(served: Served, model: str) -> float:
    began = time.perf_counter()
    status, body = ask(served.connection(), "/api/v1/plan", _question(model))
    if status != 200:
        print(f"{model}: {status}: {body[:120]}")
    return time.perf_counter() - began


def _asked_at_once(served: Served, models: list[str], clients: int, seconds: float) -> tuple[list[float], int]:
    """The seconds of every answer of ``clients`` that ask about all models in turn, and how many were no plan."""
    end = time.monotonic() + seconds
    taken: list[float] = []
    errors: list[int] = []

    def client(number: int) -> None:
        connection = served.connection()
        while time.monotonic() < end:
            number += 7
            began = time.perf_counter()
            try:
                status, _ = ask(connection, "/api/v1/plan", _question(models[number % len(models)]))
            except OSError:
                status, connection = 0, served.connection()
            taken.append(time.perf_counter() - began)
            if status != 200:
                errors.append(status)

    threads = [threading.Thread(target=client, args=[number]) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken, len(errors)


def _seconds(taken: list[float]) -> str:
    ordered = sorted(taken)
    middle, most = statistics.median(ordered), ordered[len(ordered) * 99 // 100]
    return f"median {middle * 1000:.0f} ms, 99 % within {most * 1000:.0f} ms"


def _memory(served: Served) -> int:
    processes = [psutil.Process(served.process.pid), *served.children()]
    return sum(each.memory_info().rss for each in processes)


if __name__ == "__main__":
    main()
