"""``python -m tools.wine.trial WHEEL``: install a wheel for Windows under wine, as a user does, and use it.

pip for Windows installs it into a Python that has nothing else, and its command is asked all that it is for. The exit
status is 1 if something fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.builds.llama_builds import FetchError
from tools.models.tiny import write_tiny
from tools.wheel.trial import TrialError
from tools.wine import place

EXTRAS = "report,web"
_SECONDS = 300
_MODEL = "a mödel.gguf"
_CARD = ("--gpu", "1GiB", "--fit-target", "64")


class Installed:
    """fitter from a wheel, installed without an index into a fresh Python for Windows in ``directory``.

    Raises ``TrialError`` if pip does not install it, ``FetchError`` if its requirements cannot be had.
    """

    def __init__(self, wheel: Path, directory: Path) -> None:
        place.keep_running()
        shutil.rmtree(directory, ignore_errors=True)
        python, wheels = directory / "python", directory / "wheels"
        shutil.copytree(place.PLACE / "python", python, ignore=shutil.ignore_patterns("__pycache__", "tcl"))
        # its makers' packages would hide that a requirement is not declared, and their pip writes other commands
        packages = python / "Lib" / "site-packages"
        shutil.rmtree(packages)
        packages.mkdir()
        (pip,) = (python / "Lib" / "ensurepip" / "_bundled").glob("pip-*.whl")
        place.download_packages(wheels, f"{wheel}[{EXTRAS}]")
        self.folder = directory / "a földer"
        self.temporary = directory / "temporary"
        self.temporary.mkdir()
        self.folder.mkdir()
        self._command: tuple[str | Path, ...] = (python / "python.exe", place.windows_path(pip / "pip"))
        self.ask(
            "install", "--quiet", "--no-index", "--find-links", place.windows_path(wheels), f"llama-fitter[{EXTRAS}]"
        )
        self._command = (python / "Scripts" / "fitter.exe",)

    def ask(self, *words: str, status: int = 0) -> str:
        """Return what the command prints. Raises ``TrialError`` if it ends with another status."""
        process = self.start(*words)
        said, errors = process.communicate(timeout=_SECONDS)
        if process.returncode != status:
            raise TrialError(f"{words[0]}: status {process.returncode}: {errors.strip() or said.strip()}")
        return said

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start the command with these words."""
        # of this Python and its pip nothing
        kept = {name: text for name, text in place.environment().items() if not name.startswith(("PIP_", "PYTHON"))}
        temporary = place.windows_path(self.temporary)
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*place.wine(), *map(str, self._command), *words],
            env=kept | {"PYTHONUTF8": "1", "TEMP": temporary, "TMP": temporary},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            encoding="utf-8",
            errors="replace",
        )


def shape(fitter: Installed) -> str:
    """Plan a large model that is not there."""
    return fitter.ask("--shape", "gpt-oss-120b", "--gpu", "rtx-4090").strip()


def fit(fitter: Installed) -> str:
    """Plan a file."""
    return fitter.ask(_model(fitter), *_CARD).strip()


def quants(fitter: Installed) -> str:
    """Compare its quantizations."""
    return _with(fitter.ask("quants", _model(fitter), *_CARD), "Q4_K_M")


def explore(fitter: Installed) -> str:
    """Plan it several times in two workers."""
    return _with(fitter.ask("explore", _model(fitter), *_CARD, "-c", "1024,2048", "-j", "2"), "2 plans: 2 fit")


def lock(fitter: Installed) -> str:
    """Lock a plan, check it, and see that a change is found."""
    cases = fitter.folder / "fitter.toml"
    text = f'[cases.one]\nmodel = "{_MODEL}"\ngpu = ["1GiB"]\nn_ctx = '
    cases.write_text(f"{text}512\n", encoding="utf-8")
    fitter.ask("lock")
    said = fitter.ask("check")
    cases.write_text(f"{text}8192\n", encoding="utf-8")
    fitter.ask("check", status=4)
    return said.strip().splitlines()[-1] if said.strip() else "unchanged"


def report(fitter: Installed) -> str:
    """Write a report."""
    fitter.ask("report", _model(fitter), *_CARD, "-o", "ä report.html")
    return _with((fitter.folder / "ä report.html").read_text(encoding="utf-8"), "tiny moe")


def serve(fitter: Installed) -> str:
    """Ask the service for a plan, from Linux."""
    server = fitter.start("serve", "--port", "0", "--root", place.windows_path(fitter.folder))
    assert server.stderr is not None
    try:
        address = server.stderr.readline().partition("at ")[2].split()[0]
        body = json.dumps({"model": _MODEL, "gpus": ["1GiB"]}).encode()
        request = urllib.request.Request(f"{address}api/v1/plan", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return _with(answer.read().decode(), "tiny moe")
    finally:
        server.terminate()
        server.communicate(timeout=_SECONDS)


USES: tuple[Callable[[Installed], str], ...] = (shape, fit, quants, explore, lock, report, serve)


def _model(fitter: Installed) -> str:
    path = fitter.folder / _MODEL
    if not path.is_file():
        write_tiny(path)
    return place.windows_path(path)


def _with(said: str, expected: str) -> str:
    if expected not in said:
        raise TrialError(f"{expected!r} is not in {said[-2000:]}")
    return expected


def main(arguments: Sequence[str] | None = None) -> int:
    """Install it and use it; say how long each takes."""
    parser = argparse.ArgumentParser(prog="python -m tools.wine.trial", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path, help="the wheel, as tools.wheel builds it")
    options = parser.parse_args(arguments)
    try:
        begun = time.monotonic()
        fitter = Installed(options.wheel.resolve(), place.PLACE / "trial")
        print(f"{time.monotonic() - begun:5.1f} s  install: its requirements are downloaded before")
        for use in USES:
            begun = time.monotonic()
            said = use(fitter)
            print(f"{time.monotonic() - begun:5.1f} s  {use.__name__}: {said}", flush=True)
    except (TrialError, FetchError) as error:
        print(f"trial: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
