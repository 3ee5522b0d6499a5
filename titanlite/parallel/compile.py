"""torch.compile, one transformer block at a time (PyTorch 2, ASPLOS 2024).

What it is: the block's forward becomes one compiled graph, with experts if a graph can have them.
All blocks have the same code, so it is compiled once and reused: the compile time does not grow
with the depth. FSDP's communication stays outside of the graph, in hooks; that of tensor and
context parallel is inside, where the compiler can move it. The loss can be compiled too.
Why it is here: fused operators do not write their intermediate results to memory and read them
again.
What it costs: seconds at the first step for each kind of block (context parallel ranks have
different masks, so each rank compiles its own version). On a CPU the gain is small for a large
model, because most of its step is matrix products, which compiling does not change. Compiling is
still the default there from width 256 on, since such runs are long.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from titanlite.config.schema import Config, RecomputeConfig
from titanlite.distributed.agreement import gather
from titanlite.distributed.torch_private import (
    OVERLAP_TENSOR_PARALLEL,
    find_vector_instructions,
    has_triton_package,
    set_activation_memory_budget,
)
from titanlite.model.flavors import LlamaConfig
from titanlite.model.moe import multiply
from titanlite.model.wrappable import Wrappable
from titanlite.runtime import interpreter
from titanlite.runtime.errors import ConfigError

if TYPE_CHECKING:
    from titanlite.model.llama import Llama

# Variants of a block's code, which all blocks share: with and without gradients, dropout and
# adapters, which only some blocks may have, and a first block whose input needs no gradient
VARIANTS = 32


@functools.cache
def missing_for_inductor(device_type: str) -> str:
    """Describes what inductor needs on this device and does not find; empty if it can compile.

    Inductor generates C++ for CPUs. For GPUs it generates Triton kernels, which a small compiled C
    program starts.
    """
    if device_type == "cuda" and torch.cuda.get_device_capability() < (7, 0):
        return "the GPU's compute capability is below 7.0"
    if device_type == "cuda" and not has_triton_package():
        return "no Triton (a package that torch's CUDA builds install)"
    if device_type == "cuda":
        variable = "CC"
        language = "c"
        names = ["gcc", "clang"]
    else:
        variable = "CXX"
        language = "c++"
        names = ["g++"]
    if variable in os.environ:
        program = shutil.which(os.environ[variable])
        if program is None:
            return f"{variable} = {os.environ[variable]!r} is not a program"
    else:
        program = next(filter(None, map(shutil.which, names)), None)
        if program is None:
            return f"no {' or '.join(names)}"
    command = [program, "-x", language, "-fsyntax-only", "-I", sysconfig.get_path("include"), "-"]
    done = subprocess.run(command, input=b"#include <Python.h>\n", capture_output=True, check=False)
    if done.returncode:
        return f"{program} finds no Python.h (Debian and Ubuntu: apt install python3-dev)"
    if device_type == "cpu":
        problem = path_problem(program)
        if problem:
            return problem
    os.environ.update(interpreter.environment())  # inductor starts `python -c` processes
    if device_type == "cpu" and not interpreter.HAS_SAFE_PATH:
        interpreter.in_root_folder(find_vector_instructions)
    return ""


def path_problem(program: str) -> str:
    """Describes a path that inductor writes into the compiler's command line without quoting it,
    and that is not one word there; empty if all are.

    Triton needs none of this: it starts the compiler without a command line.
    """
    paths = {
        "the compiler": program,
        "torch": str(Path(torch.__file__).parent),
        "inductor's cache folder (TORCHINDUCTOR_CACHE_DIR, or TMPDIR)": os.path.abspath(
            os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
        ),
        "Python's library folder": sysconfig.get_config_var("LIBDIR") or "",
    }
    for name, path in paths.items():
        if set(path) & set(" \t\r\n'\"\\"):
            return f"{name} is {path!r}, and torch.compile cannot use a path with spaces or quotes"
    return ""


def missing_compiler(config: Config, device_type: str) -> str:
    """Describes what inductor lacks on some rank; empty if it can compile.

    All ranks call it together. Raises ConfigError on all ranks if a setting requires a compiler.
    """
    missing = first_message(missing_for_inductor(device_type))
    if not missing:
        return ""
    required = ""
    if config.compile.enabled == "true":
        required = "compile.enabled = true"
        alternative = "compile.enabled = false"
    elif config.recompute.mode == "memory_budget":
        required = "recompute.mode = memory_budget"
        alternative = "another recompute.mode"
    elif config.compile.loss == "true":
        required = "compile.loss = true"
        alternative = "compile.loss = false"
    if required:
        raise ConfigError(f"{required} needs a compiler: {missing}; expected one, or {alternative}")
    return missing


def compiles_experts(llama: LlamaConfig, dtype: torch.dtype) -> bool:
    """Whether a graph can have the products of this model's experts.

    torch 2.13 computes them in more dtypes than it compiles: on the meta device it takes what it
    compiles.
    """
    meta = functools.partial(torch.empty, dtype=dtype, device="meta")
    ends = torch.empty(llama.num_experts, dtype=torch.int32, device="meta")
    weight = meta(llama.num_experts, llama.expert_ffn_dim, llama.dim)
    try:
        multiply(meta(1, llama.dim), weight, ends)
    except RuntimeError:
        return False
    return True


def apply_compile(
    model: Llama,
    backend: str,
    recompute: RecomputeConfig,
    async_tp: bool = False,
    experts: bool = False,
) -> None:
    """Compiles the computation of each block.

    `experts`: whether a graph can have the experts of a block; else only attention is compiled.
    """
    options = OVERLAP_TENSOR_PARALLEL if async_tp else None  # options of inductor
    torch.compiler.config.recompile_limit = VARIANTS  # with `fullgraph` one more is an error
    set_activation_memory_budget(recompute.budget if recompute.mode == "memory_budget" else 1.0)
    for block in model.layers.values():
        compiled: nn.Module = block
        if model.config.num_experts and not experts:
            compiled = block.get_submodule("attention")
        assert isinstance(compiled, Wrappable)
        # fullgraph: a graph break is an error
        compiled.wrap(torch.compile, backend=backend, options=options, fullgraph=True)


def first_message(text: str) -> str:
    """Finds the first rank whose text is not empty; returns rank and text, or an empty text."""
    everyone = gather(text)
    if len(everyone) == 1:
        return text
    return next((f"rank {rank}: {message}" for rank, message in enumerate(everyone) if message), "")
