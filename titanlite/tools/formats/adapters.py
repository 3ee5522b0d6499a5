"""Adds low-rank adapters (LoRA) to the weights of their model.

What it is: a checkpoint of a run with `lora.rank > 0` holds only the factors A and B of each
adapter. `merge` makes of these and of the frozen model one checkpoint whose adapted weights are
W + s B A. The sum is computed in fp32 when rows are read, and rounded to the dtype of W. So what
reads a checkpoint of any format also reads one with adapters. `peft.py` has PEFT's files.
What it costs: one product with A for each block of rows; A is read again for every block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.config.schema import LoraConfig
from titanlite.parallel.lora import is_adapter
from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats.fingerprint import fingerprint
from titanlite.tools.formats.full_state import FullState, FullTensor
from titanlite.tools.formats.huggingface import LAYER


@dataclass(frozen=True)
class MergedTensor(FullTensor):
    """The sum W + s B A: W is (N, K), A (r, K), and B (N, r)."""

    # With defaults, because those of the base class have some
    weight: FullTensor | None = None
    a: FullTensor | None = None
    b: FullTensor | None = None
    scale: float = 1.0

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows from `start` to `stop`, in the dtype of W."""
        assert self.weight
        assert self.a
        assert self.b
        rows = self.weight.read(start, stop).float()
        rows += self.scale * (self.b.read(start, stop).float() @ self.a.read().float())
        return rows.to(self.dtype)


def holds_adapters(state: FullState) -> bool:
    """Whether the tensors are factors of adapters, without the model that they belong to."""
    return any(map(is_adapter, state.tensors))


def lora_of(state: FullState) -> LoraConfig:
    """The section [lora] of the run that saved a checkpoint. Raises CorruptCheckpoint."""
    section = state.about.config.get("lora", {})
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    try:
        lora = LoraConfig(**{name: section[name] for name in known & section.keys()})
        if lora.rank >= 1 and lora.scale > 0:
            return lora
    except (TypeError, ValueError, ArithmeticError):
        pass
    raise CorruptCheckpoint(f"{state.path}: holds adapters, but not their rank and alpha")


def require_every_adapter(state: FullState, lora: LoraConfig) -> None:
    """Raises CorruptCheckpoint if a run's checkpoint lacks an adapter that [lora] names, such as
    one of another pipeline stage.
    """
    if state.about.format != "titanlite":
        return  # `read_peft` has compared PEFT's folder with its own configuration
    expected = [
        f"layers.{i}.{module}"
        for i in range(state.model.num_layers)
        if lora.adapts_layer(i)
        for module in LAYER
        if module.rpartition(".")[2] in lora.target_names
    ]
    problem = missing_adapters(expected, state.tensors)
    if problem:
        raise CorruptCheckpoint(f"{state.path}: {problem}, which lora.targets and lora.layers name")


def missing_adapters(expected: Sequence[str], found: Iterable[str]) -> str:
    """Says which of the expected layers have no factor A in `found`; "" if all have one."""
    present = {name.removesuffix(".lora_a.weight") for name in found}
    missing = [layer for layer in expected if layer not in present]
    if not missing:
        return ""
    return (
        f"has no adapter of {len(missing)} of {len(expected)} layers, as {', '.join(missing[:3])}"
    )


def base_of(state: FullState) -> Path:
    """The model that a run's adapters belong to. Raises ConfigError if it is not there."""
    name = str(state.about.config.get("checkpoint", {}).get("initial_load", ""))
    path = Path(name)
    if not name or not path.exists():
        raise ConfigError(
            f"{state.path}: holds adapters, and the model that they belong to "
            f"(checkpoint.initial_load = {name!r}) is not there; give its path, and this one with "
            "--adapter"
        )
    return path


def is_base(base: FullState, adapter: FullState) -> bool:
    """Whether the adapters of a run were trained on these weights; true for PEFT's, which cannot
    tell.
    """
    saved = adapter.others.get("frozen.fingerprint")
    return saved is None or bytes(saved.read().tolist()).hex() == fingerprint(base)


def merge(base: FullState, adapter: FullState) -> FullState:
    """Adds adapters to the weights of a model; those of a run also give its step and tokenizer.

    Raises ConfigError if they do not fit.
    """
    lora = lora_of(adapter)
    require_every_adapter(adapter, lora)
    tensors = dict(base.tensors)
    factors = dict(adapter.tensors)
    layers = [name.removesuffix(".lora_a.weight") for name in factors if ".lora_a." in name]
    problems = []
    for layer in layers:
        a = factors.pop(f"{layer}.lora_a.weight")
        b = factors.pop(f"{layer}.lora_b.weight", None)
        weight = tensors.get(f"{layer}.weight")
        if b is None or weight is None:
            problems.append(f"{adapter.path}: the adapter of {layer} has no other factor or weight")
            continue
        shapes = (a.shape, b.shape)
        if shapes != ((lora.rank, weight.shape[1]), (weight.shape[0], lora.rank)):
            problems.append(
                f"{adapter.path}: the adapter of {layer} is {b.shape} times {a.shape}; its weight "
                f"in {base.path} is {weight.shape}, and the rank {lora.rank}"
            )
            continue
        tensors[f"{layer}.weight"] = MergedTensor(
            weight.dtype, weight.shape, weight.parts, weight.half_split, weight, a, b, lora.scale
        )
    problems += [f"{adapter.path}: {name!r} is not a factor of an adapter" for name in factors]
    if problems:
        raise ConfigError(problems[:8])
    of_run = adapter if adapter.about.format == "titanlite" else base
    about = dataclasses.replace(
        of_run.about,
        format=f"adapters in {adapter.path} on {base.about.format} {base.path}",
        model=base.about.model or adapter.about.model,
        tokenizer=of_run.about.tokenizer or base.about.tokenizer,
    )
    merged = FullState(of_run.path, about, tensors)
    merged.sources = [base, adapter]
    return merged
