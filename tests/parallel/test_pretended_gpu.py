"""A step on a GPU that does not exist: every operation has its tensors there, and the host reads
none of them.

Tensors are torch's fake ones, which have device, dtype and shape and no numbers: an operation on
tensors of two devices is an error, and so is reading a number, for which the host would wait.
Autograd's engine needs the real device, so the backward is not run, and gradients are made by hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model_builder import SMALL
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from titanlite.config.schema import (
    Config,
    DataConfig,
    Float8Config,
    LossConfig,
    MetricsConfig,
    OptimizerConfig,
    RecomputeConfig,
    StabilityConfig,
    TrainingConfig,
)
from titanlite.data.rows import Batch
from titanlite.data.to_device import to_device
from titanlite.distributed.mesh import Mesh
from titanlite.model import block_mask
from titanlite.model.llama import Llama
from titanlite.optim.clip import clip_gradients
from titanlite.optim.loss_scale import LossScale
from titanlite.optim.optimizer import build_optimizer
from titanlite.optim.stability import Guard
from titanlite.parallel import parallelize
from titanlite.parallel.parallelize import split_and_parallelize
from titanlite.parallel.pipeline_parallel import sum_shared_gradients
from titanlite.parallel.stages import Stages
from titanlite.probes.activations import Activations
from titanlite.probes.noise_scale import NoiseScale
from titanlite.rules.degrees import AXES

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""
GPU = torch.device("cuda", 0)
TRAINING = TrainingConfig(seq_len=16, local_batch_size=2, compute_dtype="bfloat16")

pytestmark = [
    pytest.mark.skipif(
        torch.version.cuda is not None or sys.platform == "darwin", reason="this torch has its own"
    ),
    pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler"),
]


@pytest.fixture(scope="module")
def guard(tmp_path_factory) -> Path:
    """A library that lets a torch without GPUs switch to one, which does nothing."""
    folder, package = tmp_path_factory.mktemp("guard"), Path(torch.__file__).parent
    (folder / "guard.cpp").write_text(GUARD)
    options = ["-shared", "-fPIC", "-std=c++20", f"-I{package}/include", f"-L{package}/lib"]
    command = ["g++", *options, str(folder / "guard.cpp"), "-o", str(folder / "guard.so"), "-lc10"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "guard.so"


def to_gpu(model: nn.Module, device: torch.device) -> None:
    """Gives parameters that are on the meta device memory on the GPU, fake memory."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device))


def in_place_of_flex_attention(q, k, v, block_mask, enable_gqa):
    """That needs a real device. Its mask is made on the pretended one."""
    assert block_mask.kv_indices.device == block_mask.q_indices.device == q.device == GPU
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa)


