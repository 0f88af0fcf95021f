"""``python -m tools.cuda.toolkit``: a CUDA toolkit to build ggml-cuda with, and CMake's options for it, on one line.

The toolkit is the one of ``CUDAToolkit_ROOT``, or the one whose nvcc is on PATH if it has all that ggml-cuda needs.
Else it is NVIDIA's packages, 0.8 GB, which pip installs into this Python's environment: no card, no driver, no root.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = (
    # All of CUDA 13.0: what is linked with it runs with every driver for CUDA 13.
    *("nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-crt==13.0.88", "nvidia-nvvm==13.0.88", "nvidia-cuda-runtime==13.0.96"),
    *("nvidia-cuda-cccl==13.0.85", "nvidia-cublas==13.0.2.14"),
)
NEEDED = ("cudart", "cublas")
_ARCHITECTURE = r"\d+[af]?(-real|-virtual)?"


class ToolkitError(Exception):
    """Why ggml-cuda cannot be built, in one line, with the remedy."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its nvcc, and its directory (``None`` where CMake finds it by nvcc).

    ``found`` and ``libraries`` are what CMake found of it, and the directory of its libraries.
    """

    nvcc: Path
    root: Path | None
    found: frozenset[str] = frozenset()
    libraries: str = ""

    def options(self) -> list[str]:
        """CMake's options for it."""
        options = ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={self.nvcc}"]
        if self.root is not None:
            options.append(f"-DCUDAToolkit_ROOT={self.root}")
        if "cuda_driver" not in self.found:
            # Virtual memory management is the one thing that ggml-cuda links the driver's library for.
            options.append("-DGGML_CUDA_NO_VMM=ON")
        if self.libraries:
            # llama-cpp-python's libraries look beside themselves alone.
            options.append(f"-DCMAKE_SHARED_LINKER_FLAGS=-Wl,-rpath,{self.libraries}")
        return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the options; what is done meanwhile is said on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tools.cuda.toolkit", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--architectures", default="", help="compute capabilities to build for, such as 86;89")
    options = parser.parse_args(arguments)
    try:
        architectures = architectures_of(options.architectures or ";".join(capabilities_here()))
        toolkit = find(os.environ) or install()
    except ToolkitError as error:
        print(f"cuda: {error}", file=sys.stderr)
        return 1
    words = [*toolkit.options(), f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"]
    print(" ".join(quoted(word) for word in words))
    return 0


def architectures_of(text: str) -> str:
    """What CMake calls the architectures of ``86;89`` or ``86,89``. Raises ``ToolkitError``."""
    words = [word for word in re.split(r"[;, ]+", text) if word]
    if not words:
        raise ToolkitError(
            "no NVIDIA card is here to build for: name the compute capabilities of yours, such as "
            "CUDA_ARCHITECTURES=89 for an RTX 4090, or 86;89 for two kinds of cards"
        )
    wrong = [word for word in words if not re.fullmatch(_ARCHITECTURE, word)]
    if wrong:
        raise ToolkitError(f"CUDA_ARCHITECTURES: '{wrong[0]}' is no compute capability without its dot, such as 89")
    return ";".join(words)


def capabilities_here() -> list[str]:
    """The compute capabilities of this machine's cards, without their dots; none without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.findall(r"^(\d+)\.(\d)$", done.stdout, re.MULTILINE) if done.returncode == 0 else []
    return sorted({major + minor for major, minor in found}, key=int)


def find(environment: Mapping[str, str]) -> Toolkit | None:
    """The toolkit that the environment names; ``None`` without one, or if the nvcc on PATH is not all of one.

    Raises ``ToolkitError`` if ``CUDAToolkit_ROOT`` names one that cannot be used.
    """
    if root := environment.get("CUDAToolkit_ROOT"):
        toolkit, missing = probe(Toolkit(Path(root, "bin", "nvcc"), Path(root)))
        if missing:
            raise ToolkitError(f"CUDAToolkit_ROOT={root} {missing}: complete it, or unset the variable to use packages")
        return toolkit
    nvcc = shutil.which("nvcc", path=environment.get("PATH"))
    if nvcc is None:
        return None
    toolkit, missing = probe(Toolkit(Path(nvcc), None))
    if missing:
        print(f"cuda: the toolkit of {nvcc} {missing}; NVIDIA's packages are used", file=sys.stderr)
    return None if missing else toolkit


def install() -> Toolkit:
    """The toolkit of NVIDIA's packages. Raises ``ToolkitError``."""
    root = Path(sysconfig.get_path("purelib"), "nvidia", "cu13")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    there = subprocess.run([*pip, "freeze"], capture_output=True, text=True, check=False).stdout.split()
    if not set(PACKAGES) <= set(there):
        print("cuda: installing the CUDA compiler and cuBLAS with pip, 0.8 GB", file=sys.stderr)
        done = subprocess.run([*pip, "install", "-q", *PACKAGES], stdout=sys.stderr, check=False)
        if done.returncode != 0:
            raise ToolkitError("NVIDIA's packages cannot be installed, see above: set CUDAToolkit_ROOT to a toolkit")
    lay_out(root)
    toolkit, missing = probe(Toolkit(root / "bin" / "nvcc", root))
    if missing:
        raise ToolkitError(f"the toolkit of NVIDIA's packages {missing}: set CUDAToolkit_ROOT to another one")
    return toolkit


def lay_out(root: Path) -> None:
    """Give the linker the names that it asks for: the packages hold only those that programs are started with."""
    for library in sorted((root / "lib").glob("lib*.so.*")):
        name = root / "lib" / re.sub(r"\.so\..*", ".so", library.name)
        if not name.exists():
            name.unlink(missing_ok=True)
            name.symlink_to(library.name)
    if not (root / "lib64").exists():
        (root / "lib64").symlink_to("lib")


def probe(toolkit: Toolkit) -> tuple[Toolkit, str]:
    """The toolkit with what CMake finds of it, and why it cannot be used, empty if it can."""
    if not toolkit.nvcc.is_file():
        return toolkit, "has no bin/nvcc"
    with tempfile.TemporaryDirectory(prefix="fitter-cuda-") as directory:
        command = [_cmake(), "-S", str(HERE), "-B", directory, *toolkit.options()]
        # Cards that are not here are no reason to fail.
        command.append("-DCMAKE_CUDA_ARCHITECTURES=89")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = frozenset(re.findall(r"^-- found: (\w+)", done.stdout, re.MULTILINE))
    libraries = re.search(r"^-- libraries: (\S.*)$", done.stdout, re.MULTILINE)
    toolkit = Toolkit(toolkit.nvcc, toolkit.root, found, libraries[1] if libraries else "")
    missing = [name for name in NEEDED if name not in found]
    if "toolkit" in found and missing:
        return toolkit, f"has no {' and no '.join(missing)}"
    return toolkit, f"does not compile here ({reason(done.stderr)})" if done.returncode != 0 or missing else ""


def _cmake() -> str:
    """CMake beside this Python, or on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        raise ToolkitError("there is no cmake: make install puts one into .venv, or pip install cmake")
    return cmake


def reason(said: str) -> str:
    """The line of CMake's errors that names the error."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"\berror\b", line) and not line.startswith("CMake Error")]
    return (named or lines or ["CMake says nothing"])[0]


def quoted(word: str) -> str:
    """A word of CMAKE_ARGS, which stands in a shell's single quotes there and alone elsewhere."""
    return word if re.fullmatch(r"[\w@%+=:,./-]+", word, re.ASCII) else f'"{word}"'


if __name__ == "__main__":
    sys.exit(main())
