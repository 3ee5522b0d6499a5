"""Attention: shared heads, masks of blocks and of context parallelism, the kernel reported."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from model_builder import SMALL, assert_same, small_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from titanlite.config.schema import RecomputeConfig
from titanlite.model import block_mask
from titanlite.model.attention import attention, document_mask, share_heads
from titanlite.model.flavors import FLAVORS
from titanlite.observe.start_and_end import attention_kernel
from titanlite.parallel import parallelize
from titanlite.parallel.activation_checkpoint import apply_ac
from titanlite.parallel.compile import apply_compile


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


pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
LLAMA = dataclasses.replace(SMALL, dim=64, num_layers=2)  # heads of 16 numbers
SEQ_LEN = 300


def number_documents(seq_len: int, seed: int = 0, rows: int = 2) -> torch.Tensor:
    """(rows, S), some six documents in each."""
    return (
        torch.rand(rows, seq_len, generator=torch.Generator().manual_seed(seed)) < 5 / seq_len
    ).cumsum(dim=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seq_len", "start", "end"),
    [
        (512, 0, None),
        (500, 0, None),
        (1024, 256, 512),
        (1024, 768, 1024),
        (600, 150, 300),
        (600, 450, 600),
    ],
)
@pytest.mark.parametrize("window", [0, 1, 100, 129, 300])
def test_blocks_are_those_that_torch_finds_by_computing_every_pair(seq_len, start, end, window):
    for seed in range(5):
        documents = number_documents(seq_len, seed)
        if seed == 4:  # one in each row
            documents = torch.zeros_like(documents)
        mask, pairs = (
            block_mask.block_mask(documents, start, end, window),
            document_mask(documents, start, end, window),
        )
        size = (2, None, *pairs.shape[2:])
        right = create_block_mask(mask.mask_mod, *size, device="cpu")
        assert torch.equal(create_mask(mask.mask_mod, *size, device="cpu"), pairs)
        assert mask.shape == right.shape
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(mask, name), getattr(right, name)), name
        assert torch.equal(mask.to_dense(), right.to_dense())


def test_a_query_sees_the_keys_of_its_document_up_to_itself():
    (mask,) = document_mask(torch.tensor([[1, 1, 2, 2, 2]]))
    rows = ["1....", "11...", "..1..", "..11.", "..111"]
    assert ["".join("1" if seen else "." for seen in row) for row in mask[0]] == rows
    assert torch.equal(document_mask(torch.tensor([[1, 1, 2, 2, 2]]), 2, 4)[0, 0], mask[0, 2:4, :4])
    (mask,) = document_mask(torch.tensor([[1, 1, 2, 2, 2]]), window=2)
    rows[-1] = "...11"
    assert ["".join("1" if seen else "." for seen in row) for row in mask[0]] == rows


@pytest.mark.parametrize("window", [1, 3, 4, 5, 9])
@pytest.mark.parametrize(("start", "end"), [(0, 12), (3, 9), (9, 12)])
def test_a_window_ends_with_the_query(window, start, end):
    """Pair by pair, as the paper on Mistral 7B says: at most `window` positions, its own one of
    them.
    """
    mask = document_mask(torch.zeros(1, 12, dtype=torch.int64), start, end, window)[0, 0]
    for query in range(start, end):
        seen = [key for key in range(end) if mask[query - start, key]]
        assert seen == list(range(query + 1))[-window:]


@pytest.fixture
def kernel(monkeypatch):
    """The reference that FlexAttention has for its kernels, also in the backward, which torch
    refuses on a CPU.
    """
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(
        block_mask, "compiled_flex_attention", lambda: flex_attention.flex_attention
    )


def gradients(model, seed: int) -> dict[str, torch.Tensor]:
    documents = number_documents(SEQ_LEN, seed)
    if model.config.sliding_window:
        documents = torch.zeros_like(documents)
    tokens = torch.randint(101, documents.shape, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    model(
        tokens, positions=torch.arange(SEQ_LEN).expand(documents.shape), documents=documents
    ).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "compiled"),
    [
        ("none", False),
        ("selective", True),
        *(pytest.param("full", compiled, marks=pytest.mark.slow) for compiled in (False, True)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("none", True), ("selective", False))
        ),
    ],
)
def test_gradients_with_blocks_are_those_with_a_tensor(kernel, mode, compiled):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, other, recompute = (
        *(small_model(SEQ_LEN, config=LLAMA) for _ in "ab"),
        RecomputeConfig(mode=mode),
    )
    other.document_mask = block_mask.block_mask
    if mode == "selective":
        apply_ac(other, recompute)
    if compiled:
        apply_compile(other, "aot_eager", recompute)
    if mode == "full":
        apply_ac(other, recompute)
    for seed in range(3):
        assert_same(gradients(other, seed), gradients(model, seed), rtol=1e-4, atol=1e-7)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, (
        "new documents need no new graph"
    )


def test_gradients_with_a_window_are_those_with_a_tensor(kernel):
    config = dataclasses.replace(LLAMA, sliding_window=140, window_layers="1")
    model = small_model(SEQ_LEN, config=config)
    other = small_model(SEQ_LEN, config=config)
    other.document_mask = block_mask.block_mask
    assert_same(gradients(other, 0), gradients(model, 0), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("dim", "no_compiler", "message"),
    [(32, "", "heads of 8 numbers"), (64, "no Triton", "no Triton"), (64, "", "")],
)
def test_where_flex_attention_cannot_run_masks_are_tensors(
    dim, no_compiler, message, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("titanlite"), "propagate", True)
    caplog.set_level(logging.INFO)
    model = small_model(config=dataclasses.replace(SMALL, dim=dim))
    parallelize.apply_block_mask(model, no_compiler)
    mask = model.document_mask(number_documents(16))
    assert isinstance(mask, torch.Tensor) == bool(message)
    assert message in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("seq_len", "start", "end"), [(512, 0, None), (1000, 0, None), (1024, 512, 768)]
)
@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
def test_the_kernel_computes_what_a_tensor_does(
    compiled, seq_len, start, end, window, dtype, tolerance
):
    """Output and gradients against fp64 on the CPU."""
    documents, found = number_documents(seq_len), []
    generator = torch.Generator().manual_seed(0)
    end = end or seq_len
    shapes = [(2, 4, end - start, 64), (2, 2, end, 64), (2, 2, end, 64)]
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    call = torch.compile(attention, fullgraph=True) if compiled else attention
    for function, mask, device, precision in (
        (call, block_mask.block_mask(documents.cuda(), start, end, window), "cuda", dtype),
        (attention, document_mask(documents, start, end, window), "cpu", torch.float64),
    ):
        inputs = [x.to(device, precision, copy=True).requires_grad_() for x in (q, k, v)]
        out = function(*inputs, mask)
        out.square().sum().backward()
        found.append([x.double().cpu() for x in (out.detach(), *(x.grad for x in inputs))])
    for ours, right in zip(*found, strict=True):
        assert (ours - right).norm() <= tolerance * right.norm()
