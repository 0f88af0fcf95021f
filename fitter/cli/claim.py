"""``fitter claim``: what a pod must ask for to run a plan, or a device claim for a model at a speed."""

from __future__ import annotations

from typing import Any

import click

from fitter.cli import answers, options
from fitter.errors import EXIT_DOES_NOT_FIT, EXIT_FITS, UsageError
from fitter.parameters.table import PARAMETERS, Measuring

_EPILOG = """\
Examples:
  fitter claim model.gguf --gpu rtx-4090 -c 32768
  fitter claim Qwen/Qwen3-30B-A3B --quant Q4_K_M --min-tps 20 -c 32768

llmfit-dra runs it in place of llmfit where this is its llmfit program:
  #!/bin/sh
  shift 2; exec fitter claim --json "$@"

Exit status: 0 the claim is on stdout, 1 the model does not fit, 2 usage error, 3 the model cannot be read, llama.cpp
failed, or no claim can express it.
"""


@click.command(cls=options.Command, epilog=_EPILOG)
@options.model_argument
@options.claim_options
@options.fitting_options()
@options.json_option
def claim(
    model: str,
    min_tps: float | None,
    quant: str | None,
    efficiency: int | None,
    as_json: bool | None,
    **given: Any,
) -> int:
    """Say what Kubernetes must give MODEL: memory and devices of a pod, as requests and limits.

    The plan is that of fitter MODEL with the same options. Memory counts all that a llama-server takes of the host:
    weights, context, buffers, prompt cache, checkpoints and its own process.

    With --min-tps, say what one device must have instead: memory for all of the model with its context (-c, 8192 by
    default), and bandwidth for the speed. This is what llmfit-dra asks.

    MODEL may also be a repository or a name on Hugging Face, of which --quant says the file type.
    """
    given["program"] = given["program"] or "llama-server"
    if min_tps is None:
        if efficiency is not None:
            raise UsageError("--efficiency belongs to a claim for a device: give --min-tps as well")
        return _of_pod(model, quant, given, as_json=bool(as_json))
    from fitter.api.claim_model import claim_device
    from fitter.output.documents.deployment_documents import DEVICE_CLAIM

    for keyword in options.given(given):
        if keyword not in Measuring.__annotations__:
            raise UsageError(f"--min-tps asks about one load, which has no {PARAMETERS[keyword].option}: leave it out")
    chosen = options.given({"min_tps": min_tps, "quant": quant, "efficiency": efficiency})
    with answers.asking(-1):
        device = claim_device(model, **chosen, **options.given(given))
    _print(DEVICE_CLAIM.write(device), as_json=bool(as_json))
    return EXIT_FITS


def _of_pod(model: str, quant: str | None, given: dict[str, Any], *, as_json: bool) -> int:
    from fitter import api
    from fitter.api.claim_model import model_of
    from fitter.output.documents.deployment_documents import POD_CLAIM
    from fitter.planning.plan.claims import pod_claim

    with answers.asking(-1):
        plan = api.fit(model_of(model, quant), **options.given(given))
    answers.report_problems(plan.problems)
    if not plan.fits:
        return EXIT_DOES_NOT_FIT
    _print(POD_CLAIM.write(pod_claim(plan)), as_json=as_json)
    return EXIT_FITS


def _print(document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        answers.print_json(document)
        return
    for name, value in document.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {each}" for key, each in value.items()) or "none"
        if name != "schema":
            click.echo(f"{name}: {value}")
