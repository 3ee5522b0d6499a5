"""Output projection and cross entropy in chunks of tokens, against the plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from allocations import Largest

from titanlite.optim import chunked_loss
from titanlite.optim.chunked_loss import chunked_cross_entropy_sum, replace_by_gradient
from titanlite.optim.loss import cross_entropy_sum

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
