from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# A busy machine fails no test, and each run draws the same examples; HYPOTHESIS_PROFILE=drawn draws new ones.
settings.register_profile("fitter", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("drawn", settings.get_profile("fitter"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fitter"))

# With more threads than processors, threads of a real load that wait busily take the time of the threads that they wait
# for. The library reads this variable when it is loaded, here and in every process that is started.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


LONGEST_FIRST = (
    *("test_docs", "test_against_upstream", "test_llama_builds_refused", "test_shared", "test_regression"),
    *("test_search_properties", "test_skeleton_plans", "test_hostile_text", "test_bad_input", "test_formats"),
    *("test_failed_loads", "test_builds_compared", "test_llama_builds_plans", "test_verify_server", "test_packaging"),
    *("test_exit_status", "test_calibrate", "test_cli", "test_llama_cpp", "test_programs", "test_report"),
    *("test_profile_tables", "test_pytest_plugin", "test_serve", "test_verify", "test_skeleton", "test_json_schema"),
    *("test_rpc", "test_planner", "test_remote_models", "test_explore", "test_server_fit", "test_repositories"),
    *("test_mutated_headers", "test_interrupt", "test_malformed_headers"),
)
"""Files that take longest in `make test` on two cores: they begin first, so that no process works alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, then the other integration tests, and the quick unit tests at the end."""

    def place(item: pytest.Item) -> int:
        name = item.path.stem
        return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST) + ("unit" in item.path.parts)

    items.sort(key=place)


@pytest.fixture(autouse=True, scope="session")
def own_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests a configuration and a cache of their own: they neither read nor change this machine's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("configuration")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # llama-fit-params, with which most tests compare, makes every token an output
        patch.setenv("FITTER_PROGRAM", "any")
        yield