def one_step(guard: Path, config: Config, llama) -> None:
    """As in train.py, up to the backward, which fills `grad`. Then a validation."""
    ctypes.CDLL(str(guard))
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1), 60)
    mesh.device_type = GPU.type
    parallelize.missing_for_inductor = lambda device_type: ""
    block_mask.compiled_flex_attention = lambda: in_place_of_flex_attention
    with torch.device("meta"):
        model = Llama(llama, config.training.seq_len)
    parts = split_and_parallelize(model, config, mesh, compiled=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        to_gpu(parts[0], GPU)
        parts[0].reset_rope(GPU)
        stages, optimizer = (
            Stages(parts, config, mesh, GPU),
            build_optimizer(parts, config.optimizer),
        )
        # Parts that are off are built too
        scaler = LossScale(TrainingConfig(compute_dtype="float32"), optimizer, GPU)
        progress, metrics = SimpleNamespace(step=0), SimpleNamespace(device=GPU)
        NoiseScale(MetricsConfig(), stages, scaler, progress)
        Activations(0, stages, metrics)
        Guard(StabilityConfig(), optimizer, scaler, mesh, GPU)
        for step in range(2):
            tokens = torch.zeros(2, config.training.seq_len, dtype=torch.long, device=GPU)
            batch = Batch(tokens, tokens, tokens if config.data.document_mask else None)
            total = mesh.sum_counts(torch.ones((), dtype=torch.long, device=GPU))
            with stages.inputs(batch) as (_, _, packing):
                loss = stages.runner.loss(parts[0](tokens, **packing), tokens) / total
            for parameter in parts[0].parameters():
                parameter.grad = torch.empty_like(parameter)
            factor = config.optimizer.agc_factor if config.optimizer.clip == "agc" else 0.0
            norm = clip_gradients(parts, config.training.max_norm, GPU, agc_factor=factor)
            if step == 1:
                optimizer.found_inf = torch.ones((), device=GPU)
            optimizer.step()
            optimizer.zero_grad()
            moments = [state["exp_avg"] for state in optimizer.state.values()]
            assert {value.device for value in (loss, norm, stages.evaluate(batch), *moments)} == {
                GPU
            }
            assert loss.dtype == norm.dtype == torch.float32
            with pytest.raises(DataDependentOutputException):
                float(loss)


@pytest.mark.parametrize(
    ("sections", "llama"),
    [
        ([], {}),
        pytest.param(
            [dataclasses.replace(TRAINING, compute_dtype="float32")], {}, marks=pytest.mark.slow
        ),
        pytest.param([], {"tied_embeddings": True}, marks=pytest.mark.slow),
        pytest.param([RecomputeConfig(mode="full")], {}, marks=pytest.mark.slow),
        ([RecomputeConfig(mode="selective")], {}),
        ([Float8Config(enabled=True, emulate=True)], {}),
        ([OptimizerConfig("muon", clip="agc"), LossConfig(z_loss=1e-4)], {}),
        pytest.param([DataConfig(document_mask=True)], {}, marks=pytest.mark.slow),
        # Heads of 16 numbers, which FlexAttention supports
        ([DataConfig(document_mask=True)], {"dim": 64}),
    ],
    ids=[
        "bf16",
        "fp32",
        "tied",
        "recomputed",
        "selective",
        "float8",
        "muon",
        "documents",
        "blocks",
    ],
)
def test_a_step_stays_on_the_gpu(pool, guard, sections, llama):
    given = {"training": TRAINING} | {
        type(one).__name__.removesuffix("Config").lower(): one for one in sections
    }
    pool.run(1, one_step, guard, Config(**given), dataclasses.replace(SMALL, **llama))


def sum_an_offloaded_gradient(guard: Path) -> tuple[set[str], str]:
    """The devices of what is sent and received, and of the result, for a gradient in CPU memory."""
    ctypes.CDLL(str(guard))
    sent: list[str] = []
    with FakeTensorMode(), contextlib.ExitStack() as stack:
        replaced = {"P2POp": lambda operation, tensor, *rest: sent.append(tensor.device.type)}
        replaced |= {
            "batch_isend_irecv": lambda exchange: [],
            "get_global_rank": lambda group, rank: rank,
        }
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(dist, name, function))
        mesh = mock.Mock(device_type="cuda")
        mesh.size.return_value, mesh.get_local_rank.return_value = 2, 0
        gradient = torch.ones(3)
        sum_shared_gradients([mock.Mock(grad=mock.Mock(to_local=lambda: gradient))], mesh)
        return set(sent), gradient.device.type


def test_an_offloaded_gradient_of_a_tied_embedding_is_sent_from_the_gpu(pool, guard):
    """The axis of a pipeline has NCCL only, which sends no CPU tensor."""
    assert pool.run(1, sum_an_offloaded_gradient, guard) == [({"cuda"}, "cpu")]


def withhold_an_offloaded_update(guard: Path) -> None:
    """In float16, with parameters in CPU memory: by the loss scale, then by the guard."""
    ctypes.CDLL(str(guard))
    with FakeTensorMode():
        model = nn.Linear(3, 3)
        optimizer = build_optimizer([model], OptimizerConfig())
        scale = LossScale(TrainingConfig(compute_dtype="float16"), optimizer, GPU)
        mesh = mock.Mock(degrees={"tp": 1})
        empty = torch.empty
        with mock.patch.object(
            torch, "empty", lambda *size, pin_memory=False, **keys: empty(*size, **keys)
        ):
            bad_steps = Guard(StabilityConfig("skip"), optimizer, scale, mesh, GPU)
        for step in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            scale.unscale()
            norm = torch.ones((), device=GPU)
            scale.judge(norm)
            assert optimizer.found_inf.device.type == "cpu"
            with mock.patch.object(bad_steps, "send") as send:
                bad_steps.judge(step, range(2), torch.ones((), device=GPU), norm, norm)
            assert send.call_args.args[3].device == GPU
            assert optimizer.found_inf.device.type == "cpu"
            optimizer.step()
            with pytest.raises(DataDependentOutputException):
                scale.columns()  # reads, from tensors of one device


def test_offloaded_parameters_get_the_decision_of_the_gpu(pool, guard):
    """An optimizer would copy it too, but without waiting for the copy, and read it at once."""
    pool.run(1, withhold_an_offloaded_update, guard)


def a_mistake(guard: Path) -> None:
    ctypes.CDLL(str(guard))
    with FakeTensorMode(), pytest.raises(RuntimeError, match=r"[Dd]evice"):
        torch.ones(3, device=GPU)[1:] + torch.ones(2)


def test_tensors_of_two_devices_are_an_error(pool, guard):
    """What the test above relies on."""
    pool.run(1, a_mistake, guard)


def copy_twice(guard: Path) -> bool:
    ctypes.CDLL(str(guard))
    with FakeTensorMode():
        there = torch.ones(3, device=GPU)
        return to_device(there, GPU) is there


def test_a_tensor_that_is_on_the_gpu_is_not_copied_there(pool, guard):
    assert pool.run(1, copy_twice, guard) == [True]
