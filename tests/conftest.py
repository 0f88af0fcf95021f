from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# A machine that is busy is not a failure, and what is drawn is the same each time; HYPOTHESIS_PROFILE=drawn draws anew.
settings.register_profile("fitter", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("drawn", settings.get_profile("fitter"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fitter"))

# Threads of real loads that wait for each other busily take the time of those that they wait for, as soon as there are
# more of them than processors. Read when the library is loaded, here and in every process that is started.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


LONGEST_FIRST = (
    *("test_docs", "test_against_upstream", "test_llama_builds_refused", "test_shared", "test_regression"),
    *("test_search_properties", "test_skeleton_plans", "test_hostile_text", "test_bad_input", "test_formats"),
    *("test_failed_loads", "test_builds_compared", "test_llama_builds_plans", "test_verify_server", "test_packaging"),
    *("test_exit_status", "test_calibrate", "test_cli", "test_llama_cpp", "test_programs", "test_report"),
    *("test_profile_tables", "test_pytest_plugin", "test_serve", "test_verify", "test_skeleton", "test_json_schema"),
    *("test_rpc", "test_planner", "test_remote_models", "test_explore", "test_server_fit", "test_repositories"),
    "test_mutated_headers",
)
"""Files that take longest, in `make test` on two cores: what begins late is short, and no process waits for another."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those files, then the other integration tests, and the quick unit tests at the end."""

    def place(item: pytest.Item) -> int:
        name = item.path.stem
        return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST) + ("unit" in item.path.parts)

    items.sort(key=place)


@pytest.fixture(autouse=True, scope="session")
def own_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what fitter has measured and stored for this machine out of the tests, and theirs out of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("configuration")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # what most tests compare with, such as llama-fit-params, makes every token an output
        patch.setenv("FITTER_PROGRAM", "any")
        yield
