"""The results of commands as JSON: stable keys in a stable order, sizes in bytes, versioned by ``schema``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fitter.llama.types import Array, DeviceInfo, MetadataValue, Params, Row
from fitter.machine.gpu_catalogue import capability_text
from fitter.output.arguments import arguments
from fitter.parameters.table import of_a_load
from fitter.planning.plan.plan import Plan, resolved
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.summary import DeviceUse, HostUse, ModelSummary, PoolUse, Problem, SharedUse

if TYPE_CHECKING:
    from fitter.machine.gpu_catalogue import CatalogueGpu
    from fitter.planning.checked.calibration import Calibration
    from fitter.planning.plan.inspection import Inspection
    from fitter.planning.plan.verified import MemoryUse, ServerUse, Verification

SCHEMA = 1


def to_dict(plan: Plan) -> dict[str, Any]:
    """``plan`` in the published schema."""
    return {
        "schema": SCHEMA,
        "fits": plan.fits,
        "program": plan.program,
        "model": _model(plan.model),
        "params": _params(resolved(plan)),
        "arguments": arguments(plan),
        "devices": [_device(device) for device in plan.devices],
        "host": _host(plan.host),
        "pools": [_pool(pool) for pool in plan.pools],
        "memory": [_row(row) for row in plan.breakdown.rows],
        "estimate": None if plan.estimate is None else _estimate(plan.estimate),
        "explanation": _explanation(plan),
        "levers": list(plan.levers),
        "shared": [_shared(shared) for shared in plan.shared],
        "later": [asdict(later) for later in plan.later],
        "left_out": [{"device": left.device, "reason": left.reason, "message": left.message} for left in plan.left_out],
        "rpc": list(plan.rpc),
        "notes": list(plan.notes),
        "llama_cpp": None if plan.llama_cpp is None else asdict(plan.llama_cpp),
        "search": {
            "dummy_loads": plan.search.dummy_loads,
            "shared_loads": plan.search.shared_loads,
            "seconds": round(plan.search.seconds, 3),
            "cut_short": plan.search.is_cut_short,
        },
        "problems": [_problem(problem) for problem in plan.problems],
    }


def devices_to_dict(devices: tuple[DeviceInfo, ...], host: DeviceInfo) -> dict[str, Any]:
    """The document of ``fitter devices``: the devices in llama.cpp's order, and the host."""
    return {
        "schema": SCHEMA,
        "devices": [
            {
                "name": device.name,
                "description": device.description,
                "type": device.type,
                "backend": device.backend,
                "total": device.total,
                "free": device.free,
                "virtual": device.virtual,
            }
            for device in devices
        ],
        "host": {"description": host.description, "total": host.total, "free": host.free},
    }


def catalogue_to_dict(gpus: Iterable[CatalogueGpu]) -> dict[str, Any]:
    """The document of ``fitter devices --catalogue``; a figure is ``null`` if it is not published, or does not exist.

    ``bandwidth``, ``pcie`` and ``nvlink`` are bytes per second, ``compute`` FLOP per second.
    """
    return {
        "schema": SCHEMA,
        "gpus": [
            {
                "name": gpu.key,
                "description": gpu.description,
                "profile": gpu.profile,
                "compute_capability": capability_text(gpu.compute_capability) if gpu.compute_capability else None,
                "total": gpu.total,
                "usable": gpu.usable,
                "free": gpu.free,
                "bandwidth": gpu.bandwidth,
                "pcie": gpu.pcie,
                "nvlink": gpu.nvlink,
                "compute": gpu.compute,
                "unified": gpu.unified,
                "sources": {
                    "compute_capability": gpu.sources.compute_capability,
                    "total": gpu.sources.total,
                    "usable": gpu.sources.usable,
                    "free": gpu.sources.free,
                    "bandwidth": gpu.sources.bandwidth,
                    "pcie": gpu.sources.pcie,
                    "nvlink": gpu.sources.nvlink,
                    "compute": gpu.sources.compute,
                },
            }
            for gpu in gpus
        ],
    }


