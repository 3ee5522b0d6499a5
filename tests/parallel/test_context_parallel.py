"""Attention over a sequence that is cut gives what attention over the whole gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from titanlite.distributed.mesh import Mesh
from titanlite.parallel.context_parallel import (
    AllGatherAttention,
    UlyssesAttention,
    local_positions,
)
from titanlite.rules.degrees import AXES

SEQ_LEN = 24


def line(size: int):
    """The cp axis of a mesh that has no other."""
    return Mesh("cpu", {axis: size if axis == "cp" else 1 for axis in AXES}, 60)["cp"]


def make_inputs() -> list[torch.Tensor]:
    """q, k, v and the gradient of the output; 6 query heads share 3 key heads."""
    generator = torch.Generator().manual_seed(0)
    heads = (6, 3, 3, 6)
    return [torch.randn(2, n, SEQ_LEN, 8, generator=generator, dtype=torch.float64) for n in heads]


def attend(size: int, method: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """This process's part of the output and of the gradients of q, k and v."""
    mesh = line(size)
    here = local_positions(SEQ_LEN, mesh, method)
    q, k, v, gradient = (x[:, :, here].requires_grad_() for x in make_inputs())
    if method == "ulysses":
        out = UlyssesAttention(mesh)(q, k, v)
    else:
        out = AllGatherAttention(SEQ_LEN, mesh)(q, k, v)
    out.backward(gradient.detach())
    return out.detach(), [x.grad for x in (q, k, v)]


def positions(size: int, method: str) -> list[int]:
    return local_positions(SEQ_LEN, line(size), method).tolist()


@pytest.mark.parametrize(
    ("size", "method"),
    [
        *(pytest.param(size, "all_gather", marks=pytest.mark.slow) for size in (1, 2, 4)),
        *((3, "all_gather"), (3, "ulysses")),
    ],
)
def test_values_and_gradients_are_those_of_the_whole(pool, size, method):
    q, k, v, gradient = (x.requires_grad_() for x in make_inputs())
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    whole.backward(gradient.detach())
    found = pool.run(size, attend, size, method)
    order = [position for places in pool.run(size, positions, size, method) for position in places]
    assert sorted(order) == list(range(SEQ_LEN)), "each token is somewhere, once"
    out = torch.cat([out for out, _ in found], dim=2)
    torch.testing.assert_close(out, whole[:, :, order].detach())
    for index, x in enumerate((q, k, v)):
        gradients = torch.cat([gradients[index] for _, gradients in found], dim=2)
        torch.testing.assert_close(gradients, x.grad[:, :, order])


def test_head_and_tail_make_equal_work(pool):
    """Key positions that each process's queries look at."""
    work = [
        sum(position + 1 for position in places)
        for places in pool.run(4, positions, 4, "all_gather")
    ]
    chunk = SEQ_LEN // 8
    assert max(work) - min(work) == 0, work
    assert sum(work) == SEQ_LEN * (SEQ_LEN + 1) // 2
    assert pool.run(4, positions, 4, "all_gather")[1] == [
        *range(chunk, 2 * chunk),
        *range(6 * chunk, 7 * chunk),
    ]
    contiguous = [
        sum(position + 1 for position in places) for places in pool.run(4, positions, 4, "ulysses")
    ]
    assert max(contiguous) > 2 * min(contiguous), "which is why"
