"""The device of a process, and its memory.

What it is: `run.device` resolved to the device on which this process computes, its name, and the
settings of the two allocators that must be made before memory is used.
"""

from __future__ import annotations

import ctypes
import os

import torch

from titanlite.runtime.errors import ConfigError

# From glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def device_type(name: str) -> str:
    """Resolves `run.device` to cuda, mps or cpu.

    Raises ConfigError for a device that torch does not find.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    no_cuda = name == "cuda" and not torch.cuda.is_available()
    no_mps = name == "mps" and not torch.backends.mps.is_available()
    if no_cuda or no_mps:
        raise ConfigError(f"run.device = {name}: torch finds no such device; allowed: auto, cpu")
    return name


def device_name(device: torch.device) -> str:
    """Returns the readable name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return "Apple GPU"
    return "CPU"


def open_device(name: str) -> torch.device:
    """Opens the device of this process: the CPU, Apple's GPU, or the CUDA device whose index is the
    rank on the node.
    """
    kind = device_type(name)
    if kind != "cuda":
        keep_freed_memory()
        return torch.device(kind)
    index = int(os.environ.get("LOCAL_RANK", 0))
    # Segments that can grow waste less memory between tensors of changing sizes. CUDA reads the
    # variable at its first allocation.
    chosen = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if not chosen and segments_can_grow():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


class FabricInfo(ctypes.Structure):
    """The struct nvmlGpuFabricInfo_v2_t of nvml.h."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    )


def segments_can_grow() -> bool:
    """Whether torch can allocate in segments that can grow on every GPU of this host.

    It needs the driver's management library, NVML. And at its first allocation torch 2.13 asks NVML
    how GPUs are connected, and stops if the answer is an error, as on GPUs before Hopper
    (pytorch#186374, fixed by pytorch#186375). This asks the same question without starting CUDA,
    about all GPUs, since CUDA_VISIBLE_DEVICES may number them differently than NVML does.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in ("2.12", "2.13"):
        return True
    info = FabricInfo(version=ctypes.sizeof(FabricInfo) | 2 << 24)
    count = ctypes.c_uint()
    device = ctypes.c_void_p()
    errors = []
    try:
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return False
        for index in range(count.value):
            # Fails for a GPU that this process may not use
            if not nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
                errors.append(nvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info)))
    except AttributeError:  # an old driver, which has no such function
        return False
    return bool(errors) and not any(errors)


def keep_freed_memory() -> None:
    """Makes glibc keep the memory of freed tensors, unless a variable MALLOC_* or GLIBC_TUNABLES is
    set.

    By default it returns freed tensors of more than 32 MB to the system, and smaller ones often.
    The system clears each page before it gives it out again, which can take as long as the
    computation (docs/cpu.md). This holds for the main thread, which computes; other threads still
    return what is larger than 64 MB.
    """
    libc = ctypes.CDLL(None)
    chosen = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if not chosen and hasattr(libc, "mallopt"):
        # Large tensors also come from the heap, not from separate mappings
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never return the end of the heap
