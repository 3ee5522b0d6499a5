"""The model against independent arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from model_builder import SMALL, assert_same, small_model

from titanlite.model.flavors import FLAVORS, RopeScaling
from titanlite.model.llama import Llama, apply_rope, rope_table


@pytest.mark.parametrize("tied", [False, True])
def test_init_sets_every_parameter_and_buffer(tied):
    config = replace(
        SMALL, dim=128, ffn_dim=256, num_layers=2, vocab_size=4112, tied_embeddings=tied
    )
    model = small_model(config=config)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert torch.isfinite(tensor).all(), name
    std = {name: float(p.detach().std()) for name, p in model.named_parameters() if p.ndim == 2}
    assert std["layers.0.attention.wq.weight"] == pytest.approx(0.02, rel=0.05)
    assert std["layers.1.attention.wo.weight"] == pytest.approx(0.02 / 2, rel=0.05)
    assert std["layers.0.feed_forward.w3.weight"] == pytest.approx(0.02 / math.sqrt(2), rel=0.05)
    assert std["tok_embeddings.weight"] == pytest.approx(0.02 if tied else 1.0, rel=0.05)
    if not tied:
        assert std["output.weight"] == pytest.approx(128**-0.5, rel=0.05)
    assert all(
        bool((p == 1).all()) for name, p in model.named_parameters() if name.endswith("norm.weight")
    )
    tokens = torch.randint(4112, (4, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    # With untied weights the logits have variance 1 under random labels, which adds 1/2 to ln V.
    assert float(loss) == pytest.approx(math.log(4112) + (0 if tied else 0.5), abs=0.2)


def test_init_depends_on_the_seed_and_the_name_only():
    a, b, c = (
        small_model().state_dict(),
        small_model(seed=0).state_dict(),
        small_model(seed=1).state_dict(),
    )
    deeper = small_model(config=replace(SMALL, num_layers=5)).state_dict()
    for name in a:
        assert torch.equal(a[name], b[name])
        assert torch.equal(a[name], deeper[name])
        assert a[name].ndim == 1 or not torch.equal(a[name], c[name])
    assert not torch.equal(a["layers.0.attention.wq.weight"], a["layers.1.attention.wq.weight"])


def test_parameter_names_are_metas():
    names = set(small_model().state_dict())
    block = {
        "attention.wq",
        "attention.wk",
        "attention.wv",
        "attention.wo",
        "feed_forward.w1",
        "feed_forward.w2",
    }
    block |= {"feed_forward.w3", "attention_norm", "ffn_norm"}
    expected = {f"layers.{i}.{name}.weight" for i in range(3) for name in block}
    assert names == expected | {"tok_embeddings.weight", "norm.weight", "output.weight"}


def test_rope_is_a_complex_rotation():
    x = torch.randn(2, 7, 3, 8, dtype=torch.float32)
    positions, half = torch.arange(7, dtype=torch.float64), torch.arange(4, dtype=torch.float64)
    angle = positions[:, None] * 500000.0 ** (-half / 4)
    turned = (
        torch.view_as_complex(x.double().view(2, 7, 3, 4, 2))
        * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    expected = torch.view_as_real(turned).flatten(-2)
    config = replace(SMALL, dim=32, num_heads=4)
    torch.testing.assert_close(
        apply_rope(x, rope_table(config, torch.arange(7))).double(), expected, atol=1e-6, rtol=1e-5
    )
    assert apply_rope(x.bfloat16(), rope_table(config, torch.arange(7))).dtype == torch.bfloat16


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_scaling_slows_long_wavelengths_only(factor):
    """Piecewise, by wavelength against the original context, as the Llama 3.1 release does."""
    config = replace(FLAVORS["llama3_8b"], rope_scaling=RopeScaling(factor))
    table = rope_table(config, torch.arange(2)).double()
    found = torch.atan2(table[1, :, 1], table[1, :, 0])
    for i in range(config.head_dim // 2):
        frequency = 500000.0 ** (-2 * i / config.head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected = frequency
        elif wavelength > 8192 / 1:
            expected = frequency / factor
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * frequency / factor + smooth * frequency
        assert float(found[i]) == pytest.approx(expected, rel=1e-5)


def reference_forward(
    model: Llama, tokens: torch.Tensor, windowed: Sequence[int] = (), grad: bool = False
) -> torch.Tensor:
    """Logits of one sequence in float64, head by head and position by position, from the weights
    alone.

    `windowed`: the blocks with the model's window. With `grad` the weights get gradients.
    """
    c, w = model.config, {name: p.double() for name, p in model.named_parameters()}
    if not grad:
        w = {name: p.detach() for name, p in w.items()}

    def norm(x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + c.norm_eps) * w[name]

    def turn(x):  # (S, Dh)
        half = torch.arange(c.head_dim // 2, dtype=torch.float64)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None] * c.rope_theta ** (
            -2 * half / c.head_dim
        )
        turned = torch.view_as_complex(x.view(len(x), -1, 2).contiguous()) * torch.polar(
            torch.ones_like(angle), angle
        )
        return torch.view_as_real(turned).flatten(1)

    x = w["tok_embeddings.weight"][tokens]
    for i in range(c.num_layers):
        p = f"layers.{i}"
        h = norm(x, f"{p}.attention_norm.weight")
        q, k, v = (h @ w[f"{p}.attention.w{n}.weight"].T for n in "qkv")
        heads = []
        for head in range(c.num_heads):
            group = head // (c.num_heads // c.num_kv_heads)
            own = slice(head * c.head_dim, (head + 1) * c.head_dim)
            shared = slice(group * c.head_dim, (group + 1) * c.head_dim)
            scores = turn(q[:, own]) @ turn(k[:, shared]).T / math.sqrt(c.head_dim)
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            for position in range(len(x)):
                if c.sliding_window and i in windowed:
                    scores[position, : max(0, position + 1 - c.sliding_window)] = -math.inf
            heads.append(scores.softmax(-1) @ v[:, shared])
        x = x + torch.cat(heads, -1) @ w[f"{p}.attention.wo.weight"].T
        h = norm(x, f"{p}.ffn_norm.weight")
        gate = h @ w[f"{p}.feed_forward.w1.weight"].T
        hidden = gate * torch.sigmoid(gate) * (h @ w[f"{p}.feed_forward.w3.weight"].T)
        x = x + hidden @ w[f"{p}.feed_forward.w2.weight"].T
    last = "tok_embeddings.weight" if c.tied_embeddings else "output.weight"
    return norm(x, "norm.weight") @ w[last].T


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_equal_a_reference(kv_heads, tied):
    model = small_model(config=replace(SMALL, num_kv_heads=kv_heads, tied_embeddings=tied))
    tokens = torch.randint(101, (2, 11), generator=torch.Generator().manual_seed(1))
    logits = model(tokens)
    for row, sequence in zip(logits, tokens, strict=True):
        torch.testing.assert_close(
            row.double(), reference_forward(model, sequence), atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("window", "layers", "windowed"),
    [(1, "all", [0, 1, 2]), (4, "all", [0, 1, 2]), (4, "1-2", [1, 2]), (10, "0, 2", [0, 2])],
)
def test_logits_and_gradients_with_a_window_equal_a_reference(window, layers, windowed):
    config = replace(SMALL, sliding_window=window, window_layers=layers)
    model = small_model(config=config)
    tokens = torch.randint(101, (2, 11), generator=torch.Generator().manual_seed(1))
    found = []
    for logits in (
        model(tokens),
        torch.stack([reference_forward(model, row, windowed, grad=True) for row in tokens]),
    ):
        model.zero_grad()
        logits.double().square().mean().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append((logits.detach().double(), gradients))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-4)
    assert_same(found[0][1], found[1][1], atol=1e-6, rtol=1e-4)
    without = replace(config, sliding_window=0)
    other = small_model(config=without)(tokens).detach().double()
    assert (other - found[0][0]).abs().max() > 1e-4, "the window changes something"


@pytest.mark.parametrize("window", [0, 11, 16, 99])
def test_a_window_that_holds_the_sequence_makes_no_mask(window, monkeypatch):
    """So the same kernels run."""
    model = small_model(config=replace(SMALL, sliding_window=window))
    tokens = torch.randint(101, (2, 11), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(model, "document_mask", None)
    assert torch.equal(model(tokens), small_model()(tokens))


def test_blocks_without_the_window_have_no_mask():
    """Unless rows have several documents; the logits are the same with one."""
    model = small_model(config=replace(SMALL, sliding_window=4, window_layers="1"))
    tokens = torch.randint(101, (2, 11), generator=torch.Generator().manual_seed(1))
    documents = torch.zeros_like(tokens)
    positions = torch.arange(11).expand(2, 11)
    assert list(model.masks(tokens, None, None)) == [4]
    assert list(model.masks(tokens[:, :5], None, documents)) == [4], "of the whole sequences"
    assert sorted(model.masks(tokens, positions, documents)) == [0, 4]
    logits = model(tokens, positions=positions, documents=documents)
    torch.testing.assert_close(model(tokens), logits)


def test_no_position_sees_a_later_one():
    model = small_model()
    tokens = torch.randint(101, (1, 12), generator=torch.Generator().manual_seed(2))
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 101
    a, b = model(tokens), model(changed)
    assert torch.equal(a[0, :8], b[0, :8])
    assert not torch.allclose(a[0, 8:], b[0, 8:])


def test_rope_is_the_same_for_the_compiler():
    """Which gets real arithmetic instead of complex."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 8, generator=generator)
    weights = torch.randn(2, 5, 3, 8, generator=generator)
    table = rope_table(FLAVORS["debug"], torch.arange(9))[:, :4]
    found = []
    for turn in (apply_rope, torch.compile(apply_rope, backend="aot_eager", fullgraph=True)):
        given = x.clone().requires_grad_()
        turned = turn(given, table)
        (turned * weights).sum().backward()
        found.append((turned, given.grad))
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-7)
