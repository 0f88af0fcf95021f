"""Compare the vulkan profile with the real ggml-vulkan, built from vendor, on Mesa's software device.

``make test-vulkan`` builds what this needs and runs it. The limits of other drivers are shown to the real backend by a
library that is preloaded (driver.cpp).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from fitter.llama.client import Worker
from fitter.llama.types import Params, TensorBuftOverride
from tools import shapes
from tools.vulkan.loads import TABLE, Load, answer, corners, draw, store

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ROOT / "build" / "vulkan" / "bin"
DRIVER = LIBRARIES / "libfitter-vulkan-driver.so"

Answers = list[str]


def main(arguments: Sequence[str]) -> int:
    """Run the comparison; the exit status is 0 if every answer is equal."""
    parser = argparse.ArgumentParser(prog="tools.vulkan.check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=512, help="loads to draw (512)")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn with (1)")
    parser.add_argument("--models", type=Path, help="a directory of GGUF files to compare as well")
    parser.add_argument("--write", action="store_true", help="store the real answers as the table that the tests use")
    parser.add_argument("--needs", action="store_true", help="only say what is missing to build ggml-vulkan")
    options = parser.parse_args(arguments)
    missing = _missing()
    if missing:
        print("missing: " + ", ".join(missing), file=sys.stderr)
        print(f"Debian, Ubuntu: apt-get install {' '.join(dict.fromkeys(missing.values()))}", file=sys.stderr)
    if missing or options.needs:
        return 1 if missing else 0

    drawn = draw(options.count, options.seed)
    loads = sorted([*drawn, *corners()], key=lambda load: load.session)
    with tempfile.TemporaryDirectory(prefix="fitter-vulkan-") as directory:

        def model(load: Load) -> Path:
            return shapes.write(load.model, Path(directory), vocab=False)

        real = _real(loads, model)
        if options.write:
            store(zip(loads, real, strict=True))
            print(f"wrote {TABLE.relative_to(ROOT)}")
        different = _compare("loads", loads, real, _virtual(loads, model))
    if options.models is not None:
        files = {path.stem: path for path in sorted(options.models.glob("*.gguf"))}
        loads = list(_settings_of(files))

        def file(load: Load) -> Path:
            return files[load.model]

        different += _compare(str(options.models), loads, _real(loads, file), _virtual(loads, file))
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
        yield Load(model, driver, 1, "", params)


def _compare(what: str, loads: Sequence[Load], real: Answers, virtual: Answers) -> int:
    different = 0
    for load, expected, found in zip(loads, real, virtual, strict=True):
        if expected != found:
            different += 1
            print(f"different: {load}\n  real    {expected}\n  virtual {found}")
    failed = sum(answer.startswith("FAIL") for answer in real)
    drivers = ", ".join(f"{count} {name}" for name, count in sorted(Counter(load.driver for load in loads).items()))
    print(
        f"{what}: {len(loads) - different} of {len(loads)} equal ({drivers}; {failed} that llama.cpp refuses), "
        f"{len({load.model for load in loads})} models"
    )
    return different


def _real(loads: Sequence[Load], model: Callable[[Load], Path]) -> Answers:
    answers: Answers = []
    for first, group in _sessions(loads):
        environment = {
            "LD_PRELOAD": str(DRIVER),
            "FITTER_VULKAN_DRIVER": first.driver,
            # A software device is only used on request; named again, it is another device.
            "GGML_VK_VISIBLE_DEVICES": ",".join(["0"] * first.n_devices),
        }
        with _environment(first, environment), Worker() as worker:
            found = [(device.backend, device.virtual) for device in worker.devices() if device.type != "cpu"]
            if found != [("Vulkan", False)] * first.n_devices:
                raise SystemExit(f"{LIBRARIES} has {found} instead of {first.n_devices} Vulkan devices")
            answers += [answer(worker, model(load), load.params) for load in group]
    return answers


def _virtual(loads: Sequence[Load], model: Callable[[Load], Path]) -> Answers:
    answers: Answers = []
    for first, group in _sessions(loads):
        with _environment(first, {}), Worker(first.devices) as worker:
            answers += [answer(worker, model(load), load.params) for load in group]
    return answers


def _sessions(loads: Iterable[Load]) -> Iterator[tuple[Load, list[Load]]]:
    for _, group in itertools.groupby(loads, key=lambda load: load.session):
        same = list(group)
        yield same[0], same


@contextlib.contextmanager
def _environment(load: Load, more: dict[str, str]) -> Iterator[None]:
    """What worker processes get that start meanwhile. No GPU of this machine is seen."""
    name, _, value = load.environment.partition("=")
    drivers = ":".join(map(str, _software_drivers()))
    changes = {"LLAMA_CPP_LIB_PATH": str(LIBRARIES), "VK_ICD_FILENAMES": drivers, "VK_DRIVER_FILES": drivers, **more}
    if name:
        changes[name] = value
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for key, old in before.items():
            if old is None:
                del os.environ[key]
            else:
                os.environ[key] = old


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