def calibration_to_dict(calibration: Calibration) -> dict[str, Any]:
    """The document of ``fitter calibrate``; ``context`` and ``outside`` are ``null`` if the device does not tell."""
    return {
        "schema": SCHEMA,
        "exact": calibration.is_exact,
        "devices": [
            {
                "name": device.info.name,
                "description": device.info.description,
                "backend": device.info.backend,
                "total": device.info.total,
                "free": device.info.free,
                "twin": None
                if device.twin is None
                else {
                    "profile": device.twin.profile,
                    "compute_capability": capability_text(device.twin.compute_capability)
                    if device.twin.compute_capability
                    else None,
                },
                "context": device.context,
                "outside": device.outside,
                "margin": device.margin,
            }
            for device in calibration.devices
        ],
        "comparisons": [
            {
                "devices": list(comparison.devices),
                "between": comparison.between,
                "loads": comparison.loads,
                "differences": [
                    {
                        "model": difference.model,
                        "configuration": difference.configuration,
                        "what": difference.what,
                        "real": difference.real,
                        "other": difference.other,
                    }
                    for difference in comparison.differences
                ],
            }
            for comparison in calibration.comparisons
        ],
        "stored": None if calibration.stored is None else str(calibration.stored),
    }


def verification_to_dict(verification: Verification) -> dict[str, Any]:
    """The document of ``fitter verify``; ``holds`` is ``null`` if the plan does not fit, so that nothing was loaded."""
    *devices, host = verification.memory or (None,)
    return {
        "schema": SCHEMA,
        "fits": verification.fits,
        "holds": verification.holds if verification.fits else None,
        "tolerance": verification.tolerance,
        "model": _model(verification.model),
        "params": _params(verification.params),
        "memory": [
            {
                "buffer_type": row.real.buffer_type,
                "device": row.real.device,
                "is_host": row.real.is_host,
                "predicted": _bytes(row.predicted),
                "real": {kind: None if kind in row.unsaid else size for kind, size in _bytes(row.real).items()},
            }
            for row in verification.rows
        ],
        "devices": [{"name": use.name, **_memory_use(use)} for use in devices if use is not None],
        "host": None if host is None else _memory_use(host),
        "shared": [_shared(shared) for shared in verification.shared],
        "problems": [_problem(problem) for problem in verification.problems],
        "server": None if verification.server is None else _server(verification.server),
    }


def _server(use: ServerUse) -> dict[str, Any]:
    return {
        "path": use.path,
        "version": use.version,
        "prompts": use.prompts,
        "answered": use.answered,
        "tokens": use.tokens,
        "slots": use.slots,
        "refused": use.refused,
        "later": [asdict(each) for each in use.later],
        "resident": use.resident,
        "of_files": use.of_files,
        "counted": use.counted,
        "planned": use.planned,
        "margin": use.margin,
    }


def _memory_use(use: MemoryUse) -> dict[str, Any]:
    return {
        "free_before": use.before,
        "free_after": use.after,
        "counted": use.counted,
        "unaccounted": use.unaccounted,
    }


def inspection_to_dict(inspection: Inspection) -> dict[str, Any]:
    """The document of ``fitter inspect``."""
    return {
        "schema": SCHEMA,
        "model": _model(inspection.model),
        "metadata": {key: _metadata(value) for key, value in inspection.metadata.items()},
        "roles": [{"role": role.role, "count": role.count, "bytes": role.bytes} for role in inspection.roles],
        "n_ctx": inspection.n_ctx,
        "layers": [
            {
                "layer": layer.index,
                "bytes": layer.bytes,
                "weights": {role.role: role.bytes for role in layer.weights},
                "context": layer.context,
            }
            for layer in inspection.layers
        ],
        "memory": [
            {
                "buffer_type": row.buffer_type,
                "device": row.device,
                "model": row.model,
                "context": row.context,
                "compute": row.compute,
            }
            for row in inspection.rows
        ],
    }


def dumps(document: dict[str, Any]) -> str:
    """``document`` as text: in ASCII, so that any terminal or pipe can show it, and without commands to CI systems."""
    return json.dumps(document, indent=2).replace("\x7f", r"\u007f").replace("##", r"#\u0023")


