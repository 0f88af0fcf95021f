"""A GPU that the system lists and llama.cpp does not use, from the files that the system has for it."""

from __future__ import annotations

from pathlib import Path

from fitter.llama.types import DeviceInfo
from fitter.machine.host import unused_gpus, vendors
from tests.support.cases import named_cases

NVIDIA, AMD, INTEL = "0x10de", "0x1002", "0x8086"
VGA, THREE_D, NETWORK = "0x030000", "0x030200", "0x020000"


def pci(place: str, kind: str, vendor: str, device: str = "0x2684") -> dict[str, str]:
    folder = f"sys/bus/pci/devices/0000:{place}"
    return {f"{folder}/class": f"{kind}\n", f"{folder}/vendor": f"{vendor}\n", f"{folder}/device": f"{device}\n"}


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@named_cases(
    ("nothing", {}, ()),
    ("a card", pci("01:00.0", VGA, NVIDIA), ("NVIDIA",)),
    ("a card without a connector", pci("3b:00.0", THREE_D, NVIDIA), ("NVIDIA",)),
    ("two vendors, the faster first", pci("c5:00.0", VGA, AMD) | pci("01:00.0", VGA, NVIDIA), ("NVIDIA", "AMD")),
    ("graphics inside an AMD processor", pci("c5:00.0", VGA, AMD), ("AMD",)),
    ("an Arc", pci("03:00.0", VGA, INTEL), ("Intel",)),
    ("graphics inside an Intel processor", pci("00:02.0", VGA, INTEL), ()),
    ("a network card of the same vendor", pci("03:00.0", NETWORK, NVIDIA), ()),
    ("ASPEED", pci("03:00.0", VGA, "0x1a03"), ()),
    ("Matrox", pci("03:00.0", VGA, "0x102b"), ()),
    ("virtio", pci("00:01.0", VGA, "0x1af4"), ()),
    ("QXL", pci("00:02.0", VGA, "0x1b36"), ()),
    ("AMD's graphics of a server board", pci("03:00.0", VGA, AMD, "0x515e"), ()),
    ("a device without files", {"sys/bus/pci/devices/0000:01:00.0/class": ""}, ()),
    ("NVIDIA's driver without a bus", {"proc/driver/nvidia/gpus/0000:01:00.0/information": ""}, ("NVIDIA",)),
    ("NVIDIA's driver without a card", {"proc/driver/nvidia/version": ""}, ()),
    ("a Jetson", {"dev/nvhost-gpu": ""}, ("NVIDIA",)),
    ("AMD's driver", {"dev/kfd": "", "dev/dri/renderD128": ""}, ("AMD",)),
    ("a graphics node of nobody", {"dev/dri/renderD128": ""}, ()),
    ("WSL with NVIDIA's driver", {"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""}, ("NVIDIA",)),
    ("WSL with another", {"dev/dxg": "", "usr/lib/wsl/lib/libdxcore.so": ""}, ()),
    ("a library of WSL elsewhere", {"usr/lib/wsl/lib/libcuda.so.1": ""}, ()),
)
def test_the_gpus_that_a_machine_has(files: dict[str, str], expected: tuple[str, ...], tmp_path: Path) -> None:
    assert vendors(machine(tmp_path, files)) == expected


def device(kind: str) -> DeviceInfo:
    return DeviceInfo("X0", "", kind, "X", 2**30, 2**30)


NO_BACKEND = (
    "this machine has a GPU of {}, but this llama.cpp has no backend for it: build it anew with "
    'CMAKE_ARGS="-DGGML_{}=on" pip install --force-reinstall --no-cache-dir llama-cpp-python, or name another one with '
    "--llama-cpp"
)
NO_DEVICE = (
    "this machine has a GPU of NVIDIA, but llama.cpp's backend cuda finds no device: look whether its driver works "
    "(nvidia-smi), and whether a variable such as CUDA_VISIBLE_DEVICES hides it"
)


@named_cases(
    ("no backend", NVIDIA, (), ("cpu", "rpc"), NO_BACKEND.format("NVIDIA", "CUDA")),
    ("no backend for this vendor", AMD, (), ("cpu", "cuda"), NO_BACKEND.format("AMD", "HIP")),
    ("an Intel card", INTEL, (), ("cpu",), NO_BACKEND.format("Intel", "VULKAN")),
    ("an accelerator that is none", NVIDIA, ("accel",), ("cpu", "blas"), NO_BACKEND.format("NVIDIA", "CUDA")),
    ("a backend without a device", NVIDIA, (), ("cpu", "cuda"), NO_DEVICE),
    ("a device", NVIDIA, ("gpu",), ("cpu", "cuda"), ""),
    ("an integrated device", AMD, ("igpu",), ("cpu", "vulkan"), ""),
    ("no card", "0x1a03", (), ("cpu",), ""),
)
def test_what_is_said_of_a_gpu_without_a_device(
    vendor: str, kinds: tuple[str, ...], backends: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    root = machine(tmp_path, pci("01:00.0", VGA, vendor))
    assert unused_gpus([device(kind) for kind in kinds], lambda: backends, root) == said


def test_a_build_is_not_looked_at_without_need(tmp_path: Path) -> None:
    def backends() -> tuple[str, ...]:
        raise AssertionError

    assert unused_gpus([], backends, tmp_path) == ""
    assert unused_gpus([device("gpu")], backends, machine(tmp_path, pci("01:00.0", VGA, NVIDIA))) == ""
