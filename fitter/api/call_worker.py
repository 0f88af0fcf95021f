"""The worker that a call asks: the one that is given, or one for the call alone; and what it is asked about a load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Layout, Params, Skeleton, VirtualDevice
from fitter.machine.machine import Machine, check_main_gpu, choose, described, device_speeds, speed_of_host
from fitter.machine.memory_pools import used_by_default
from fitter.model.files.source import called
from fitter.model.header import Model, open_model
from fitter.model.location import is_address, model_files
from fitter.planning.plan.request_of_machine import Questions, pinned_by, with_main_gpu
from fitter.planning.request.ask import Ask
from fitter.planning.request.constraints import check_split_devices, for_model
from fitter.planning.request.request import Progress
from fitter.planning.request.request_limits import check_context

if TYPE_CHECKING:
    from fitter.llama.build.cuda_library import Answering
    from fitter.model.files.remote_files import Fetching


def fetch(model: str, timeout: float, on_progress: Callable[[Progress], None] | None = None) -> None:
    """Have the header of a model here that is elsewhere, within ``timeout`` seconds; for others there is nothing to do.

    Raises ``ModelError`` where it cannot be read, ``LibraryError`` where a package is missing for that.
    """
    if not is_address(model):
        return

    def say(fetching: Fetching) -> None:
        if on_progress:
            on_progress(Progress(0, fetching.text, fetching.part))

    model_files(model, timeout=timeout, say=say)


def fetch_all(ask: Ask, model: str, timeout: float, on_progress: Callable[[Progress], None] | None = None) -> Ask:
    """``ask`` with the files of its adapters, after ``fetch`` of the model and of everything beside it.

    ``timeout`` is for each of them. Raises what ``fetch`` raises.
    """
    beside = (ask.sharing.model_draft, ask.sharing.mmproj, *(lora.path for lora in ask.load.lora))
    for each in (model, *beside):
        fetch(each or "", timeout, on_progress)
    if not ask.load.lora:
        return ask
    here = (str(model_files(each.path)[0]) if is_address(each.path) else each.path for each in ask.load.lora)
    adapters = (replace(each, path=path) for each, path in zip(ask.load.lora, here, strict=True))
    return replace(ask, load=replace(ask.load, lora=tuple(adapters)))


def with_addresses(params: Params) -> Params:
    """``params`` with the addresses of its adapters in place of what was fetched of them."""
    return replace(params, lora=tuple(replace(each, path=called(Path(each.path))) for each in params.lora))


@contextmanager
def worker_for(
    ask: Ask,
    given: Worker | None,
    on_log: Callable[[str], None] | None,
    *,
    at_once: bool = False,
) -> Iterator[Worker]:
    """The ``given`` worker, told of the devices of ``ask``, or one that ends with the call.

    ``at_once``: the process of the latter starts now, not with the first question.
    """
    llama_cpp = ask.llama_cpp if given is None else given.llama_cpp_for(ask.llama_cpp)
    found = answering(ask.virtual, ask.profile, llama_cpp)
    library = found.library if found else None
    if given is not None:
        given.configure(ask.virtual, library, ask.rpc, ask.llama_cpp)
        yield given
        return
    with Worker(
        ask.virtual, library=library, timeout=ask.timeout, on_log=on_log, rpc=ask.rpc, llama_cpp=ask.llama_cpp
    ) as own:
        if at_once:
            own.start()
        yield own


@contextmanager
def limited(worker: Worker, deadline: float | None) -> Iterator[None]:
    """Let what ``worker`` is asked end at ``deadline`` (on the monotonic clock), and then be as it was."""
    before = worker.deadline
    worker.deadline = deadline
    try:
        yield
    finally:
        worker.deadline = before


def answering(virtual: Sequence[VirtualDevice], profile: str | None, llama_cpp: str | None) -> Answering | None:
    """Who answers for ``virtual`` with this ``--profile`` and ``--llama-cpp``.

    ``None``: fitter's own rules. Raises ``LibraryError`` if the profile names a CUDA backend that cannot be asked.
    """
    from fitter.llama.build.build_folder import may_have_cuda, named

    where = named(llama_cpp)
    is_asked = profile is not None and profile != "cuda"
    # Where llama-cpp-python has no CUDA, that is all that there is to find out.
    if not is_asked and not (any(device.profile == "cuda" for device in virtual) and may_have_cuda(where)):
        return None
    from fitter.llama.build import cuda_library

    return cuda_library.answering(virtual, profile, where)


def questions_of(ask: Ask, worker: Worker, machine: Machine) -> Questions:
    """What ``worker`` and this machine are asked for a request."""
    return Questions(
        worker.match,
        lambda infos: device_speeds(infos, machine.devices, ask.virtual, worker.speed, ask.remote_bandwidths),
        lambda: speed_of_host(ask.host_bandwidth, is_described=ask.is_described, virtual=ask.virtual),
    )


@dataclass(frozen=True)
class OneLoad:
    """A worker to ask about one load, its model, and its parameters."""

    worker: Worker
    model: Model
    params: Params

    def measured(self) -> tuple[Breakdown, Layout]:
        """What the load takes, and the sizes of all tensors in it."""
        breakdown = self.worker.measure(str(self.model.path), self.params)
        copy = Skeleton(tuple(map(str, self.model.files)))
        return breakdown, self.worker.layout(copy, replace(self.params, n_ctx=breakdown.n_ctx))


@contextmanager
def one_load(ask: Ask, model: str, given: Worker | None, on_log: Callable[[str], None] | None) -> Iterator[OneLoad]:
    """What is needed to ask about exactly the load of ``ask``. Raises what ``fit`` raises."""
    ask = fetch_all(ask, model, ask.timeout)
    with worker_for(ask, given, on_log) as worker:
        params = ask.load
        if ask.is_described and ask.rpc and not ask.virtual:
            infos = choose(described(worker.devices()), ask.devices)
            params = replace(params, devices=tuple(info.name for info in infos))
        if params.devices is None and any(device.type == "igpu" for device in ask.virtual):
            used = used_by_default(described(worker.devices(), ask.virtual))
            params = replace(params, devices=tuple(info.name for info in used))
        if params.split_mode == "none" and params.main_gpu > 0:
            check_main_gpu(params.main_gpu, worker.devices() if params.devices is None else params.devices)
        if params.split_mode == "tensor":
            names = params.devices
            check_split_devices("tensor", [device.name for device in worker.devices()] if names is None else names)
        opened = open_model(model, worker.header)
        check_context(params.n_ctx or opened.n_ctx_train, opened.n_ctx_train, params.n_seq_max)
        params = for_model(params, opened, ask.cpu_moe, ask.n_cpu_moe)
        if params.tensor_buft_overrides:
            every = worker.devices()
            used = with_main_gpu(choose(every, params.devices), params.split_mode, params.main_gpu)
            pinned_by(params, opened, used, every, worker.match)
        yield OneLoad(worker, opened, params)
