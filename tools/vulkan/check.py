"""Compare the vulkan profile with the real ggml-vulkan, built from vendor, on Mesa's software device.

``make test-vulkan`` builds what this needs and runs it. The limits of other drivers are shown to the real backend by a
library that is preloaded (driver.cpp).
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fitter.llama.types import Params, TensorBuftOverride
from tools.comparisons import cuda_rules
from tools.comparisons.backend_loads import VULKAN, Load, answers, draw, store
from tools.comparisons.load_answers import compare
from tools.models import shapes
from tools.oracle.build import compiler, run

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ROOT / "build" / "vulkan" / "bin"
DRIVER = "libfitter-vulkan-driver.so"


def main(arguments: Sequence[str]) -> int:
    """Run the comparison; the exit status is 0 if every answer is equal."""
    parser = argparse.ArgumentParser(prog="tools.vulkan.check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=512, help="loads to draw (512)")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn with (1)")
    parser.add_argument("--models", type=Path, help="a directory of GGUF files to compare as well")
    parser.add_argument("--write", action="store_true", help="store the real answers as the table that the tests use")
    parser.add_argument("--libraries", type=Path, default=LIBRARIES, help="where ggml-vulkan and the driver are")
    parser.add_argument(
        "--device", type=Path, help="the manifest of a software device (this machine's), of a build that is there"
    )
    parser.add_argument("--keep", metavar="BUILD", help="store the figures of this build, which plans quote")
    parser.add_argument("--needs", action="store_true", help="only say what is missing to build ggml-vulkan")
    parser.add_argument("--build-driver", action="store_true", help="only compile the driver, into --libraries")
    options = parser.parse_args(arguments)
    missing = {} if options.device else _missing()
    if missing:
        print("missing: " + ", ".join(missing), file=sys.stderr)
        print(f"Debian, Ubuntu: apt-get install {' '.join(dict.fromkeys(missing.values()))}", file=sys.stderr)
    if missing or options.needs:
        return 1 if missing else 0
    if options.build_driver:
        build_driver(options.libraries, "-lvulkan")
        return 0

    where = str(options.libraries.resolve())

    def variables(load: Load) -> dict[str, str]:
        return _variables(load, options.libraries / DRIVER, [options.device] if options.device else _software_drivers())

    loads = sorted([*draw(VULKAN, options.count, options.seed), *corners()], key=lambda load: load.session)
    with tempfile.TemporaryDirectory(prefix="fitter-vulkan-") as directory:

        def model(load: Load) -> Path:
            return shapes.write(load.model, Path(directory), vocab=False)

        real = list(answers(loads, model, variables, where))
        if options.write:
            store(VULKAN, zip(loads, real, strict=True))
            print(f"wrote {VULKAN.table.relative_to(ROOT)}")
        different = compare("shapes", loads, real, list(answers(loads, model, llama_cpp=where)))
        if options.keep:
            by = cuda_rules.OWN_VULKAN if options.device else cuda_rules.SOFTWARE_DEVICE
            subject = cuda_rules.Subject(options.keep, where, options.libraries, by, "vulkan")
            cuda_rules.keep(cuda_rules.figures_of(subject, len(loads), len(loads) - different), "vulkan")
    if options.models is not None:
        files = {path.stem: path for path in sorted(options.models.glob("*.gguf"))}
        loads = list(_settings_of(files))

        def file(load: Load) -> Path:
            return files[load.model]

        different += compare(
            str(options.models),
            loads,
            list(answers(loads, file, variables, where)),
            list(answers(loads, file, llama_cpp=where)),
        )
    return 1 if different else 0


def _settings_of(models: Iterable[str]) -> Iterator[Load]:
    """Loads that reach what an architecture has of operations, on the drivers at both ends."""
    settings = (
        Params(n_ctx=512),
        Params(n_ctx=2048, flash_attn="off", n_seq_max=2),
        Params(n_ctx=1024, n_gpu_layers=1, n_ubatch=64, type_k="q8_0", type_v="q8_0", flash_attn="on"),
        Params(n_ctx=1024, tensor_buft_overrides=(TensorBuftOverride("ffn|exps", "CPU"),), n_ubatch=16),
    )
    for driver, params, model in itertools.product(("radv", "lavapipe"), settings, models):
        yield Load(VULKAN, model, driver, 1, "", params)


def corners() -> Iterator[Load]:
    """Loads at the limits: of caches, buffers and chunks of buffers, of devices, of models; on each driver."""
    experts_on_host = (TensorBuftOverride("exps", "CPU"),)
    large = Params(n_ctx=131072, flash_attn="off", n_batch=4096, n_ubatch=2048)
    corners: tuple[tuple[str, int, str, Params], ...] = (
        # K of a layer takes 2 KiB per token: just below 4 GiB, and as much.
        ("llama-3.1-8b", 1, "", Params(n_ctx=2**21 - 256)),
        ("llama-3.1-8b", 1, "", Params(n_ctx=2**21)),
        ("qwen3-30b-a3b", 1, "", large),
        ("qwen3-30b-a3b", 2, "GGML_VK_SUBALLOCATION_BLOCK_SIZE=17179869184", large),
        ("qwen3-next-80b-a3b", 1, "GGML_VK_FORCE_MAX_BUFFER_SIZE=100000000", Params(n_ctx=2048, n_seq_max=2)),
        ("nemotron-h-9b", 1, "GGML_VK_FORCE_MAX_BUFFER_SIZE=300000000", Params(n_ctx=2048, n_seq_max=8)),
        ("nemotron-h-9b", 1, "", Params(n_ctx=2048, n_seq_max=8)),
        ("deepseek-v3.1", 4, "", replace(large, flash_attn="on", tensor_buft_overrides=experts_on_host)),
        ("kimi-k2", 3, "", Params(n_ctx=65536, flash_attn="off")),
        ("gpt-oss-120b", 4, "GGML_VK_DISABLE_GRAPH_OPTIMIZE=1", Params(n_ctx=65536)),
        ("qwen3-235b-a22b", 5, "", Params(n_ctx=65536, n_gpu_layers=20, split_mode="none", main_gpu=1)),
        ("llama-3.1-70b", 8, "", Params(n_ctx=8192)),
    )
    for driver, (model, n_devices, environment, params) in itertools.product(VULKAN.drivers, corners):
        yield Load(VULKAN, model, driver, n_devices, environment, params)


def _variables(load: Load, driver: Path, devices: Sequence[Path]) -> dict[str, str]:
    """The variables with which ggml-vulkan has the load's devices, and no GPU of this machine."""
    drivers = ":".join(str(device.resolve()) for device in devices)
    return {
        "VK_ICD_FILENAMES": drivers,
        "VK_DRIVER_FILES": drivers,
        "LD_PRELOAD": str(driver.resolve()),
        "FITTER_VULKAN_DRIVER": load.driver,
        # A software device is only used on request; named again, it is another device.
        "GGML_VK_VISIBLE_DEVICES": ",".join(["0"] * load.n_devices),
    }


