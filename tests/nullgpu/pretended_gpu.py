"""Builds the library that pretends to be a GPU, and runs commands on it.

    python tests/nullgpu/pretended_gpu.py [--devices 2] [--gib 79.1] [--log FILE] COMMAND...

What it is: g++ over the C++ files beside this one, with the headers of CUDA's runtime from the
wheels that a CUDA build of torch installs. What the library is and cannot show: see runtime.cpp.
Why it is here: tests and benchmarks/pretended_memory.py start processes on it. The library must be
loaded before torch's, so it is for child processes only.
What it costs: three seconds of a compiler, once per folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
# Names by which torch and Triton load CUDA's driver and NVML
NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")


def why_not() -> str:
    """What is missing to build it; empty if nothing is."""
    import torch

    if torch.version.cuda is None:
        return "this torch has no CUDA"
    if torch.cuda.is_available():
        return "there is a GPU"
    if not shutil.which("g++"):
        return "no g++"
    return "" if cuda_headers() else "no headers of CUDA's runtime in the wheels of this torch"


def cuda_headers() -> list[Path]:
    """The folders with cuda.h and cuda_runtime_api.h."""
    import torch

    packages = Path(torch.__file__).parents[1]
    found = [*packages.glob("nvidia/cu*/include"), *packages.glob("nvidia/cuda_runtime/include")]
    runtime = [folder for folder in found if (folder / "cuda_runtime_api.h").exists()]
    driver = [*runtime, packages / "triton/backends/nvidia/include"]
    has_driver = any((folder / "cuda.h").exists() for folder in driver)
    return driver if runtime and has_driver else []


def build(folder: Path) -> Path:
    """Compiles the library into `folder`, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    library, other = (folder / name for name in NAMES)
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-shared", "-fPIC"]
    command += [f"-isystem{include}" for include in cuda_headers()]
    command += [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    subprocess.run([*command, "-o", str(library), "-ldl"], check=True)
    if not other.exists():
        other.symlink_to(library.name)
    return library


def environment(
    library: Path, devices: int = 1, gib: float = 79.1, log: Path | None = None
) -> dict[str, str]:
    """The environment of a process that sees this many devices, each with this much memory."""
    folder = str(library.parent)
    found = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": folder,
        "TRITON_LIBCUDA_PATH": folder,
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # cuDNN asks a driver that is not pretended
        "PRETENDED_GPUS": str(devices),
        "PRETENDED_GIB": str(gib),
    }
    return found | ({"PRETENDED_LOG": str(log)} if log else {})


def main() -> int:
    """Runs the command, and returns its exit code."""
    parser = argparse.ArgumentParser(description="Run a command on a GPU that computes nothing.")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--gib", type=float, default=79.1, help="memory of each")
    parser.add_argument(
        "--log", type=Path, help="file to which launches, waits, copies and collectives are added"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("expected a command")
    if missing := why_not():
        parser.error(missing)
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(build(Path(folder)), options.devices, options.gib, options.log)
        return subprocess.run(options.command, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
