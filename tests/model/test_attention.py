"""Attention: heads that share keys and values, the masks of context parallelism, and the kernel
that is reported.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right

from titanlite.model.attention import attention, share_heads
from titanlite.model.flavors import FLAVORS
from titanlite.observe.start_and_end import attention_kernel


def by_definition(q, k, v, keys_before):
    """Softmax of the scores; query i sees the keys up to keys_before + i.

    Each head has its own keys and values.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (
        torch.stack([x[:, head // groups] for head in range(q.shape[1])], dim=1) for x in (k, v)
    )
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    seen = torch.arange(k.shape[2])[None] <= keys_before + torch.arange(q.shape[2])[:, None]
    return scores.masked_fill(~seen.to(q.device), -torch.inf).softmax(-1) @ v


def assert_follows_definition(device, dtype, compiled, queries, keys, tolerance):
    """Output and gradients, the definition in fp64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, 16, generator=generator, dtype=torch.float64).to(dtype)
        for heads, length in ((6, queries), (2, keys), (2, keys))
    )
    mask = causal_lower_right(queries, keys) if queries < keys else None
    call = torch.compile(attention, backend=compiled, fullgraph=True) if compiled else attention
    found = []
    for function, there, precision in ((call, device, dtype), (None, "cpu", torch.float64)):
        inputs = [x.to(there, precision, copy=True).requires_grad_() for x in (q, k, v)]
        out = (
            function(*inputs, mask, mask is None)
            if function
            else by_definition(*inputs, keys - queries)
        )
        out.square().sum().backward()
        found.append([x.double().cpu() for x in (out.detach(), *(x.grad for x in inputs))])
    for ours, right in zip(*found, strict=True):
        assert (ours - right).norm() <= tolerance * right.norm()


@pytest.mark.parametrize("compiled", ["", "aot_eager"])
@pytest.mark.parametrize(("queries", "keys"), [(24, 24), (8, 24)])
def test_it_follows_the_definition(compiled, queries, keys):
    assert_follows_definition("cpu", torch.float32, compiled, queries, keys, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", ["", "inductor"])
@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (128, 384)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
def test_it_follows_the_definition_on_the_gpu(compiled, queries, keys, dtype, tolerance):
    assert_follows_definition("cuda", dtype, compiled, queries, keys, tolerance)


@pytest.mark.parametrize(
    ("dtype", "masked", "heads"),
    [(torch.float32, False, 6), (torch.bfloat16, False, 2), (torch.bfloat16, True, 6)],
)
def test_heads_are_repeated_where_no_fused_kernel_shares_them(dtype, masked, heads):
    """On a CUDA device that need not exist: in fp32, and with a mask."""
    with FakeTensorMode():
        q, k = (torch.empty(2, n, 8, 16, dtype=dtype, device="cuda") for n in (6, 2))
        mask = torch.empty(2, 1, 8, 8, dtype=torch.bool, device="cuda") if masked else None
        assert share_heads(q, k, mask).shape == (2, heads, 8, 16)


def test_the_kernel_of_a_cpu():
    assert (
        attention_kernel(FLAVORS["llama3_1b"], 128, torch.float32, torch.device("cpu")) == "flash"
    )
