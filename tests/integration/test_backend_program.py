"""``fitter backend -- PROGRAM``: upstream's own programs see described cards, take their bytes, and answer on them."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import fitter
from examples.tiny_moe import TinyModel
from fitter.llama.client import Worker
from fitter.machine.gpu import parse_gpus
from fitter.parameters.table import PARAMETERS
from tests.support import real_cards
from tests.support.cases import cases, named_cases
from tests.support.command import run_fitter
from tests.support.patience import SECONDS, until
from tests.support.real_cards import Load
from tools.comparisons import upstream
from tools.loopback.rpc_servers import free_port

MODEL = TinyModel("tiny")

CARDS = ["2x rtx-5090"]
WORDS = ("--gpu", *CARDS, "--")
MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Path:
    return upstream.tool("llama-server")


def answer(command: Sequence[str | Path], log: Path) -> str:
    """What a server answers to a prompt, with all its words chosen by the largest logit; its log is written."""
    port = free_port()
    with log.open("w") as output:
        words = [*map(str, command), "-c", "2048", "--port", str(port), "--no-repack", "-lv", "4"]
        process = subprocess.Popen(words, stdout=output, stderr=output)
    try:

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            with suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            return False

        until(is_ready, "the server never answers")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        body = {"prompt": "Once upon a time there was", "n_predict": 16, "temperature": 0, "seed": 1}
        connection.request("POST", "/completion", json.dumps(body))
        text: str = json.loads(connection.getresponse().read())["content"]
        return text
    finally:
        process.terminate()
        process.wait(SECONDS)


def test_a_server_answers_on_described_cards(server: Path, model: Path, tmp_path: Path) -> None:
    """The words of the CPU, since it computes, and the bytes of the cards, since they are planned on."""
    here = answer([server, "-m", model], tmp_path / "cpu.log")
    fitter_words = [sys.executable, "-m", "fitter", "backend", *WORDS]
    there = answer([*fitter_words, server, "-m", model, "-ngl", "99"], tmp_path / "cards.log")
    assert here == there != ""
    log = (tmp_path / "cards.log").read_text()
    plan = fitter.measure(model, gpus=CARDS, n_ctx=2048, n_seq_max=4, kv_unified=True, program="llama-server").real
    for name in ("CUDA0", "CUDA1"):
        row = plan.on(name)
        for what, size in (("model", row.model), ("KV", row.context), ("compute", row.compute)):
            (said,) = re.findall(rf"{name} {what} buffer size = +([0-9.]+) MiB", log)
            assert float(said) == pytest.approx(size / MIB, abs=0.006), (name, what)
    assert log.count("NVIDIA GeForce RTX 5090") >= 2


@named_cases(("itself", ()), ("by a shell", ("sh", "-c", '"$0" "$@"')))
def test_a_program_lists_the_cards(way: tuple[str, ...], server: Path) -> None:
    done = run_fitter("backend", *WORDS, *way, server, "--list-devices")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(CUDA\d): NVIDIA GeForce RTX 5090 \((\d+) MiB, (\d+) MiB free\)", done.stdout) == [
        ("CUDA0", "32607", "31331"),
        ("CUDA1", "32607", "31331"),
    ]


# a server needs a file: those of shapes have none
@pytest.mark.parametrize(
    "load", [each for each in real_cards.loads() if "://" not in each.header], ids=lambda load: load.name
)
def test_a_server_prints_the_loads_of_real_logs(load: Load, server: Path, directory: Path) -> None:
    """An unmodified llama-server of the pinned build with ``-fit on`` says of each load what fitter says."""
    model = real_cards.write_model(load, directory)
    of_server = {"n_seq_max": 1} | {name: load.parameters[name] for name in load.parameters if name != "n_outputs_max"}
    command = [server, "-m", model, *words_of(of_server), "-fit", "on", "-lv", "5"]
    with real_cards.environment(load.environment):
        fitted = breakdown_of(command, load.gpus)
        plan = fitter.measure(model, gpus=load.gpus, program="llama-server", **of_server)
    rows = [(row.name, plan.on(row.name)) for row in parse_gpus(load.gpus)]
    ours = {name: tuple(size // MIB for size in (row.model, row.context, row.compute)) for name, row in rows}
    ours["Host"] = tuple(size // MIB for size in (plan.host.model, plan.host.context, plan.host.compute))
    assert fitted == ours


def words_of(keywords: Mapping[str, Any]) -> list[str]:
    """Keywords of ``fitter.measure`` as llama-server's options."""
    words: list[str] = []
    for name, value in keywords.items():
        text = ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
        words += [PARAMETERS[name].options[0].partition("/")[0], *([] if value is True else [text])]
    return words


