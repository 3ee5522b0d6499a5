"""Reads and describes PEFT's folder of adapters: adapter_config.json, adapter_model.safetensors.

What it is: the factors A and B of each adapter under Hugging Face's names. The rows of B of wq and
wk are in Hugging Face's order, as the rows of the weights that they are added to.
What it costs: the configuration and a header are read; factors when they are used.
Reference: PEFT 0.18, `LoraConfig` and `save_pretrained`
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from titanlite.model.flavors import LlamaConfig
from titanlite.runtime.documents import read_json
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.typed_json import typed
from titanlite.tools.formats.adapters import lora_of, missing_adapters, require_every_adapter
from titanlite.tools.formats.full_state import About, FullState, reading
from titanlite.tools.formats.huggingface import LAYER, is_permuted
from titanlite.tools.formats.safetensors_files import read_whole_file
from titanlite.tools.formats.shape_file import LARGEST

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model.model."  # begins PEFT's names
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


@dataclasses.dataclass
class _Numbers:
    """The numbers of adapter_config.json that are used."""

    r: int
    lora_alpha: float
    lora_dropout: float | None = None


NUMBERS = [field.name for field in dataclasses.fields(_Numbers)]


def hf_names(model: LlamaConfig) -> dict[str, str]:
    """PEFT's names of all possible factors by ours."""
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


def read_folder(folder: Path, model: LlamaConfig) -> FullState:
    """The adapters in PEFT's folder, for a model. Raises ConfigError or CorruptCheckpoint."""
    path = folder / CONFIG
    with reading(path, "PEFT's configuration"):
        fields = typed(dict[str, Any], read_json(path))
        problems = [
            f"{path}: {key} = {fields[key]!r:.200}; allowed: {', '.join(map(repr, values))}"
            for key, values in ONLY.items()
            if key in fields and fields[key] not in values
        ]
        numbers = typed(_Numbers, {name: fields[name] for name in NUMBERS if name in fields})
        expected = targets_of(fields, model)
    lora = {
        "rank": numbers.r,
        "alpha": float(numbers.lora_alpha),
        "rslora": fields.get("use_rslora") is True,
        "dropout": float(numbers.lora_dropout or 0.0),
    }
    if not 1 <= numbers.r < LARGEST:
        problems.append(f"{path}: r = {numbers.r}; expected 1 to {LARGEST - 1}")
    if not 0 < lora["alpha"] < math.inf:
        problems.append(f"{path}: lora_alpha = {lora['alpha']:g}; expected a finite number above 0")
    if not 0 <= lora["dropout"] < 1:
        problems.append(f"{path}: lora_dropout = {lora['dropout']:g}; expected 0 to below 1")
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
    """The fields of adapter_config.json for a run's adapters."""
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
