"""How fast fitter's plans and those of upstream's llama-fit-params are estimated to be on the same virtual machines.

    python -m benchmarks.placements [--only TEXT] [--host-bandwidth 60GB/s] [--output FILE]

Needs ``make tools``. Both plans are priced by ``fitter.estimate``, for the same request and host. Upstream's plans are
kept in build/placements, so a second run takes a second per case; the exit status is 1 where a check is not met.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fitter
from benchmarks.placement_tables import Pair, Placed, Spill, document, verdicts
from fitter.errors import FitterError
from fitter.llama.client import Worker, describe
from fitter.llama.types import Params, VirtualDevice
from fitter.machine.gpu import parse_gpus
from fitter.model.header import Model, open_model
from fitter.model.tensors import Role, layer_of, role_of
from fitter.parameters.table import Measuring, taken_by
from fitter.parameters.values import parse_overrides
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.placing.placement import counts_for_split
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.constraints import workload_of
from fitter.planning.request.request import DEFAULT_MARGIN
from fitter.planning.speed.cost import Workload
from tools.comparisons import upstream
from tools.comparisons.cases import CASES, MIXED, Case
from tools.models import shapes

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "placements"

PAIRS: tuple[Case, ...] = (*CASES, *MIXED)
"""What is compared by default."""


def compare(case: Case, directory: Path, worker: Worker, host_bandwidth: str | None = None) -> Pair:
    """Both programs on ``case``; the model is written to ``directory``, and ``worker`` measures both plans."""
    # the tokens take most of a load's time and none of its devices' memory
    path = shapes.write(case.shape, directory, vocab=False)
    gpus = parse_gpus(case.gpus)
    model = open_model(path, worker.header)
    upstreams = upstream_plan(case, path, gpus)
    # at the context that upstream chooses: with more of it a plan may be slower
    options = {**({"n_ctx": upstreams.n_ctx} if upstreams else {}), **_options(case)}
    # a set context gives a longer request
    prompt = case.prompt or Workload.prompt
    try:
        plan = fitter.fit(path, gpus=gpus, prompt=prompt, host_bandwidth=host_bandwidth, **options)
    except FitterError as error:
        return Pair(case.name, len(gpus), (0, 0), None, None, str(error))
    if not plan.fits:
        return Pair(case.name, len(gpus), (0, 0), None, None, "; ".join(problem.message for problem in plan.problems))
    contexts = [plan.params.n_ctx, *([upstreams.n_ctx] if upstreams else [])]
    workload = workload_of(prompt, None, min(contexts), is_set=True)

    def placed(params: Params, arguments: Sequence[str]) -> Placed:
        price = fitter.estimate(
            path,
            gpus=gpus,
            prompt=workload.prompt,
            generate=workload.generate,
            host_bandwidth=host_bandwidth,
            worker=worker,
            devices=params.devices,
            **_parameters(params),
        )
        return _placed(model, params, arguments, price, gpus, worker)

    ours = placed(plan.params, plan.arguments())
    own = plan.estimate
    if own is not None and own.workload == workload:
        ours = replace(ours, own_seconds=own.seconds)
    theirs = placed(_params(upstreams, gpus), upstreams.arguments) if upstreams else None
    return Pair(case.name, len(gpus), (workload.prompt, workload.generate), ours, theirs)


def _options(case: Case) -> dict[str, Any]:
    names = {"-c": "n_ctx", "--fit-ctx": "fit_ctx"}
    words = case.options
    return {names[word]: int(value) for word, value in zip(words[::2], words[1::2], strict=True)}


def _parameters(params: Params) -> dict[str, Any]:
    """What ``fitter.estimate`` takes for exactly ``params``."""
    # devices are said apart, and there are no adapters
    beside = ("devices", "lora")
    known = [each for each in taken_by(Measuring) if each.struct and each.key and each.name not in beside]
    overrides = [f"{override.pattern}={override.buffer_type}" for override in params.tensor_buft_overrides]
    return {each.name: params.of_parameter(each) for each in known} | {"override_tensor": overrides}


def _params(plan: upstream.UpstreamPlan, gpus: Sequence[VirtualDevice]) -> Params:
    return Params(
        n_ctx=plan.n_ctx,
        n_gpu_layers=plan.n_gpu_layers,
        tensor_split=plan.tensor_split,
        tensor_buft_overrides=parse_overrides(plan.override_tensor),
        devices=tuple(gpu.name for gpu in gpus),
    )


def _placed(
    model: Model,
    params: Params,
    arguments: Sequence[str],
    price: Price,
    gpus: Sequence[VirtualDevice],
    worker: Worker,
) -> Placed:
    breakdown = price.breakdown
    return Placed(
        arguments=tuple(arguments),
        n_ctx=breakdown.n_ctx,
        seconds=price.seconds,
        prompt=price.prompt_tokens_per_second,
        generation=price.generation_tokens_per_second,
        left=tuple((gpu.name, gpu.free - breakdown.on(gpu.name).used - DEFAULT_MARGIN) for gpu in gpus),
        left_out=tuple(gpu.name for gpu in gpus if breakdown.on(gpu.name).model == 0),
        spill=spill_of(model, params, {gpu.name: gpu.free for gpu in gpus}, worker),
        n_splits=breakdown.n_splits,
    )


def spill_of(model: Model, params: Params, free: dict[str, int], worker: Worker) -> Spill:
    """What of ``model`` is on the host with ``params``, without the token embedding, which always is.

    ``free``: bytes by device. The smallest is that of the routed experts, where none is spilled of the dense
    feed-forward's matrices: what a placement may take apart from its layer.
    """
    devices = tuple(free) if params.devices is None else params.devices
    n_units = model.n_layer + 1
    wanted = n_units if params.n_gpu_layers < 0 else min(params.n_gpu_layers, n_units)
    given = params.tensor_split if params.tensor_split and any(params.tensor_split) else None
    split = given or tuple(float(free[name]) for name in devices)
    first = n_units - (sum(counts_for_split(wanted, split)) if devices else 0)
    names = [tensor.name for tensor in model.tensors]
    overrides = params.tensor_buft_overrides
    matches = worker.match([override.pattern for override in overrides], names) if overrides else [HOST] * len(names)
    spilled = []
    for tensor, match in zip(model.tensors, matches, strict=True):
        role, layer = role_of(tensor.name), layer_of(tensor.name)
        if role is Role.TOKEN_EMBEDDING:
            continue
        home = model.n_layer if layer is None else layer
        if overrides[match].buffer_type == "CPU" if match >= 0 else home < first:
            spilled.append((tensor, role))
    kinds = [
        [t for t, role in spilled if role is wanted_role and t.name.endswith(".weight")] for wanted_role in _SINGLE
    ]
    smallest = min(next(filter(None, kinds), []), key=lambda tensor: tensor.bytes, default=None)
    total = sum(tensor.bytes for tensor, _ in spilled)
    return Spill(total, smallest.bytes, smallest.name) if smallest else Spill(total, None)


_SINGLE = (Role.EXPERT, Role.FFN)


def upstream_plan(case: Case, path: Path, gpus: Sequence[VirtualDevice]) -> upstream.UpstreamPlan | None:
    """What upstream chooses for ``case``, from build/placements where it has been asked before."""
    options = list(case.options)
    if case.prompt and not {"-c", "--fit-ctx"} & set(options):
        # a context that holds the request, as fitter chooses one
        options += ["--fit-ctx", str(case.prompt + Workload.generate)]
    kept = KEPT / f"{_key(case, gpus, options)}.json"
    if not kept.exists():
        plan = upstream.fit(path, gpus, options)
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"case": case.name, "arguments": plan.arguments if plan else None}))
    arguments = json.loads(kept.read_text())["arguments"]
    return upstream.plan_from(arguments) if arguments else None


def _key(case: Case, gpus: Sequence[VirtualDevice], options: Sequence[str]) -> str:
    """Differs with everything that upstream's answer depends on."""
    shape = shapes.SHAPES[case.shape]
    model = [shape.architecture, shape.metadata, [(t.name, t.shape, t.type.name) for t in shape.tensors]]
    backend = hashlib.sha256(upstream.BACKEND.read_bytes()).hexdigest()
    text = json.dumps([pin(), backend, describe(gpus), list(options), model])
    return f"{case.shape}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def pin() -> list[str]:
    text = (ROOT / "vendor" / "llama.cpp" / "pin.toml").read_text()
    return re.findall(r'^(?:version|commit) = "(.*)"$', text, re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and print or write the tables. The exit status is 1 where a check is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--host-bandwidth", help="of the machines' host, such as 60GB/s (fitter's default for any)")
    parser.add_argument("--output", type=Path, help="write the Markdown here (stdout)")
    options = parser.parse_args(arguments)
    cases = [case for case in PAIRS if options.only in case.name]
    if not cases:
        parser.error(f"no case has {options.only!r} in its name")
    pairs = []
    with tempfile.TemporaryDirectory() as directory, Worker() as worker:
        for number, case in enumerate(cases, 1):
            pairs.append(compare(case, Path(directory), worker, options.host_bandwidth))
            bad = [verdict for verdict in verdicts(pairs[-1:]) if not verdict.met]
            said = "".join(f"\n    not met: {verdict.check}: {verdict.shown}" for verdict in bad)
            print(f"[{number}/{len(cases)}] {case.name}{said}", file=sys.stderr, flush=True)
    text = document(pairs, f"Host bandwidth: {options.host_bandwidth or 'the default for a described machine'}.")
    if options.output is None:
        print(text, end="")
    else:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)
    return 0 if all(verdict.met for verdict in verdicts(pairs)) else 1


if __name__ == "__main__":
    sys.exit(main())
