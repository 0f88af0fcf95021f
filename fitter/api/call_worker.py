"""The workers that answer a call: the caller's own, or new ones that end with the call; and its tokenizers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fitter.errors import ExpertCacheError, UsageError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Layout, Params, VirtualDevice
from fitter.machine.device_memory import used_by_default
from fitter.machine.machine import Machine, check_main_gpu, choose, described, device_speeds, speed_of_host
from fitter.model.files.source import called
from fitter.model.header import Model, open_model
from fitter.model.location import is_address, model_files
from fitter.planning.plan.request_of_machine import Questions, pinned_by, with_main_gpu
from fitter.planning.request.ask import Ask
from fitter.planning.request.constraints import check_split_devices, for_model
from fitter.planning.request.request import Progress
from fitter.planning.request.request_limits import check_context
from fitter.system import processors
from fitter.text import MIB

if TYPE_CHECKING:
    from fitter.llama.build.virtual_backends import Answering
    from fitter.model.files.remote_files import Fetching

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def fetch(model: str, timeout: float, on_progress: Callable[[Progress], None] | None = None) -> None:
    """Fetch the header of a model that has an address; do nothing for a model on disk.

    Args:
        model: Path or address.
        timeout: Seconds for the whole download.
        on_progress: Called as the header arrives.

    Raises:
        ModelError: The header cannot be read.
        LibraryError: A package that downloads is missing.
    """
    if not is_address(model):
        return

    def say(fetching: Fetching) -> None:
        if on_progress:
            on_progress(Progress(0, fetching.text, fetching.part))

    model_files(model, timeout=timeout, say=say)


def fetch_all(ask: Ask, model: str, timeout: float, on_progress: Callable[[Progress], None] | None = None) -> Ask:
    """Fetch the headers of the model, its draft model, projector and adapters.

    Args:
        ask: The parameters of the call.
        model: Path or address.
        timeout: Seconds for each file.
        on_progress: Called as the headers arrive.

    Returns:
        ``ask`` with the local files of the adapters.

    Raises:
        FitterError: As ``fetch`` raises it.
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
    """Replace the local files of adapters in ``params`` by the addresses that they were fetched from."""
    return replace(params, lora=tuple(replace(each, path=called(Path(each.path))) for each in params.lora))


@contextmanager
def worker_for(
    ask: Ask,
    given: Worker | None,
    on_log: Callable[[str], None] | None,
    *,
    at_once: bool = False,
) -> Iterator[Worker]:
    """Lend the caller's worker, or start one that ends with the call; either has the devices of ``ask``.

    Args:
        ask: The parameters of the call.
        given: The caller's worker, if any.
        on_log: Called with every line of llama.cpp's log.
        at_once: Start a new worker's process now instead of with the first question.

    Raises ``UsageError`` with the largest cache of experts in place of ``ExpertCacheError``.
    """
    llama_cpp = ask.llama_cpp if given is None else given.llama_cpp_for(ask.llama_cpp)
    answer = answering(ask.virtual, ask.profile, llama_cpp)
    library = answer.library if answer else None
    if given is not None:
        given.configure(ask.virtual, library, ask.rpc, ask.llama_cpp)
        with _cache_limits(ask):
            yield given
        return
    with Worker(
        ask.virtual, library=library, timeout=ask.timeout, on_log=on_log, rpc=ask.rpc, llama_cpp=ask.llama_cpp
    ) as worker:
        if at_once:
            worker.start()
        with _cache_limits(ask):
            yield worker


@contextmanager
def _cache_limits(ask: Ask) -> Iterator[None]:
    """Say the largest cache of experts that loads where the one that was asked for ends llama.cpp's process."""
    try:
        yield
    except ExpertCacheError as error:
        largest = error.largest()
        remedy = f"give --moe-cache-mib {largest} or less" if largest else "leave --moe-cache-mib out"
        raise UsageError(
            f"a cache of {ask.load.moe_cache_size // MIB} MiB for experts needs a larger buffer than a device has: "
            f"{remedy}"
        ) from None


@contextmanager
def limited(worker: Worker, deadline: float | None) -> Iterator[None]:
    """Set the deadline of ``worker`` (seconds of the monotonic clock) inside the ``with`` block."""
    before = worker.deadline
    worker.deadline = deadline
    try:
        yield
    finally:
        worker.deadline = before


def answering(virtual: Sequence[VirtualDevice], profile: str | None, llama_cpp: str | None) -> Answering | None:
    """Choose the CUDA backend that answers for ``virtual`` devices.

    Args:
        virtual: The described devices.
        profile: The value of ``--profile``.
        llama_cpp: The value of ``--llama-cpp``.

    Returns:
        The backend; ``None`` where fitter's own rules answer.

    Raises:
        LibraryError: ``profile`` names a CUDA backend that cannot answer.
    """
    from fitter.llama.build.build_folder import may_have_cuda, named

    where = named(llama_cpp)
    is_asked = profile is not None and profile != "cuda"
    # Only a library with CUDA can answer for CUDA cards.
    if not is_asked and not (any(device.profile == "cuda" for device in virtual) and may_have_cuda(where)):
        return None
    from fitter.llama.build import virtual_backends

    return virtual_backends.answering(virtual, profile, where)


def questions_of(ask: Ask, worker: Worker, machine: Machine) -> Questions:
    """Bundle the questions that planning asks ``worker`` and this machine."""
    return Questions(
        worker.match,
        lambda infos: device_speeds(infos, machine.devices, ask.virtual, worker.speed, ask.remote_bandwidths),
        lambda: speed_of_host(ask.host_bandwidth, is_described=ask.is_described, virtual=ask.virtual),
    )


