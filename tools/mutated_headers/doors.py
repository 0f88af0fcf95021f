"""The ways into fitter that a header may take: each is gone through, and what that took is measured."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tools.loopback.web_server import Served, ask

MOST_MEMORY = 600 * 10**6
MOST_SECONDS = 10.0
HARD_LIMIT = 700 * 10**6
"""Bytes of data that no process may have, so that what goes wrong does no harm."""
_GIVEN_UP = 180.0
"""Seconds after which a command is ended; others may use the machine, too."""
_LOOK = 0.02
_STATUSES = (0, 1, 3)
"""What a header may lead to: it fits, it does not, it cannot be planned."""
_HTTP_STATUSES = (200, 400, 422, 500)
"""A plan, and what it says of a question, a model and a llama.cpp that are no good."""
_BUGS = ("failed unexpectedly", "Traceback", "this is a bug", "Error in ", "Assertion")

ALONE = ("fit", "quants", "serve")
TOGETHER = ("explore", "directory")

_WAYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "fit": (
        ("--gpu", "8GiB"),
        ("--gpu", "8GiB", "--gpu", "6GiB"),
        ("--gpu", "none", "--host-memory", "16GiB"),
        ("--gpu", "6GiB", "-cmoe"),
    ),
    "quants": (("--gpu", "8GiB", "--type", "Q4_K_M"),),
    "explore": (("--gpu", "8GiB + 6GiB", "--jobs", "1", "--json"),),
    "directory": (("--gpu", "8GiB", "--json"),),
}
"""Words after the model, for each command; one after another of them."""


@dataclass(frozen=True)
class Outcome:
    """What one header came to at one door.

    ``memory``: bytes of all processes together, at most; ``seconds``: of computing, of all of them.
    """

    door: str
    what: str
    status: int
    seconds: float
    memory: int
    said: str
    wrong: str


def command(door: str, number: int, what: str, path: Path) -> Outcome:
    """Run the command of a door on a file, in one of its ways."""
    words = _WAYS[door][number % len(_WAYS[door])]
    ran = _run([*(() if door == "fit" else (door,)), str(path), *words])
    return Outcome(
        door, what, ran.status, ran.seconds, ran.memory, ran.last, ran.wrong or _costly(ran.seconds, ran.memory)
    )


def command_of_many(door: str, what: str, files: Sequence[Path]) -> Outcome:
    """Run ``explore`` with all ``files``, or a fit with their directory; the first is a model that fits.

    The seconds are those of a file.
    """
    given = ["explore", *map(str, files)] if door == "explore" else [str(files[0].parent)]
    ran = _run([*given, *_WAYS[door][0]])
    ran = replace(ran, seconds=ran.seconds / len(files))
    wrong = ran.wrong
    if not wrong:
        document = json.loads(ran.out) if ran.status == 0 else {}
        rows = document.get("cells") or document.get("files") or []
        fits = {os.path.basename(each.get("model") or each["name"]): each["fits"] for each in rows}
        is_there = set(fits) == {each.name for each in files} and fits[files[0].name]
        wrong = _costly(ran.seconds, ran.memory) if is_there else "a file is not in the table"
    return Outcome(door, what, ran.status, ran.seconds, ran.memory, ran.last, wrong)


def question(served: Served, what: str, name: str) -> Outcome:
    """Ask a server about a file below its root."""
    before, connection = _taken_by(served.process.pid).seconds, served.connection()
    with _watching(served.process.pid) as seen:
        try:
            status, said = ask(connection, "/api/v1/plan", {"model": name, "gpus": ["8GiB"]})
        except OSError as error:
            status, said = 0, f"{type(error).__name__}: {error}"
        finally:
            connection.close()
    memory, seconds = max(each.memory for each in seen), max(each.seconds for each in seen) - before
    if status == 200:
        said = "a plan"
    with suppress(ValueError, KeyError, TypeError):
        said = json.loads(said)["error"]
    wrong = _costly(seconds, memory)
    if status not in _HTTP_STATUSES:
        wrong = f"status {status}"
    elif "\n" in said or any(each in said for each in _BUGS):
        wrong = "not one line"
    return Outcome("serve", what, status, seconds, memory, said, wrong)


@contextmanager
def _watching(pid: int) -> Iterator[list[_Taken]]:
    """What a process and its children have taken, seen again and again."""
    seen, over = [_taken_by(pid)], threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK):
            seen.append(_taken_by(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        seen.append(_taken_by(pid))


@dataclass(frozen=True)
class _Ran:
    """A command that has ended: what it said, and what it took."""

    status: int
    out: str
    err: str
    seconds: float
    memory: int

    @property
    def last(self) -> str:
        """The last line of what it said on stderr."""
        return (self.err.splitlines() or [""])[-1].removeprefix("fitter: ")

    @property
    def wrong(self) -> str:
        """What should not be, in a word; empty where all is as it should."""
        errors = [line for line in self.err.splitlines() if line.startswith("fitter: error: ")]
        if bug := next((each for each in _BUGS if each in self.out + self.err), ""):
            return bug
        if self.status not in _STATUSES:
            return f"status {self.status}"
        if self.status == 3 and (self.out or len(self.err.splitlines()) != 1):
            return "more than one line"
        return "" if len(errors) == (self.status == 3) else f"{len(errors)} errors"


def _run(words: Sequence[str]) -> _Ran:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "fitter", *words], stdin=subprocess.DEVNULL, stdout=out, stderr=err, preexec_fn=limit
        )
        taken = _watched(process)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
    return _Ran(process.returncode, said[0], said[1], taken.seconds, taken.memory)


def limit(pid: int = 0) -> None:
    """Let a process, and those that it starts from now on, have no more than ``HARD_LIMIT``."""
    resource.prlimit(pid, resource.RLIMIT_DATA, (HARD_LIMIT, HARD_LIMIT))
    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


def _costly(seconds: float, memory: int) -> str:
    if memory > MOST_MEMORY:
        return "memory"
    return "time" if seconds > MOST_SECONDS else ""


@dataclass(frozen=True)
class _Taken:
    """What processes take: bytes of memory, and seconds of computing so far."""

    memory: int = 0
    seconds: float = 0.0


def _watched(process: subprocess.Popen[bytes]) -> _Taken:
    """Wait for the end of a process; the most that it and its children have taken together."""
    most, end = _Taken(), time.monotonic() + _GIVEN_UP
    while True:
        taken = _taken_by(process.pid)
        most = _Taken(max(most.memory, taken.memory), max(most.seconds, taken.seconds))
        if process.poll() is not None:
            return most
        if time.monotonic() > end:
            process.kill()
        time.sleep(_LOOK)


_OWN = re.compile(r"^Rss(?:Anon|File):\s+([0-9]+) kB$", re.MULTILINE)
"""Without shared memory, of which the cells of a dummy load's cache map a little again and again."""


_TICK = os.sysconf("SC_CLK_TCK")


def _taken_by(pid: int) -> _Taken:
    """What a process and its children take now; of children that have ended, the seconds."""
    memory, seconds = 0, 0.0
    with suppress(OSError):
        memory = sum(int(kib) * 1024 for kib in _OWN.findall(Path(f"/proc/{pid}/status").read_text()))
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        seconds = sum(map(int, times)) / _TICK
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()):
                taken = _taken_by(child)
                memory, seconds = memory + taken.memory, seconds + taken.seconds
    return _Taken(memory, seconds)
