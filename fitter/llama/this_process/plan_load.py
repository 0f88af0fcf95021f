"""Load a plan as a ``llama_cpp.Llama`` with all its parameters. Importing this module loads llama-cpp-python."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import llama_cpp

from fitter.errors import (
    LlamaCppCrashError,
    LlamaCppError,
    OutOfMemoryError,
    PlanError,
    PlanWarning,
    RemoteError,
    UsageError,
)
from fitter.llama.build import library
from fitter.llama.build.log import LogLine, reason
from fitter.llama.load.backend_devices import Device, Registry, registry, rpc_devices, settle_host_layouts
from fitter.llama.load.breakdown import breakdown_of
from fitter.llama.load.structs import apply
from fitter.llama.processes import rpc
from fitter.llama.this_process import guarded
from fitter.llama.this_process.guarded import check_servers, lose_servers, name_of_server, servers_of_models
from fitter.llama.types import RPC, Breakdown, LlamaCpp, Params
from fitter.parameters.table import of_a_struct
from fitter.text import MIB, human


class HostMemoryUse(Protocol):
    """Bytes of host memory that a plan uses and leaves free (``None``: no limit)."""

    @property
    def used(self) -> int: ...

    @property
    def left(self) -> int | None: ...


class Loadable(Protocol):
    """The parts of a plan that a load needs: parameters, measured memory, rpc-servers, host memory."""

    @property
    def params(self) -> Params: ...

    @property
    def breakdown(self) -> Breakdown: ...

    @property
    def rpc(self) -> tuple[str, ...]: ...

    @property
    def host(self) -> HostMemoryUse: ...


_REFUSED = re.compile(r"failed to allocate (?P<buffer_type>.+) buffer of size (?P<size>[0-9.]+)(?P<mib> MiB)?")
_NO_MEMORY = re.compile(r"std::bad_alloc|Cannot allocate memory|unable to allocate|failed to allocate|out of memory")


def loaded_build() -> LlamaCpp:
    """Return the llama.cpp of this process. Raises ``LibraryError``."""
    return library.loaded()


def check_names(names: Iterable[str]) -> None:
    """Raise ``UsageError`` for a keyword that ``llama_cpp.Llama`` lacks, and would silently ignore."""
    keywords = inspect.signature(llama_cpp.Llama.__init__).parameters
    for name in names:
        if name not in keywords:
            close = difflib.get_close_matches(name, keywords, n=1)
            raise UsageError(
                f"llama_cpp.Llama has no parameter '{name}'" + (f"; did you mean '{close[0]}'?" if close else "")
            )


def warn(text: str) -> None:
    """Warn with ``PlanWarning``, at the line that called ``load`` or ``Llama``."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "fitter":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, PlanWarning, stacklevel=level)


def load(
    plan: Loadable,
    model_path: str,
    keywords: Mapping[str, Any],
    caller_keywords: Mapping[str, Any],
    timeout: float | None = None,
) -> PlannedLlama:
    """Load ``model_path`` with all parameters of ``plan``, also those without a keyword of ``llama_cpp.Llama``.

    No failure ends the process, even if llama.cpp would abort.

    Args:
        plan: The plan.
        model_path: The file.
        keywords: The plan's parameters with keywords of ``Llama``.
        caller_keywords: The caller's further keywords.
        timeout: Seconds without an answer after which an rpc-server is given up.

    Raises:
        PlanError: The plan's devices are not here.
        OutOfMemoryError: A device has too little memory.
        RemoteError: An rpc-server failed.
        LlamaCppError: llama.cpp cannot load the model.
    """
    if plan.rpc:
        check_servers(plan.rpc, timeout)
    if settle_host_layouts():
        warn(
            "this llama.cpp crashes where it computes with AMX (its compiler did not write that right: "
            "gcc.gnu.org/PR114098), so it is loaded without. Other programs that load it crash until it is built anew: "
            'CMAKE_ARGS="-DGGML_NATIVE=OFF" pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python '
            "llama-cpp-python"
        )
    described: list[Registry] = []

    def construct(progress: guarded.LoadProgress) -> PlannedLlama:
        registry = _registry(plan.rpc, progress)
        described.append(registry)
        _check_devices(plan, registry)
        model = PlannedLlama.__new__(PlannedLlama)
        try:
            model.__init__(model_path, plan, registry, progress, keywords, caller_keywords)  # type: ignore[misc]
        except BaseException:
            # on this thread, which can stop without ending the process
            model.close()
            raise
        return model

    outcome = guarded.attempt(
        construct, plan.rpc, timeout, lambda: lose_servers(plan.rpc, is_connected=bool(described))
    )
    if outcome.value is not None:
        _warn_of_difference(plan, outcome.value)
        _warn_of_logits(plan, outcome.value)
        return outcome.value
    raise _failure(plan, model_path, described[0] if described else Registry((), ()), outcome) from outcome.error


