"""Compares the weights in a file with the model that they are for; one error has all differences.

Why it is here: most differences raise no error by themselves. Weights fit into a model with another
RoPE theta, epsilon or number of heads; more layers than the model has, biases or a second embedding
would only not be read.
What it is: a file that describes its model is compared field by field, the others by what shapes
tell; then the names, shapes and dtypes of its tensors with those that its own model has.
What it costs: nothing; names and shapes are known when a file is open. Where the file of a tied
model has an output besides the embedding, opening it (detect_format.py) reads both completely, in
each process, to see that they are equal.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.config.mistakes import suggestion
from titanlite.config.schema import ModelConfig
from titanlite.model.flavors import LlamaConfig, RopeScaling, parameter_shapes
from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats.full_state import FullState, FullTensor

logger = logging.getLogger("titanlite")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Computed from the shape, not parameters
TABLES = re.compile(r".*(freqs_cis|rope\.freqs|rotary_emb\.inv_freq)")
MOST = 8  # problems of tensors that are listed


class Stored(NamedTuple):
    """What is known of a tensor that is not opened yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]


Tensors = Mapping[str, Stored | FullTensor]


def require_same_model(
    path: Path, stated: LlamaConfig | None, tensors: Tensors, model: LlamaConfig
) -> None:
    """Raises ConfigError with every difference between a file and the model of this run's config.

    `stated`: the model that the file describes. Without it a warning lists what could not be
    compared.
    """
    sizes: dict[str, Any] = {}
    if stated:
        in_file = _fields(stated)
        shapes = parameter_shapes(stated)
    else:
        sizes = _sizes(tensors, model)
        in_file = _fields(model) | sizes
        shapes = parameter_shapes(_shaped(tensors, model, sizes))
    problems = [
        _problem(name, expected, actual, path)
        for name, expected, actual in _differences(_fields(model), in_file)
    ]
    problems += tensor_problems(path, tensors, shapes)
    if problems:
        raise ConfigError(problems)
    if stated is None:
        unknown = [
            f"{name} = {value}" for name, value in _fields(model).items() if name not in sizes
        ]
        logger.warning(
            "%s: has no description of its model; could not be compared: %s",
            path,
            ", ".join(unknown),
        )


def require_own_tensors(full: FullState) -> None:
    """Raises CorruptCheckpoint if the tensors are not those of the model that the file describes.

    It comes before anything is built or allocated from the description's numbers.
    """
    config = full.model
    if f"layers.{config.num_layers - 1}.attention.wq.weight" not in full.tensors:
        raise CorruptCheckpoint(
            f"{full.path}: describes {config.num_layers} layers, and holds fewer"
        )
    problems = tensor_problems(full.path, full.tensors, parameter_shapes(config))
    if problems:
        raise CorruptCheckpoint(problems)


def require_stated(
    named: LlamaConfig, stated: LlamaConfig, option: str, value: str, path: Path
) -> None:
    """Raises ConfigError if the model that an option's value names is not the one that the file
    describes.
    """
    problems = [
        f"{option} {value}: {name} = {by_option}, and {in_file} in {path}"
        for name, by_option, in_file in differences(named, stated)
    ]
    if problems:
        raise ConfigError([*problems, f"{path} describes its model: leave {option} out"])


def differences(first: LlamaConfig, second: LlamaConfig) -> list[tuple[str, Any, Any]]:
    """Lists (field, the first model's value, the second's) of each field that differs."""
    return _differences(_fields(first), _fields(second))


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [
        (name, value, second[name])
        for name, value in first.items()
        if name in second and value != second[name]
    ]


def _fields(model: LlamaConfig) -> dict[str, Any]:
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    fields["head_dim"] = fields.pop("explicit_head_dim")  # as the key is called
    if model.num_experts:
        del fields["ffn_dim"]  # a mixture has no such feed-forward
    return fields


def _problem(name: str, expected: Any, actual: Any, path: Path) -> str:
    """Describes one difference: both values, and the key that changes this model's."""
    if name == "rope_scaling":
        of_file = _scaling_keys(actual)
        return f"[model] {_scaling_keys(expected)}, and {of_file} in {path}; expected {of_file}"
    if isinstance(expected, bool) and name != "tied_embeddings":
        expected = str(expected).lower()
        actual = str(actual).lower()
    if name == "tied_embeddings":
        name = "embeddings"
        expected = "tied" if expected else "untied"
        actual = "tied" if actual else "untied"
    if name in {field.name for field in dataclasses.fields(ModelConfig)}:
        return (
            f"model.{name} = {expected}, and {actual} in {path}; expected model.{name} = {actual}"
        )
    return (
        f"{name} = {expected}, and {actual} in {path}; titanlite has no key for it, so this model "
        "cannot use these weights"
    )


def _scaling_keys(scaling: RopeScaling | None) -> str:
    """Describes a scaling by the keys that give it, and numbers that no key gives."""
    if scaling is None:
        return "rope_scaling = none"
    text = f"rope_scaling = {scaling.kind}, rope_factor = {scaling.factor:g}"
    if scaling.kind != "linear":
        text += f", rope_original_context = {scaling.original_context}"
    for name, value in numbers_without_key(scaling).items():
        text += f", {name} = {value:g} (no key)"
    return text


