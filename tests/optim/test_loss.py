"""Cross entropy summed over targets, whole and in chunks, against its definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from allocations import Largest
from model_builder import small_model

from titanlite.optim.loss import chunked_cross_entropy_sum, cross_entropy_sum


def test_loss_is_a_sum_over_targets_in_fp32():
    logits = torch.randn(2, 5, 11)
    labels = torch.randint(11, (2, 5))
    labels[0, 3:] = -100
    expected = -sum(logits[b, s].log_softmax(-1)[labels[b, s]] for b in range(2) for s in range(5) if labels[b, s] >= 0)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_chunks", [1, 3, 8, 1000])
def test_chunked_loss_equals_the_plain_one(num_chunks, dtype):
    """Loss and gradients; some labels are no targets, and the chunks are not all of one size."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((3, 37, 16), (53, 16)))
    labels = torch.randint(53, (3, 37), generator=generator)
    labels[1, 5:] = -100

    def gradients(loss, *inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        value = loss(*leaves) / 70
        return [value.detach(), *torch.autograd.grad(value * 3, leaves)]

    def plain(x, w):
        return cross_entropy_sum(F.linear(x, w), labels)

    def by_chunks(x, w):
        return chunked_cross_entropy_sum(x, w, labels, num_chunks, cross_entropy_sum)

    exact = gradients(plain, hidden.to(dtype).double(), weight.to(dtype).double())
    wanted = gradients(plain, hidden.to(dtype), weight.to(dtype))
    found = gradients(by_chunks, hidden.to(dtype), weight.to(dtype))
    for a, b, true in zip(wanted, found, exact, strict=True):
        assert a.dtype == b.dtype
        if dtype == torch.float32:
            assert (a - b).norm() <= 1e-6 * a.norm()
        else:  # as near to the truth as the plain loss, but for one more rounding, where the factor comes in
            assert (b - true).norm() <= (a - true).norm() + 2**-9 * true.norm()
    with torch.no_grad():
        value = chunked_cross_entropy_sum(hidden.to(dtype), weight.to(dtype), labels, num_chunks, cross_entropy_sum)
    torch.testing.assert_close(value / 70, wanted[0])


def test_chunked_loss_takes_a_part_of_the_memory():
    """Logits, log-softmax and gradient are some 100 times what is projected here, and the weight's gradient."""
    labels = torch.randint(2048, (4, 256))
    used = {}
    for num_chunks in (1, 2, 4, 8, 16):
        hidden, weight = torch.randn(4, 256, 16, requires_grad=True), torch.randn(2048, 16, requires_grad=True)
        with Largest() as largest:
            if num_chunks == 1:
                cross_entropy_sum(F.linear(hidden, weight), labels).backward()
            else:
                chunked_cross_entropy_sum(hidden, weight, labels, num_chunks, cross_entropy_sum).backward()
        used[num_chunks] = largest.most
    assert used[1] >= 2 * 4 * 256 * 2048 * 4  # the measure sees the logits
    for num_chunks in (2, 4, 8, 16):
        assert used[num_chunks] <= 1.25 * used[1] / num_chunks + 6 * hidden.nbytes + 6 * weight.nbytes, used
