"""The loss against its definition: summed over targets, in chunks of tokens, and with z-loss."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from allocations import Largest
from model_builder import EVEN, build_stages, full, small_model

from titanlite.config.schema import LossConfig
from titanlite.data.rows import Batch
from titanlite.distributed.mesh import Mesh
from titanlite.optim import chunked_loss
from titanlite.optim.chunked_loss import chunked_cross_entropy_sum, replace_by_gradient
from titanlite.optim.loss import cross_entropy_sum
from titanlite.optim.z_loss import with_z_loss
from titanlite.rules.degrees import AXES


def test_loss_is_a_sum_over_targets_in_fp32():
    logits = torch.randn(2, 5, 11)
    labels = torch.randint(11, (2, 5))
    labels[0, 3:] = -100
    expected = -sum(
        logits[b, s].log_softmax(-1)[labels[b, s]]
        for b in range(2)
        for s in range(5)
        if labels[b, s] >= 0
    )
    torch.testing.assert_close(cross_entropy_sum(logits, labels), expected)
    assert cross_entropy_sum(logits.bfloat16(), labels).dtype == torch.float32
    assert cross_entropy_sum(logits, torch.full((2, 5), -100)) == 0


def test_sum_over_global_count_weighs_tokens_alike():
    """Two microbatches of unequal target counts give the gradient of their joint mean."""
    model = small_model()
    tokens = torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    labels[0, 2:] = -100
    for i in range(2):
        (cross_entropy_sum(model(tokens[i : i + 1]), labels[i : i + 1]) / 11).backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    for mine, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-6, rtol=1e-4)


GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_chunks", [1, 3, 8, 1000])
def test_chunked_loss_equals_the_plain_one(num_chunks, dtype, device, monkeypatch):
    """Loss and gradients; some labels are no targets, and neither the chunks nor the blocks are all
    of one size.
    """
    monkeypatch.setattr(chunked_loss, "BLOCK_NUMEL", 5 * 53)
    monkeypatch.setattr(chunked_loss, "CPU_BLOCK_NUMEL", 5 * 53)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((3, 37, 16), (53, 16)))
    labels = torch.randint(53, (3, 37), generator=generator)
    labels[1, 5:] = -100
    hidden = hidden.to(device, dtype)
    weight = weight.to(device, dtype)
    labels = labels.to(device)

    def gradients(loss, *inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        value = loss(*leaves) / 70
        return [value.detach(), *torch.autograd.grad(value * 3, leaves)]

    def plain(x, w):
        return cross_entropy_sum(F.linear(x, w), labels)

    def by_chunks(x, w):
        return chunked_cross_entropy_sum(x, w, labels, num_chunks, cross_entropy_sum)

    exact = gradients(plain, hidden.double(), weight.double())
    wanted = gradients(plain, hidden, weight)
    found = gradients(by_chunks, hidden, weight)
    for a, b, true in zip(wanted, found, exact, strict=True):
        assert a.dtype == b.dtype
        if dtype == torch.float32:
            assert (a - b).norm() <= 1e-6 * a.norm()
        else:  # as near to the truth as the plain loss, but for the rounding of the factor
            assert (b - true).norm() <= (a - true).norm() + 2**-9 * true.norm()
    with torch.no_grad():
        value = by_chunks(hidden, weight)
    torch.testing.assert_close(value / 70, wanted[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunked_loss_takes_a_part_of_the_memory(dtype, monkeypatch):
    """At most 4 bytes for each logit of a chunk, and those of a block; logits are some 100 times
    what is projected here, and the weight's gradient.
    """
    monkeypatch.setattr(chunked_loss, "CPU_BLOCK_NUMEL", 16 * 2048)
    labels = torch.randint(2048, (4, 256))
    used = {}
    for num_chunks in (0, 1, 2, 4, 8, 16):
        hidden, weight = (
            torch.randn(4, 256, 16, dtype=dtype, requires_grad=True),
            torch.randn(2048, 16, dtype=dtype, requires_grad=True),
        )
        with Largest() as largest:
            if num_chunks == 0:
                cross_entropy_sum(F.linear(hidden, weight), labels).backward()
            else:
                chunked_cross_entropy_sum(
                    hidden, weight, labels, num_chunks, cross_entropy_sum
                ).backward()
        used[num_chunks] = largest.most
    logits = 4 * 256 * 2048
    assert used.pop(0) >= 12 * logits  # the measure sees the logits
    for num_chunks, most in used.items():
        block = 16 * chunked_loss.CPU_BLOCK_NUMEL
        projected = 16 * (hidden.numel() + weight.numel())
        assert most <= dtype.itemsize * logits / num_chunks + block + projected, used


@pytest.mark.parametrize("rows", [1, 5, 37, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_take_the_place_of_the_logits(rows, dtype, monkeypatch):
    """With the bits that the loss computes at once, for any size of a block; and the last is
    smaller.
    """
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(1, 37, 53, generator=generator)).to(dtype)
    labels = torch.randint(53, (1, 37), generator=generator)
    labels[0, 5:9] = -100
    leaf = logits.clone().requires_grad_()
    value = cross_entropy_sum(leaf, labels)
    (expected,) = torch.autograd.grad(value, leaf)
    monkeypatch.setattr(chunked_loss, "CPU_BLOCK_NUMEL", rows * 53)
    with torch.no_grad():
        found = replace_by_gradient(logits, labels, cross_entropy_sum)
    assert torch.equal(logits, expected)
    torch.testing.assert_close(found, value.detach())


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
@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.slow), 3])
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
