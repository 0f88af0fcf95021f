"""Inspect a build of llama.cpp in another process."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from fitter.errors import FitterError
from fitter.llama.build import library as native
from fitter.llama.build.build_folder import PYTHON, Build, find, has_python, on_path
from fitter.llama.build.functions import best_of, ggml_version, open_build, same_commit
from fitter.llama.build.verdicts import read_answer, write_answer
from fitter.llama.processes import interpreter
from fitter.llama.types import LlamaCpp
from fitter.text import printable

_PATIENCE = 60.0
"""Seconds for a build to load."""


@dataclass(frozen=True)
class BuildReport:
    """The facts about a build of llama.cpp.

    Attributes:
        where: The user's name for it.
        libllama: Its path.
        version: Version of llama.cpp; '' if it has none.
        ggml: Version of ggml.
        backends: Names of ggml's backends.
        cpu: File of the CPU backend for this machine; '' if there is only one.
        layout: Layout of its parameters, by the first llama-cpp-python or build with it.
        key: Equal for equal files, wherever they are.
        checks: Checks that it passed.
        problem: Why fitter cannot plan with it; '' if it can.
    """

    where: str
    libllama: str = ""
    version: str = ""
    ggml: str = ""
    commit: str = ""
    backends: tuple[str, ...] = ()
    cpu: str = ""
    layout: str = ""
    key: str = ""
    checks: tuple[str, ...] = ()
    problem: str = ""


def inspect_build(where: str) -> BuildReport:
    """Inspect a build in another process; a crash becomes its ``problem``. Never raises ``FitterError``."""
    try:
        build = find(where)
    except FitterError as error:
        return BuildReport(where, problem=str(error))
    report = BuildReport(where, build.libllama, backends=build.backends, key=build.key)
    try:
        done = interpreter.run(__name__, main.__name__, where, seconds=_PATIENCE)
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return _changed_report(
            report, problem=f"{build.libllama} did not answer for {_PATIENCE:.0f} seconds: name another llama.cpp"
        )
    except OSError as error:
        return _changed_report(report, problem=f"{build.libllama} cannot be asked: {error}")
    except (ValueError, IndexError):
        said = done.stderr.strip().splitlines()
        why = f"ended with signal {-done.returncode}" if done.returncode < 0 else said[-1] if said else "said nothing"
        return _changed_report(report, problem=f"{build.libllama} cannot be asked ({why}): name another llama.cpp")
    return _changed_report(report, **answer)


CHECKS = ("symbols", "layout", "operations", "models")
"""The checks of a build: its functions, the layout of its parameters, the names of ggml's operations, and the memory of
small models.
"""


def check_build(where: str) -> BuildReport:
    """Inspect a build, and load small models as before the first plan (see ``fitter.llama.build.verdicts``)."""
    report = inspect_build(where)
    if report.problem:
        return report
    from fitter.llama.build import verdicts

    try:
        problem = verdicts.problem_of(find(where), native.own_libraries())
    except FitterError as error:
        return replace(report, problem=str(error))
    return replace(report, problem=f"{report.libllama}: {problem}") if problem else replace(report, checks=CHECKS)


def look_around(given: Sequence[str] = ()) -> tuple[BuildReport, ...]:
    """Inspect the builds of this Python, of the ``llama-server`` on the PATH, and those that are ``given``."""
    places = [PYTHON] if has_python() else []
    if server := on_path("llama-server"):
        places.append(server)
    return tuple(check_build(where) for where in dict.fromkeys((*places, *given)))


def other_server(planned: LlamaCpp) -> str:
    """Say that the ``llama-server`` on the PATH is not of the ``planned`` llama.cpp, and how to plan with it.

    Empty if it has the same, without a server, and if llama.cpp is built into it.
    """
    server = on_path("llama-server")
    try:
        build = find(server) if server else None
    except FitterError:
        return ""
    if build is None or build.key == planned.key:
        return ""
    report = _stored_report(build, server)
    if report.problem or (report.ggml == planned.ggml and same_commit(report.commit, planned.commit)):
        return ""
    its = native.Versions(report.version, report.ggml, report.commit)
    where = printable(shlex.quote(report.where))
    return (
        f"{where} is llama.cpp {its}, which may take other memory than {planned.version}: to plan with it, "
        f"add --llama-cpp {where}"
    )


def _stored_report(build: Build, where: str) -> BuildReport:
    """Inspect a build, or return the stored report."""
    name = f"look-{build.key[:32]}"
    answer = read_answer(name) or {}
    texts = {key: value for key, value in answer.items() if key in ("version", "ggml", "commit")}
    if len(texts) == 3 and all(isinstance(value, str) for value in texts.values()):
        return BuildReport(where, build.libllama, key=build.key, **texts)
    report = inspect_build(where)
    if not report.problem:
        write_answer(name, {"version": report.version, "ggml": report.ggml, "commit": report.commit})
    return report


def is_any_unusable(looks: Iterable[BuildReport], given: Sequence[str]) -> bool:
    """Return whether one of the ``given`` builds cannot be planned with."""
    return any(look.problem for look in looks if look.where in given)


def _changed_report(report: BuildReport, **changes: str) -> BuildReport:
    return BuildReport(**{**asdict(report), **changes})


def ask(build: Build) -> dict[str, str]:
    """Load the libraries of ``build`` into this process, and return their answers."""
    answer: dict[str, str] = {}
    try:
        llama = open_build(build)
        answer["version"] = (llama.llama_version() or b"").decode() if llama.llama_version else ""
        answer["ggml"], answer["commit"] = ggml_version(llama.library)
        if build.cpu_plugins:
            answer["cpu"] = best_of(build.cpu_plugins).rpartition("/")[2]
        answer["layout"] = native.libraries().llama.layout
    except (FitterError, OSError) as error:
        why = " ".join(str(error).split())
        answer["problem"] = why if build.libllama in why else f"{build.libllama} cannot be used: {why}"
    return answer


def main(where: str) -> None:
    """Print the facts about the build ``where`` as JSON on one line."""
    os.environ[interpreter.LLAMA_CPP] = where
    interpreter.become_worker(is_canary=True)
    print(json.dumps(ask(find(where))), flush=True)