# --- devices


class _NoDeviceError(Exception):
    """llama.cpp found no device of an rpc-server; the argument is its ``host:port``."""


def _registry(servers: Sequence[str], progress: guarded.LoadProgress) -> Registry:
    """Return the devices here and those of ``servers``, with their names in the plan."""
    local = registry()
    remote: list[Device] = []
    for server in servers:
        name = name_of_server(server)
        devices = rpc_devices(name)
        if not devices:
            raise _NoDeviceError(server)
        for device in devices:
            buffer_type = (device.buffer_type or "").replace(name, server)
            info = replace(device.info, name=f"RPC{len(remote)}", description=server, buffer_type=buffer_type)
            remote.append(replace(device, info=info, buffer_type=buffer_type))
        progress.step()
    if not remote:
        return local
    here = tuple(device for device in local.devices if device.info.backend != RPC)
    default = tuple(device for device in local.default if device.info.backend != RPC)
    return Registry((*remote, *here), (*remote, *default))


def _check_devices(plan: Loadable, registry: Registry) -> None:
    wanted = plan.breakdown.devices if plan.params.devices is None else plan.params.devices
    here = [device.info.name for device in registry.devices]
    here_by_default = [device.info.name for device in registry.default]
    if not set(wanted) <= set(here) or (plan.params.devices is None and list(wanted) != here_by_default):
        raise PlanError(
            f"the plan is for {', '.join(wanted) or 'no device'}, but llama.cpp has "
            f"{', '.join(here_by_default) or 'no device'} here: fit again on this machine"
        )


# --- what went wrong

_DIAGNOSIS_SECONDS = 3.0


def _failure(plan: Loadable, path: str, registry: Registry, outcome: guarded.CallResult[Any]) -> Exception:
    """Make the error for a failed load."""
    error, log = outcome.error, tuple(line.text for line in outcome.log)
    if outcome.crash is None and outcome.stalled is None:
        if error is None:
            return LlamaCppError(f"{path}: loading was cancelled", log)
        if isinstance(error, _NoDeviceError):
            return RemoteError(rpc.refusal_of(str(error), log))
        if refused := _refused(plan, registry, outcome.log, error):
            device, size, what = refused
            return OutOfMemoryError(
                f"{path}: {'the host' if device == 'host' else device} does not have {size} bytes ({human(size)}) free "
                f"for {what}: free memory there, or fit again with a larger margin",
                device,
                size,
                log,
            )
        if not isinstance(error, (ValueError, RuntimeError)) or isinstance(error, UsageError):
            return error if isinstance(error, Exception) else LlamaCppError(f"{path}: {error!r}", log)
        message = reason(outcome.log)
        return LlamaCppError(f"{path}: {message or error}; load with verbose=True to see llama.cpp's log", log)
    leaked = "; the memory that it allocated is not freed until the process ends" if outcome.is_lost else ""
    if plan.rpc and (outcome.stalled is not None or "ggml-rpc" in (outcome.crash or "")):
        if wrong := rpc.mismatch(plan.rpc, (*log, _one_line(outcome.crash or ""))):
            return RemoteError(wrong)
        servers = ", ".join(plan.rpc)
        if gone := rpc.lost(plan.rpc, _DIAGNOSIS_SECONDS):
            return RemoteError(f"llama.cpp lost an RPC server while it loaded {path}: {gone}{leaked}")
        if outcome.stalled is not None:
            return RemoteError(
                f"loading {path} made no progress for {outcome.stalled:.0f} seconds: check {servers} and the network, "
                f"or fit with a longer timeout{leaked}"
            )
        return RemoteError(
            f"an RPC server ({servers}) dropped the connection while llama.cpp loaded {path}, but answers again: look "
            f"for the reason in its log, and try again{leaked}"
        )
    return LlamaCppCrashError(f"{path}: llama.cpp gave up: {_one_line(outcome.crash or '')}{leaked}", log)


def _refused(
    plan: Loadable, registry: Registry, log: Sequence[LogLine], error: BaseException
) -> tuple[str, int, str] | None:
    """Return the device with too little memory, the bytes, and their purpose; ``None`` for another failure."""
    if isinstance(error, MemoryError):
        return "host", plan.host.used, f"the plan and llama-cpp-python ({_one_line(str(error)) or 'no memory'})"
    for line in reversed(log):
        if match := _REFUSED.search(line.text):
            size = float(match["size"]) * (MIB if match["mib"] else 1)
            device = next((d.info.name for d in registry.default if d.buffer_type == match["buffer_type"]), "host")
            return device, int(size), f"a buffer of type {match['buffer_type']}"
    if any(_NO_MEMORY.search(line.text) for line in log):
        return "host", plan.host.used, "the plan"
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _warn_of_difference(plan: Loadable, model: PlannedLlama) -> None:
    """Warn if the loaded model takes more memory than planned."""
    real = breakdown_of(model.ctx)
    planned = {name: plan.breakdown.real.on(name).used for name in plan.breakdown.devices}
    for name, planned_name in zip(plan.breakdown.devices, real.devices, strict=False):
        used = real.on(planned_name).used
        if used > planned[name]:
            warn(f"{name} holds {used} bytes, {used - planned[name]} more than the plan says: please report it")


