"""Load a model of every architecture for real, and compare what it takes with what a dummy load of it says.

``make test-real`` runs this on the tiny models that upstream's test-llama-archs writes, on the CPU alone and with one
and two rpc-servers as devices. Model and context must agree, byte for byte; compute must never be more than was said.
Where it is less, the table names the architecture and the bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fitter.errors import FitterError
from fitter.llama.client import Worker
from fitter.llama.types import Header, ModelInfo, Params, TensorBuftOverride
from fitter.planning.checked.verification import compare
from fitter.planning.plan.verified import VerifiedDifference
from tools.architectures.compare import with_context
from tools.faults.cut_servers import RpcServer

N_CTX = 2048
"""Of every sequence, and what each model is told that it was trained with: its own 256 tokens are no micro batch."""

TIMEOUT = 300.0

LEARNED_POSITIONS = ("position_embd.weight", "token_pos_embd.weight")
"""A model with one of these has as many positions as its tensor has rows."""

CPU: dict[str, Params] = {
    "CPU": Params(n_ctx=N_CTX, devices=()),
    "CPU, no flash attention": Params(n_ctx=N_CTX, flash_attn="off", n_ubatch=128, devices=()),
    "CPU, 4 sequences": Params(n_ctx=4 * N_CTX, n_seq_max=4, devices=()),
    "CPU, 4 sequences, one cache": Params(n_ctx=4 * N_CTX, n_seq_max=4, kv_unified=True, devices=()),
}
DEVICE: dict[str, Params] = {
    "device": Params(n_ctx=N_CTX),
    "output and a layer on it": Params(n_ctx=N_CTX, n_gpu_layers=2),
    "caches on it alone": Params(n_ctx=N_CTX, tensor_buft_overrides=(TensorBuftOverride(r"weight", "CPU"),)),
    "FFN on the host": Params(n_ctx=N_CTX, tensor_buft_overrides=(TensorBuftOverride(r"ffn_", "CPU"),)),
    "weights on the host": Params(n_ctx=N_CTX, n_gpu_layers=0),
    "caches on the host": Params(n_ctx=N_CTX, offload_kqv=False),
    "4 sequences": Params(n_ctx=4 * N_CTX, n_seq_max=4, n_gpu_layers=2),
}
TWO_DEVICES: dict[str, Params] = {
    "two devices": Params(n_ctx=N_CTX),
    "two devices, FFN on the host": Params(n_ctx=N_CTX, tensor_buft_overrides=(TensorBuftOverride(r"ffn_", "CPU"),)),
    "two devices and the host": Params(n_ctx=N_CTX, n_gpu_layers=2),
}


@dataclass(frozen=True)
class Result:
    """A model under every configuration: ``differences`` and ``errors`` by configuration; ``how`` it was computed."""

    name: str
    how: str
    loads: int
    differences: tuple[tuple[str, VerifiedDifference], ...]
    errors: tuple[tuple[str, str], ...]

    @property
    def wrong(self) -> list[str]:
        """What must not be: other weights or caches, more to compute with, a load that fails."""
        found = [
            f"{where}: {each.buffer_type} {each.kind} is {each.real}, not {each.predicted} ({each.more:+d})"
            for where, each in self.differences
            if each.kind != "compute" or each.more > 0
        ]
        return found + [f"{where}: {error}" for where, error in self.errors]

    @property
    def over(self) -> list[tuple[str, VerifiedDifference]]:
        """Where compute is less than was said."""
        return [(where, each) for where, each in self.differences if each.kind == "compute" and each.more < 0]


def check(worker: Worker, path: Path, configurations: dict[str, Params]) -> Result:
    """Load ``path`` both ways under each of ``configurations``."""
    differences: list[tuple[str, VerifiedDifference]] = []
    errors: list[tuple[str, str]] = []
    how, loads = "", 0
    for name, params in configurations.items():
        try:
            dummy = worker.measure(path, params, reserve=True)
            how = how or _how(worker.model_info(path, params), bool(sum(row.context for row in dummy.rows)))
            real = worker.load(path, params).breakdown
            worker.unload()
        except FitterError as error:
            errors.append((name, str(error)))
            continue
        loads += 1
        if real.n_ctx != dummy.n_ctx or real.devices != dummy.devices:
            errors.append((name, f"context {real.n_ctx} on {real.devices}, not {dummy.n_ctx} on {dummy.devices}"))
        differences += [(name, each) for row in compare(dummy.rows, real) for each in row.differences]
    return Result(path.stem, how, loads, tuple(differences), tuple(errors))


def _how(info: ModelInfo, has_cache: bool) -> str:
    if info.has_encoder:
        return "encoder, then decoder"
    if not has_cache:
        return "as a whole: it has no cache"
    return "prompts, then single tokens"


def longer(worker: Worker, path: Path, directory: Path) -> Path:
    """The model with ``N_CTX`` as its own context; itself where its positions are learned."""
    header: Header = worker.header(path)
    if any(tensor.name in LEARNED_POSITIONS for tensor in header.tensors):
        return path
    return with_context(path, directory / path.name, N_CTX)


def main(arguments: Sequence[str]) -> int:
    """Compare; the exit status is 0 if all is as it must be, 2 where there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="tools.architectures.real", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="GGUF files, such as test-llama-archs -o writes")
    parser.add_argument("--only", default="", metavar="TEXT", help="only what has TEXT in its name")
    options = parser.parse_args(arguments)
    files = sorted(path for path in options.models.glob("*.gguf") if options.only in path.stem)
    if not files:
        print(f"no model has {options.only!r} in its name" if options.only else "no models", file=sys.stderr)
        return 2
    start = time.monotonic()
    results = []
    for result in _check_all(files):
        results.append(result)
        print(f"{result.name:24} {result.loads:3} loads  {result.how}", flush=True)
        for line in result.wrong:
            print(f"    WRONG {line}", flush=True)
    print(*summary(results), f"{time.monotonic() - start:.0f} s", sep="\n")
    return int(any(result.wrong for result in results))


