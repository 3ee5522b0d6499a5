"""Compiled blocks: the same gradients, one graph for all blocks, and what the compiler needs."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import assert_mentions, refused
from model_builder import assert_same, gradients, small_model

from titanlite.config.load import load_config
from titanlite.config.schema import ConfigError, RecomputeConfig
from titanlite.distributed.mesh import Mesh
from titanlite.parallel.activation_checkpoint import apply_ac
from titanlite.parallel.compile import apply_compile, missing_for_inductor
from titanlite.parallel.layout import AXES
from titanlite.parallel.parallelize import reason_blocks_not_compiled


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_compiled_blocks_give_the_same_gradients_and_compile_once(mode):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected, model = gradients(small_model()), small_model()
    for index, block in enumerate(model.layers.values()):
        if mode != "full":
            apply_ac(block, RecomputeConfig(mode=mode), index)
        apply_compile(block, "aot_eager")
        if mode == "full":
            apply_ac(block, RecomputeConfig(mode=mode), index)
    assert_same(gradients(model), expected, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "three blocks, one graph"


@pytest.fixture
def compiler(gpu, monkeypatch):
    """Sets the compilers for C and C++, on a machine with a GPU."""

    def use(program: str, **of_the_gpu: Any) -> None:
        for name in ("CC", "CXX"):
            monkeypatch.setenv(name, program)
        gpu(**of_the_gpu)

    return use


ON_CUDA, ON_CPU = (SimpleNamespace(device_type=name, degrees=dict.fromkeys(AXES, 1)) for name in ("cuda", "cpu"))


def test_without_a_compiler_auto_is_off_and_true_an_error(compiler, tmp_path):
    compiler("no-such-program")
    assert_mentions(reason_blocks_not_compiled(load_config(["llama3_1b"]), 2048, ON_CUDA), "CC = 'no-such-program'")
    assert reason_blocks_not_compiled(load_config(["llama3_1b", "--compile.backend=aot_eager"]), 2048, ON_CUDA) == ""
    with refused("compile.enabled = true", "CC", "no-such-program", "compile.enabled = false"):
        reason_blocks_not_compiled(load_config(["llama3_1b", "--compile.enabled"]), 2048, ON_CUDA)
    with refused("memory_budget", "CXX", "no-such-program", "recompute.mode"):
        reason_blocks_not_compiled(load_config(["cpu_25m", "--recompute.mode=memory_budget"]), 512, ON_CPU)
    compiler("")
    assert_mentions(reason_blocks_not_compiled(load_config(["llama3_1b"]), 2048, ON_CUDA), "CC = ''")
    works, fails = tmp_path / "works", tmp_path / "fails"
    for path, code in ((works, 0), (fails, 1)):
        path.write_text(f"#!/bin/sh\nexit {code}\n")
        path.chmod(0o755)
    compiler(str(fails))
    assert_mentions(reason_blocks_not_compiled(load_config(["llama3_1b"]), 2048, ON_CUDA), "Python.h")
    compiler(str(works))
    assert reason_blocks_not_compiled(load_config(["llama3_1b"]), 2048, ON_CUDA) == ""
    compiler(str(works), capability=(6, 1))
    assert_mentions(reason_blocks_not_compiled(load_config(["llama3_1b"]), 2048, ON_CUDA), "7.0")
    compiler(str(works), triton=False)
    assert_mentions(reason_blocks_not_compiled(load_config(["llama3_1b"]), 2048, ON_CUDA), "Triton")


def ask_where_one_has_no_compiler() -> tuple[str, str]:
    """What both processes are told for auto, and for true."""
    os.environ["CXX"] = "g++" if dist.get_rank() == 0 else "no-such-program"
    missing_for_inductor.cache_clear()
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1) | {"tp": 2}, 77)
    try:
        reason_blocks_not_compiled(load_config(["cpu_25m", "--compile.enabled"]), 512, mesh)
        message = ""
    except ConfigError as error:
        message = str(error)
    return reason_blocks_not_compiled(load_config(["cpu_25m"]), 512, mesh), message


def test_all_processes_compile_or_none(pool):
    for auto, message in pool.run(2, ask_where_one_has_no_compiler):
        assert_mentions(auto, "rank 1", "no-such-program")
        assert_mentions(message, "compile.enabled = true", "rank 1", "no-such-program")
