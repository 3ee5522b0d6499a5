"""What `auto` resolves to: the dtype of computation, and whether blocks are compiled."""

from __future__ import annotations

import platform
import sys

import pytest
import torch

from titanlite.config.load import load_config
from titanlite.config.schema import CompileConfig, Config, TrainingConfig
from titanlite.parallel import auto
from titanlite.parallel.auto import cpu_has_bfloat16, resolve_auto
from titanlite.parallel.layout import AXES


@pytest.mark.parametrize(
    ("given", "dim", "device", "native", "expected"),
    [
        ("auto", 128, "cuda", False, torch.bfloat16),
        ("auto", 512, "cpu", True, torch.bfloat16),
        ("auto", 128, "cpu", True, torch.float32),  # its casts cost more than its products gain
        ("auto", 512, "cpu", False, torch.float32),
        ("float32", 512, "cpu", True, torch.float32),
        ("float32", 512, "cuda", True, torch.float32),
        ("bfloat16", 128, "cpu", False, torch.bfloat16),
    ],
)
def test_dtype_of_computation(monkeypatch, given, dim, device, native, expected):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native})
    config = Config(
        training=TrainingConfig(compute_dtype=given, reduce_dtype="float32"), compile=CompileConfig(enabled="false")
    )
    resolved = resolve_auto(config, dim, dict.fromkeys(AXES, 1), device).training.compute_dtype
    assert getattr(torch, resolved) == expected


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
        (["--parallel.cp_method=ring"], 2048, "cuda", 1, False),
    ],
)
def test_what_auto_compiles(gpu, options, dim, device, pp, expected):
    gpu()
    resolved = resolve_auto(load_config(["cpu_25m", *options]), dim, {"pp": pp, "cp": 2}, device)
    assert resolved.compile.enabled == ("true" if expected else "false")
