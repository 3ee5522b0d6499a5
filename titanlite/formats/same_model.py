"""Whether the weights in a file are those of the model that they are for: every difference, in one error.

Why it is here: most differences raise no error by themselves. Weights fit into a model with another RoPE theta, epsilon
or number of heads; more layers than the model has, biases or a second embedding would only not be read.
What it is: a file that describes its model is compared field by field, the others by what shapes tell; then the names,
shapes and dtypes of its tensors with those that its own model has.
What it costs: nothing; names and shapes are known when a file is open.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.config.mistakes import suggestion
from titanlite.config.schema import ConfigError, ModelConfig
from titanlite.formats.full_state import FullTensor
from titanlite.model.flavors import LlamaConfig, parameter_shapes

logger = logging.getLogger("titanlite")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TABLES = re.compile(r".*(freqs_cis|rope\.freqs|rotary_emb\.inv_freq)")  # computed from the shape, not parameters
MOST = 8  # problems of tensors that are listed


class Stored(NamedTuple):
    """What is known of a tensor that is not opened yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]


Tensors = Mapping[str, Stored | FullTensor]


def require_same_model(path: Path, stated: LlamaConfig | None, tensors: Tensors, model: LlamaConfig) -> None:
    """Raises ConfigError with every difference between a file and the model of this run's config.

    `stated`: the model that the file describes. Without it a warning lists what could not be compared.
    """
    tensors = without_tables(tensors)
    known = _fields(stated) if stated else _fields(model) | _sizes(tensors, model)
    problems = [_problem(name, own, its, path) for name, own, its in _differences(_fields(model), known)]
    problems += tensor_problems(path, tensors, parameter_shapes(stated or _shaped(tensors, model)))
    if problems:
        raise ConfigError(problems)
    if stated is None:
        rest = {name: value for name, value in _fields(model).items() if name not in _sizes(tensors, model)}
        taken = ", ".join(f"{name} = {value}" for name, value in rest.items())
        logger.warning("%s: has no description of its model; could not be compared: %s", path, taken)


def require_stated(given: LlamaConfig, stated: LlamaConfig, option: str, path: Path) -> None:
    """Raises ConfigError if the model that an option names is not the one that the file describes."""
    found = differences(given, stated)
    if found:
        raise ConfigError(
            [f"{option}: {name} = {own}, and {its} in {path}" for name, own, its in found]
            + [f"{path} describes its model: leave {option.split()[0]} out"]
        )


def differences(here: LlamaConfig, there: LlamaConfig) -> list[tuple[str, Any, Any]]:
    """(field, value here, value there) of each field that differs."""
    return _differences(_fields(here), _fields(there))


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, here[name], there[name]) for name in here if here[name] != there[name]]


def _fields(model: LlamaConfig) -> dict[str, Any]:
    return {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}


def _problem(name: str, own: Any, its: Any, path: Path) -> str:
    """One difference: both values, and the key that changes this model's."""
    if name == "tied_embeddings":
        own, its = ("tied" if value else "untied" for value in (own, its))
        name = "embeddings"
    if name in {field.name for field in dataclasses.fields(ModelConfig)}:
        return f"model.{name} = {own}, and {its} in {path}; expected model.{name} = {its}"
    return f"{name} = {own}, and {its} in {path}; titanlite has no key for it, so this model cannot use these weights"


def _sizes(tensors: Tensors, model: LlamaConfig) -> dict[str, Any]:
    """The fields of a model that the names and shapes of its tensors tell."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    embedding = shapes.get("tok_embeddings.weight", ())
    if len(embedding) != 2:
        return {}
    vocabulary, dim = embedding
    layers = {match[1] for name in shapes if (match := re.match(r"layers\.(\d+)\.", name))}
    sizes: dict[str, Any] = {"dim": dim, "num_layers": len(layers), "vocab_size": vocabulary}
    sizes["tied_embeddings"] = "output.weight" not in shapes
    for name, shape in shapes.items():
        if name.endswith(".feed_forward.w1.weight"):
            sizes["ffn_dim"] = shape[0]
        if name.endswith(".attention.wk.weight") and dim == model.dim and shape[0] % model.head_dim == 0:
            sizes["num_kv_heads"] = shape[0] // model.head_dim  # if its heads are as wide as this model's
    return sizes


def _shaped(tensors: Tensors, model: LlamaConfig) -> LlamaConfig:
    """A model whose parameters have the names and shapes of a file that does not describe its model."""
    sizes = _sizes(tensors, model)
    keys = [tensor.shape[0] for name, tensor in tensors.items() if name.endswith(".attention.wk.weight")]
    if sizes.get("dim", model.dim) != model.dim and keys:
        # The width of a head is not known: heads of width 1 give the same shapes.
        sizes |= {"num_heads": sizes["dim"], "num_kv_heads": keys[0]}
    return dataclasses.replace(model, **sizes)


def without_tables(tensors: Tensors) -> dict[str, Stored | FullTensor]:
    """Without the tables of RoPE that other software saves; they are computed from the model's fields."""
    return {name: tensor for name, tensor in tensors.items() if not TABLES.fullmatch(name)}


def tensor_problems(path: Path, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What of a file does not fit a model whose parameters have these shapes, also what the model does not have."""
    theirs = [name for name in tensors if name not in shapes]
    if tensors and not tensors.keys() & shapes.keys():
        found = ", ".join(repr(name[:100]) for name in theirs[:3])
        return [f"{path}: none of its {len(tensors)} tensors ({found}, ...) has a name of a Llama's parameter"]
    problems = mismatches(path, tensors, shapes)
    problems += [f"{path}: {name[:200]!r} is not a parameter of this model{_reason(name, tensors)}" for name in theirs]
    if len(problems) > MOST + 1:
        problems[MOST:] = [f"{path}: and {len(problems) - MOST} more like these"]
    return problems


def _reason(name: str, tensors: Collection[str]) -> str:
    if name in ("output.weight", "lm_head.weight"):
        return ", whose embeddings are tied, and not a copy of its embedding"
    if ".experts." in name:
        return ", which has no mixture of experts"
    return ", which has no biases" if name.endswith(".bias") else ""


def mismatches(path: Path, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Missing names with the nearest one there is, other shapes, and dtypes that are not floating point."""
    problems, missing = [], 0
    unknown = {name: tensor.shape for name, tensor in tensors.items() if name not in shapes and len(name) < 200}
    for name, shape in shapes.items():
        if (tensor := tensors.get(name)) is None:
            missing += 1
            if missing <= MOST:
                near = [other for other in unknown if unknown[other] == shape]
                problems.append(f"{path}: has no {name!r}{suggestion(name, near[:500])}")
        elif tensor.shape != shape:
            problems.append(f"{path}: {name!r} is {tensor.shape}; the model's is {shape}")
        elif tensor.dtype not in FLOATS:
            problems.append(f"{path}: {name!r} is {tensor.dtype}; allowed: {', '.join(map(str, FLOATS))}")
    if missing > MOST:
        problems.append(f"{path}: lacks {missing - MOST} more of the model's {len(shapes)} parameters")
    return problems
