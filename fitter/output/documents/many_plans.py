"""The documents of ``fitter quants``, ``explore``, ``hf://org/repo`` and ``shapes --gpu``: a plan for each of many.

A figure of a grid is ``null`` where it is not known.
"""

from __future__ import annotations

from fitter.output.arguments import arguments
from fitter.output.documents.document import Key, document, rounded
from fitter.output.documents.plan_document import MODEL
from fitter.planning.request.summary import ModelSummary
from fitter.planning.tables.exploration import ASKED, Exploration, ExploredAnswer, ExploredCell
from fitter.planning.tables.file_rows import Planned, Repository, RepositoryFile, SideFile
from fitter.planning.tables.quantization_rows import Quantization, Quantizations, ShapePlan, ShapePlans

_WORDS = tuple[str, ...]
_BEST = Key(
    "best",
    change=lambda best: best.name,
    hint=str | None,
    about="The name of the best one; null where there is none.",
)


def _problem(each: Planned) -> str | None:
    return each.problem or (each.plan.problems[0].message if each.plan is not None and each.plan.problems else None)


_PLACED = (
    Key(
        "fits",
        "plan",
        change=lambda plan: plan.fits,
        hint=bool | None,
        about="Whether the plan fits; null without a plan.",
    ),
    *map(Key, ("n_ctx", "longest_context", "host_weights")),
    Key(
        "on_devices",
        ".",
        change=lambda each: None if each.plan is None else each.is_on_devices,
        hint=bool | None,
        about=f"{Planned.is_on_devices.__doc__}",
    ),
)
"""Whether and how the plan of a row fits."""

_OUTCOME = (
    Key(
        "arguments",
        "plan",
        change=lambda plan: arguments(plan) if plan.fits else None,
        hint=_WORDS | None,
        about="llama.cpp's command-line arguments for the plan; null where none fits.",
    ),
    Key(
        "problem",
        ".",
        change=_problem,
        hint=str | None,
        about="Why there is no plan, or why it does not fit; null where it fits.",
    ),
)
"""The arguments of the plan of a row, or why there are none."""

_FILE_TYPE = document(
    Quantization,
    *("name", "bytes"),
    rounded("bits_per_weight"),
    *("types", "needs_imatrix"),
    *_PLACED,
    rounded("tokens_per_second"),
    *_OUTCOME,
)

QUANTIZATIONS = document(
    Quantizations,
    "fits",
    Key("model", of=MODEL, about=f"{ModelSummary.__doc__}"),
    "source_type",
    _BEST,
    Key(
        "file_types",
        "found",
        _FILE_TYPE,
    ),
    "notes",
    title="A model in every file type of llama-quantize",
)

REPOSITORY = document(
    Repository,
    "fits",
    Key("repository", "address"),
    _BEST,
    *("download", "run", "hf"),
    Key(
        "files",
        "found",
        document(
            RepositoryFile,
            *("name", "files", "bytes", "file_type", "weights"),
            rounded("bits_per_weight"),
            *_PLACED,
            rounded("prompt_tokens_per_second"),
            rounded("generation_tokens_per_second"),
            *_OUTCOME,
        ),
    ),
    Key("beside", of=document(SideFile, "name", "kind", "bytes")),
    title="The models of a repository",
)

SHAPE_PLANS = document(
    ShapePlans,
    "fits",
    Key(
        "shapes",
        "found",
        document(
            ShapePlan,
            *(Key(name, f"shape.{name}") for name in ("name", "model", "title", "parameters", "n_ctx_train")),
            Key("best", of=_FILE_TYPE),
        ),
    ),
    "left",
    title="The strongest shapes for a machine",
)


CELL = document(
    ExploredCell,
    *ASKED,
    *("fits", "n_ctx", "bytes", "used", "host_weights"),
    rounded("prompt_tokens_per_second"),
    rounded("tokens_per_second"),
    *("arguments", "problem", "needs_imatrix", "memory", "cost", "is_best", "bits_per_weight"),
    rounded("full_context_tokens_per_second"),
)

EXPLORATION = document(
    Exploration,
    *("fits", "cost"),
    Key("cells", of=CELL),
    "asked",
    Key("answers", of=document(ExploredAnswer, "model", Key("cell", of=CELL), "is_of_header", "refused")),
    *("kept", "seconds"),
    title="A grid of models, machines and parameters",
)

DOCUMENTS = {each.kind: each for each in (EXPLORATION, QUANTIZATIONS, REPOSITORY, SHAPE_PLANS)}
"""The document of each class of results."""
