"""llama.cpp of Debian's next release: its real backends without a card, and its llama-server. It is fetched anew."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fitter.llama.build.virtual_backends import comparisons
from tests.support.cases import cases
from tools.builds import debian_llama
from tools.builds.debian_llama import NAME, DebianLlama
from tools.builds.llama_builds import FetchError
from tools.models.tiny import write_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def debian() -> DebianLlama:
    try:
        return debian_llama.made()
    except FetchError as error:
        pytest.skip(str(error))


def run(debian: DebianLlama, *words: str | Path) -> str:
    done = subprocess.run([debian.python, "-m", *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@cases("cuda", "rocm")
def test_as_many_loads_are_equal_as_plans_say(profile: str, debian: DebianLlama) -> None:
    words = {"cuda": ("--library", NAME, debian.libraries), "rocm": ("--rocm", NAME, debian.libraries, debian.hip)}
    (known,) = (each for each in comparisons(profile) if each.llama_cpp == NAME)
    assert f"{known.equal} of {known.rows} equal, by {known.by}" in run(
        debian, "tools.comparisons.cuda_rules", *words[profile]
    )


def test_loads_at_the_limits_of_vulkan_are_equal(debian: DebianLlama) -> None:
    words = ("--libraries", debian.vulkan, "--device", debian.software_device, "--count", "12")
    assert run(debian, "tools.vulkan.check", *words).startswith("shapes: 60 loads, ")


def test_its_server_takes_what_is_said(debian: DebianLlama, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf")
    words = ("verify", path, "-c", "4096", "--for", "llama-server", "--server", debian.server)
    said = run(debian, "fitter", *words, "--llama-cpp", debian.server)
    assert "llama-server 0.7.0 (build 11669, commit Debian)" in " ".join(said.split())
    assert "as predicted, as far as its log says it" in " ".join(said.split())
