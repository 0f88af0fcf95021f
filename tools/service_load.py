"""``python -m tools.service_load``: what ``fitter serve`` answers a second, and when it is asked too much.

Every model is asked about once; then some clients ask about all of them in turn, for a bounded time, on loopback alone.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

import psutil

from fitter.model.shapes import listing
from tools.web_server import Served, ask, serving

TYPES = ("Q4_K_M", "Q8_0")


def main() -> None:
    """Start a server, ask it, and print what it took."""
    parser = argparse.ArgumentParser(prog="python -m tools.service_load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    named = [f"shape://{shape.name}:{each}" for each in TYPES for shape in listing.shapes()][: options.models]
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
