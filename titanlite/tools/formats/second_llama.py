"""Computes logits without the code of `model/llama.py`, to compare exports.

What it is: attention as a product and a softmax, RoPE as complex rotations, in fp64. It computes
from tensors in either order of rows, with the RoPE that belongs to it. What it knows of a model is
a `Description`; `second_config.py` makes one from a config.json, without our reader of that file.
Why it is here: a reader and a writer that share a mistake agree with each other. On purpose nothing
here is imported from the model but its description.
What it costs: one layer in memory at a time, and one of its experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from titanlite.model.flavors import LlamaConfig, RopeScaling, layer_numbers
from titanlite.tools.formats.full_state import FullTensor

Rounded = Callable[[FullTensor, Tensor], Tensor]  # rows of a tensor -> the same rows as written


class Weights:
    """Parameters by titanlite's names, in fp64, rounded as in the output; large ones by rows."""

    def __init__(
        self, tensors: dict[str, FullTensor], rounded: Rounded = lambda tensor, rows: rows
    ) -> None:
        self.tensors = tensors
        self.rounded = rounded

    def __call__(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        return self.rounded(tensor, tensor.read()).double()

    def one(self, name: str, number: int) -> Tensor:
        """Matrix (F, D) of a parameter (E, F, D)."""
        tensor = self.tensors[name]
        return self.rounded(tensor, tensor.read(number, number + 1)).double()[0]

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeds tokens: (S,) -> (S, D)."""
        table = self.tensors["tok_embeddings.weight"]
        rows = torch.cat([table.read(token, token + 1) for token in tokens.tolist()])
        return self.rounded(table, rows).double()

    def project(self, x: Tensor, tied: bool) -> Tensor:
        """Logits of the last layer's output: (S, D) -> (S, V)."""
        table = self.tensors["tok_embeddings.weight" if tied else "output.weight"]
        # Allocated first: results allocated between the blocks would fragment the memory that the
        # blocks reuse.
        logits = torch.empty(len(x), table.shape[0], dtype=torch.float64)
        for start, stop in table.row_ranges():
            logits[:, start:stop] = x @ self.rounded(table, table.read(start, stop)).double().T
        return logits


class Description(NamedTuple):
    """What the logits of a model depend on, beside its weights."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    norm_eps: float
    frequencies: tuple[float, ...]  # radians per position, of each pair
    amplitude: float  # factor of rotated queries and keys
    windows: tuple[int, ...]  # of each layer: how many positions a query sees; 0: all
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    experts_per_token: int = 0  # 0: one feed-forward


def described(config: LlamaConfig) -> Description:
    """The description of a `LlamaConfig`."""
    windowed = layer_numbers(config.window_layers, config.num_layers)
    return Description(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_width=config.head_dim,
        norm_eps=config.norm_eps,
        frequencies=_frequencies(config),
        amplitude=_amplitude(config),
        windows=tuple(
            config.sliding_window if layer in windowed else 0 for layer in range(config.num_layers)
        ),
        qkv_bias=config.qkv_bias,
        qk_norm=config.qk_norm,
        tied=config.tied_embeddings,
        experts_per_token=config.experts_per_token if config.num_experts else 0,
    )


def second_logits(model: Description, read: Weights, tokens: Tensor, half_split: bool) -> Tensor:
    """Logits (S, V) of these weights for these tokens.

    `half_split`: whether rows of wq and wk lie in Hugging Face's order.
    """
    x = read.embed(tokens)
    width = model.head_width
    heads = model.num_heads
    kv_heads = model.num_kv_heads
    positions = torch.arange(len(tokens), dtype=torch.float64)
    angles = torch.outer(positions, torch.tensor(model.frequencies, dtype=torch.float64))
    places = range(len(tokens))

    def normed(value: Tensor, name: str) -> Tensor:
        return value / (value.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * read(name)

    def projected(value: Tensor, layer: str, name: str) -> Tensor:  # -> (S, heads, width)
        rows = value @ read(f"{layer}attention.{name}.weight").T
        if model.qkv_bias:
            rows = rows + read(f"{layer}attention.{name}.bias")
        return rows.reshape(len(tokens), -1, width)

    def rotated(value: Tensor) -> Tensor:  # (S, heads, width)
        if half_split:  # a pair is number i of the first and of the second half
            pairs = value.reshape(len(tokens), -1, 2, width // 2)
            dim = 2
        else:  # neighbours
            pairs = value.reshape(len(tokens), -1, width // 2, 2)
            dim = 3
        first, second = pairs.unbind(dim)
        rotation = torch.polar(torch.full_like(angles, model.amplitude), angles)[:, None]
        plane = torch.complex(first, second) * rotation
        return torch.stack((plane.real, plane.imag), dim).reshape(len(tokens), -1, width)

    def masked(scores: Tensor, layer: int) -> Tensor:  # (heads, S, S)
        reach = model.windows[layer] or len(tokens)
        seen = [[max(0, i + 1 - reach) <= j <= i for j in places] for i in places]
        return scores.masked_fill(~torch.tensor(seen), -math.inf)

    for i in range(model.num_layers):
        layer = f"layers.{i}."
        h = normed(x, layer + "attention_norm.weight")
        q = projected(h, layer, "wq")
        k = projected(h, layer, "wk")
        v = projected(h, layer, "wv")
        if model.qk_norm:
            q = normed(q, layer + "attention.q_norm.weight")
            k = normed(k, layer + "attention.k_norm.weight")
        q = rotated(q)
        k = rotated(k).repeat_interleave(heads // kv_heads, 1)
        v = v.repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(width)
        attended = torch.einsum("hij,jhd->ihd", masked(scores, i).softmax(-1), v)
        x = x + attended.flatten(1) @ read(layer + "attention.wo.weight").T

        h = normed(x, layer + "ffn_norm.weight")
        names = [f"{layer}feed_forward.{name}.weight" for name in ("w1", "w2", "w3")]
        if model.experts_per_token:
            scores = h @ read(layer + "feed_forward.router.weight").T
            names = [name.replace("forward.", "forward.experts.") for name in names]
            x = x + mixed(h, scores, names, read, model.experts_per_token)
        else:
            x = x + gated(h, *(read(name) for name in names))
    x = normed(x, "norm.weight")
    return read.project(x, model.tied)


def gated(h: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """A feed-forward of the norm's output h (n, D)."""
    gate = h @ w1.T
    return (gate * torch.sigmoid(gate) * (h @ w3.T)) @ w2.T


def mixed(h: Tensor, scores: Tensor, names: list[str], read: Weights, most: int) -> Tensor:
    """The `most` experts with the highest scores (S, E) of each token, weighted by the softmax of
    these scores; one expert in memory at a time.
    """
    result = torch.zeros_like(h)
    best = scores.topk(most)
    shares = best.values.softmax(1)
    for expert in best.indices.unique().tolist():
        tokens, places = torch.nonzero(best.indices == expert, as_tuple=True)
        output = gated(h[tokens], *(read.one(name, expert) for name in names))
        result[tokens] += shares[tokens, places, None] * output
    return result


def _unscaled_share(
    pair: int, frequency: float, config: LlamaConfig, scaling: RopeScaling
) -> float:
    """How much of a pair's frequency is not divided by the factor, from 0 to 1."""
    if scaling.kind == "linear":
        return 0.0
    wavelength = 2 * math.pi / frequency
    if scaling.kind == "llama3":
        if wavelength > scaling.original_context / scaling.low_freq_factor:
            return 0.0
        if wavelength < scaling.original_context / scaling.high_freq_factor:
            return 1.0
        smooth = scaling.original_context / wavelength - scaling.low_freq_factor
        return smooth / (scaling.high_freq_factor - scaling.low_freq_factor)
    # YaRN: a ramp over the pairs, from the one with beta_fast turns to that with beta_slow

    def pair_of(turns: float) -> float:
        per_turn = math.log(scaling.original_context / (turns * 2 * math.pi))
        return config.head_dim * per_turn / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), config.head_dim - 1)
    ramp = (pair - low) / (high - low if high > low else 0.001)
    return 1 - min(max(ramp, 0.0), 1.0)


def _amplitude(config: LlamaConfig) -> float:
    """The factor of rotated queries and keys."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return scaling.attention_factor or 1 + math.log(scaling.factor) / 10


def _frequencies(config: LlamaConfig) -> tuple[float, ...]:
    """Radians per position, of each pair.

    On purpose not `rope_frequencies` of `model/llama.py`.
    """
    frequencies = []
    for i in range(0, config.head_dim, 2):
        frequency = config.rope_theta ** (-i / config.head_dim)
        if config.rope_scaling:
            share = _unscaled_share(i // 2, frequency, config, config.rope_scaling)
            frequency = share * frequency + (1 - share) * frequency / config.rope_scaling.factor
        frequencies.append(frequency)
    return tuple(frequencies)
