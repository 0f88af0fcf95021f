"""Relations between plans: what the search must keep when a machine gets better, or the user says more."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tools.search.machines import MOE, Machine, better
from tools.search.outcomes import Outcome


@dataclass(frozen=True)
class Relation:
    """A machine whose plan is compared with the ``plan`` of another one.

    Attributes:
        what: the difference.
        machine: the machine.
        is_free: its plan must not be worse: it has everything that ``plan`` has, and may do more.
        is_held: its plan must not be better: it may do nothing that ``plan`` may not.
        plan: the plan to compare with.
        is_excused: whether larger compute buffers excuse a worse plan: with 128 slots instead of 256, llama.cpp's for
            gpt-oss-20b with its caches on the host grow by 2 GiB (machine 376).
    """

    what: str
    machine: Machine
    plan: Outcome
    is_free: bool = True
    is_held: bool = False
    is_excused: bool = False


def narrowed(machine: Machine, plan: Outcome) -> list[tuple[str, dict[str, object]]]:
    """Draw three options that only narrow a search, each with the keywords of ``fitter.fit``."""
    rng = random.Random(f"narrower than {machine.number}")
    found: list[tuple[str, dict[str, object]]] = [("-nkvo", {"offload_kqv": False}), ("-fa on", {"flash_attn": "on"})]
    if "type_v" not in machine.options and plan.pins["devices"]:
        # llama.cpp has no quantized V cache without it; plans without devices leave it to llama.cpp
        found.append(("-fa off", {"flash_attn": "off"}))
    if machine.shape in MOE:
        n_layers = rng.choice((5, 10, 20, 30, 40))
        found += [("-cmoe", {"cpu_moe": True}), (f"-ncmoe {n_layers}", {"n_cpu_moe": n_layers})]
    names = [gpu.name for gpu in machine.gpus]
    n_ubatch, n_gpu_layers = rng.choice((128, 256, 512, 1024, 2048, 4096)), rng.randrange(1, 81)
    some, split = rng.sample(names, rng.randint(1, len(names))), [float(rng.randint(1, 3)) for _ in names]
    if "n_ubatch" not in machine.options:
        found.append((f"-ub {n_ubatch}", {"n_ubatch": n_ubatch, "n_batch": max(2048, n_ubatch)}))
    found.append((f"-ngl {n_gpu_layers}", {"n_gpu_layers": n_gpu_layers}))
    if len(names) > 1 and "model_draft" not in machine.options:
        found += [(f"-dev {','.join(some)}", {"devices": some}), (f"-ts {split}", {"tensor_split": split})]
    return rng.sample(found, 3)


def relations(machine: Machine, plan: Outcome) -> Iterator[Relation]:
    """List the relations of a machine with its ``plan``."""
    for what, more in better(machine):
        # where slots have contexts of their own, one of fewer slots is not worse than one of more
        n_ctx = plan.n_ctx // machine.streams * more.streams
        yield Relation(what, more, replace(plan, n_ctx=n_ctx), is_excused=more.slots < machine.slots)
    if not plan.fits:
        return
    # a set context is no choice: the times are compared as if both were at one
    step, twice = 256 * machine.streams, 2 * plan.n_ctx
    least = max(4096 * machine.streams, (machine.options["prompt"] + 1024) * machine.slots)
    if (half := plan.n_ctx // 2 // step * step) >= least:
        yield Relation("half the context", machine.having(n_ctx=half), replace(plan, n_ctx=half))
    yield Relation(
        "twice the context", machine.having(n_ctx=twice), replace(plan, n_ctx=twice), is_free=False, is_held=True
    )
    at_its_context = machine.having(n_ctx=plan.n_ctx)
    for what, words in narrowed(machine, plan):
        yield Relation(what, at_its_context.having(**words), plan, is_free=False, is_held=True)
    pinned: dict[str, object] = {}
    for name, value in plan.pins.items():
        if value not in (None, []):
            pinned[name] = value
            yield Relation("pinned " + ", ".join(pinned), machine.having(**pinned), plan, is_held=True)
