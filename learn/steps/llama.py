"""The model that all steps train: a small Llama, in plain PyTorch.

What it is: RMSNorm (arXiv 1910.07467), rotary positions (RoPE, arXiv 2104.09864), grouped-query
attention (arXiv 2305.13245) and SwiGLU (arXiv 2002.05202), with the names of titanlite's
parameters and the same initial weights.
Why it is here: it contains no parallelism and never changes, so that each step shows its idea only.
What it costs: N = 182,848 parameters, 731,392 bytes in fp32; a step takes about 30 ms on one core.

Letters in shapes: B sequences, S tokens of a sequence, D width, H query heads, K key/value heads,
Dh width of a head, F width of the feed-forward, V vocabulary.
"""

from __future__ import annotations

import math
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, LAYERS, H, K, DH, FFN, V = 64, 4, 4, 2, 16, 128, 272
EPS = 1e-5
THETA = 500000.0
SEED = 42


def rope(x: Tensor, start: int = 0) -> Tensor:
    """Rotates neighbouring pairs of each head by position * THETA^(-2i/Dh): (B, S, heads, Dh).

    `start`: the position of the first token, for a rank that has only a later part of a sequence.
    """
    positions = torch.arange(start, start + x.shape[1], dtype=torch.float32)
    frequencies = THETA ** -(torch.arange(DH // 2, dtype=torch.float32) / (DH // 2))
    angle = positions[:, None] * frequencies  # (S, Dh / 2)
    turn = torch.complex(angle.cos(), angle.sin())[:, None]  # (S, 1, Dh / 2)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # (B, S, heads, Dh / 2)
    return torch.view_as_real(pairs * turn).flatten(-2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (B, H, S, Dh), k and v (B, K, S, Dh) -> (B, H, S, Dh); H / K query heads share a key."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Causal self-attention. A step may replace `attend` and `start`, or the linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.wq: nn.Module = nn.Linear(D, H * DH, bias=False)
        self.wk: nn.Module = nn.Linear(D, K * DH, bias=False)
        self.wv: nn.Module = nn.Linear(D, K * DH, bias=False)
        self.wo: nn.Module = nn.Linear(H * DH, D, bias=False)
        self.attend = causal_attention
        self.start = 0  # position of the first token

    def forward(self, x: Tensor) -> Tensor:
        # -1: the heads, of which a tensor-parallel rank has a part
        q = self.wq(x).unflatten(-1, (-1, DH))  # (B, S, H, Dh)
        k = self.wk(x).unflatten(-1, (-1, DH))  # (B, S, K, Dh)
        v = self.wv(x).unflatten(-1, (-1, DH))  # (B, S, K, Dh)
        q = rope(q, self.start).transpose(1, 2)  # (B, H, S, Dh)
        k = rope(k, self.start).transpose(1, 2)  # (B, K, S, Dh)
        out = self.attend(q, k, v.transpose(1, 2))  # (B, H, S, Dh)
        return self.wo(out.transpose(1, 2).flatten(2))  # (B, S, D)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self) -> None:
        super().__init__()
        self.w1: nn.Module = nn.Linear(D, FFN, bias=False)
        self.w2: nn.Module = nn.Linear(FFN, D, bias=False)
        self.w3: nn.Module = nn.Linear(D, FFN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and feed-forward; each adds its result to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(D, eps=EPS)
        self.attention = Attention()
        self.ffn_norm = nn.RMSNorm(D, eps=EPS)
        self.feed_forward: nn.Module = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """tokens (B, S) -> logits (B, S, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module = nn.Embedding(V, D)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm: nn.Module = nn.RMSNorm(D, eps=EPS)
        self.output: nn.Module = nn.Linear(D, V, bias=False)
        for name, parameter in self.named_parameters():
            parameter.data.copy_(initial_value(name, parameter.shape))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)  # (B, S, D)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def initial_value(name: str, shape: torch.Size) -> Tensor:
    """The initial value of a parameter, as titanlite/model/llama.py draws it.

    It depends only on the seed and the name, so every rank can draw it, and a layout changes none.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ SEED)
    std, cut = 0.02, 2.0
    if name == "tok_embeddings.weight":
        std, cut = 1.0, math.inf
    elif name == "output.weight":
        std = D**-0.5
        cut = 3 * std
    elif name.endswith(("wo.weight", "w2.weight", "w3.weight")):
        std /= math.sqrt(2 * (int(name.split(".")[1]) + 1))  # smaller in deeper blocks
    value = torch.empty(shape).normal_(0.0, std, generator=generator)
    while (outside := value.abs() > cut).any():  # draw these again
        value[outside] = torch.empty(int(outside.sum())).normal_(0.0, std, generator=generator)
    return value