def _check_all(files: Sequence[Path]) -> Iterator[Result]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fitter-real-")))
        servers = [stack.enter_context(RpcServer()).address for _ in range(3)]
        on_cpu = stack.enter_context(Worker(timeout=TIMEOUT))
        on_device = stack.enter_context(Worker(timeout=TIMEOUT, rpc=servers[:1]))
        # an rpc-server talks to one process only
        on_two = stack.enter_context(Worker(timeout=TIMEOUT, rpc=servers[1:]))
        for file in files:
            path = longer(on_cpu, file, directory)
            parts = [check(on_cpu, path, CPU), check(on_device, path, DEVICE), check(on_two, path, TWO_DEVICES)]
            if path != file:
                path.unlink()
            yield replace(
                parts[0],
                how=parts[0].how or parts[1].how,
                loads=sum(part.loads for part in parts),
                differences=tuple(each for part in parts for each in part.differences),
                errors=tuple(each for part in parts for each in part.errors),
            )


def summary(results: Sequence[Result]) -> Iterator[str]:
    """The table of what is over-estimated, how models were computed, and the count."""
    over = [(result, *each) for result in results for each in result.over]
    if over:
        yield f"{'over-estimated':24} {'configuration':28} {'buffer type':24} {'said':>12} {'real':>12} {'over':>10}"
    for result, where, each in over:
        sizes = f"{each.predicted:12} {each.real:12} {-each.more:10}"
        yield f"{result.name:24} {where:28} {each.buffer_type:24} {sizes}"
    for how in sorted({result.how for result in results}):
        names = [result.name for result in results if result.how == how]
        listed = f": {', '.join(names)}" if len(names) < len(results) / 2 else ""
        yield f"{len(names):4} {how or 'not computed'}{listed}"
    loads = sum(result.loads for result in results)
    wrong = [result.name for result in results if result.wrong]
    too_much = len({result.name for result, *_ in over})
    yield (
        f"{len(results)} models, {loads} pairs of a dummy and a real load: "
        f"{len(results) - len(wrong)} as they must be, {too_much} with compute over-estimated"
    )
    if wrong:
        yield f"WRONG: {', '.join(wrong)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
