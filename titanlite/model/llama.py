"""Llama 3 in plain PyTorch.

What it is: a token embedding, L blocks of attention and feed-forward on a residual stream, a norm
and an output projection. It uses RMSNorm (arXiv 1910.07467) before attention and feed-forward,
rotary positions (RoPE, arXiv 2104.09864), grouped-query attention (arXiv 2305.13245) and SwiGLU
(arXiv 2002.05202).
Why it is here: this is the only model definition. It contains no parallelism; `parallel/` changes
it from outside, in four ways: it replaces submodules, wraps the computation of a block, of its
attention or of its experts (`wrappable.py`), and sets `document_mask` and `initial_values` of the
model.
What it costs: 2 FLOPs per parameter and token in the forward, twice that in the backward, plus
attention (`flops.py` has the exact count).

Shapes in comments: B sequences, S tokens, D = dim, H query heads, K key/value heads, Dh = head_dim
(D / H in most models), F = ffn_dim, V = vocabulary. Parameter names are those of Meta's release and
of torchtitan.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.model.attention import Mask, attention, document_mask
from titanlite.model.flavors import LlamaConfig
from titanlite.model.moe import MixtureOfExperts
from titanlite.model.wrappable import Wrappable

# Parameters of a block whose initial std decreases with the block's depth
SMALLER_WITH_DEPTH = (
    "attention.wo.weight",
    "feed_forward.w2.weight",
    "feed_forward.w3.weight",
    "feed_forward.experts.w2.weight",
    "feed_forward.experts.w3.weight",
)


class LayerCache(Protocol):
    """The interface of a key/value cache, which attention uses in generation (`generate.py`)."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


def rope_frequencies(config: LlamaConfig, device: torch.device) -> Tensor:
    """Computes RoPE's angle per position for each pair i of a head: theta^(-2i/Dh), (Dh / 2,).

    With a scaling, the frequencies of long wavelengths are divided by `factor`, so that positions
    beyond the original context have angles that the model has seen:
    linear      all frequencies (arXiv 2306.15595)
    llama3      those with few turns over the original context; others are kept, and between
                `low_freq_factor` and `high_freq_factor` turns both are blended by the number of
                turns (`apply_scaling` of the Llama 3.1 release)
    yarn        likewise, but blended by the number of the pair, between the pairs with `beta_slow`
                and `beta_fast` turns (arXiv 2309.00071)
    """
    half = config.head_dim // 2
    pairs = torch.arange(half, dtype=torch.float32, device=device)
    frequency = config.rope_theta ** -(pairs / half)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "llama3":
        low = scaling.low_freq_factor
        high = scaling.high_freq_factor
        turns = scaling.original_context * frequency / (2 * math.pi)  # over the original context
        share = (turns - low) / (high - low)
    else:
        first = max(math.floor(pair_with_turns(scaling.beta_fast, config)), 0)
        last = min(math.ceil(pair_with_turns(scaling.beta_slow, config)), config.head_dim - 1)
        share = 1 - (pairs - first) / max(last - first, 0.001)
    # `share` is the part of the unscaled frequency in the blend
    return torch.lerp(frequency / scaling.factor, frequency, share.clamp(0, 1))


def pair_with_turns(turns: float, config: LlamaConfig) -> float:
    """Computes which pair i makes so many turns over the original context; not rounded."""
    assert config.rope_scaling is not None
    frequency = 2 * math.pi * turns / config.rope_scaling.original_context
    return -config.head_dim / 2 * math.log(frequency) / math.log(config.rope_theta)


