"""Compiled blocks: the same gradients, one graph for all blocks, and what the compiler needs."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_builder import EVEN, assert_same, build_stages, full, gradients, small_model

from titanlite.config.load import load_config
from titanlite.config.schema import CompileConfig, RecomputeConfig
from titanlite.data.rows import Batch
from titanlite.model.flavors import FLAVORS
from titanlite.optim.router_balance import RouterBalance
from titanlite.parallel.activation_checkpoint import apply_ac
from titanlite.parallel.auto import decide_compile
from titanlite.parallel.compile import apply_compile, first_message, missing_for_inductor
from titanlite.rules.degrees import AXES
from titanlite.runtime.errors import ConfigError

EXPERTS = dataclasses.replace(EVEN, num_experts=4, experts_per_token=2, expert_ffn_dim=24)


def two_steps_with_experts(
    parallel: dict[str, int], mode: str, compile: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any], int]:
    """The gradients of the second step, the router's columns, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    stages = build_stages(
        parallel,
        0,
        EXPERTS,
        CompileConfig(enabled=compile, backend="aot_eager"),
        RecomputeConfig(mode=mode),
        compute_dtype="bfloat16",  # the only one in which torch 2.13 compiles experts
    )
    balance = RouterBalance(stages.model_parts, 0.5, stages.mesh, torch.device("cpu"))
    tokens = torch.randint(104, (2, 17), generator=torch.Generator().manual_seed(3))
    padding = (torch.arange(16) >= 12).expand(2, 16)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], padding=padding)
    for _ in range(2):
        for part in stages.model_parts:
            part.zero_grad()
        balance.start_step(torch.tensor(24 * stages.mesh.data_size), 1.0)
        stages.evaluate(batch)
        stages.forward_backward(batch, torch.tensor(32))
        balance.finish_step()
    found = {name: full(p.grad) for name, p in stages.model_parts[0].named_parameters()}
    return found, balance.columns(), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("parallel", "mode"),
    [
        ({}, "none"),
        ({"dp_shard": 2}, "full"),
        ({"tp": 2}, "selective"),
        ({"ep": 2, "dp_shard": 2}, "none"),
    ],
)
def test_experts_are_compiled_with_their_block(pool, parallel, mode):
    """Counts, auxiliary loss and gradients are the same; with ep only attention is compiled."""
    processes = parallel.get("dp_shard", 1) * parallel.get("tp", 1)
    eager = pool.run(processes, two_steps_with_experts, parallel, mode, "false")
    compiled = pool.run(processes, two_steps_with_experts, parallel, mode, "true")
    for (expected, columns, _), (found, found_columns, graphs) in zip(eager, compiled, strict=True):
        assert_same(found, expected, rtol=0, atol=0)
        assert found_columns == columns
        assert columns["router_loss"] > 0
        assert graphs == 2, "with and without gradients, for all blocks"


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_compiled_blocks_give_the_same_gradients_and_compile_once(mode):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected, model = gradients(small_model()), small_model()
    if mode != "full":
        apply_ac(model, RecomputeConfig(mode=mode))
    apply_compile(model, "aot_eager", RecomputeConfig())
    if mode == "full":
        apply_ac(model, RecomputeConfig(mode=mode))
    assert_same(gradients(model), expected, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "three blocks, one graph"


@pytest.mark.slow
def test_both_graphs_of_a_block_are_compiled_for_async_tp(monkeypatch):
    """On CUDA the backward runs, and is compiled, in another thread than the forward."""
    from functorch.compile import make_boxed_func
    from torch._inductor import compile_fx, config

    found = []

    def record(graph, inputs, is_backward=False, **rest):
        found.append((threading.current_thread().name, is_backward, config._micro_pipeline_tp))
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(
        compile_fx, "compile_fx", functools.partial(compile_fx.compile_fx, inner_compile=record)
    )
    for async_tp in (True, False):
        torch._dynamo.reset()
        model = small_model()
        apply_compile(model, "inductor", RecomputeConfig(), async_tp)
        backward = threading.Thread(
            target=model(torch.zeros(2, 16, dtype=torch.long)).sum().backward, name="backward"
        )
        backward.start()
        backward.join()
        assert found == [("MainThread", False, async_tp), ("backward", True, async_tp)]
        found.clear()


@pytest.fixture
def compiler(gpu, monkeypatch):
    """Sets the compilers for C and C++, on a machine with a GPU."""

    def use(program: str, **of_the_gpu: Any) -> None:
        for name in ("CC", "CXX"):
            monkeypatch.setenv(name, program)
        gpu(**of_the_gpu)

    return use


DEGREES = dict.fromkeys(AXES, 1)


def compiled(flavor: str, *options: str, device: str = "cuda") -> bool:
    """Whether the blocks are, with these options and `auto` otherwise."""
    config = load_config([flavor, *options])
    return decide_compile(config, FLAVORS[flavor], DEGREES, torch.device(device))


def test_without_a_compiler_auto_is_off_and_true_an_error(compiler, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("titanlite"), "propagate", True)
    caplog.set_level(logging.INFO)
    compiler("no-such-program")
    assert not compiled("llama3_1b")
    assert "CC = 'no-such-program' is not a program" in caplog.text
    assert compiled("llama3_1b", "--compile.backend=aot_eager")
    with pytest.raises(
        ConfigError,
        match=r"compile\.enabled = true needs a compiler: CC .*compile\.enabled = false",
    ):
        compiled("llama3_1b", "--compile.enabled")
    with pytest.raises(
        ConfigError, match=r"compile\.loss = true needs a compiler: CC .*compile\.loss = false"
    ):
        compiled("llama3_1b", "--compile.enabled=false", "--compile.loss")
    with pytest.raises(
        ConfigError, match=r"memory_budget needs a compiler: CXX .* or another recompute\.mode"
    ):
        compiled("cpu_25m", "--recompute.mode=memory_budget", device="cpu")
    compiler("")
    assert not compiled("llama3_1b")
    assert "CC = '' is not a program" in caplog.text
    works, fails = tmp_path / "works", tmp_path / "fails"
    for path, code in ((works, 0), (fails, 1)):
        path.write_text(f"#!/bin/sh\nexit {code}\n")
        path.chmod(0o755)
    compiler(str(fails))
    assert not compiled("llama3_1b")
    assert "finds no Python.h" in caplog.text
    compiler(str(works))
    assert compiled("llama3_1b")
    compiler(str(works), capability=(6, 1))
    assert not compiled("llama3_1b")
    assert "below 7.0" in caplog.text
    compiler(str(works), triton=False)
    assert not compiled("llama3_1b")
    assert "no Triton" in caplog.text


@pytest.mark.parametrize(
    ("variable", "file", "name"),
    [("TORCHINDUCTOR_CACHE_DIR", "cache", "cache folder"), ("CXX", "g++", "the compiler")],
)
def test_other_paths_with_a_space_are_named(variable, file, name, monkeypatch, tmp_path, gpu):
    program = tmp_path / "a space" / "g++"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv(variable, str(program.with_name(file)))
    missing_for_inductor.cache_clear()
    with pytest.raises(
        ConfigError, match=f"{name}.* is '.*a space.*', and torch.compile cannot use a path with"
    ):
        compiled("cpu_25m", "--compile.enabled", device="cpu")


def test_torch_in_a_path_with_a_space_is_named(monkeypatch, gpu):
    monkeypatch.setattr(torch, "__file__", "/My Projects/site-packages/torch/__init__.py")
    missing_for_inductor.cache_clear()
    assert not compiled("cpu_25m", device="cpu")
    with pytest.raises(ConfigError, match="torch is '/My Projects/site-packages/torch'"):
        compiled("cpu_25m", "--compile.enabled", device="cpu")


def ask_where_one_has_no_compiler() -> tuple[bool, str]:
    """What both ranks decide for auto, and the error that both raise for true."""
    os.environ["CXX"] = "g++" if dist.get_rank() == 0 else "no-such-program"
    missing_for_inductor.cache_clear()
    degrees = DEGREES | {"tp": 2}
    llama = FLAVORS["cpu_25m"]
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError) as refused:
        decide_compile(load_config(["cpu_25m", "--compile.enabled"]), llama, degrees, cpu)
    compiled = decide_compile(load_config(["cpu_25m"]), llama, degrees, cpu)
    return compiled, str(refused.value)


def test_all_processes_compile_or_none(pool):
    for compiled, refused in pool.run(2, ask_where_one_has_no_compiler):
        assert not compiled
        assert "no-such-program" in refused
        assert "compile.enabled = true needs a compiler: rank " in refused


def message_of_a_rank() -> str:
    rank = dist.get_rank()
    return first_message(f"no compiler {rank}" if rank else "")


def test_all_ranks_get_the_message_of_the_first_that_has_one(pool):
    assert pool.run(3, message_of_a_rank) == ["rank 1: no compiler 1"] * 3
    assert first_message("") == ""
