"""Compares the output of a conversion with its source: every tensor bit by bit, and the model's
logits.

What it is: the output is opened again and compared with the source. Equal bits are not enough: a
reader and a writer that share a mistake, as a wrong order of rows, agree with each other. So a
second Llama, which shares no code with `model/llama.py`, must compute from the output the logits
that titanlite's model computes from the source. It reads files in Hugging Face's order of rows as
they are, with the RoPE that belongs to it.
What it costs: reading both twice; memory for one layer, in fp64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.model.attention import document_mask
from titanlite.model.flavors import LlamaConfig, RopeScaling, layer_numbers
from titanlite.model.llama import TransformerBlock, rope_table
from titanlite.tools.formats import huggingface
from titanlite.tools.formats.full_state import FullState, FullTensor
from titanlite.tools.formats.safetensors_files import read_folder

PROMPT = 16  # tokens of the fixed prompt
# Relative to the largest logit. Angles and rotations are fp32, the rest is fp64. A wrong order of
# rows makes 0.1 in a trained model, and 1e-4 in a new one, whose attention is nearly uniform.
TOLERANCE = 1e-5
Rounded = Callable[[FullTensor, Tensor], Tensor]  # rows of a tensor -> the same rows as written
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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

    def embed(self, tokens: Tensor) -> Tensor:
        """(S,) -> (S, D)"""
        table = self.tensors["tok_embeddings.weight"]
        rows = torch.cat([table.read(token, token + 1) for token in tokens.tolist()])
        return self.rounded(table, rows).double()

    def project(self, x: Tensor, tied: bool) -> Tensor:
        """(S, D) -> logits (S, V)"""
        table = self.tensors["tok_embeddings.weight" if tied else "output.weight"]
        # Allocated first: results allocated between the blocks would fragment the memory that the
        # blocks reuse.
        logits = torch.empty(len(x), table.shape[0], dtype=torch.float64)
        for start, stop in table.row_ranges():
            logits[:, start:stop] = x @ self.rounded(table, table.read(start, stop)).double().T
        return logits


def compare_tensors(
    source: FullState,
    result: FullState,
    rounded: Rounded,
    full: bool,
    progress: Callable[[int], object],
) -> list[str]:
    """A line for each tensor that is missing, new, of another shape or dtype, or differs."""
    problems = []
    pairs = [(source.tensors, result.tensors, rounded)]
    if full:
        pairs.append((source.others, result.others, lambda tensor, rows: rows))
    for expected, written, rounding in pairs:
        for name in expected:
            if name not in written:
                problems.append(f"{result.path}: has no {name!r}")
        for name in written:
            if name not in expected:
                problems.append(f"{result.path}: has {name!r}, and the source does not")
        for name, tensor in expected.items():
            if name not in written:
                continue
            problem = _difference(tensor, written[name], rounding)
            if problem:
                problems.append(f"{result.path}: {name!r} {problem}")
            progress(written[name].nbytes)
    return problems


def _difference(source: FullTensor, written: FullTensor, rounded: Rounded) -> str:
    if source.shape != written.shape:
        return f"is {written.shape}; expected {source.shape}"
    for start, stop in source.row_ranges():
        expected = rounded(source, source.read(start, stop))
        actual = written.read(start, stop)
        if expected.dtype != actual.dtype:
            return f"is {actual.dtype}; expected {expected.dtype}"
        bits = INTEGERS[expected.dtype.itemsize]
        if not torch.equal(expected.contiguous().view(bits), actual.contiguous().view(bits)):
            return f"differs in rows {start} to {stop}"
    return ""


def compare_logits(
    source: FullState, path: Path, format: str, result: FullState, rounded: Rounded
) -> str | None:
    """The problem with the result's logits for a fixed prompt, empty if they agree; None if they
    are not finite.
    """
    difference, largest = logits_difference(source, path, format, result, rounded)
    if not math.isfinite(largest):
        return None  # finite weights can overflow too; their bits were compared
    if not difference <= TOLERANCE * max(largest, 1e-3):  # NaN too is a difference
        return (
            f"{path}: logits are {difference:.3g} apart from the source's, of up to {largest:.3g}"
        )
    return ""


def logits_difference(
    source: FullState, path: Path, format: str, result: FullState, rounded: Rounded
) -> tuple[float, float]:
    """The largest difference of the result's logits from those of the source for a fixed prompt,
    and the largest logit of the source, which is not finite if any is not.
    """
    config = source.model
    tokens = torch.arange(PROMPT) * 7919 % config.vocab_size

    expected = _model_logits(config, Weights(source.tensors, rounded), tokens)
    # llama.cpp rotates the pairs of Hugging Face in the models that it calls Qwen
    half_split = format == "hf" or (format == "gguf" and (config.qkv_bias or config.qk_norm))
    tensors = result.tensors
    if format == "hf":
        stored = read_folder(path)
        tensors = {name: stored[hf_name] for name, hf_name in huggingface.names(config).items()}
    elif half_split:
        tensors = {name: dataclasses.replace(t, half_split=0) for name, t in tensors.items()}
    computed = _reference_logits(config, Weights(tensors), tokens, half_split)
    difference = float((expected - computed).abs().max())
    return difference, float(expected.abs().max())


@torch.no_grad()
def _model_logits(config: LlamaConfig, read: Weights, tokens: Tensor) -> Tensor:
    """Logits (S, V) of `model/llama.py`, one layer in memory at a time."""
    x = read.embed(tokens)[None]
    rope = rope_table(config, torch.arange(len(tokens)))
    block = TransformerBlock(config).double()
    one_document = torch.zeros_like(tokens)[None]
    for i, window in enumerate(config.windows(len(tokens))):
        block.load_state_dict({name: read(f"layers.{i}.{name}") for name in block.state_dict()})
        x = block(x, rope, document_mask(one_document, window=window) if window else None)
    x = F.rms_norm(x, (config.dim,), read("norm.weight"), config.norm_eps)[0]
    return read.project(x, config.tied_embeddings)


def _reference_logits(
    config: LlamaConfig, read: Weights, tokens: Tensor, half_split: bool
) -> Tensor:
    """Logits (S, V) of an independent Llama: attention as product and softmax, RoPE as complex
    rotations.
    """
    x = read.embed(tokens)
    width = config.head_dim
    heads = config.num_heads
    kv_heads = config.num_kv_heads
    angles = _angles(config, len(tokens))
    places = range(len(tokens))

    def normed(value: Tensor, name: str) -> Tensor:
        return value / (value.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * read(name)

    def projected(value: Tensor, layer: str, name: str) -> Tensor:  # -> (S, heads, width)
        rows = value @ read(f"{layer}attention.{name}.weight").T
        if config.qkv_bias:
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
        rotation = torch.polar(torch.full_like(angles, _amplitude(config)), angles)[:, None]
        plane = torch.complex(first, second) * rotation
        return torch.stack((plane.real, plane.imag), dim).reshape(len(tokens), -1, width)

    def masked(scores: Tensor, layer: int) -> Tensor:  # (heads, S, S)
        reach = len(tokens)
        if config.sliding_window and layer in layer_numbers(
            config.window_layers, config.num_layers
        ):
            reach = config.sliding_window
        seen = [[max(0, i + 1 - reach) <= j <= i for j in places] for i in places]
        return scores.masked_fill(~torch.tensor(seen), -math.inf)

    for i in range(config.num_layers):
        layer = f"layers.{i}."
        h = normed(x, layer + "attention_norm.weight")
        q = projected(h, layer, "wq")
        k = projected(h, layer, "wk")
        v = projected(h, layer, "wv")
        if config.qk_norm:
            q = normed(q, layer + "attention.q_norm.weight")
            k = normed(k, layer + "attention.k_norm.weight")
        q = rotated(q)
        k = rotated(k).repeat_interleave(heads // kv_heads, 1)
        v = v.repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(width)
        attended = torch.einsum("hij,jhd->ihd", masked(scores, i).softmax(-1), v)
        x = x + attended.flatten(1) @ read(layer + "attention.wo.weight").T

        h = normed(x, layer + "ffn_norm.weight")
        gate = h @ read(layer + "feed_forward.w1.weight").T
        hidden = gate * torch.sigmoid(gate) * (h @ read(layer + "feed_forward.w3.weight").T)
        x = x + hidden @ read(layer + "feed_forward.w2.weight").T
    x = normed(x, "norm.weight")
    return read.project(x, config.tied_embeddings)


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


def _angles(config: LlamaConfig, length: int) -> Tensor:
    """Angle of each pair at each position, (S, width / 2).

    On purpose not `rope_frequencies` of `model/llama.py`.
    """
    frequencies = []
    for i in range(0, config.head_dim, 2):
        frequency = config.rope_theta ** (-i / config.head_dim)
        if config.rope_scaling:
            share = _unscaled_share(i // 2, frequency, config, config.rope_scaling)
            frequency = share * frequency + (1 - share) * frequency / config.rope_scaling.factor
        frequencies.append(frequency)
    return torch.outer(
        torch.arange(length, dtype=torch.float64), torch.tensor(frequencies, dtype=torch.float64)
    )
