"""Ask one build of llama.cpp all that fitter asks, on any system: ``questions.py BUILD FOLDER ANSWERS``.

``FOLDER`` has models, and beside each NAME.gguf maybe an adapter (NAME.lora) and a projector (NAME.mmproj). Needs
nothing but fitter.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fitter.errors import FitterError
from fitter.llama.client import Worker
from fitter.llama.processes import interpreter, wire
from fitter.llama.types import Lora, Params, Skeleton, VirtualDevice

_GIB = 1 << 30
_CARDS = tuple(VirtualDevice(f"CUDA{i}", "a card", "cuda", 890, 24 * _GIB, 23 * _GIB) for i in range(2))
_ONE_THREAD = (
    "from fitter.llama.load import real_load; apply = real_load.apply; real_load.apply = lambda *given: "
    "(apply(*given), [setattr(given[2], name, 1) for name in ('n_threads', 'n_threads_batch')])[0]"
)
"""A real load computes in one thread: those of builds without OpenMP wait busily, for seconds on few processors."""
_ALL = Params(n_ctx=512, devices=("CUDA0",))
_BOTH = Params(n_ctx=512, devices=("CUDA0", "CUDA1"))


def questions(worker: Worker, model: Path, folder: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each question and what asks it."""
    path = str(model)
    yield "header", lambda: worker.header(path)
    yield "model", lambda: worker.model_info(path, _ALL)
    yield "layout", lambda: worker.layout(path, _ALL)
    yield "caches", lambda: worker.caches(path, _ALL)
    yield "skeleton", lambda: worker.measure(Skeleton((path,)), _BOTH, reserve=True)
    yield "file types", lambda: worker.file_types([path], folder)
    yield "files", lambda: sorted((name, os.path.getsize(os.path.join(folder, name))) for name in os.listdir(folder))
    yield "a real load", lambda: worker.load(path, Params(n_ctx=256, devices=(), n_gpu_layers=0)).breakdown
    yield "patterns", lambda: worker.match([r"blk\.1\..*", "out"], ["blk.1.a", "blk.2.b", "output"])
    if (adapter := model.with_suffix(".lora")).is_file():
        params = Params(n_ctx=512, devices=("CUDA0",), lora=(Lora(str(adapter), 1.0),))
        yield "an adapter", lambda: worker.measure(path, params, reserve=True)
    if (projector := model.with_suffix(".mmproj")).is_file():
        yield "a projector", lambda: worker.projector(str(projector), device="CUDA0")
        yield "a projector of the host", lambda: worker.projector(str(projector), device=None)


def main(build: str, folder: str, result: str) -> None:
    """Write the answers as JSON, by model and question; a refusal is its text."""
    answers: dict[str, Any] = {}
    start, module, rest = interpreter.BOOT.partition("from {module}")
    interpreter.BOOT = f"{start}{_ONE_THREAD}\n{module}{rest}"
    with Worker(_CARDS, llama_cpp=build) as worker:
        for model in sorted(Path(folder).glob("*.gguf")):
            with tempfile.TemporaryDirectory() as place:
                for question, ask in questions(worker, model, place):
                    try:
                        answer = wire.encode(ask())
                    except FitterError as error:
                        answer = f"{type(error).__name__} {error}"
                    said = json.dumps(answer)
                    for path in (place, folder):
                        said = said.replace(json.dumps(path)[1:-1], "")
                    answers[f"{model.name}: {question}"] = said.replace("\\\\", "/")
            worker.unload()
    with open(result, "w", encoding="utf-8") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
