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
    *("test_docs", "test_search_properties", "test_serve", "test_verify_server", "test_shared", "test_rpc"),
    *("test_llama_builds_refused", "test_against_upstream", "test_hostile_text", "test_skeleton", "test_programs"),
    *("test_fleet", "test_pytest_plugin", "test_failed_loads", "test_release", "test_regression", "test_shapes"),
    *("test_report", "test_malformed_headers", "test_planner", "test_json_schema", "test_real_load", "test_explore"),
    *("test_by_hand", "test_offload_table", "test_packaging", "test_claim", "test_builds_compared"),
    *("test_llama_builds_plans", "test_tune", "test_verify", "test_levers", "test_remote_models", "test_repositories"),
    *("test_poor_systems", "test_every_system", "test_llama_cpp", "test_formats", "test_bad_input"),
    *("test_exit_status", "test_cli", "test_profile_tables", "test_pools", "test_tokenizers", "test_calibrate"),
    *("test_interrupt", "test_conversations"),
)
"""Files that take longest in `make test` on two cores: they begin first, so that no process works alone at the end."""

WAITING = ("test_windows",)
"""Files for which CI still makes something ready when the tests begin."""


SLOW = {
    "test_returned_map": ("clang",),
    "test_docs": (
        *("choose-a-quantization", "compare-builds", "split-mode-tensor", "server-memory", "verify-and-calibrate"),
        *("reports", "models-without-a-file", "guides/pytest", "guides/ci", "draft-models", "which-gpu-to-buy"),
        *("virtual-gpus", "other-programs", "unified-memory", "explanation/", "when-it-does-not-fit", "macs"),
        *("guides/llama-server", "remote-devices", "web-planner", "hugging-face-models", "guides/llama-cpp-python"),
        *("printed[docs/guides/several-models", "guides/users-and-agents", "guides/kubernetes"),
    ),
    "test_against_upstream": (
        "qwen3-30b-a3b/12GiB+10GiB",
        "gpt-oss-120b/rtx-4090+12GiB",
        *("qwen3-235b-a22b", "kimi-k2", "deepseek-v3.1/4x31600MiB", "deepseek-v3.1/rtx-5090", "qwen3-30b-a3b/2x4GiB"),
        *("qwen3-30b-a3b/12GiB]", "qwen3-30b-a3b/8GiB", "qwen3-32b/4x4GiB", "qwen3-32b/12GiB", "llama-3.1-70b/4x8GiB"),
        *("llama-3.1-8b/4GiB/c16384",),
        *(
            "deepseek-v3.1/2x48073MiB",
            "gemma3-12b/8GiB",
            "llama-3.1-8b/6GiB",
            "nemotron-h",
            "qwen3-32b/rtx-4090",
            "llama-3.1-8b/4GiB",
            "rtx-4090+rtx-5090",
        ),
    ),
    "test_builds_compared": ("same_load[no card", "same_load[several", "same_load[no flash"),
    "test_exit_status": (
        *(f"says_nothing_to_run[{form}" for form in ("ini", "ik_llama", "python", "llama-swap", "compose", "ollama")),
        *(
            "is_the_same[a.gguf --gpu 8GiB]",
            "is_the_same[a.gguf --gpu 8GiB --format",
            "written[verify",
            "written[check",
        ),
    ),
    "test_failed_loads": ("nothing[on a server-10", "nothing[here-10", "says_nothing_any_more", "beside_one_that_dies"),
    "test_faster_first": ("done[30000-8GiB", "done[None"),
    "test_fleet": ("each_goal_is_reached", "remedy[one beside one"),
    "test_formats": ("whole on one", "one of two", "what was given up", "no GPU", "format[four", "format[cache on"),
    "test_demo": ("test_one_case",),
    "test_gpu_layers": ("gap_left[qwen3-32b", "gap_left[qwen3-30b", "gap_left[qwen3-next"),
    "test_hostile_directory": (
        *(
            "with a server0",
            "with that on the PATH0",
            "fitter-shapes0",
            "fitter-quants0",
            "fitter-llama-cpp0",
            "fitter-check0",
            "fitter-verify0",
        ),
    ),
    "test_hostile_text": ("fit_in_every_format", "lock_and_check", "diff_and_verify"),
    "test_interrupt": ("qwen3-30b-a3b", "nemotron-h-9b", "no_answer[lock"),
    "test_levers": ("allowed[deepseek", "no_buffer_holds[2"),
    "test_llama_builds": ("headers[0.3.25", "headers[0.3.30"),
    "test_llama_builds_plans": ("[python-0", "now[python", "hybrid on one card", "[b9842", "[v0.4.0"),
    "test_llama_builds_refused": ("layout_is_refused[b9842", "layout_is_refused[v0.5.0", "version_is_refused[b"),
    "test_llama_python": ("little", "embeddings"),
    "test_malformed_headers": (
        "bad_is_one_line[fit",
        "[HTTP",
        "others_end_as_they_should",
        "[door3",
        "[quants",
        "[serve",
    ),
    "test_offload_table": ("small-windows-5-a card", "published_to_pay[1"),
    "test_packaging": ("wheel_holds", "installed_wheel"),
    "test_planner": ("of_fit[['8GiB'", "of_fit[['12GiB", "takes[70B", "one_after_the_other"),
    "test_by_hand": ("faster[one more card of 2 GiB", "devices[100 GFLOP/s", "devices[50 GFLOP/s"),
    "test_claim": ("is_killed_with_less",),
    "test_conversations": ("turn[fewer", "eight do not fit", "a larger card", "checkpoints, several", "weights once"),
    "test_pytest_plugin": ("the_plan[xdist",),
    "test_planning_search_order": ("slower-on-fewer",),
    "test_pools": ("by_hand[m3-max", "by_hand[radeon", "by_hand[m1:", "by_hand[jetson"),
    "test_programs": ("the_server_keeps[all on the host", "the_server_keeps[a cache on the host", "[weights in both"),
    "test_profile_tables": ("says[vulkan", "says[cuda published", "[rocm"),
    "test_random_words": ("[70]", "[10]", "[60]", "[20]"),
    "test_real_load": ("has_room_when_it_is_loaded",),
    "test_regression": ("costs_memory[a smaller device", "costs_memory[a tensor", "costs_memory[n_ubatch"),
    "test_remote_models": ("[kimi-k2",),
    "test_report": ("can_use_it[dark-1200", "can_use_it[light-390"),
    "test_repositories": ("every_model_of_a_repository",),
    "test_search_properties": (
        *("[21]", "[54]", "[252]", "[9]", "[LlamaCppCrashError", "[306", "[1100"),
        *("[47", "[33", "[5]", "more[900", "more[954", "takes_the_last_layer", "is_off_where"),
        *("[128 tokens begin a search", "[caches on the host have a use"),
        *("drawn_now", "[flash attention lets one", "[without-flash", "[attention-before"),
        *("card_has_room_for_nothing", "no_card_has_room_for_any"),
    ),
    "test_shapes": ("card_are_as_quants_says",),
    "test_tune": ("turns_are_cut",),
    "test_explore": ("interrupted_goes_on",),
    "test_release": ("dry_run_builds", "commit_meanwhile"),
    "test_sequence_states": ("[b9842", "[v0.4.0", "[b10361", "writes[MoE", "writes[positions", "[SWA"),
    "test_serve": ("can_use_it[dark-390",),
    "test_server_fit": (
        "glm45-air/rtx-4090/c8192",
        "glm45-air/h100",
        *("no_less[glm45-air/2xrtx-5090", "no_less[glm45-air/rtx-4090/c8192-ngl99-otffn_.*_exps=CPU/mtp"),
        *("no_less[llama-3.1-8b/6GiB", "no_less[llama-3.1-8b/arc-a380/c4096-ngl12/draft"),
    ),
    "test_shared": ("alone[CUDA1", "alone[host-small", "alone[host-four, each"),
    "test_skeleton": (
        *("takes[split", "[dense-other", "[mixture of experts-other", "[latent attention-other"),
        *("without[experts, two devices", "without[recurrent layers", "without[windows of attention"),
        *("without[latent attention", "without[a host that is too small"),
    ),
    "test_tokenizers": ("placements_take",),
    "test_verify_server": (
        *("[dense]", "[experts]", "[dense, one cache]", "[sliding windows]", "two_gib_less", "recurrent states"),
    ),
}
"""Parts of names of tests, by file, that are marked as slow: quicker ones of the same kind remain in `make test`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests; run the longest files first, then the other integration tests, and unit tests at the end."""

    def place(item: pytest.Item) -> int:
        name = item.path.stem
        if name in LONGEST_FIRST:
            return LONGEST_FIRST.index(name)
        return len(LONGEST_FIRST) + (2 if "unit" in item.path.parts else name in WAITING)

    for item in items:
        if any(part in item.name for part in SLOW.get(item.path.stem, ())):
            item.add_marker(pytest.mark.slow)
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
