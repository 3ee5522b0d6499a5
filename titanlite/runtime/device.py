"""The device of a process, its memory, and which of its kernels torch may choose.

What it is: `run.device` resolved to the device on which this process computes, its name, and what
must be set before memory is used or anything is compiled: the two allocators, and the keys
`debug.deterministic` and `debug.cudnn_attention`.
"""

from __future__ import annotations

import ctypes
import logging
import os

import torch
import torch.compiler.config as compiler_config

from titanlite.runtime.errors import ConfigError

logger = logging.getLogger("titanlite")

# From glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4

# The values for which cuBLAS documents reproducible results
REPRODUCIBLE_WORKSPACES = (":4096:8", ":16:8")
WITHOUT_CUDNN = "without cuDNN's attention"


def device_type(name: str) -> str:
    """Resolves `run.device` to cuda or cpu.

    Raises ConfigError for a device that torch does not find.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"run.device = {name}: torch finds no such device; allowed: auto, cpu")
    return name


def device_name(device: torch.device) -> str:
    """Returns the readable name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU"


def open_device(name: str) -> torch.device:
    """Opens the device of this process: the CPU, or the CUDA device whose index is the rank on the
    node.
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


def use_deterministic_operators() -> None:
    """`debug.deterministic`: makes two runs of one layout on the same devices bit-equal.

    Call it before anything runs on the GPU, since cuBLAS reads the environment once.

    torch then uses deterministic implementations, and raises an error for an operator that has none
    (torch.use_deterministic_algorithms). Some operators on GPUs add with atomic instructions, in
    the order in which their threads arrive: the backward of attention, `index_put`. cuBLAS may
    divide a product differently if it gets another workspace, so that is fixed. cuDNN chooses
    kernels by their measured speed, which is turned off; inductor does too, and
    torch.use_deterministic_algorithms turns it off (read in torch 2.13; 2.11 has not been checked).
    Attention: torch then skips cuDNN's kernel and runs the deterministic backward of the others;
    the Triton kernels of FlexAttention use no atomics. On a CPU all operators that a run uses are
    deterministic already, if the number of threads is equal. Not covered: another layout, batch
    division, GPU or version of torch, all of which change the order of sums.

    What it costs: on a GPU, the kernels are slower than those that are not used; not measured.
    torch also fills memory that it allocates without a value, so that a read of it is noticed.
    """
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in REPRODUCIBLE_WORKSPACES:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = REPRODUCIBLE_WORKSPACES[0]
    # Errors, not warnings: some kernels check which of the two is set
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    logger.warning("debug.deterministic = true: on GPUs, slower kernels are used")


def choose_attention(cudnn: bool) -> None:
    """`debug.cudnn_attention`: with false, attention without cuDNN's kernels.

    Call it before anything is compiled. torch then chooses among its other kernels, FlashAttention
    first. cuDNN is torch's first choice on Hopper and Blackwell data-centre GPUs, and releases of
    it have computed some lengths wrongly (pytorch#169849): the key shows whether it is the cause of
    a loss that differs. The difference in speed has not been measured.
    """
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    # The choice is compiled into a block, and torch's caches of compiled code do not record it:
    # without a mark in their key a run could use code with the other setting
    if not cudnn and WITHOUT_CUDNN not in compiler_config.cache_key_tag:
        compiler_config.cache_key_tag += WITHOUT_CUDNN
