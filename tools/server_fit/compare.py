"""What llama-server's fit measures of a case, and what fitter measures of the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fitter.asking import OneLoad, one_load
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Params, Row
from fitter.machine.gpu import parse_gpus
from fitter.planning.ask import Ask
from fitter.planning.shared import Draft, Mtp
from tools import shapes
from tools.server_fit import server
from tools.server_fit.pairs import DRAFT, Case, Feature
from tools.tiny_projector import TinyProjector, write_projector


@dataclass(frozen=True)
class Difference:
    """Where the two do not agree: ``what`` of which load."""

    what: str
    theirs: object
    ours: object

    def __str__(self) -> str:
        return f"{self.what}: llama-server {self.theirs}, fitter {self.ours}"


class Models:
    """The files of a comparison, written once into ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(self, shape: str) -> Path:
        """The model of a shape, without a tokenizer, which is most of the time that a load takes and no byte of a device."""
        return shapes.write(shape, self._directory, vocab=False)

    def projector(self) -> Path:
        """A small projector."""
        path = self._directory / "projector.gguf"
        return path if path.exists() else write_projector(path, TinyProjector(n_embd_text=4096))


def differences(case: Case, models: Models, worker: Worker) -> list[Difference]:
    """All that llama-server's fit and fitter measure otherwise."""
    model = models.of(case.pair.shape)
    gpus = parse_gpus(case.pair.gpus)
    said = server.ask(model, gpus, (*case.arguments, "-fit", "on", *_files(case.feature, models)))
    ask = Ask.of_a_load({**case.keywords, "gpus": case.pair.gpus, "devices": [gpu.name for gpu in gpus]})
    with one_load(ask, str(model), worker, None) as load:
        ours, _ = load.measured()
        found = _of_context(said.measured[0], load.params)
        found += _of_rows("the model", said.measured[0], ours)
        beside = _beside(case.feature, load, ours, models)
        if beside is not None:
            found += _of_rows(f"beside it the {case.feature.beside}", said.measured[1], beside)
        elif len({each.path for each in said.measured}) > 1 or any(each.params["ctx_type"] for each in said.measured):
            found += [Difference("loads", len(said.measured), 1)]
        if case.feature.beside == "projector":
            name = gpus[0].name
            ours_of = sum(row.model + row.context + row.compute for row in _projector(load, name, models))
            found += _different("the projector", sum(said.projector.values()), ours_of)
    return found


def _files(feature: Feature, models: Models) -> tuple[str, ...]:
    if feature.beside == "draft":
        return ("-md", str(models.of(DRAFT)))
    return ("--mmproj", str(models.projector())) if feature.beside == "projector" else ()


def _beside(feature: Feature, load: OneLoad, main: Breakdown, models: Models) -> Breakdown | None:
    params = replace(load.params, n_ctx=main.n_ctx)
    if feature.beside == "draft":
        path = str(models.of(DRAFT))
        draft = Draft(path, None, -1, Params.type_k, Params.type_v, load.worker.measure)
        return load.worker.measure(path, draft.params(params))
    if feature.beside == "mtp":
        found = load.worker.measure(str(load.model.path), Mtp(load.model.name).params(params))
        # its weights are those of the first context
        return found
    return None


def _projector(load: OneLoad, device: str, models: Models) -> Sequence[Row]:
    return load.worker.projector(models.projector(), device=device)


def _of_context(theirs: server.Measured, ours: Params) -> list[Difference]:
    names = {
        "n_ctx": ours.n_ctx,
        "n_batch": ours.n_batch,
        "n_ubatch": ours.n_ubatch,
        "n_seq_max": ours.n_seq_max,
        "n_rs_seq": ours.n_rs_seq,
        "n_outputs_max": ours.n_outputs_max,
        "embeddings": int(ours.embeddings),
        "kv_unified": int(ours.kv_unified),
    }
    return [each for name, value in names.items() for each in _different(name, theirs.params[name], value)]


def _of_rows(what: str, theirs: server.Measured, ours: Breakdown) -> list[Difference]:
    rows = {
        (row.buffer_type, "" if row.is_host else row.device or "", row.is_host): (row.model, row.context, row.compute)
        for row in ours.rows
        if row.used
    }
    return [
        each
        for key in sorted({*rows, *theirs.rows})
        for each in _different(f"{what}, {key[0]}", theirs.rows.get(key), rows.get(key))
    ]


def _different(what: str, theirs: object, ours: object) -> list[Difference]:
    return [] if theirs == ours else [Difference(what, theirs, ours)]
