"""Fitter on a real model: fitted to two GPUs that are not here, then to this machine, loaded, and checked byte by byte.

    make demo

The model goes into build/demo, or into the folder that is given, and is used again the next time. The exit status is 0
if llama.cpp took exactly the memory that was predicted.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import fitter
from fitter.errors import FitterError, LlamaCppError
from fitter.llama.load.breakdown import breakdown_of
from fitter.llama.types import Breakdown
from fitter.output.arguments import arguments, command_line
from fitter.output.tables.plan_table import plan_table, print_to

ROOT = Path(__file__).resolve().parent.parent
WRITER = ROOT / "examples" / "tiny_moe.py"
TWO_GPUS = ("--gpu", "112MiB", "--gpu", "64MiB", "--fit-target", "8")
PROMPT, MAX_TOKENS = "ba lu mi", 24

Bytes = Counter[tuple[str, str]]
"""Bytes by buffer type and by what they hold: model, context or compute."""


def main(folder: Path) -> int:
    """Run the demo with the model in ``folder``; returns the exit status."""
    path = folder / "tiny-moe.gguf"
    _heading("1. A model", "A small mixture-of-experts model with random weights: what it says means nothing.")
    if path.exists() and path.stat().st_mtime >= WRITER.stat().st_mtime:
        print(f"{_relative(path)} is there from the last time.", flush=True)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        _run([_relative(WRITER), _relative(path)])

    _heading(
        "2. Two GPUs that are not here",
        "Together they are too small for it. Attention and KV cache get their place first, then as many experts as",
        "there is room for; the other experts stay in host memory. The last line is for llama-server and the like.",
    )
    _run(["-m", "fitter", _relative(path), *TWO_GPUS])

    _heading("3. This machine", "The same from Python, for the devices that llama.cpp finds here.")
    plan = _fit_here(path)

    _heading("4. The proof", "The plan is loaded for real, and llama.cpp is asked how much it allocated.")
    real = _load(plan)
    return compare(_bytes(plan.breakdown), _bytes(real))


def _fit_here(path: Path) -> fitter.Plan:
    print(f'>>> plan = fitter.fit("{_relative(path)}")', flush=True)
    plan = fitter.fit(path)
    print_to(sys.stdout, plan_table(plan))
    if plan.fits:
        print(f">>> print(*plan.arguments())\n{command_line(arguments(plan), quoted=False)}", flush=True)
    return plan


def _load(plan: fitter.Plan) -> Breakdown:
    print(">>> llm = plan.load(use_mmap=False)", flush=True)
    llm = plan.load(use_mmap=False, verbose=False)
    try:
        print(f">>> llm({PROMPT!r}, max_tokens={MAX_TOKENS})", flush=True)
        answer = llm.create_completion(PROMPT, max_tokens=MAX_TOKENS, temperature=0.8, seed=1)
        said, tokens = answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
        print(f"{PROMPT}{said}   ({tokens} tokens)\n", flush=True)
        if not tokens:
            raise LlamaCppError("the model was loaded, but it generates nothing")
        return breakdown_of(llm._ctx.ctx)
    finally:
        llm.close()


def _bytes(breakdown: Breakdown) -> Bytes:
    found: Bytes = Counter()
    for row in breakdown.rows:
        for kind in ("model", "context", "compute"):
            found[row.buffer_type, kind] += getattr(row, kind)
    return +found


def compare(predicted: Bytes, real: Bytes) -> int:
    """Print both side by side and say what differs; returns 0 if nothing does, else 1."""
    places = list(dict.fromkeys([*predicted, *real]))
    width = max(len("buffer type"), *(len(buffer_type) for buffer_type, _ in places))
    print(f"{'buffer type':{width}}  {'holds':8}{'predicted bytes':>17}{'real bytes':>17}")
    for buffer_type, kind in places:
        off = real[buffer_type, kind] - predicted[buffer_type, kind]
        note = f"   {off:+,} in reality" if off else ""
        print(f"{buffer_type:{width}}  {kind:8}{predicted[buffer_type, kind]:17,}{real[buffer_type, kind]:17,}{note}")
    print(f"{'all':{width}}  {'':8}{predicted.total():17,}{real.total():17,}\n")
    if predicted != real:
        print("They differ: the prediction was wrong.")
        return 1
    print("Equal, to the byte.")
    return 0


def _heading(title: str, *lines: str) -> None:
    print("", title, "-" * len(title), *lines, "", sep="\n", flush=True)


def _run(arguments: Sequence[str]) -> None:
    """Run this Python with ``arguments`` and show the command. Raises ``CalledProcessError`` if it fails."""
    command = [_relative(Path(sys.executable)), *arguments]
    print(f"$ {shlex.join(command)}", flush=True)
    subprocess.run([sys.executable, *arguments], cwd=ROOT, stderr=subprocess.STDOUT, check=True)


def _relative(path: Path) -> str:
    """``path`` as it can be typed in the project's folder."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "demo"))
    except FitterError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"demo: error: {error.strerror}: {error.filename}", file=sys.stderr)
        sys.exit(3)
    except subprocess.CalledProcessError as error:
        # it has said why
        sys.exit(error.returncode)
    except KeyboardInterrupt:
        sys.exit(130)