def rope_table(config: LlamaConfig, positions: Tensor) -> Tensor:
    """Computes cos and sin at these positions, fp32: ([B,] S) -> ([B,] S, Dh / 2, 2).

    YaRN also scales queries and keys up, so that attention over more keys does not become more
    uniform. Both are multiplied by the table, so the factor is in the table.
    """
    angle = positions.float()[..., None] * rope_frequencies(config, positions.device)
    table = torch.stack((angle.cos(), angle.sin()), dim=-1)
    scaling = config.rope_scaling
    if scaling and scaling.kind == "yarn":
        table = table * (scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1)
    return table


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotates neighbouring pairs of each head, in fp32.

    x: (B, S, heads, Dh), rope: ([B,] S or more, Dh / 2, 2).
    In eager mode a pair is a complex number, multiplied by cos + i sin in one kernel. Real
    arithmetic gives the same bits by several kernels, and on one CPU thread makes a step of `debug`
    about 4 % slower, one of `cpu_25m` about 1 % (torch 2.13). In a compiled graph it is real
    arithmetic, which the compiler fuses; it cannot fuse complex arithmetic.
    """
    pairs = x.float().unflatten(-1, (-1, 2))  # (B, S, heads, Dh / 2, 2)
    rope = rope[..., : x.shape[1], None, :, :]  # ([B,] S, 1, Dh / 2, 2)
    if torch.compiler.is_compiling():
        a, b = pairs.unbind(-1)
        cos, sin = rope.unbind(-1)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rope))
    return turned.flatten(-2).type_as(x)


def truncated_normal(weight: Tensor, std: float, cut: float, generator: torch.Generator) -> Tensor:
    """Fills `weight` from N(0, std); values beyond +-cut are drawn again.

    `nn.init.trunc_normal_` is not used: with the same seed it gives different weights in torch 2.11
    and 2.13.
    """
    weight.normal_(0.0, std, generator=generator)
    while True:
        outside = weight.abs() > cut
        if not outside.any():
            return weight
        redrawn = torch.empty(int(outside.sum()), dtype=weight.dtype, device=weight.device)
        weight[outside] = redrawn.normal_(0.0, std, generator=generator)


class CausalAttention(nn.Module):
    """Attention in which each query attends to the keys up to its position.

    It is a module so that `parallel/` can replace it.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
        """Computes attention: q (B, H, S, Dh), k and v (B, K, S, Dh) -> (B, H, S, Dh).

        A single query attends to all keys. `mask`: from `document_mask`, if a query attends only to
        the keys of its document, or of its window.
        """
        causal = mask is None and q.shape[2] > 1
        return attention(q, k, v, mask, causal)


class Attention(Wrappable):
    """Causal self-attention; H query heads share K key/value heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.q_dim, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, config.kv_dim, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, config.kv_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(config.q_dim, config.dim, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.attend: nn.Module = CausalAttention()

    def compute(
        self, x: Tensor, rope: Tensor, mask: Mask | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        # -1, not the number of heads: with tp a rank has only some of them
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # (B, S, H, Dh)
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))  # (B, S, K, Dh)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))  # (B, S, K, Dh)
        q = apply_rope(self.q_norm(q), rope).transpose(1, 2)  # (B, H, S, Dh)
        k = apply_rope(self.k_norm(k), rope).transpose(1, 2)  # (B, K, S, Dh)
        v = v.transpose(1, 2)  # (B, K, S, Dh)
        if cache is not None:
            k, v = cache.append(k, v)  # S grows to all positions so far
        out = self.attend(q, k, v, mask)  # (B, H, S, Dh)
        return self.wo(out.transpose(1, 2).flatten(2))  # (B, S, D)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x) with hidden width F."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(Wrappable):
    """Attention and feed-forward.

    Each reads the normalised residual stream and adds its result to the stream.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = MixtureOfExperts(config) if config.num_experts else FeedForward(config)

    def compute(
        self,
        x: Tensor,
        rope: Tensor,
        mask: Mask | None = None,
        cache: LayerCache | None = None,
        **routing: Tensor,
    ) -> Tensor:
        """`routing`: further arguments of a mixture of experts (`padding`)."""
        x = x + self.attention(self.attention_norm(x), rope, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x), **routing)


