"""A step on a CUDA device that does not exist: every operation has its tensors there, and the host reads none of them.

Tensors are torch's fake ones, which have device, dtype and shape and no numbers: an operation on tensors of two devices
is an error, and so is reading a number, for which the host would wait. Autograd's engine needs the real device, so the
backward is not run, and gradients are made by hand.
"""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from model_builder import SMALL
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from titanlite.config.schema import (
    Config,
    Float8Config,
    RecomputeConfig,
    TrainingConfig,
)
from titanlite.distributed.mesh import Mesh
from titanlite.model.llama import Llama
from titanlite.optim.clip import clip_grad_norm
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.layout import AXES
from titanlite.parallel.parallelize import split_and_parallelize
from titanlite.parallel.stages import Stages

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""
GPU = torch.device("cuda", 0)
TRAINING = TrainingConfig(seq_len=16, local_batch_size=2, compute_dtype="bfloat16")

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA's own"),
    pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler"),
]


@pytest.fixture(scope="module")
def guard(tmp_path_factory) -> Path:
    """A library that lets a torch without CUDA switch to a CUDA device, which does nothing."""
    folder, package = tmp_path_factory.mktemp("guard"), Path(torch.__file__).parent
    (folder / "guard.cpp").write_text(GUARD)
    options = ["-shared", "-fPIC", "-std=c++20", f"-I{package}/include", f"-L{package}/lib"]
    command = ["g++", *options, str(folder / "guard.cpp"), "-o", str(folder / "guard.so"), "-lc10"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "guard.so"


def to_gpu(model: nn.Module) -> None:
    """Gives parameters that are on the meta device memory on the GPU, fake memory."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=GPU))


def one_step(guard: Path, config: Config, llama) -> None:
    """As in train.py, up to the backward, which fills `grad`. Then a validation."""
    ctypes.CDLL(str(guard))
    config = dataclasses.replace(config, compile=dataclasses.replace(config.compile, enabled="false"))
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1), 60)
    mesh.device_type = "cuda"
    with torch.device("meta"):
        model = Llama(llama, config.training.seq_len)
    parts = split_and_parallelize(model, config, mesh)
    with FakeTensorMode(allow_non_fake_inputs=True):
        to_gpu(parts[0])
        parts[0].reset_rope(GPU)
        stages, optimizer = Stages(parts, config, mesh, GPU), build_optimizer(parts, config.optimizer)
        for _ in range(2):
            tokens = torch.zeros(2, config.training.seq_len, dtype=torch.long, device=GPU)
            total = mesh.sum_counts(torch.ones((), dtype=torch.long, device=GPU))
            loss = stages.runner.loss(parts[0](tokens), tokens) / total
            for parameter in parts[0].parameters():
                parameter.grad = torch.empty_like(parameter)
            norm = clip_grad_norm(parts, config.training.max_norm, GPU)
            optimizer.step()
            optimizer.zero_grad()
            moments = [state["exp_avg"] for state in optimizer.state.values()]
            assert {value.device for value in (loss, norm, stages.evaluate(tokens, tokens), *moments)} == {GPU}
            assert loss.dtype == norm.dtype == torch.float32
            with pytest.raises(DataDependentOutputException):
                float(loss)


@pytest.mark.parametrize(
    ("sections", "llama"),
    [
        ([], {}),
        ([dataclasses.replace(TRAINING, compute_dtype="float32")], {}),
        ([], {"tied_embeddings": True}),
        ([RecomputeConfig(mode="full")], {}),
        ([RecomputeConfig(mode="selective")], {}),
        ([Float8Config(enabled=True, emulate=True)], {}),
    ],
    ids=["bf16", "fp32", "tied", "recomputed", "selective", "float8"],
)
def test_a_step_stays_on_the_gpu(pool, guard, sections, llama):
    given = {"training": TRAINING} | {type(one).__name__.removesuffix("Config").lower(): one for one in sections}
    pool.run(1, one_step, guard, Config(**given), dataclasses.replace(SMALL, **llama))


def a_mistake(guard: Path) -> None:
    ctypes.CDLL(str(guard))
    with FakeTensorMode(), pytest.raises(RuntimeError, match=r"[Dd]evice"):
        torch.ones(3, device=GPU)[1:] + torch.ones(2)


def test_tensors_of_two_devices_are_an_error(pool, guard):
    """What the test above relies on."""
    pool.run(1, a_mistake, guard)