def build_driver(directory: Path, *options: str | Path) -> None:
    """Compile what shows the limits of drivers; ``options`` end with the loader of Vulkan that it is linked to."""
    words = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", f"-I{ROOT / 'bindings'}")
    source = Path(__file__).with_name("driver.cpp")
    run(compiler(), *words, source, "-o", directory / DRIVER, "-Wl,--no-as-needed", *options)


def _software_drivers() -> list[Path]:
    return sorted(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))


def _missing() -> dict[str, str]:
    """What ggml-vulkan cannot be built or run without, and Debian's package of it."""
    missing = {}
    if shutil.which("glslc") is None:
        missing["glslc"] = "glslc"
    if not _includes("vulkan/vulkan.hpp"):
        missing["Vulkan's headers"] = "libvulkan-dev"
    if not _includes("spirv/unified1/spirv.hpp"):
        missing["SPIR-V's headers"] = "spirv-headers"
    if not _software_drivers():
        missing["Mesa's software device"] = "mesa-vulkan-drivers"
    return missing


def _includes(header: str) -> bool:
    compiler = os.environ.get("CXX", "c++").split()
    done = subprocess.run(
        [*compiler, "-x", "c++", "-E", "-"], input=f"#include <{header}>\n", text=True, capture_output=True, check=False
    )
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
