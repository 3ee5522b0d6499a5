"""A small Llama with weights: whole, or the parts of it that a process of some layout holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Config, ParallelConfig, RunConfig, TrainingConfig
from titanlite.distributed.mesh import Mesh
from titanlite.model.flavors import FLAVORS, LlamaConfig, RopeScaling
from titanlite.model.llama import Llama
from titanlite.optim.loss import cross_entropy_sum
from titanlite.parallel.auto import decide_compile, resolve_dtype
from titanlite.parallel.parallelize import build_model_parts
from titanlite.parallel.stages import Stages
from titanlite.rules.degrees import AXES
from titanlite.tokenizer.tokenizer import BUNDLED

SMALL = LlamaConfig(dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=101)
# Fits tp and pp
EVEN = LlamaConfig(dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=104)

# No power of two, with what families add to the blocks
ODD = LlamaConfig(
    dim=42,
    num_layers=3,
    num_heads=3,
    num_kv_heads=1,
    ffn_dim=50,
    vocab_size=97,
    qkv_bias=True,
    rope_scaling=RopeScaling(4.0, original_context=8, kind="yarn"),
)

GROUPED = LlamaConfig(dim=64, num_layers=3, num_heads=8, num_kv_heads=2, ffn_dim=96, vocab_size=211)
EXPORTED = {  # shapes that other software is given
    "debug": dataclasses.replace(FLAVORS["debug"], vocab_size=4112),
    "untied": GROUPED,
    "all heads": dataclasses.replace(GROUPED, num_kv_heads=8, vocab_size=4112),
    "one head for keys": dataclasses.replace(
        GROUPED, num_kv_heads=1, tied_embeddings=True, rope_theta=10000.0
    ),
    "llama 3.1": dataclasses.replace(
        GROUPED, rope_scaling=RopeScaling(8.0, original_context=32), norm_eps=1e-6
    ),
}


def small_model(seq_len: int = 16, seed: int = 0, config: LlamaConfig = SMALL) -> Llama:
    """Built as train.py does: on meta, given memory, initialised. What init leaves out is NaN."""
    with torch.device("meta"):
        model = Llama(config, seq_len)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.constant_(tensor, float("nan"))
    model.init_weights(seed)
    return model


def assert_equal_bits(
    a: Mapping[str, torch.Tensor],
    b: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """The same names in the same order, and equal tensors; `dtype`: after rounding those of `a`."""
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name].to(dtype or a[name].dtype), b[name]), name


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers a tensor that is cut over processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def build_stages(
    parallel: dict[str, Any],
    seed: int = 0,
    llama: LlamaConfig = SMALL,
    *sections: Any,
    **training: Any,
) -> Stages:
    """This process's parts of the model in a layout: `parallel` is the section, `training` others
    of its keys.

    `sections`: others, as objects.
    """
    config = Config(
        training=TrainingConfig(**{"seq_len": 16, "local_batch_size": 2, **training}),
        parallel=ParallelConfig(**parallel),
        **{type(section).__name__.removesuffix("Config").lower(): section for section in sections},
    )
    degrees = {axis: parallel.get(axis, 1) for axis in AXES}
    cpu = torch.device("cpu")
    config = resolve_dtype(dataclasses.replace(config, run=RunConfig(seed=seed)), llama, cpu)
    compiled = decide_compile(config, llama, degrees, cpu)
    mesh = Mesh("cpu", degrees, 77, config.parallel.ep)
    with torch.device("meta"):
        model = Llama(llama, config.training.seq_len)
    parts = build_model_parts(model, config, mesh, cpu, compiled)
    return Stages(parts, config, mesh, cpu, compiled)


TOKENS = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(3))


def gradients(model: nn.Module, tokens: torch.Tensor = TOKENS) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss, by parameter name."""
    (cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(found: dict, expected: dict, **tolerance) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def make_file(path: Path, config: LlamaConfig) -> None:
    """Writes a model whose attention is not uniform: with weights as they are drawn, every order of heads
    would nearly do.
    """
    model = small_model(config=config)
    weights = {
        name: 4 * w if "attention.w" in name else w for name, w in model.state_dict().items()
    }
    ranks = torch.frombuffer(bytearray(BUNDLED.read_bytes()), dtype=torch.uint8)
    tree = {"model": weights, "model_config": dataclasses.asdict(config), "step": 3, "seq_len": 512}
    torch.save(tree | ({"tokenizer": ranks} if config.vocab_size >= 4112 else {}), path)


# Layouts of up to four processes; each axis is in one of them
EIGHT_LAYOUTS = [
    {"dp_shard": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2},
    {"pp": 2, "dp_shard": 2},
    {"pp": 2, "tp": 2},
    {"cp": 2, "tp": 2},
    {"dp_shard": 1},
]
