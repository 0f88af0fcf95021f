"""Compare the rules of profiles with the backends in a build's source, compiled without their cards."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fitter.llama.build.build_folder import find
from tools.comparisons import backend_loads, cuda_rules
from tools.comparisons.cuda_rules import ORACLE
from tools.comparisons.load_answers import compare as print_differences
from tools.follow.subject import PLACE, FollowError, Subject
from tools.metal import build as build_metal
from tools.metal.check import variables
from tools.models import shapes
from tools.oracle import build as build_cuda
from tools.oracle import build_hip
from tools.oracle.build import MissingError
from tools.oracle.draw import draw

_SEED = 14
Figures = dict[str, Any]


def compare(subject: Subject, count: int, jobs: int, models: Path, keep: bool) -> Iterator[str]:
    """Draw ``count`` loads for each profile, and say of how many the rules and the backend say the same.

    ``models`` is a directory for the models; ``keep`` stores the figures. Raises ``FollowError`` without a source or
    libraries.
    """
    if subject.source is None or subject.library is None:
        raise FollowError("--rules needs the source and the libraries of the build: name these with --library")
    for profile, ask in _PROFILES.items():
        try:
            found = ask(subject, profile, count, jobs, models)
        except MissingError as error:
            yield f"{profile}: not compared: {error}"
            continue
        except subprocess.CalledProcessError as error:
            yield f"differs: {profile}: its source cannot be compiled without a card: {error.cmd[0]} failed, see above"
            continue
        if keep:
            cuda_rules.keep(found, profile)
        word = "equal" if found["equal"] == found["rows"] else "differs"
        yield f"{word}: {profile}: {found['equal']} of {found['rows']}"


def _compare_cuda(subject: Subject, profile: str, count: int, jobs: int, models: Path) -> Figures:
    build = build_hip.build if profile == "rocm" else build_cuda.build
    library = build(_source(subject), _place(subject, profile), _ggml_base(subject), jobs)
    rows = draw(list(shapes.SHAPES), count, _SEED, cuda_rules.CARDS[profile])
    return cuda_rules.compare(_compared(subject, profile, library), rows, models, jobs)


def _compare_metal(subject: Subject, profile: str, count: int, jobs: int, models: Path) -> Figures:
    library = build_metal.build(_source(subject), _place(subject, profile), _ggml_base(subject))
    loads = backend_loads.draw(backend_loads.METAL, count, _SEED)

    def model(load: backend_loads.Load) -> Path:
        return shapes.write(load.model, models, vocab=False)

    where = str(subject.library)
    real = list(backend_loads.answers(loads, model, lambda load: variables(load, library), where))
    ours = list(backend_loads.answers(loads, model, llama_cpp=where))
    different = print_differences(f"{subject.name}, {profile}", loads, real, ours)
    return cuda_rules.figures_of(_compared(subject, profile, library), count, count - different)


_PROFILES: dict[str, Callable[[Subject, str, int, int, Path], Figures]] = {
    "cuda": _compare_cuda,
    "rocm": _compare_cuda,
    "metal": _compare_metal,
}


_BY = {
    "cuda": ORACLE,
    "rocm": "ggml-hip of its source, built without a GPU",
    "metal": "ggml-metal of its source, without a Mac",
}


def _compared(subject: Subject, profile: str, library: Path) -> cuda_rules.Subject:
    return cuda_rules.Subject(subject.name, str(subject.library), library, _BY[profile], profile)


def _source(subject: Subject) -> Path:
    assert subject.source is not None
    return subject.source


def _place(subject: Subject, profile: str) -> Path:
    return PLACE / f"{subject.name}-{profile}"


def _ggml_base(subject: Subject) -> Path:
    return next(Path(path) for path in find(str(subject.library)).libraries if "libggml-base." in path)