def _warn_of_logits(plan: Loadable, model: PlannedLlama) -> None:
    """Warn if the host may lack memory for the logits of every token that ``Llama`` itself stores."""
    row = 4 * model.n_vocab()
    # logits of one batch in llama.cpp, and Llama's array with copies of them
    size = row * plan.params.n_batch + int(model.scores.nbytes)
    left = plan.host.left
    if model._logits_all and left is not None and size > left:
        warn(
            f"logits_all, or a draft model, keeps up to {size} bytes ({human(size)}) in host memory, but the plan "
            f"leaves {left}: use a smaller n_ctx or n_batch"
        )


# --- the model


class PlannedLlama(llama_cpp.Llama):
    """A ``llama_cpp.Llama`` with a plan's parameters in its structs, whatever its constructor writes there.

    ``plan`` is the loaded plan. Unpickling loads the model again.
    """

    _model_struct: Any = None
    _context_struct: Any = None
    _is_planned = False
    _is_remote = False

    def __init__(
        self,
        model_path: str,
        plan: Loadable,
        registry: Registry,
        progress: guarded.LoadProgress,
        keywords: Mapping[str, Any],
        caller_keywords: Mapping[str, Any],
    ) -> None:
        self.plan = plan
        self._own = dict(caller_keywords)
        self._progress = progress
        self._planned_model = llama_cpp.llama_model_default_params()
        self._planned_context = llama_cpp.llama_context_default_params()
        # llama.cpp keeps the pointers as long as the model lives
        self._keep = apply(plan.params, self._planned_model, self._planned_context, registry)
        super().__init__(model_path, **{**keywords, **caller_keywords})
        self._is_planned = True
        self._is_remote = bool(plan.rpc)
        if plan.rpc:
            servers_of_models[id(self)] = plan.rpc

    def __repr__(self) -> str:
        return f"<Llama: {repr(self.plan)[1:-1]}>"

    @property
    def model_params(self) -> Any:
        """llama.cpp's ``llama_model_params``."""
        if not self._is_planned:
            # The constructor writes its own values field by field, and reads the struct a last time to pass it to
            # llama.cpp. Writing the plan's values at every read makes them the last ones.
            _copy("model", self._planned_model, self._model_struct)
            self._model_struct.progress_callback = self._progress.callback
        return self._model_struct

    @model_params.setter
    def model_params(self, value: Any) -> None:
        self._model_struct = value

    @property
    def context_params(self) -> Any:
        """llama.cpp's ``llama_context_params``."""
        if not self._is_planned:
            _copy("context", self._planned_context, self._context_struct)
        return self._context_struct

    @context_params.setter
    def context_params(self, value: Any) -> None:
        self._context_struct = value

    def close(self) -> None:
        """Free the model. An rpc-server that is gone neither blocks this nor ends the process."""
        if not self._is_remote:
            # there is no stack if the constructor failed early
            if hasattr(self, "_stack"):
                super().close()
            return
        self._is_remote = False
        servers_of_models.pop(id(self), None)
        if sys.is_finalizing():
            # the servers free their memory when the connection ends with the process
            self._let_go()
            return
        servers = self.plan.rpc
        outcome = guarded.attempt(
            lambda _: super(PlannedLlama, self).close(),
            servers,
            _CLOSE_SECONDS,
            lambda: lose_servers(servers, True),
        )
        if outcome.error is not None:
            raise outcome.error
        if outcome.is_lost:
            self._let_go()
            warn(f"an RPC server ({', '.join(servers)}) is gone: the model's memory on this machine is not freed")

    def _let_go(self) -> None:
        """Forget the native model and context without freeing them."""
        self._ctx.ctx = None
        self._model.model = None

    def __reduce__(self) -> tuple[Any, ...]:
        # functions such as on_progress belong to this process
        plan: Any = self.plan
        keywords = {name: value for name, value in plan.fit_keywords.items() if not callable(value)}
        return _reload, (replace(plan, fit_keywords=keywords), self._own)


def _copy(struct: str, planned: Any, out: Any) -> None:
    """Copy a plan's parameters; those without a field in this llama-cpp-python have their default in every plan."""
    fields = {name for name, *_ in out._fields_}
    for each in of_a_struct(struct):
        if each.field in fields:
            setattr(out, each.field, getattr(planned, each.field))


_CLOSE_SECONDS = 30.0


def _reload(plan: Any, caller_keywords: dict[str, Any]) -> Any:
    return plan.load(**caller_keywords)
