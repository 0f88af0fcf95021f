from __future__ import annotations

import pytest

from fitter.programs.server_log import (
    CachedPrompt,
    CacheState,
    Checkpoint,
    ExpertLookups,
    Figure,
    Listener,
    Said,
    figure,
    is_host,
    reason,
)
from tests.support.cases import cases, stored

MIB = 2**20
TWO = 5243
"""Half of 0.01 MiB, which is what two decimals leave open."""
THREE = 525


def hear(text: str) -> Said:
    listener = Listener()
    for line in text.splitlines():
        listener.hear(line)
    return listener.said


@cases(("1.00", MIB, TWO), ("0.005", 5243, THREE), ("12", 12 * MIB, MIB // 2 + 1), ("4.2617", 4468716, 53))
def test_a_figure_is_as_exact_as_its_decimals(text: str, size: int, rounding: int) -> None:
    assert figure(text) == Figure(size, rounding)


LOAD = """\
0.00.006.164 I load_tensors:   CPU_Mapped model buffer size =     1.00 MiB
0.00.006.165 I load_tensors:   CPU_REPACK model buffer size =     0.50 MiB
0.00.006.165 I load_tensors:        CUDA0 model buffer size =     7.25 MiB
0.00.006.571 I llama_context: constructing llama_context
0.00.006.615 I llama_context:        CPU  output buffer size =     0.01 MiB
0.00.006.957 I llama_kv_cache:      CUDA0 KV buffer size =     4.00 MiB
0.00.006.957 I llama_kv_cache:      CUDA0 KV buffer size =     2.00 MiB
0.00.006.957 I llama_memory_recurrent:      CUDA0 RS buffer size =     3.00 MiB
0.00.009.860 I sched_reserve:      CUDA0 compute buffer size =     4.26 MiB
0.00.009.860 I sched_reserve:  CUDA_Host compute buffer size =     1.25 MiB
"""
OLDER_LOAD = """\
load_tensors:        CUDA0 model buffer size =   292.36 MiB
llama_context: constructing llama_context
llama_context:  CUDA_Host  output buffer size =     0.58 MiB
llama_kv_cache_unified:      CUDA0 KV buffer size =   128.00 MiB
llama_context:      CUDA0 compute buffer size =   254.50 MiB
llama_context:  CUDA_Host compute buffer size =    10.01 MiB
"""


def sizes(said: Said) -> dict[tuple[int, str, str], tuple[float, int]]:
    return {(e.context, e.buffer_type, e.kind): (e.size.bytes / MIB, e.size.rounding) for e in said.buffers}


def test_what_a_load_takes() -> None:
    said = hear(LOAD)
    assert {key: (round(size, 2), rounding) for key, (size, rounding) in sizes(said).items()} == {
        (0, "CPU", "model"): (1.0, TWO),
        (0, "CPU_REPACK", "model"): (0.5, TWO),
        (0, "CUDA0", "model"): (7.25, TWO),
        (0, "CPU", "output"): (0.01, TWO),
        # three lines: what they leave open adds up
        (0, "CUDA0", "context"): (9.0, 3 * TWO),
        (0, "CUDA0", "compute"): (4.26, TWO),
        (0, "CUDA_Host", "compute"): (1.25, TWO),
    }
    assert [each.buffer_type for each in said.buffers if each.is_mapped] == ["CPU"]


def test_what_an_older_load_takes() -> None:
    assert {key: round(size, 2) for key, (size, _) in sizes(hear(OLDER_LOAD)).items()} == {
        (0, "CUDA0", "model"): 292.36,
        (0, "CUDA_Host", "output"): 0.58,
        (0, "CUDA0", "context"): 128.0,
        (0, "CUDA0", "compute"): 254.5,
        (0, "CUDA_Host", "compute"): 10.01,
    }


def test_a_second_context_is_the_drafts() -> None:
    said = hear(LOAD + LOAD.replace("7.25", "2.25"))
    found = sizes(said)
    assert found[1, "CUDA0", "model"][0] == 2.25 and found[0, "CUDA0", "model"][0] == 7.25
    assert found[1, "CUDA0", "context"] == found[0, "CUDA0", "context"]


def test_a_buffer_that_is_made_again_counts_once() -> None:
    again = "sched_reserve:      CUDA0 compute buffer size =     {} MiB\n"
    for size, most in (("6.00", 6.0), ("1.00", 4.26)):
        assert round(sizes(hear(LOAD + again.format(size)))[0, "CUDA0", "compute"][0], 2) == most


@cases(
    "alloc_compute_meta:        CPU compute buffer size =   9.00 MiB",
    "clip_model_loader: model size:         850.00 MiB",
    "load_tensors: something else = 1.00 MiB",
)
def test_a_projector_is_no_part_of_the_model(line: str) -> None:
    assert hear(line).buffers == ()


CHECKPOINTS = """\
0.08.1 I slot c: id  3 | task 9 | created context checkpoint 1 of 32 (pos_min = 0, n_tokens = 60, size = 0.062 MiB)
0.08.2 I slot c: id  3 | task 9 | created context checkpoint 2 of 32 (pos_min = 0, n_tokens = 600, size = 0.316 MiB)
0.08.3 I slot c: id  0 | task 8 | created context checkpoint 1 of 32 (pos_min = 0, n_tokens = 600, size = 0.316 MiB)
0.08.4 W slot c: id  0 | task 8 | erasing old context checkpoint (pos_min = 0, n_tokens = 600, size = 9.316 MiB)
"""
OLDER_CHECKPOINT = "slot s: id  2 | task 0 | created context checkpoint 1 of 8 (pos_min = 0, size = 1.125 MiB)"


def test_checkpoints() -> None:
    said = hear(CHECKPOINTS)
    large = figure("0.316")
    assert said.n_checkpoints == 3
    assert said.checkpoints == (Checkpoint(60, figure("0.062")), Checkpoint(600, large))
    assert said.largest_checkpoint == large
    assert said.held == Figure(3 * large.bytes, 3 * THREE), "two in one slot and one in another"
    assert hear(OLDER_CHECKPOINT).checkpoints == (Checkpoint(None, figure("1.125")),)
    assert hear("").largest_checkpoint is None and hear("").held == Figure(0, 0)


CACHE = """\
0.09 I srv        update:  - cache state: 1 prompts, 25.964 MiB (limits: 8192.000 MiB, 4096 tokens, 1292345 est)
0.09 I srv        update:    - prompt 0x7f2a4c0: 826 tokens, checkpoints:  2, 25.964 MiB
0.09 I srv        update:  - cache state: 0 prompts, 0.000 MiB (limits: 8192.000 MiB, 4096 tokens, 8589934592 est)
"""


def test_the_prompt_cache_when_it_was_largest() -> None:
    said = hear(CACHE)
    assert said.cache == CacheState(1, figure("25.964"), figure("8192.000"))
    assert said.cached == (CachedPrompt(826, 2, figure("25.964")),)
    without_limit = hear(CACHE.splitlines()[0].replace("8192.000", "0.000"))
    assert without_limit.cache is not None and without_limit.cache.limit is None
    assert hear("").cache is None


LOOKUPS = """\
0.20 I llama_moe_cache: ubatch <= 8: hits = 700, misses = 300, hit rate = 70.00%, uploaded = 512.25 MiB
0.20 I llama_moe_cache: ubatch  > 8: hits = 20, misses = 60, hit rate = 25.00%, uploaded = 100.50 MiB
0.20 I llama_moe_cache: large batches: 5 experts copied from the cache, 8.00 MiB
"""


def test_the_cache_of_experts() -> None:
    assert hear(LOOKUPS).lookups == ExpertLookups(720, 360, figure("512.25") + figure("100.50"))
    assert hear(LOOKUPS.splitlines()[2]).lookups is None


def test_memory_that_was_allocated_again() -> None:
    assert (
        hear("0.2 I llama_perf_context_print:   graph reallocs =         12    /     3        (same)").reallocations
        == 3
    )
    assert hear("").reallocations is None


def test_where_it_listens() -> None:
    assert hear("main: server is listening on http://127.0.0.1:18765 - starting the main loop").can_bind
    bound = "0.1 I srv  llama_server: listening on http://127.0.0.1:18765\n"
    assert hear(bound + "failed to bind a texture").can_bind
    assert not hear("0.1 E srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 80").can_bind


@cases(stored("server_log", "reasons"))
def test_the_reason_of_a_failure(lines: list[str], why: str) -> None:
    assert reason(lines) == why


def test_a_log_without_end_is_not_kept() -> None:
    listener = Listener()
    for i in range(6000):
        listener.hear(f"created context checkpoint 1 of 32 (pos_min = 0, n_tokens = {i}, size = 0.{i:04} MiB)")
    assert len(listener.said.checkpoints) == 4096 and listener.said.n_checkpoints == 6000


@cases(("CPU", True), ("CPU_REPACK", True), ("CUDA_Host", True), ("CUDA0", False), ("RPC0[a:1]", False))
def test_host_memory_by_name(name: str, is_it: bool) -> None:
    assert is_host(name) is is_it


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize(
    "line",
    [
        "CPU model buffer size = {}.00 MiB",
        "slot  id  {} | task 0 | created context checkpoint {} of {} (pos_min = 0, n_tokens = {}, size = {}.0 MiB)",
        "cache state: {} prompts, {}.0 MiB (limits: {}.0 MiB",
        "- prompt 0x1: {} tokens, checkpoints: {}, {}.0 MiB",
        "llama_moe_cache: x hits = {}, misses = {}, y uploaded = {} MiB",
        "graph reallocs = {} / {}",
    ],
)
def test_a_number_of_too_many_digits_is_not_read(line: str, digits: int) -> None:
    listener = Listener()
    listener.hear(line.replace("{}", "9" * digits))
    assert all(buffer.size.bytes < 10**30 for buffer in listener.said.buffers)
