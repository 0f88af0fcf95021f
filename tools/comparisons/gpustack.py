"""``GPUSTACK_PYTHON tools/comparisons/gpustack.py JOBS RESULTS``: where GPUStack places models, by its own code.

It runs in a Python that has GPUStack (2.3.0), whose ``third_party/bin/gguf-parser/gguf-parser`` is the program to try:
``exec fitter gguf-parser "$@"``, or gguf-parser itself. A job is a model's ``path``, its ``cards`` (bytes of each), the
host's ``ram``, and ``parameters`` of the model. ``tests/data/gpustack`` has what was seen.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

# ruff: noqa: E402
# mypy does not read this file: GPUStack is in another environment
from gpustack.logging import setup_logging

setup_logging()
logging.disable(logging.CRITICAL)

from gpustack.policies.candidate_selectors.gguf_resource_fit_selector import GGUFResourceFitSelector
from gpustack.policies.resource_view import ResourceView
from gpustack.schemas.models import Model, SourceEnum
from gpustack.schemas.workers import (
    CPUInfo,
    GPUDeviceStatus,
    MemoryInfo,
    SystemReserved,
    Worker,
    WorkerStateEnum,
    WorkerStatus,
)


def main(jobs: Path, results: Path) -> None:
    """Place every model of ``jobs``, and write where it is."""
    found = []
    for job in json.loads(jobs.read_text()):
        began = time.monotonic()
        placed = asyncio.run(_place(job))
        found.append({**job, "placed": placed, "seconds": round(time.monotonic() - began, 1)})
        print(job["name"], placed and placed["layers"], flush=True)
    results.write_text(json.dumps(found, indent=1))


async def _place(job: dict[str, Any]) -> dict[str, Any] | None:
    """Ask GPUStack's selector for the first place of a model; ``None`` if it finds none."""
    model = Model(
        id=1,
        name="model",
        source=SourceEnum.LOCAL_PATH,
        local_path=job["path"],
        backend_parameters=job["parameters"],
        replicas=1,
        cluster_id=1,
        distributed_inference_across_workers=False,
        cpu_offloading=True,
    )
    selector = GGUFResourceFitSelector(model, [], None, resource_view=ResourceView([]))
    candidates = await selector.select_candidates([_worker(job["cards"], job["ram"])])
    if not candidates:
        return None
    claim = candidates[0].computed_resource_claim
    return {"layers": claim.offload_layers, "ram": claim.ram, "vram": claim.vram, "split": claim.tensor_split}


def _worker(cards: list[int], ram: int) -> Worker:
    devices = [
        GPUDeviceStatus(index=index, vendor="nvidia", type="cuda", name="card", memory=MemoryInfo(total=total, used=0))
        for index, total in enumerate(cards)
    ]
    status = WorkerStatus(cpu=CPUInfo(total=16), memory=MemoryInfo(total=ram, used=0), gpu_devices=devices)
    reserved = SystemReserved(ram=0, vram=0)
    named = {"id": 1, "name": "worker", "ip": "127.0.0.1", "hostname": "worker", "port": 1, "worker_uuid": "1"}
    worker = Worker(**named, status=status, cluster_id=1, labels={}, system_reserved=reserved, metrics_port=1)
    worker.state = WorkerStateEnum.READY
    return worker


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
