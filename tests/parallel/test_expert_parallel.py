"""Rows travel to the ranks of their experts and come back in order, also if some get none."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from messages import assert_mentions
from model_builder import EVEN, full, gradients, small_model

from titanlite.config.load import load_config
from titanlite.distributed.mesh import Mesh
from titanlite.model.flavors import FLAVORS, resolve_flavor
from titanlite.parallel.expert_parallel import apply_ep
from titanlite.parallel.parallelize import assign_shard
from titanlite.rules.check import check_layout
from titanlite.rules.degrees import AXES
from titanlite.rules.unused import unused_settings
from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats.shape_file import from_json

EXPERTS = dataclasses.replace(EVEN, num_experts=4, experts_per_token=2, expert_ffn_dim=24)
COUNTS = {  # rows for each expert, of rank 0 and of rank 1
    "some for each": ([3, 1, 2, 4], [1, 2, 5, 1]),
    "all for the last": ([0, 0, 0, 7], [0, 0, 0, 3]),
    "one rank has none": ([0, 0, 0, 0], [2, 0, 0, 1]),
}


def compute(counts: tuple[list[int], list[int]]) -> tuple:
    """Outputs and gradients of this rank's rows, with whole and with divided experts."""
    degrees = dict.fromkeys(AXES, 1) | {"dp_shard": 2}
    mesh = Mesh("cpu", degrees, 60, ep=2)
    rank = mesh["ep"].get_local_rank()
    whole = small_model(config=EXPERTS).layers["0"].feed_forward.experts
    model = small_model(config=EXPERTS)
    apply_ep(model, mesh)
    divided = model.layers["0"].feed_forward.experts
    with torch.no_grad():
        for name, parameter in divided.named_parameters():
            assign_shard(parameter, whole.get_parameter(name))
    results = []
    for experts in (whole, divided):
        rows = torch.randn(sum(counts[rank]), 32, generator=torch.Generator().manual_seed(rank))
        rows.requires_grad_()
        out = experts(rows, torch.tensor(counts[rank]))
        (out * torch.arange(32)).sum().backward()
        grads = {name: full(p.grad) for name, p in experts.named_parameters()}
        results.append((out.detach(), rows.grad, grads))
    return tuple(results)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rows_come_back_in_order_with_their_gradients(pool, counts):
    ranks = pool.run(2, compute, counts)
    for whole, divided in ranks:
        torch.testing.assert_close(divided[0], whole[0], rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(divided[1], whole[1], rtol=1e-5, atol=1e-7)
    # The gradient of a divided expert is the sum over the tokens of both ranks
    for name, gradient in ranks[0][1][2].items():
        summed = ranks[0][0][2][name] + ranks[1][0][2][name]
        torch.testing.assert_close(gradient, summed, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_divided_is_said_in_one_sentence():
    def message(world_size: int, *options: str) -> str:
        config = load_config(["debug_moe", *(f"--{option}" for option in options)])
        with pytest.raises(ConfigError) as caught:
            check_layout(config, resolve_flavor(config.model, 4112), world_size)
        return str(caught.value)

    assert_mentions(
        message(3, "parallel.ep=3", "training.global_batch_size=6"),
        "parallel.ep = 3",
        "model.num_experts = 8",
    )
    assert_mentions(message(2, "parallel.ep=4"), "parallel.dp_shard x parallel.cp = 2")
    by_number = ("parallel.ep=2", "parallel.reshard_after_forward=2")
    assert_mentions(message(4, *by_number), "parallel.reshard_after_forward", "parallel.ep")
    assert_mentions(message(2, "parallel.ep=2", "model.num_experts=0"), "a dense model")
    assert_mentions(message(1, "float8.enabled"), "float8.enabled", "model.num_experts = 8")
    assert_mentions(message(1, "lora.rank=4", "lora.targets=w1"), "allowed: wq, wk, wv, wo")
    dropped = message(1, "lora.rank=4", "lora.dropout=0.1", "recompute.mode=selective")
    assert_mentions(dropped, "lora.dropout = 0.1", "recompute.mode = full or none")
    frozen = message(1, "training.frozen=layers.0.*")
    assert_mentions(frozen, "loss.router_aux_loss = 0.01", "training.frozen")


def test_sizes_of_experts_are_checked():
    for option, found in (
        ("experts_per_token=9", "model.experts_per_token = 9"),
        ("experts_per_token=1", "the router gets no gradient"),
        ("expert_ffn_dim=12", "expected a multiple of 8 .*; nearest: 8 or 16"),
        ("dim=132", r"model\.dim = 132 with model\.num_experts = 8: .* nearest: 128 or 136"),
    ):
        config = load_config(["debug_moe", f"--model.{option}"])
        with pytest.raises(ConfigError, match=found):
            resolve_flavor(config.model, 4112)
    config = load_config(["debug", "--model.num_experts=4", "--model.experts_per_token=2"])
    with pytest.raises(ConfigError, match=r"model\.expert_ffn_dim is missing"):
        resolve_flavor(config.model, 4112)
    assert FLAVORS["debug"].num_experts == 0


def test_a_dense_model_has_no_sizes_of_experts():
    """So a token uses all its parameters, and it equals a model that never had them."""
    config = load_config(["debug_moe", "--model.num_experts=0"])
    model = resolve_flavor(config.model, 4112)
    assert model.num_active_parameters == model.num_parameters
    assert from_json(dataclasses.replace(model, experts_per_token=2).to_json()) == model
    config = load_config(["debug", "--model.expert_ffn_dim=64"])
    (note,) = unused_settings(config, model, dict.fromkeys(AXES, 1))
    assert note == "model.expert_ffn_dim = 64 has no effect: a dense model"


def test_a_mixture_has_no_width_of_a_dense_feed_forward():
    """A key that the user sets is named; from_checkpoint sets it itself."""
    degrees = dict.fromkeys(AXES, 1)
    config = load_config(["debug_moe", "--model.ffn_dim=64"])
    (note,) = unused_settings(config, FLAVORS["debug_moe"], degrees)
    assert note == "model.ffn_dim = 64 has no effect: a mixture has model.expert_ffn_dim"
    adopted = load_config(["debug_moe", "--model.ffn_dim=64", "--model.flavor=from_checkpoint"])
    assert unused_settings(adopted, FLAVORS["debug_moe"], degrees) == []


def test_without_ep_and_tp_nothing_changes(pool):
    (found,) = pool.run(1, not_divided)
    expected = gradients(small_model(config=EXPERTS))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def not_divided() -> dict[str, torch.Tensor]:
    model = small_model(config=EXPERTS)
    apply_ep(model, Mesh("cpu", dict.fromkeys(AXES, 1), 60))
    return gradients(model)
