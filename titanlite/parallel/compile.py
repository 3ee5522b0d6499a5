"""torch.compile, one transformer block at a time (PyTorch 2, ASPLOS 2024).

What it is: the block's forward becomes one compiled graph. All blocks have the same code, so it is compiled once
and reused: a short wait however deep the model. fully_shard's communication stays outside of the graph, in hooks;
that of tensor and context parallel is inside, where the compiler can move it. The loss can be compiled too.

It is the default on CUDA, and on CPU for models that are not small: of their steps little is left beside the matrix
products, which it leaves as they are, but the runs are long.

What it costs: seconds at the first step, for each kind of block (context parallel processes have masks of their own,
so each compiles its own). What it saves: reading and writing of intermediate results that are fused away.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import torch
from torch import nn


def what_inductor_lacks(device_type: str) -> str:
    """What the compiler needs on this device and does not find, in words; empty if nothing.

    It writes programs that Python calls: C++ for CPUs, and on GPUs kernels that a small C program starts.
    """
    if device_type == "cuda" and torch.cuda.get_device_capability() < (7, 0):
        return "the GPU's compute capability is below 7.0"
    variable, usual = ("CC", ("gcc", "clang")) if device_type == "cuda" else ("CXX", ("g++", "clang++"))
    names = [os.environ[variable]] if variable in os.environ else usual
    if not any(map(shutil.which, names)):
        return f"no compiler found ({' or '.join(names)}; {variable} can name another)"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return "" if headers.exists() else f"no {headers} (Debian and Ubuntu: apt install python3-dev)"


def apply_compile(block: nn.Module, backend: str) -> None:
    """Replaces the block's forward by its compiled version; `fullgraph` makes a graph break an error."""
    block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
