"""Compute with a model of every architecture, and compare what llama.cpp writes of a sequence with what is planned.

The models are the tiny ones that upstream's test-llama-archs writes; ``--llama-cpp`` names the build. The whole state,
and the part of it that a context checkpoint has, must be the planned bytes after every number of tokens, and never more
than the largest. A build that also writes what a window no longer sees may write less than is planned.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fitter.errors import FitterError
from fitter.llama.client import Worker
from fitter.llama.processes import interpreter
from fitter.llama.types import Params
from fitter.programs.later import SequenceState, state_of
from tools.architectures.real import LEARNED_POSITIONS

_ONE = Params(n_ctx=512, n_ubatch=64, n_batch=128)
_FOUR = replace(_ONE, n_ctx=2048, n_seq_max=4)

CONFIGURATIONS: dict[str, Params] = {
    "1 sequence": _ONE,
    "1 sequence, large micro batch": replace(_ONE, n_ubatch=512, n_batch=512),
    "no flash attention": replace(_ONE, flash_attn="off"),
    "SWA in full": replace(_ONE, swa_full=True),
    "q8_0": replace(_ONE, type_k="q8_0", type_v="q8_0"),
    "q8_0 keys alone, no flash attention": replace(_ONE, type_k="q8_0", flash_attn="off"),
    "bf16": replace(_ONE, type_k="bf16", type_v="bf16"),
    "snapshots": replace(_ONE, n_rs_seq=3),
    "4 sequences": _FOUR,
    "4 sequences, no flash attention": replace(_FOUR, flash_attn="off"),
    "4 sequences, one cache": replace(_FOUR, kv_unified=True),
    "4 sequences, one cache, no flash attention": replace(_FOUR, kv_unified=True, flash_attn="off"),
    "4 sequences, one cache, SWA in full": replace(_FOUR, kv_unified=True, swa_full=True),
}

COUNTS = (0, 1, 2, 3, 4, 5, 31, 33, 64, 127, 128, 129, 200, 255, 256, 257, 300, 383, 385, 448, 511)
"""After how many tokens the state is asked for: around blocks, windows, micro batches and the context."""

_LEARNED = 256
"""Positions that the models have whose positions are learned."""

_FULL, _PARTIAL = 0, 1
_SECONDS = 600


@dataclass(frozen=True)
class Compared:
    """A model under a configuration: how many states were compared, and what is wrong. ``skipped``: why none was."""

    configuration: str
    count: int
    wrong: tuple[str, ...] = ()
    skipped: str = ""


def compare(worker: Worker, path: Path, configurations: dict[str, Params]) -> Iterator[Compared]:
    """Compare the states of the model at ``path`` under each of ``configurations``."""
    is_short = any(tensor.name in LEARNED_POSITIONS for tensor in worker.header(path).tensors)
    real = _ask_child(path, _LEARNED if is_short else COUNTS[-1], configurations, worker.llama_cpp_for(None))
    for name, params in configurations.items():
        said = real.get(name, {"error": "llama.cpp ended"})
        if "error" in said:
            yield Compared(name, 0, skipped=said["error"])
            continue
        try:
            state = state_of(worker.caches(path, params), swa_full=params.swa_full)
        except FitterError as error:
            yield Compared(name, 0, (str(error),))
            continue
        wrong = [*_wrong(state, said["states"])]
        if said["removable"] is not None and said["removable"] != (state.removal in ("any", "bounded")):
            wrong.append(f"that its last token can be taken back is {said['removable']}, not {state.removal}")
        yield Compared(name, len(said["states"]), tuple(wrong))


def _wrong(state: SequenceState, real: Sequence[Sequence[int]]) -> Iterator[str]:
    for n_tokens, full, partial in real:
        for what, found, own, largest in (
            ("state", full, state.full(n_tokens), state.largest),
            ("checkpoint", partial, state.checkpoint(n_tokens), state.largest_checkpoint),
        ):
            if found > own or (found < own and state.caches.leaves_out_masked):
                yield f"{n_tokens} tokens: {what} of {found} bytes, not {own}"
            if found > largest:
                yield f"{n_tokens} tokens: {what} of {found} bytes, and {largest} was said to be the largest"


# --- the real states, in a process that may crash


def _ask_child(path: Path, longest: int, configurations: dict[str, Params], llama_cpp: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    waiting = list(configurations)
    while waiting:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                __spec__.name if __spec__ else "tools.architectures.states",
                "--real",
                str(path),
                str(longest),
                *waiting,
            ],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env={**os.environ, "GGML_NO_BACKTRACE": "1", **interpreter.worker_variables(llama_cpp)},
        )
        said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        found.update({each["name"]: each for each in said})
        waiting = waiting[len(said) :]
        if waiting:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing was said"]
            found[waiting[0]] = {"error": f"exit status {done.returncode}: {lines[-1]}"}
            waiting = waiting[1:]
    return found


def tell_real(path: str, longest: int, names: Sequence[str]) -> None:
    """Print what llama.cpp itself says under each of the configurations with these ``names``, a line of JSON each.

    ``longest``: the most tokens of a sequence.
    """
    interpreter.become_worker()
    from fitter.llama.build import library as native
    from fitter.llama.build.layouts import read_whole
    from fitter.llama.load.backend_devices import registry
    from fitter.llama.load.structs import apply

    native.prepare()
    llama = native.libraries().llama
    for name in names:
        params = replace(CONFIGURATIONS[name], devices=())
        model_params, context_params = llama.llama_model_default_params(), llama.llama_context_default_params()
        keep = apply(params, model_params, context_params, registry())
        read_whole(model_params)
        # more of them only wait for each other where a machine is busy
        context_params.n_threads = context_params.n_threads_batch = 1
        model = llama.llama_model_load_from_file(os.fsencode(path), model_params)
        context = llama.llama_init_from_model(model, context_params) if model else None
        if context:
            states = [*_states(llama, model, context, params, longest)]
            answer = {"states": states, "removable": _removable(llama, context, params, states)}
            llama.llama_free(context)
        else:
            answer = {"error": "no context"}
        if model:
            llama.llama_model_free(model)
        del keep
        print(json.dumps({"name": name, **answer}), flush=True)


def _states(llama: Any, model: Any, context: Any, params: Params, longest: int) -> Iterator[tuple[int, int, int]]:
    """Tokens of a sequence, and the bytes of its state and of a checkpoint, while more and more are computed."""
    if not llama.llama_get_memory(context):
        return
    dice = random.Random(0)
    sequence = params.n_seq_max - 1
    length = min(int(llama.llama_n_ctx_seq(context)), longest)
    if sequence and not _decode(llama, model, context, [0] * 7, 0):
        return
    done = 0
    for count in COUNTS:
        if count > length:
            break
        while done < count:
            step = min(count - done, params.n_batch)
            if not _decode(llama, model, context, [dice.randrange(64) for _ in range(step)], sequence):
                return
            done += step
        llama.llama_synchronize(context)
        size = llama.llama_state_seq_get_size_ext
        yield count, size(context, sequence, _FULL), size(context, sequence, _PARTIAL)


def _removable(llama: Any, context: Any, params: Params, states: Sequence[tuple[int, int, int]]) -> bool | None:
    """Whether the last of several tokens can be taken back; ``None`` where there are none."""
    memory, n_tokens = llama.llama_get_memory(context), states[-1][0] if states else 0
    if not memory or n_tokens < 2:
        return None
    remove = llama.library.llama_memory_seq_rm
    remove.restype, remove.argtypes = ctypes.c_bool, [ctypes.c_void_p, *[ctypes.c_int32] * 3]
    return bool(remove(memory, params.n_seq_max - 1, n_tokens - 1, -1))


def _decode(llama: Any, model: Any, context: Any, tokens: Sequence[int], sequence: int) -> bool:
    from fitter.llama.build.functions import Batch

    count = len(tokens)
    own = ctypes.pointer(ctypes.c_int32(sequence))
    batch = Batch(
        count,
        (ctypes.c_int32 * count)(*tokens),
        None,
        None,
        (ctypes.c_int32 * count)(*[1] * count),
        (ctypes.POINTER(ctypes.c_int32) * count)(*[own] * count),
        None,
    )
    if llama.llama_model_has_encoder(model) and llama.llama_encode(context, batch):
        return False
    return bool(llama.llama_model_has_decoder(model)) and llama.llama_decode(context, batch) == 0


def main(arguments: Sequence[str]) -> int:
    """Compare; the exit status is 0 if all is as it must be, 2 where there is nothing to compare."""
    if arguments[:1] == ["--real"]:
        tell_real(arguments[1], int(arguments[2]), arguments[3:])
        return 0
    parser = argparse.ArgumentParser(prog="tools.architectures.states", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="GGUF files, such as test-llama-archs -o writes")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only what has PATTERN in its name")
    parser.add_argument("--llama-cpp", default=None, help="which llama.cpp")
    options = parser.parse_args(arguments)
    files = sorted(path for path in options.models.glob("*.gguf") if re.search(options.only, path.stem))
    start, compared, wrong, skipped = time.monotonic(), 0, [], 0
    with Worker(llama_cpp=options.llama_cpp) as worker:
        for file in files:
            found = list(compare(worker, file, CONFIGURATIONS))
            count = sum(each.count for each in found)
            compared, skipped = compared + count, skipped + sum(bool(each.skipped) for each in found)
            print(
                f"{file.stem:24} {count:4} states, {sum(not each.skipped for each in found)} configurations", flush=True
            )
            for each in found:
                if each.skipped:
                    print(f"    skipped: {each.configuration}: {each.skipped}")
                for line in each.wrong:
                    print(f"    WRONG {each.configuration}: {line}")
            wrong += [file.stem] * any(each.wrong for each in found)
    print(f"{len(files)} models, {compared} states, {skipped} configurations skipped, {time.monotonic() - start:.0f} s")
    if wrong:
        print(f"WRONG: {', '.join(wrong)}")
    return 2 if not compared else int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