def breakdown_of(command: Sequence[str | Path], gpus: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """MiB of model, context and compute on each device, as its fit prints them; then it is killed."""
    words = [sys.executable, "-m", "fitter", "backend", *(word for gpu in gpus for word in ("--gpu", gpu)), "--"]
    found: dict[str, tuple[int, ...]] = {}
    with subprocess.Popen(
        [*words, *map(str, command), "--port", str(free_port())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            row = re.search(r"breakdown_print: \|   - (\w+) .*?= +(\d+) \+ +(\d+) \+ +(\d+)[) ]", line)
            if row:
                found[row[1]] = tuple(map(int, row.groups()[1:]))
                if row[1] == "Host":
                    break
        process.kill()
    assert "Host" in found, "".join(log[-20:])
    return found


@cases("64MiB", "140MiB", "24GiB")
def test_its_own_fit_is_the_one_of_a_plan_only(card: str, model: Path) -> None:
    """Computing changes nothing that a program plans: the same words as where cards only plan."""
    devices = parse_gpus([card])
    words = ["-fitt", "0"]
    alone = upstream.run(upstream.fit_command(model, devices, words), devices)
    done = run_fitter("backend", "--gpu", card, "--", *upstream.fit_command(model, devices, words))
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout)


def test_a_program_without_llama_cpp_runs_as_ever() -> None:
    done = run_fitter("backend", *WORDS, "sh", "-c", 'echo "$LD_PRELOAD" | grep -c fitter; exit 7')
    assert (done.returncode, done.stdout, done.stderr) == (7, "1\n", "")


def test_what_cannot_be_run(tmp_path: Path) -> None:
    inside = tmp_path / "llama-static"
    shutil.copy(shutil.which("true") or "/bin/true", inside)
    with inside.open("ab") as file:
        file.write(b"\0ggml_backend_dev_count\0")
    cases = {
        "no-such-program": (2, "'no-such-program' is no program: name one on the PATH, or give its path"),
        str(inside): (3, "has llama.cpp built into it, so it sees no other devices"),
    }
    for program, (status, message) in cases.items():
        done = run_fitter("backend", *WORDS, program)
        assert (done.returncode, done.stdout) == (status, "")
        assert message in done.stderr and len(done.stderr.splitlines()) == 1


@named_cases(
    ("of another build", "0.1.0;GLU;1;;", True), ("wrongly of this one", "{ggml};NO_SUCH_OPERATION;1;;", False)
)
def test_what_a_program_is_told_of_its_build(told: str, has_cards: bool, server: Path) -> None:
    """The build that fitter is compiled for needs no description; one that does not fit shows no cards, and says so."""
    with Worker(llama_cpp=str(server)) as worker:
        told = told.format(ggml=worker.build().ggml)
    done = run_fitter("backend", *WORDS, "sh", "-c", f'FITTER_BUILD="{told}" exec "{server}" --list-devices')
    assert done.returncode == 0
    assert ("RTX 5090" in done.stdout) is has_cards
    assert ("there are no virtual devices" in " ".join(done.stderr.split())) is not has_cards
