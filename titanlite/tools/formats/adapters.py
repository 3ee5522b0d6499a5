"""Low-rank adapters (LoRA) as files: added to a model's weights, and in PEFT's format.

What it is: a checkpoint of a run with `lora.rank > 0` holds only the factors A and B of each
adapter. `merge` makes of these and of the frozen model one checkpoint whose adapted weights are
W + s B A. The sum is computed in fp32 when rows are read, and rounded to the dtype of W. So what
reads a checkpoint of any format also reads one with adapters.
PEFT's folder has adapter_config.json and adapter_model.safetensors, with Hugging Face's names, and
for wq and wk with their order of rows, in which the rows of B are.
What it costs: one product with A for each block of rows; A is read again for every block.
Reference: PEFT 0.18, `LoraConfig` and `save_pretrained`
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.config.schema import LoraConfig
from titanlite.model.flavors import LlamaConfig
from titanlite.parallel.lora import is_adapter
from titanlite.runtime.errors import ConfigError, reason_of
from titanlite.runtime.files import read_bounded
from titanlite.tools.formats.fingerprint import fingerprint
from titanlite.tools.formats.full_state import About, FullState, FullTensor
from titanlite.tools.formats.huggingface import LAYER, is_permuted
from titanlite.tools.formats.safetensors_files import read_whole_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model.model."  # of PEFT's names
FACTORS = {"lora_a": "lora_A", "lora_b": "lora_B"}  # ours -> theirs
# Fields of adapter_config.json that change what an adapter computes, and the values that are read
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "use_rslora": (True, False, None),
    "alora_invocation_tokens": (None,),
    "target_parameters": (None, []),
    # Others change the weights that they are added to
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None),
}


@dataclass(frozen=True)
class MergedTensor(FullTensor):
    """W + s B A, of W (N, K), A (r, K) and B (N, r)."""

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
    """The section [lora] of the run that a checkpoint is of. Raises CorruptCheckpoint."""
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
    """Raises CorruptCheckpoint if a run's checkpoint lacks an adapter that [lora] names, as those
    of another pipeline stage.
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
    """Which of the expected layers have no factor A among the parameters `found`; empty: none."""
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
    """Whether the adapters of a run were trained on these weights; PEFT's do not say."""
    saved = adapter.others.get("frozen.fingerprint")
    return saved is None or bytes(saved.read().tolist()).hex() == fingerprint(base)


def merge(base: FullState, adapter: FullState) -> FullState:
    """A model with adapters added to its weights; adapters of a run give its step and tokenizer.

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


def hf_names(model: LlamaConfig) -> dict[str, str]:
    """Our name of each possible factor -> PEFT's."""
    names = {}
    for i in range(model.num_layers):
        for module, hf_module in LAYER.items():
            for factor, hf_factor in FACTORS.items():
                ours = f"layers.{i}.{module}.{factor}.weight"
                names[ours] = f"{PREFIX}layers.{i}.{hf_module}.{hf_factor}.weight"
    return names


def head_dim_of(name: str, model: LlamaConfig) -> int:
    """The width of the heads whose rows are in Hugging Face's order, else 0."""
    layer, _, factor = name.removesuffix(".weight").rpartition(".")
    return model.head_dim if factor == "lora_b" and is_permuted(f"{layer}.weight") else 0


def targets_of(fields: dict[str, Any], model: LlamaConfig) -> list[str]:
    """The layers that adapter_config.json gives adapters, by our names; none if it does so by a
    pattern or by exclusion.
    """
    targets = fields.get("target_modules")
    if not isinstance(targets, list) or fields.get("exclude_modules"):
        return []
    chosen = fields.get("layers_to_transform")
    if chosen is None or chosen == []:
        chosen = range(model.num_layers)
    elif isinstance(chosen, int):
        chosen = [chosen]
    endings = tuple(f".{target}" for target in targets)
    return [
        f"layers.{i}.{module}"
        for i in range(model.num_layers)
        for module, hf_module in LAYER.items()
        if i in chosen and hf_module.endswith("_proj") and f".{hf_module}".endswith(endings)
    ]


def read_peft(folder: Path, model: LlamaConfig) -> FullState:
    """The adapters in PEFT's folder, for a model. Raises ConfigError or CorruptCheckpoint."""
    path = folder / CONFIG
    try:
        fields = json.loads(read_bounded(path))
        problems = [
            f"{path}: {key} = {fields[key]!r:.200}; allowed: {', '.join(map(repr, values))}"
            for key, values in ONLY.items()
            if key in fields and fields[key] not in values
        ]
        lora = {
            "rank": int(fields["r"]),
            "alpha": float(fields["lora_alpha"]),
            "rslora": fields.get("use_rslora") is True,
            "dropout": float(fields.get("lora_dropout") or 0.0),
        }
        expected = targets_of(fields, model)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: not PEFT's configuration: {reason_of(error)}") from None
    if lora["rank"] < 1:
        problems.append(f"{path}: r = {lora['rank']}; expected at least 1")
    if not 0 < lora["alpha"] < math.inf:
        problems.append(f"{path}: lora_alpha = {lora['alpha']:g}; expected a finite number above 0")
    if not (folder / WEIGHTS).is_file():
        problems.append(f"{folder}: has no {WEIGHTS}, which PEFT's save_pretrained writes")
    if problems:
        raise ConfigError(problems)
    stored, _ = read_whole_file(folder / WEIGHTS)
    tensors = {}
    for name, hf_name in hf_names(model).items():
        tensor = stored.pop(hf_name, None)
        if tensor is not None:
            tensors[name] = dataclasses.replace(tensor, half_split=head_dim_of(name, model))
    if stored or not tensors:
        examples = ", ".join(repr(name[:200]) for name in list(stored)[:3]) or "none"
        raise ConfigError(
            f"{folder / WEIGHTS}: has tensors that are not adapters of this model's blocks: "
            f"{examples}"
        )
    problem = missing_adapters(expected, tensors)
    if problem:
        raise ConfigError(
            f"{folder / WEIGHTS}: {problem}, which {CONFIG} names (target_modules, "
            "layers_to_transform)"
        )
    return FullState(folder, About("peft", model=model, config={"lora": lora}), tensors)


def to_config(state: FullState) -> dict[str, Any]:
    """adapter_config.json of a run's adapters."""
    lora = lora_of(state)
    require_every_adapter(state, lora)
    modules = sorted({name.split(".")[-3] for name in state.tensors})  # wq of ...wq.lora_a.weight
    theirs = {ours.rpartition(".")[2]: hf.rpartition(".")[2] for ours, hf in LAYER.items()}
    layers = sorted({int(name.split(".")[1]) for name in state.tensors})
    every = len(layers) == state.model.num_layers
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": state.about.config.get("checkpoint", {}).get("initial_load"),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": lora.dropout,
        "target_modules": [theirs[name] for name in modules],
        "layers_to_transform": None if every else layers,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
