"""Runs the commands and the Python of the documentation, and compares what they print with what the pages say.

    python -m tools.docs.examples [--update] [PAGE…]

Without a page it runs README.md and all of docs/. With ``--update`` it writes what is printed into the pages.

The blocks of a page run in order, in a fresh folder with the model files and ``builds/NAME`` of llama.cpp that the page
names:

- ``console``: lines ``$ COMMAND``, continued by lines ``> …``, each followed by what a terminal of 100 columns shows.
  All of them run in one bash. After a command that fails comes ``$ echo $?``.
- ``python``: in one namespace; what is printed stands in comments ``#> …`` after the statement.
- one with a title, ``toml title="fitter.toml"``: written to that file.
- one after a line ``<!-- not run: REASON -->`` is left alone. Any other kind of block is an error.

Seconds and counts of dummy loads are compared without their digits. After a line ``<!-- figures of this machine -->``
every figure of a block is, and the processor's name among devices.
Ports 50052 to 50059, 8080 and 8081 stand for free ones. The exit status is 1 if a page says anything else than what is
printed.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tools.builds import llama_builds
from tools.comparisons.upstream import TOOLS
from tools.docs import models
from tools.docs.pages import ROOT, Block, Kind, blocks, commands, pages, same

COLUMNS = 100
SECONDS = 120
"""The longest that a command or a Python block may take."""

_PORTS = ("50052", "50053", "50054", "50055", "50056", "50057", "50058", "50059", "8080", "8081")
_MARK = "\036"
_BASH = f"""\
status=0
while IFS= read -r -d '' -u SCRIPT command; do
  (exit $status)
  eval "$command" SCRIPT<&- </dev/null
  status=$?
  printf '{_MARK}%d{_MARK}' "$status"
done
"""
"""``SCRIPT`` stands for the number of the pipe that the commands come through."""


@dataclass(frozen=True)
class Outcome:
    """What came of a page: its text with what is printed now, and what is wrong with it, one text for each."""

    text: str
    problems: tuple[str, ...]


@dataclass
class _Found:
    """What is gathered while a page runs: new lines for ranges of lines, and problems."""

    lines: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class _Stopped(Exception):
    """A command or a block that did not end."""


class Terminal:
    """A bash on a terminal of its own. What it starts ends with it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._screen, inner = os.openpty()
        tty.setraw(inner)
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        script, self._script = os.pipe()
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-c", _BASH.replace("SCRIPT", str(script))],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=inner,
            stderr=inner,
            pass_fds=(script,),
            start_new_session=True,
        )
        os.close(inner)
        os.close(script)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()
        os.close(self._screen)
        os.close(self._script)

    def run(self, command: str) -> tuple[str, int]:
        """What ``command`` prints, and its exit status. Raises ``_Stopped`` if it does not end, or ends the bash."""
        try:
            os.write(self._script, command.encode() + b"\0")
        except BrokenPipeError:
            raise _Stopped("the shell has ended before") from None
        said = b""
        until = time.monotonic() + SECONDS
        while said.count(_MARK.encode()) < 2:
            if not select.select([self._screen], [], [], max(0, until - time.monotonic()))[0]:
                raise _Stopped(f"did not end within {SECONDS} seconds; it printed:\n{said.decode(errors='replace')}")
            try:
                more = os.read(self._screen, 1 << 16)
            except OSError:
                more = b""
            if not more:
                raise _Stopped("ended the shell")
            said += more
        text, status, _ = said.decode(errors="replace").split(_MARK, 2)
        return text, int(status)


class Snippets:
    """A Python process that runs blocks in one namespace. It starts with the first."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Snippets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()

    def run(self, source: str) -> str:
        """The block ``source`` with what it prints in its comments. Raises ``_Stopped`` if it fails or does not end."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.docs.snippets"],
                cwd=self._folder,
                env={**self._environment, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"source": source}), file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], SECONDS)[0]:
            raise _Stopped(f"did not end within {SECONDS} seconds")
        answer = json.loads(self._process.stdout.readline() or '{"error": "the process ended"}')
        if "error" in answer:
            raise _Stopped(answer["error"])
        found: str = answer["source"]
        return found


class _Page:
    """The run of one page, in a folder of its own."""

    def __init__(self, home: Path, text: str) -> None:
        self._folder = home / "models"
        self._ports = _free_ports(text)
        # Longer ones first: one may be inside another.
        self._places = {str(ROOT): "~/llama-fitter", str(home): "~"}
        environment = _environment(home)
        self.terminal = Terminal(self._folder, environment)
        self.snippets = Snippets(self._folder, environment)

    def inward(self, text: str) -> str:
        """``text`` of a page as it is run here."""
        for port, free in self._ports.items():
            text = text.replace(port, free)
        return text

    def outward(self, text: str) -> str:
        """What was printed here as it stands in a page."""
        for port, free in self._ports.items():
            text = text.replace(free, port)
        for path, place in sorted(self._places.items(), key=lambda pair: -len(pair[0])):
            text = text.replace(path, place)
        return text

    def run(self, block: Block, found: _Found) -> None:
        """Run one block, and note what it prints."""
        if block.kind is Kind.UNKNOWN:
            raise _Stopped(
                f"a block of kind '{block.language}' cannot be run: make it a console or python block, give it a "
                "title, or write <!-- not run: REASON --> on the line before it"
            )
        if block.kind is Kind.FILE:
            assert block.title is not None
            path = self._folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.inward(block.text) + "\n", encoding="utf-8")
        elif block.kind is Kind.PYTHON:
            self._python(block, found)
        elif block.kind is Kind.CONSOLE:
            self._console(block, found)

    def _python(self, block: Block, found: _Found) -> None:
        new = self.outward(self.snippets.run(self.inward(block.text) + "\n")).rstrip("\n")
        if not same(block.text, new, is_own=block.is_own):
            found.lines[block.first, block.last] = _indented(new, block.indent)

    def _console(self, block: Block, found: _Found) -> None:
        lines, differs, failed = [], False, ""
        for command in commands(block):
            if failed and command.text != "echo $?":
                found.problems.append(f"line {block.first + 1}: `{failed}` fails, and no `$ echo $?` comes after it")
            printed, status = self.terminal.run(self.inward(command.text))
            failed = command.text if status else ""
            # A terminal that cannot remove a progress bar leaves an empty line.
            printed = self.outward(printed).lstrip("\n")
            is_same = same(command.output, printed, is_own=block.is_own)
            differs |= not is_same
            first, *more = command.text.splitlines()
            lines += [f"$ {first}", *(f"> {line}" for line in more)]
            shown = command.output if is_same else printed.rstrip("\n")
            lines += [line.rstrip() for line in shown.splitlines()]
        if failed:
            found.problems.append(f"line {block.first + 1}: `{failed}` fails, and no `$ echo $?` comes after it")
        if differs:
            found.lines[block.first, block.last] = _indented("\n".join(lines), block.indent)


