"""The auxiliary loss has the gradient of its definition, over all local batches of a step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from model_builder import SMALL, small_model

from titanlite.distributed.mesh import Mesh
from titanlite.model.llama import Llama
from titanlite.optim.router_balance import RouterBalance
from titanlite.parallel.activation_checkpoint import recomputed as checkpointed
from titanlite.rules.degrees import AXES

EXPERTS = dataclasses.replace(SMALL, num_experts=4, experts_per_token=2, expert_ffn_dim=24)
WEIGHT = 0.3
CPU = torch.device("cpu")


def local_batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(101, (2, 8), generator=generator) for _ in range(3)]


def by_definition(loads: dict[str, torch.Tensor]) -> tuple[dict, dict, float]:
    """Gradients of the auxiliary loss with these f_e, the f_e of the step, and the loss with
    those.
    """
    model = small_model(config=EXPERTS)
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in model.layers}
    for name, block in model.layers.items():
        block.feed_forward.router.register_forward_hook(
            lambda module, args, output, name=name: logits[name].append(output.flatten(0, 1))
        )
    for tokens in local_batches():
        model(tokens)
    total = torch.zeros(())
    value = 0.0
    found = {}
    for name, parts in logits.items():
        probabilities = torch.cat(parts).softmax(dim=-1)  # (48, E)
        best = probabilities.topk(2, dim=-1).indices
        found[name] = torch.stack([(best == e).sum() for e in range(4)]) / len(probabilities)
        mean = probabilities.mean(dim=0)
        total = total + 4 * (loads[name] * mean).sum()
        value += 4 * float((found[name] * mean.detach()).sum())
    (WEIGHT * total / len(model.layers)).backward()
    gradients = {}
    for name, parameter in model.named_parameters():  # what follows the last router has none
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradients, found, value / len(model.layers)


def equal_loads() -> dict[str, torch.Tensor]:
    return {str(i): torch.full((4,), 0.5) for i in range(EXPERTS.num_layers)}


def take_step(recomputed: bool, num_padding: int = 0) -> list[tuple]:
    """Takes two steps of the router's loss alone; returns gradients, loads and columns of each.

    `num_padding`: positions without a token, at the end of each sequence.
    """
    length = 8 + num_padding
    padding = (torch.arange(length) >= 8).expand(2, length)
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1), 60)
    model = small_model(length, config=EXPERTS)
    balance = RouterBalance([model], WEIGHT, mesh, CPU)
    if recomputed:
        for block in model.layers.values():
            block.wrap(checkpointed)
    results = []
    for _ in range(2):
        balance.start_step(torch.tensor(3 * 16), 1.0)
        with torch.no_grad():
            model(local_batches()[0])  # an evaluation counts nothing
        for tokens in local_batches():
            tokens = F.pad(tokens, (0, num_padding))
            block_inputs = {"padding": padding} if num_padding else {}
            (0.0 * model(tokens, **block_inputs).sum()).backward()
        balance.finish_step()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        loads = {name: value.clone() for name, value in balance.state_dict().items()}
        results.append((gradients, loads, balance.columns()))
        model.zero_grad()
    return results


@pytest.mark.parametrize(("recomputed", "num_padding"), [(False, 0), (True, 0), (True, 5)])
def test_the_gradient_is_that_of_the_definition_with_the_counts_of_the_step_before(
    pool, recomputed, num_padding
):
    """Padding changes neither gradients nor loads."""
    ((first, second),) = pool.run(1, take_step, recomputed, num_padding)
    nothing, loads, loss = by_definition(equal_loads())
    for name, gradient in first[0].items():  # of equal loads
        assert float(gradient.abs().max()) < 1e-8, name
        assert float(nothing[name].abs().max()) < 1e-8, name
    for name, load in loads.items():
        torch.testing.assert_close(first[1][f"layers.{name}"].float(), load)
    assert first[2]["router_loss"] == pytest.approx(loss, rel=1e-6)
    highest = max(float(load.max() / load.mean()) for load in loads.values())
    assert first[2]["expert_load"] == pytest.approx(highest)
    expected, _, _ = by_definition(loads)
    for name, gradient in second[0].items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-9)
    assert float(second[0]["layers.0.feed_forward.router.weight"].abs().max()) > 1e-5


def test_a_block_without_a_backward_has_no_load(pool):
    (row,) = pool.run(1, with_frozen_blocks)
    assert row["expert_load/layers.0"] is None
    assert row["expert_load/layers.2"] == row["expert_load"] >= 1
    assert row["router_loss"] == pytest.approx(2, abs=0.1)  # k, if all are chosen equally often


def with_frozen_blocks() -> dict:
    model = small_model(config=EXPERTS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("layers.2"))
    balance = RouterBalance([model], 0.0, Mesh("cpu", dict.fromkeys(AXES, 1), 60), CPU)
    balance.start_step(torch.tensor(16), 1.0)
    model(local_batches()[0]).sum().backward()
    balance.finish_step()
    return balance.columns()


def test_without_experts_there_is_nothing(pool):
    assert pool.run(1, of_a_dense_model) == [({}, {})]


def of_a_dense_model() -> tuple[dict, dict]:
    balance = RouterBalance([small_model()], WEIGHT, Mesh("cpu", dict.fromkeys(AXES, 1), 60), CPU)
    balance.start_step(torch.tensor(16), 1.0)
    balance.finish_step()
    return balance.state_dict(), balance.columns()


def test_loads_are_restored_or_begin_equal(pool):
    pool.run(1, restore)


def restore() -> None:
    mesh = Mesh("cpu", dict.fromkeys(AXES, 1), 60)
    models: list[Llama] = [small_model(config=EXPERTS) for _ in range(2)]
    one, other = (RouterBalance([model], WEIGHT, mesh, CPU) for model in models)
    one.layers["1"].load.copy_(torch.tensor([1.0, 0.5, 0.25, 0.25]))
    other.load_state_dict(one.state_dict())
    assert other.layers["1"].load.tolist() == [1.0, 0.5, 0.25, 0.25]
    other.reset()
    assert other.layers["1"].load.tolist() == [0.5] * 4