def numbers_without_key(scaling: RopeScaling) -> dict[str, float]:
    """Returns the numbers of a scaling that no key of [model] sets."""
    usual = RopeScaling(
        scaling.factor, original_context=scaling.original_context, kind=scaling.kind
    )
    names = [field.name for field in dataclasses.fields(scaling)]
    return {
        name: getattr(scaling, name)
        for name in names
        if getattr(scaling, name) != getattr(usual, name)
    }


def _sizes(tensors: Tensors, model: LlamaConfig) -> dict[str, Any]:
    """The fields of a model that the names and shapes of its tensors tell; only matrices are looked
    at.
    """
    matrices = _matrices(tensors)
    embedding = matrices.get("tok_embeddings.weight")
    if embedding is None:
        return {}
    vocabulary, dim = embedding
    matches = [re.match(r"layers\.(\d+)\.", name) for name in tensors]
    layers = {match[1] for match in matches if match}
    sizes: dict[str, Any] = {"dim": dim, "num_layers": len(layers), "vocab_size": vocabulary}
    sizes["tied_embeddings"] = "output.weight" not in tensors
    sizes["qkv_bias"] = any(name.endswith(".attention.wq.bias") for name in tensors)
    sizes["qk_norm"] = any(name.endswith(".attention.q_norm.weight") for name in tensors)
    for name, (rows, _) in matrices.items():
        if name.endswith(".feed_forward.w1.weight"):
            sizes["ffn_dim"] = rows
        if (
            name.endswith(".attention.wk.weight")
            and dim == model.dim
            and rows % model.head_dim == 0
        ):
            # If its heads are as wide as this model's
            sizes["num_kv_heads"] = rows // model.head_dim
    return sizes


def _matrices(tensors: Tensors) -> dict[str, tuple[int, int]]:
    """The shapes of the tensors with two dimensions."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}


def _shaped(tensors: Tensors, model: LlamaConfig, sizes: Mapping[str, Any]) -> LlamaConfig:
    """A model whose parameters have the names and shapes of a file that does not describe its
    model.
    """
    fields = dict(sizes)
    key_rows = [
        rows
        for name, (rows, _) in _matrices(tensors).items()
        if name.endswith(".attention.wk.weight")
    ]
    if fields.get("dim", model.dim) != model.dim and key_rows:
        # The width of a head is not known: heads of width 1 give the same shapes.
        fields |= {"num_heads": fields["dim"], "num_kv_heads": key_rows[0]}
    return dataclasses.replace(model, **fields)


def without_tables(tensors: Mapping[str, FullTensor]) -> dict[str, FullTensor]:
    """Drops tables of RoPE that other software saves; they are computed from the model's fields."""
    return {name: tensor for name, tensor in tensors.items() if not TABLES.fullmatch(name)}


def tensor_problems(
    path: Path, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Lists what does not fit a model whose parameters have these shapes, and what that model does
    not have.
    """
    unknown = [name for name in tensors if name not in shapes]
    if tensors and not tensors.keys() & shapes.keys():
        examples = ", ".join(repr(name[:100]) for name in unknown[:3])
        return [
            f"{path}: none of its {len(tensors)} tensors ({examples}, ...) has a name of a "
            "Llama's parameter"
        ]
    problems = _mismatches(path, tensors, shapes)
    for name in unknown:
        problem = f"{path}: {name[:200]!r} is not a parameter of this model"
        if name in ("output.weight", "lm_head.weight"):
            problem += ", whose embeddings are tied, and not a copy of its embedding"
        problems.append(problem)
    return _first_ones(path, problems)


def mismatches(path: Path, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Lists missing names with the nearest unknown one, other shapes, and dtypes that are not
    floating point.
    """
    return _first_ones(path, _mismatches(path, tensors, shapes))


def _mismatches(path: Path, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    problems: list[str] = []
    unknown = {
        name: tensor.shape
        for name, tensor in tensors.items()
        if name not in shapes and len(name) < 200
    }
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            candidates: list[str] = []
            if len(problems) < MOST:  # comparing names takes time, and the others are only counted
                candidates = [other for other in unknown if unknown[other] == shape]
            problem = f"{path}: has no {name!r}{suggestion(name, candidates[:500])}"
            if name == "output.weight":
                problem += " (lm_head.weight), and its model's embeddings are not tied"
            problems.append(problem)
        elif tensor.shape != shape:
            problems.append(f"{path}: {name!r} is {tensor.shape}; the model's is {shape}")
        elif tensor.dtype not in FLOATS:
            problems.append(
                f"{path}: {name!r} is {tensor.dtype}; allowed: {', '.join(map(str, FLOATS))}"
            )
    return problems


def _first_ones(path: Path, problems: list[str]) -> list[str]:
    """Cuts a list of problems: the first ones, and a line with the number of the others."""
    if len(problems) <= MOST + 1:
        return problems
    return [*problems[:MOST], f"{path}: and {len(problems) - MOST} more like these"]
