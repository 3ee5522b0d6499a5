"""z-loss against its definition, in layouts, and not in validation."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from model_builder import EVEN, build_stages, full

from titanlite.config.schema import LossConfig
from titanlite.data.rows import Batch
from titanlite.distributed.mesh import Mesh
from titanlite.optim.loss import cross_entropy_sum
from titanlite.optim.z_loss import with_z_loss
from titanlite.rules.degrees import AXES


def against_the_definition() -> None:
    loss = with_z_loss(cross_entropy_sum, 0.01, Mesh("cpu", dict.fromkeys(AXES, 1), 60)["tp"])
    logits = (5 * torch.randn(2, 7, 11)).requires_grad_()
    labels = torch.randint(11, (2, 7))
    labels[0, 4:] = -100
    with torch.no_grad():
        logits[0, 5] = float("inf")  # ignored
    squares = logits.double().exp().sum(-1).log().square()[labels >= 0].sum()
    expected = cross_entropy_sum(logits, labels) + 0.01 * squares.float()
    torch.testing.assert_close(loss(logits, labels), expected)
    with torch.no_grad():
        assert loss(logits, labels) == cross_entropy_sum(logits, labels)
    finite = logits.detach().clone().nan_to_num(posinf=3.0).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(finite, labels), finite)
    assert not gradient[labels < 0].any()
    probabilities, ln = finite.softmax(-1), finite.logsumexp(-1, keepdim=True)
    one_hot = torch.nn.functional.one_hot(labels.clamp(min=0), 11)
    wanted = (probabilities - one_hot + 0.02 * ln * probabilities) * (labels >= 0)[..., None]
    torch.testing.assert_close(gradient, wanted)
    assert loss(finite.bfloat16(), labels).dtype == torch.float32


def test_the_loss_is_that_of_the_definition(pool):
    pool.run(1, against_the_definition)


def losses_and_gradients(
    parallel: dict[str, int], section: LossConfig
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Training loss, validation loss, and the gradients that this rank has a part of, whole."""
    stages = build_stages(parallel, 0, dataclasses.replace(EVEN, tied_embeddings=True), section)
    tokens = torch.randint(101, (2, 17), generator=torch.Generator().manual_seed(3))
    labels = tokens[:, 1:].clone()
    labels[0, 3:9] = -100
    batch = Batch(tokens[:, :-1], labels)
    loss = stages.mesh.sum_losses(stages.forward_backward(batch, torch.tensor(26)))
    named = (pair for part in stages.model_parts for pair in part.named_parameters())
    gradients = {name: full(p.grad) for name, p in named}
    return float(loss), float(stages.mesh.sum_losses(stages.evaluate(batch))), gradients


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("chunks", [1, 3])
def test_each_layout_has_the_same_loss(pool, parallel, chunks):
    ((plain, held_out, _),) = pool.run(1, losses_and_gradients, {}, LossConfig())
    ((loss, also, expected),) = pool.run(1, losses_and_gradients, {}, LossConfig(z_loss=0.1))
    assert loss > plain + 0.1
    assert also == held_out
    ranks = pool.run(
        math.prod(parallel.values()), losses_and_gradients, parallel, LossConfig(chunks, z_loss=0.1)
    )
    for found, validation, gradients in ranks:
        assert found == pytest.approx(loss, rel=1e-6)
        assert validation == pytest.approx(held_out, rel=1e-6)
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() <= 2e-6 * expected[name].norm(), name