@dataclass(frozen=True)
class OneLoad:
    """One load: the worker that answers, the model, and the parameters."""

    worker: Worker
    model: Model
    params: Params

    def measured(self) -> tuple[Breakdown, Layout]:
        """Measure the load; return its bytes and the sizes of all its tensors."""
        model = self.model.skeleton
        breakdown = self.worker.measure(model, self.params)
        return breakdown, self.worker.layout(model, replace(self.params, n_ctx=breakdown.n_ctx))


@contextmanager
def one_load(ask: Ask, model: str, given: Worker | None, on_log: Callable[[str], None] | None) -> Iterator[OneLoad]:
    """Prepare a worker, the model and its checked parameters for exactly the load of ``ask``.

    Raises:
        FitterError: As ``fit`` raises it.
    """
    ask = fetch_all(ask, model, ask.timeout)
    with (
        worker_for(ask, given, on_log) as worker,
        tokenizer_check(worker, is_alone=ask.is_for_one_process) as check,
    ):
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
        check.begin(opened)
        check_context(params.n_ctx or opened.n_ctx_train, opened.n_ctx_train, params.n_seq_max)
        params = for_model(params, opened, ask.cpu_moe, ask.n_cpu_moe, ask.n_cpu_ffn)
        if params.tensor_buft_overrides:
            every = worker.devices()
            used = with_main_gpu(choose(every, params.devices), params.split_mode, params.main_gpu)
            pinned_by(params, opened, used, every, worker.match)
        yield OneLoad(worker, opened, params)


class TokenizerCheck:
    """The tokenizers of a call's models.

    One that this llama.cpp has not read before is read while the search goes on, in another process; where only one
    process may use the devices, it is read at the end.

    Args:
        worker: The worker of the call.
        is_alone: Whether no other process may load llama.cpp.
    """

    def __init__(self, worker: Worker, *, is_alone: bool) -> None:
        self._worker, self._is_alone = worker, is_alone
        self._unread: list[str] = []
        self._others = ExitStack()
        self._begun: list[Worker] = []

    def begin(self, model: Model) -> None:
        """Start to read the tokenizer of ``model``. Raises ``LlamaCppError`` where llama.cpp refuses a small one."""
        path = str(model.path)
        if self._worker.is_tokenizer_read(path):
            return
        if self._is_alone:
            self._unread.append(path)
            return
        other = self._others.enter_context(self._worker.without_devices())
        other.begin_tokenizer(path)
        self._begun.append(other)

    def finish(self) -> None:
        """Wait until all are read. Raises ``LlamaCppError`` with llama.cpp's reason where it refuses one."""
        for path in self._unread:
            self._worker.begin_tokenizer(path)
            self._worker.finish_tokenizer()
        for other in self._begun:
            other.finish_tokenizer()
            other.dismiss()
        self._unread, self._begun = [], []

    def close(self) -> None:
        """End the processes that still read."""
        self._others.close()


@contextmanager
def tokenizer_check(worker: Worker, *, is_alone: bool) -> Iterator[TokenizerCheck]:
    """Check tokenizers in the ``with`` block; its end waits for them, unless an error ends it."""
    check = TokenizerCheck(worker, is_alone=is_alone)
    try:
        yield check
        check.finish()
    finally:
        check.close()


@contextmanager
def several_workers(
    ask: Ask, given: Worker | None, on_log: Callable[[str], None] | None, most: int
) -> Iterator[list[Worker]]:
    """Lend the caller's worker, or start one for each processor, ``most`` of them; one where they share real devices.

    Args:
        ask: The parameters of the call.
        given: The caller's worker, if any.
        on_log: Called with every line of llama.cpp's log.
        most: The largest number of workers.
    """
    is_one = given is not None or ask.is_for_one_process
    with ExitStack() as stack:
        count = 1 if is_one else max(1, min(processors(), most))
        workers = [stack.enter_context(worker_for(ask, given, on_log)) for _ in range(count)]
        for each in workers:
            # only one thread at a time may take a process that was started early
            each.start()
        yield workers


def ask_in_threads(
    workers: Sequence[Worker],
    items: Iterable[_Item],
    ask: Callable[[_Item, Worker], _Result],
    tell: Callable[[_Item, _Result, Worker], object],
    *,
    stop: Callable[[], object] = lambda: None,
    dismiss: bool = True,
) -> None:
    """Call ``ask`` with each of the ``items`` and a worker, each worker in a thread, and wait for all answers.

    Args:
        workers: Started workers: only one thread at a time may take a process that was started early.
        items: Asked for the next item whenever a worker is free, by one thread at a time.
        ask: Asks a worker about an item.
        tell: Called with each answer, by one thread at a time.
        stop: Called after the first error; must end a wait of ``items``.
        dismiss: Whether to dismiss the workers after an error.

    Raises:
        Exception: The first error of ``ask`` or ``tell``.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    left, taking, telling, is_stopped = iter(items), threading.Lock(), threading.Lock(), threading.Event()

    def run(worker: Worker) -> None:
        while True:
            with taking:
                taken = [] if is_stopped.is_set() else list(islice(left, 1))
            for item in taken:
                answer = ask(item, worker)
                with telling:
                    tell(item, answer, worker)
            if not taken:
                return

    with ThreadPoolExecutor(len(workers)) as pool:
        try:
            for done in as_completed([pool.submit(run, worker) for worker in workers]):
                done.result()
        except BaseException:
            # the pool waits for its threads, so they must end
            is_stopped.set()
            stop()
            for worker in workers if dismiss else ():
                worker.dismiss()
            raise
