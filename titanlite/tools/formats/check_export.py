"""Compares the output of a conversion with its source: every tensor bit by bit, and the model's
logits.

What it is: the output is opened again. Equal bits are not enough: a reader and a writer that share
a mistake, such as a wrong order of rows, agree with each other. So the second Llama of
`second_llama.py` must compute from the output the logits that titanlite's model computes from the
source. It uses rows in Hugging Face's order without permuting them. If the source or the output is
a Hugging Face folder, separate readers read config.json and the names (`second_config.py`,
`second_names.py`).
What it costs: reading both twice, and the source a third time if it is a Hugging Face folder and
the output is not; memory for one layer, in fp64.
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
from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import TransformerBlock, rope_table
from titanlite.tools.formats.full_state import FullState, FullTensor
from titanlite.tools.formats.second_config import described_by_file
from titanlite.tools.formats.second_llama import (
    Description,
    Rounded,
    Weights,
    described,
    second_logits,
)
from titanlite.tools.formats.second_names import FolderWeights

PROMPT = 16  # tokens of the fixed prompt
# Relative to the largest logit. Angles and rotations are fp32, the rest is fp64. A wrong order of
# rows makes 0.1 in a trained model, and 1e-4 in a new one, whose attention is nearly uniform.
TOLERANCE = 1e-5
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def compare_descriptions(source: FullState, result: FullState) -> list[str]:
    """A line for each property of the model to which the second reader gives another value than
    titanlite's reader. It reads the config.json of the source and of the result, if they have one.

    It also finds what no short prompt shows, such as a window or a frequency of distant positions.
    """
    problems = []
    expected = described(source.model)
    for path, actual in _described_by_files(source, result).items():
        for name in Description._fields:
            ours = getattr(expected, name)
            theirs = getattr(actual, name)
            if not _is_same(ours, theirs):
                problems.append(
                    f"{path}: by a second reading {name} is {theirs!r:.200}, and titanlite reads "
                    f"{ours!r:.200}"
                )
    return problems


def _is_same(ours: object, theirs: object) -> bool:
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(_is_same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float | int):
        return math.isclose(ours, theirs, rel_tol=1e-9)
    return ours == theirs


def _described_by_files(*states: FullState) -> dict[Path, Description]:
    """The second reading of each config.json among the files of these checkpoints."""
    found = {}
    for state in states:
        for part in (state, *state.sources):
            path = part.path / "config.json"
            if part.about.format == "hf":
                found[path] = described_by_file(path)
    return found


def compare_logits(
    source: FullState, result: FullState, rounded: Rounded, half_split: bool
) -> str | None:
    """The problem with the result's logits for a fixed prompt, empty if they agree; None if they
    are not finite.
    """
    difference, largest = logits_difference(source, result, rounded, half_split)
    if not math.isfinite(largest):
        return None  # finite weights can overflow too; their bits were compared
    if not difference <= TOLERANCE * max(largest, 1e-3):  # NaN too is a difference
        return (
            f"{result.path}: logits are {difference:.3g} apart from the source's, of up to "
            f"{largest:.3g}"
        )
    return ""


def logits_difference(
    source: FullState, result: FullState, rounded: Rounded, half_split: bool
) -> tuple[float, float]:
    """The largest difference of the result's logits from those of the source for a fixed prompt,
    and the largest logit of the source, which is not finite if any is not.

    `half_split`: whether rows of wq and wk lie in Hugging Face's order in the result's files.
    """
    config = source.model
    by_files = list(_described_by_files(source, result).values())
    second = by_files[0] if by_files else described(config)
    tokens = torch.arange(PROMPT) * 7919 % config.vocab_size
    expected = _model_logits(config, Weights(source.tensors, rounded), tokens)
    difference = 0.0
    for read, is_split in _second_readings(source, result, rounded, half_split):
        computed = second_logits(second, read, tokens, is_split)
        largest = float((expected - computed).abs().max())
        difference = largest if math.isnan(largest) else max(difference, largest)
    return difference, float(expected.abs().max())


def _second_readings(
    source: FullState, result: FullState, rounded: Rounded, half_split: bool
) -> list[tuple[Weights, bool]]:
    """The weights for the second Llama, and whether rows of wq and wk lie in Hugging Face's order:
    those of the result, and those of a source that is a folder of Hugging Face.
    """
    if result.about.format == "hf":
        return [(FolderWeights(result.path), True)]
    # As they lie in the files: the second Llama has the RoPE of that order
    as_stored = {
        name: dataclasses.replace(tensor, half_split=0) for name, tensor in result.tensors.items()
    }
    readings = [(Weights(as_stored), half_split)]
    if source.about.format == "hf" and not source.sources:
        readings.append((FolderWeights(source.path, rounded), True))
    return readings


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
