"""What `auto` resolves to: the dtype of computation, and whether blocks are compiled."""

from __future__ import annotations

import dataclasses
import platform
import sys

import pytest
import torch
from messages import refused

from titanlite.config.load import load_config
from titanlite.config.schema import Config, TrainingConfig
from titanlite.model.flavors import FLAVORS, LlamaConfig
from titanlite.parallel import auto
from titanlite.parallel.auto import cpu_has_bfloat16, decide_compile, resolve_dtype


def wide(dim: int) -> LlamaConfig:
    return dataclasses.replace(FLAVORS["debug"], dim=dim)


def compute_dtype(config: Config, dim: int, device: str) -> str:
    return resolve_dtype(config, wide(dim), torch.device(device)).training.compute_dtype


@pytest.mark.parametrize(
    ("given", "dim", "device", "native", "expected"),
    [
        ("auto", 128, "cuda", False, torch.bfloat16),
        ("auto", 128, (8, 0), False, torch.bfloat16),
        ("auto", 512, (7, 5), True, torch.float16),  # a T4 emulates bfloat16
        ("auto", 512, "cpu", True, torch.bfloat16),
        ("auto", 128, "cpu", True, torch.float32),  # its casts cost more than its products gain
        ("auto", 512, "cpu", False, torch.float32),
        ("float32", 512, "cpu", True, torch.float32),
        ("float32", 512, "cuda", True, torch.float32),
        ("bfloat16", 128, "cpu", False, torch.bfloat16),
    ],
)
def test_dtype_of_computation(monkeypatch, gpu, given, dim, device, native, expected):
    if device != "cpu":
        gpu(*([device] if isinstance(device, tuple) else []))
        device = "cuda"
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native})
    config = Config(training=TrainingConfig(compute_dtype=given, reduce_dtype="float32"))
    assert getattr(torch, compute_dtype(config, dim, device)) == expected


def test_a_gpu_without_bfloat16_emulates_it_where_another_dtype_is_bfloat16(gpu):
    gpu((7, 0))
    config = load_config(["debug", "--training.param_dtype=bfloat16"])
    assert compute_dtype(config, 128, "cuda") == "bfloat16"


@pytest.mark.parametrize(
    ("option", "word"),
    [
        ("optimizer.implementation=foreach", "implementation = foreach"),
        ("training.loss_scale=3", "loss_scale = 3"),
    ],
)
def test_the_rules_of_float16_hold_where_it_is_chosen(gpu, option, word):
    config = load_config(["debug", f"--{option}"])
    gpu((7, 5))
    with refused("compute_dtype = auto is float16 on this GPU", word):
        compute_dtype(config, 128, "cuda")
    gpu((8, 0))
    assert compute_dtype(config, 128, "cuda") == "bfloat16"


@pytest.mark.parametrize("supported", [True, False])
def test_on_arm_torch_is_asked(monkeypatch, supported):
    """Not the CPU, which may have instructions that torch was built without."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})
    monkeypatch.setattr(auto, "mkldnn_has_bfloat16", lambda: supported)
    assert cpu_has_bfloat16() == supported


@pytest.mark.parametrize(
    ("options", "dim", "device", "pp", "expected"),
    [
        ([], 128, "cuda", 1, True),
        ([], 128, "cpu", 1, False),
        ([], 512, "cpu", 1, sys.platform == "linux"),
        (["--compile.enabled"], 128, "cpu", 1, True),
        (["--compile.enabled=false"], 2048, "cuda", 1, False),
        (["--recompute.mode=memory_budget"], 128, "cpu", 1, True),
        (["--parallel.pp_schedule=ZBVZeroBubble"], 2048, "cuda", 2, False),
        (["--parallel.pp_schedule=ZBVZeroBubble"], 512, "cpu", 2, False),
        (["--parallel.pp_schedule=ZBVZeroBubble"], 2048, "cuda", 1, True),
        (["--parallel.pp_schedule=Interleaved1F1B"], 2048, "cuda", 2, True),
    ],
)
def test_what_auto_compiles(gpu, options, dim, device, pp, expected):
    gpu()
    config = load_config(["cpu_25m", *options])
    degrees = {"pp": pp, "cp": 2}
    assert decide_compile(config, wide(dim), degrees, torch.device(device)) == expected