def run_page(page: Path) -> Outcome:
    """Run ``page`` in a fresh folder. Raises ``FetchError`` for a build of llama.cpp that cannot be fetched."""
    text = page.read_text(encoding="utf-8")
    found = _Found()
    with _home() as home:
        models.place(models.named_in(text), home / "models")
        models.place_builds(models.builds_in(text), home / "models")
        run = _Page(home, text)
        with run.terminal, run.snippets:
            for block in blocks(text):
                try:
                    run.run(block, found)
                except (_Stopped, ValueError) as error:
                    found.problems.append(f"line {block.first}: {error}")
    lines = text.splitlines()
    for (first, last), new in sorted(found.lines.items(), reverse=True):
        lines[first:last] = new
    return Outcome("\n".join(lines) + "\n", tuple(found.problems))


def difference(page: Path, outcome: Outcome) -> str:
    """What is wrong with ``page``, for a person; empty if nothing is."""
    before = page.read_text(encoding="utf-8").splitlines(keepends=True)
    diff = "".join(difflib.unified_diff(before, outcome.text.splitlines(keepends=True), "written", "printed"))
    return "\n".join([*outcome.problems, *([diff] if diff else [])])


@contextlib.contextmanager
def _home() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="fitter-docs-")).resolve()
    try:
        (home / "models").mkdir()
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _environment(home: Path) -> dict[str, str]:
    """What commands see: nothing that is set here but where programs are, and how threads of real loads wait."""
    names = ("LANG", "LC_ALL", "TMPDIR", "OMP_WAIT_POLICY")
    passed = {name: os.environ[name] for name in names if name in os.environ}
    programs = (Path(sys.executable).parent, TOOLS, os.environ.get("PATH", os.defpath))
    return {
        "LANG": "C.UTF-8",
        **passed,
        "PATH": os.pathsep.join(map(str, programs)),
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "TERM": "dumb",
        "NO_COLOR": "1",
        "PAGER": "cat",
        # pytest's word on an editable installation, which nobody who reads has
        "PYTEST_ADDOPTS": "-W ignore::pytest.PytestAssertRewriteWarning",
        "COLUMNS": str(COLUMNS),
        "LINES": "50",
    }


def _free_ports(text: str) -> dict[str, str]:
    """A free port for each that ``text`` names, with as many digits: pages run at the same time."""
    found: dict[str, str] = {}
    with contextlib.ExitStack() as held:
        for port in (port for port in _PORTS if port in text):
            candidates = range(1 + os.getpid() % 6000 + 2000, 10000) if len(port) == 4 else (0,)
            for candidate in candidates:
                listening = held.enter_context(socket.socket())
                with contextlib.suppress(OSError):
                    listening.bind(("127.0.0.1", candidate))
                    found[port] = str(listening.getsockname()[1])
                    break
    return found


def _indented(text: str, indent: str) -> list[str]:
    return [f"{indent}{line}" if line else "" for line in text.splitlines()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pages that are named, or all; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.docs.examples", description="Run the documentation's examples."
    )
    parser.add_argument("--update", action="store_true", help="write what is printed into the pages")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="pages at once (default: 2)")
    parser.add_argument(
        "pages", nargs="*", type=Path, metavar="PAGE", help="README.md or a page of docs/ (default: all)"
    )
    given = parser.parse_args(arguments)
    chosen = [page.resolve() for page in given.pages] or [ROOT / page for page in pages()]
    wrong = 0
    for page in chosen:
        try:
            for name in models.builds_in(page.read_text(encoding="utf-8")):
                llama_builds.fetched(llama_builds.packaged()[name])
        except llama_builds.FetchError as error:
            print(f"{page}: {error}")
            return 1
    with ThreadPoolExecutor(given.jobs) as pool:
        for page, outcome in zip(chosen, pool.map(run_page, chosen), strict=True):
            said = difference(page, outcome)
            if given.update and outcome.text != page.read_text(encoding="utf-8"):
                page.write_text(outcome.text, encoding="utf-8")
                said = "\n".join([*outcome.problems, "updated"])
            wrong += bool(outcome.problems) or (bool(said) and not given.update)
            print(f"{page}: {said or 'as written'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
