"""The pytest plugin: the marker ``fits_memory`` and the fixtures ``fitter_plan`` and ``fitter_model``.

Every pytest run in the environment imports this file, so slow imports wait until a test has the marker.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from fitter.errors import FitterError
from fitter.regression import MARKER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fitter.api import Plan
    from fitter.regression.marks import Checks, Verdict

_MODEL = "fitter_model"
_MARKER_HELP = (
    f"{MARKER}(gpu, n_ctx, model, limit, ...): fail the test if the model does not fit with these keywords of "
    "fitter.fit, if it misses limit, host_limit, min_ctx or min_tokens_per_second, or, without any of those, if it "
    "takes more than fitter.lock has stored."
)

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "fitter_update": (
        f"Store the memory of {MARKER} tests without limits, instead of comparing it.",
        {"action": "store_true"},
    ),
    _MODEL: (f"The model for {MARKER} tests that name none.", {"metavar": "PATH"}),
    "fitter_lock": (
        "The file that memory is stored in and compared with. [default: fitter.lock in the rootdir]",
        {"metavar": "PATH"},
    ),
    "fitter_max_growth": (
        "How much more than stored a device or the host may take, such as 1%% or 64MiB. [default: 0]",
        {"metavar": "AMOUNT"},
    ),
    "fitter_llama_cpp": (
        "The llama.cpp to plan with, as for fitter --llama-cpp; on the command line also for tests that name one.",
        {"metavar": "WHERE"},
    ),
    "fitter_timeout": (
        "Longest wait, in seconds, for a single answer of llama.cpp. [default: 120]",
        {"metavar": "SECONDS"},
    ),
}
"""Command-line options, by the names of the ini options that do the same."""

_NODEID = pytest.StashKey[str]()
_VERDICT: pytest.StashKey[Verdict] = pytest.StashKey()
_CHECKS: pytest.StashKey[Checks] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, on the command line and in the ini file."""
    group = parser.getgroup("fitter", "memory of GGUF models (llama-fitter)")
    for name, (text, settings) in OPTIONS.items():
        is_flag = "action" in settings
        group.addoption("--" + name.replace("_", "-"), dest=name, default=None, help=text, **settings)
        if is_flag:
            parser.addini(name, text, type="bool", default=False)
        else:
            parser.addini(name, text.replace("%%", "%"), type="string", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and check the options before any test runs."""
    config.addinivalue_line("markers", _MARKER_HELP)
    is_update = config.getini("fitter_update") or config.getoption("fitter_update")
    if not is_update and not any(map(config.getoption, OPTIONS)):
        return
    try:
        checks = _checks(config)
    except pytest.fail.Exception as failure:
        raise pytest.UsageError(str(failure)) from None
    # Where xdist's workers run the tests, the process that has all reports stores what they measured.
    if is_update and not hasattr(config, "workerinput"):
        from fitter.regression.marks import Writer

        config.pluginmanager.register(Writer(checks), "fitter-writer")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Remember the name of a test before other plugins add to it."""
    item.stash[_NODEID] = item.nodeid


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Request the fixture with the model for a marked test."""
    names = getattr(item, "fixturenames", None)
    if names is not None and _MODEL not in names and item.get_closest_marker(MARKER):
        names.append(_MODEL)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Fail a marked test before its body runs if one of its markers fails."""
    if item.get_closest_marker(MARKER):
        nodeid = item.stash.get(_NODEID, item.nodeid)
        verdict = item.stash[_VERDICT] = _checks(item.config).check(item, nodeid)
        if verdict.failures:
            pytest.fail("\n".join(verdict.failures), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the measurements to the report, where they are shown, and stored by the process that gets all reports."""
    report = yield
    verdict = item.stash.get(_VERDICT, None)
    if verdict is not None and call.when == "call":
        report.sections += verdict.sections
        # xdist passes these on with the rest of the report.
        report.__dict__.update(fitter_is_memory=verdict.is_memory, fitter_measured=verdict.measured)
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Show a failure because of memory as ``MEMORY``."""
    if report.failed and getattr(report, "fitter_is_memory", False):
        return "failed", "M", "MEMORY"
    return None


@pytest.fixture
def fitter_model(request: pytest.FixtureRequest) -> Path | str | None:
    """The model for ``fits_memory`` tests that name none, from --fitter-model or the ini file. You may override it."""
    return _checks(request.config).model


@pytest.fixture
def fitter_plan(request: pytest.FixtureRequest) -> Plan:
    """The plan (``fitter.Plan``) of the test's ``fits_memory`` marker; of the closest one if there are several."""
    item = request.node
    if not item.get_closest_marker(MARKER):
        pytest.fail(
            f"fitter_plan needs a marker, and {item.name} has none: add @pytest.mark.{MARKER}(gpu=...)",
            pytrace=False,
        )
    return _checks(request.config).plan(item, request.getfixturevalue(_MODEL))


def _checks(config: pytest.Config) -> Checks:
    if _CHECKS not in config.stash:
        from fitter.regression.marks import Checks

        try:
            config.stash[_CHECKS] = Checks(config)
        except FitterError as error:
            message = str(error)
        else:
            return config.stash[_CHECKS]
        pytest.fail(message, pytrace=False)
    return config.stash[_CHECKS]