class TiedOutput(nn.Module):
    """The output projection of tied embeddings: uses the embedding's weight, has no parameters."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._embedding = (embedding,)  # a tuple, so that it is not registered as a submodule again

    @property
    def weight(self) -> Tensor:
        """The embedding's weight (V, D)."""
        weight = self._embedding[0].weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Llama(nn.Module):
    """Llama: tokens (B, S) -> logits (B, S, V).

    Build it under `torch.device("meta")`, allocate memory with `to_empty`, then call
    `init_weights`, which sets every parameter and buffer. `seq_len` is the length of the longest
    sequence and so of the RoPE table.
    """

    rope: Tensor

    def __init__(self, config: LlamaConfig, seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.seq_len = seq_len
        self.windows = config.windows(seq_len)  # one entry per block; 0: no window
        self.positions = torch.arange(seq_len, device="cpu")  # one entry per row of the RoPE table
        # In a pipeline stage, ends that other stages hold are replaced by other modules
        self.tok_embeddings: nn.Module = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict(
            {str(i): TransformerBlock(config) for i in range(config.num_layers)}
        )
        self.norm: nn.Module = nn.RMSNorm(config.dim, eps=config.norm_eps)
        if config.tied_embeddings:
            self.output: nn.Module = TiedOutput(self.tok_embeddings)
        else:
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        # `parallel/` may replace it; with cp it returns a mask for each chunk of queries
        self.document_mask: Callable[..., Mask | list[Mask]] = document_mask
        # How parameters are drawn that `parallel/` adds, by the end of their names
        self.initial_values: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {}
        # Always computed, never saved: a table in a checkpoint would fix the sequence length.
        self.register_buffer("rope", rope_table(config, torch.arange(seq_len)), persistent=False)

    def forward(
        self,
        tokens: Tensor,
        caches: list[LayerCache] | None = None,
        start: int = 0,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        **block_inputs: Tensor,
    ) -> Tensor:
        """Computes logits (B, S, V) of `tokens` (B, S) at positions start, start + 1, ...

        If rows hold several documents, pass `positions` (B, S), which replace `start`, and
        `documents` (B, S), the number of each token's document: attention stays within a document.
        With cp and a window, pass `documents` of zeros and no `positions`.
        `block_inputs`: further arguments for blocks: `padding` (B, S), with experts, and those that
        `parallel/` has changed them to take.
        """
        rope = self.rope[start:] if positions is None else rope_table(self.config, positions)
        masks = self.masks(tokens, positions, documents)
        x = self.tok_embeddings(tokens)  # (B, S, D)
        for i, (name, layer) in enumerate(self.layers.items()):
            mask = masks.get(self.windows[int(name)])
            x = layer(x, rope, mask, caches[i] if caches else None, **block_inputs)
        return self.output(self.norm(x))

    def masks(
        self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None
    ) -> dict[int, Mask | list[Mask]]:
        """Builds a mask for each window of the blocks; none where attention is only causal."""
        windows = {self.windows[int(name)] for name in self.layers}
        length = tokens.shape[1] if documents is None else documents.shape[1]
        if positions is None or documents is None:  # a row is one document
            windows = {window for window in windows if 0 < window < length}
        if documents is None and windows:
            documents = torch.zeros_like(tokens)
        return {window: self.document_mask(documents, window=window) for window in windows}

    @torch.no_grad()
    def init_weights(
        self,
        seed: int,
        assign: Callable[[Tensor, Tensor], object] = Tensor.copy_,
        device: torch.device | None = None,
    ) -> None:
        """Initialises every parameter and the RoPE table, on `device` or their own device.

        Each parameter is drawn in full from a separate generator, seeded by `seed` and the
        parameter's name. So the weights do not depend on the layout: `assign(parameter,
        full_value)` stores this process's part of the value.
        """
        for name, parameter in self.named_parameters():
            draws_on = device or parameter.device  # CPU and GPU draw differently
            generator = torch.Generator(draws_on).manual_seed(zlib.crc32(name.encode()) ^ seed)
            full = torch.empty(parameter.shape, dtype=torch.float32, device=draws_on)
            assign(parameter, self.draw(name, full, generator))
        self.reset_rope(device or self.rope.device)

    def reset_rope(self, device: torch.device) -> None:
        """Recomputes the RoPE table, the only part of the model that is not in a checkpoint."""
        self.rope = rope_table(self.config, self.positions.to(device))

    def draw(self, name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
        """Draws a parameter's initial value by torchtitan's rules; Llama's are not published.

        The std of wo, w2 and w3 decreases with depth. A tied embedding has std 0.02, as in Llama
        3.2's configuration: with std 1 the first logits would have std sqrt(D), and the first loss
        would be far above ln(V).
        """
        for ending, draw in self.initial_values.items():
            if name.endswith(ending):
                return draw(weight, generator)
        if name.endswith("norm.weight"):
            return weight.fill_(1.0)
        if name.endswith(".bias"):
            return weight.zero_()
        if name == "tok_embeddings.weight" and not self.config.tied_embeddings:
            return weight.normal_(generator=generator)
        if name == "tok_embeddings.weight":
            return truncated_normal(weight, 0.02, 0.06, generator)
        if name == "output.weight":
            std = self.config.dim**-0.5
            return truncated_normal(weight, std, 3 * std, generator)
        layer = re.match(r"layers\.(\d+)\.(.+)", name)
        assert layer is not None, name
        depth = int(layer[1]) + 1
        parameter = layer[2]
        std = 0.02
        if parameter in SMALLER_WITH_DEPTH:
            std /= math.sqrt(2 * depth)
        # As in torchtitan, the bound is 2 in absolute terms: with these stds it cuts nothing
        return truncated_normal(weight, std, 2.0, generator)