def _model(model: ModelSummary) -> dict[str, Any]:
    return {"path": model.path, "name": model.name, "architecture": model.architecture, "bytes": model.bytes}


def _params(params: Params) -> dict[str, Any]:
    known = of_a_load()
    document = {name: known[name].kind.to_json(value) for name, value in params.planned().items()}
    # schema 1 has kv_unified after op_offload
    before = list(document)[: list(document).index("op_offload") + 1]
    return {name: document[name] for name in (*(name for name in before if name != "kv_unified"), *document)}


def _device(device: DeviceUse) -> dict[str, Any]:
    return {
        "name": device.name,
        "description": device.description,
        "total": device.total,
        "free": device.free,
        "margin": device.margin,
        "model": device.model,
        "context": device.context,
        "compute": device.compute,
        "shared": device.shared,
        "used": device.used,
        "left": device.left,
    }


def _host(host: HostUse) -> dict[str, Any]:
    return {
        "total": host.total,
        "free": host.free,
        "margin": host.margin,
        "model": host.model,
        "context": host.context,
        "compute": host.compute,
        "shared": host.shared,
        "later": host.later,
        "used": host.used,
        "left": host.left,
    }


def _pool(pool: PoolUse) -> dict[str, Any]:
    return {
        "name": pool.name,
        "members": list(pool.members),
        "total": pool.total,
        "free": pool.free,
        "margin": pool.margin,
        "used": pool.used,
        "left": pool.left,
        "mapped_twice": pool.mapped_twice,
        "mapped_between": pool.mapped_between,
        "load_mode": pool.load_mode,
        "setting": None if pool.setting is None else asdict(pool.setting),
    }


def _row(row: Row) -> dict[str, Any]:
    place = {"buffer_type": row.buffer_type, "device": row.device, "is_host": row.is_host}
    return {**place, **_bytes(row), "reserved": row.reserved}


def _bytes(row: Row) -> dict[str, int]:
    return {"model": row.model, "context": row.context, "compute": row.compute}


def _shared(shared: SharedUse) -> dict[str, Any]:
    return {
        "kind": shared.kind,
        "name": shared.name,
        "memory": [
            {"device": row.device, "model": row.model, "context": row.context, "compute": row.compute}
            for row in shared.rows
        ],
        "arguments": list(shared.arguments),
    }


def _problem(problem: Problem) -> dict[str, Any]:
    return {"device": problem.device, "missing": problem.missing, "message": problem.message}


def _estimate(price: Price) -> dict[str, Any]:
    return {
        "prompt_tokens_per_second": figure(price.prompt_tokens_per_second),
        "generation_tokens_per_second": figure(price.generation_tokens_per_second),
    }


def _explanation(plan: Plan) -> dict[str, Any]:
    bound = plan.bound
    distance = None if bound is None or plan.estimate is None else bound.distance(plan.estimate.seconds)
    return {
        "choices": [
            {
                "subject": choice.subject,
                "chosen": choice.chosen,
                "seconds": figure(choice.seconds),
                "runner_up": choice.runner_up,
                "runner_up_seconds": figure(choice.runner_up_seconds),
            }
            for choice in plan.choices
        ],
        "bound": None
        if bound is None
        else {
            "seconds": figure(bound.seconds),
            "text": bound.text,
            "distance": figure(distance),
            "reasons": [
                {
                    "kind": reason.kind,
                    "seconds": figure(reason.seconds),
                    "bytes": reason.bytes,
                    "devices": list(reason.devices),
                }
                for reason in bound.reasons
            ],
        },
    }


def figure(number: float | None) -> float | None:
    """``number`` to four digits; an estimate is less precise than that."""
    return None if number is None else float(f"{number:.4g}")


def _metadata(value: MetadataValue) -> Any:
    if isinstance(value, Array):
        return {"type": value.type, "length": value.length, "values": [_metadata(each) for each in value.values]}
    # JSON has no other numbers
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
