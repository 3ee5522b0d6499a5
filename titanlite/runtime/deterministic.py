"""`debug.deterministic`: makes two runs of one layout on the same devices bit-equal.

What it is: torch then uses deterministic implementations, and raises an error for an operator that
has none (torch.use_deterministic_algorithms). Some operators on GPUs add with atomic instructions,
in the order in which their threads arrive: the backward of attention, `index_put`. cuBLAS may
divide a product differently if it gets another workspace, so that is fixed. cuDNN chooses kernels
by their measured speed, which is turned off; inductor does too, and
torch.use_deterministic_algorithms turns it off (read in torch 2.13; 2.11 has not been checked).
Attention: torch then skips cuDNN's kernel and runs the deterministic backward of the others; the
Triton kernels of FlexAttention use no atomics. On a CPU all operators that a run uses are
deterministic already, for the same number of threads. Not covered: another layout, batch division,
GPU or version of torch, all of which change the order of sums.
Why it is here: to show that a difference between two runs comes from a change, and not from chance.
What it costs: on a GPU, the kernels are slower than those that are not used; not measured. torch
also fills memory that it allocates without a value, so that a read of such memory is noticed.
"""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger("titanlite")
WORKSPACES = (":4096:8", ":16:8")  # the values for which cuBLAS documents reproducible results


def use_deterministic_operators() -> None:
    """Sets deterministic operators for this process.

    Call it before anything runs on the GPU, since cuBLAS reads the environment once.
    """
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in WORKSPACES:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACES[0]
    # Errors, not warnings: some kernels check which of the two is set
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    logger.warning("debug.deterministic = true: on GPUs, slower kernels are used")
