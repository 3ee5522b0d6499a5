"""A model folder of Hugging Face's transformers: names, config.json, order of rows.

What it is: the same tensors under other names. The rows of wq and wk are permuted, because their
RoPE rotates other pairs (`half_split`); w1 is `gate_proj`, w3 `up_proj`, w2 `down_proj`. A mistake
here raises no error: logits are off by 0.2.
What it costs: config.json and the headers are read; tensors when they are used.
Reference: transformers 5, `LlamaForCausalLM`
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypedDict

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.model.flavors import (
    SCALINGS,
    LlamaConfig,
    RopeScaling,
    block_shapes,
    layer_numbers,
    layer_ranges,
)
from titanlite.model.shape_file import LARGEST, checked, sequence_length
from titanlite.runtime.errors import ConfigError, reason_of
from titanlite.runtime.files import read_bounded
from titanlite.runtime.typed_json import typed
from titanlite.tokenizer.tokenizer_json import TEMPLATE_FILE
from titanlite.tools.chat.find_template import find_template
from titanlite.tools.formats.full_state import About, FullState, FullTensor, same_numbers
from titanlite.tools.formats.huggingface_tokenizer import read_tokenizer
from titanlite.tools.formats.safetensors_files import read_folder
from titanlite.tools.formats.same_model import without_tables

logger = logging.getLogger("titanlite")
LAYER = {  # ours -> theirs
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
# RoPE rotates what these compute
PERMUTED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")
# Families whose blocks are Llama's with the differences that are fields of LlamaConfig
FAMILIES = ("llama", "mistral", "ministral", "qwen2", "qwen3")
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Entries of `layer_types`: a layer with the window, and one without
WINDOWED = "sliding_attention"
FULL = "full_attention"

Size: TypeAlias = Annotated[int, range(1, LARGEST)]


class _Needed(TypedDict):
    """The fields of a config.json without which there is no model."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    vocab_size: Size


class _Fields(_Needed, total=False):
    """And those that may be absent. Fields that are refused may be of any type."""

    num_key_value_heads: Size | None
    head_dim: Size | None
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    rope_scaling: dict[str, Any] | None
    rope_parameters: dict[str, Any] | None
    use_sliding_window: bool
    max_window_layers: int
    layer_types: list[str] | None


def names(config: LlamaConfig) -> dict[str, str]:
    """Our parameter name -> theirs, in our order."""
    result = {"tok_embeddings.weight": "model.embed_tokens.weight"}
    for i in range(config.num_layers):
        for name in block_shapes(config):
            module, _, kind = name.rpartition(".")  # attention.wq, weight or bias
            result[f"layers.{i}.{name}"] = f"model.layers.{i}.{LAYER[module]}.{kind}"
    result["norm.weight"] = "model.norm.weight"
    if not config.tied_embeddings:
        result["output.weight"] = "lm_head.weight"
    return result


def is_permuted(name: str) -> bool:
    """Whether the rows of this parameter lie in another order in Hugging Face's files."""
    return name.rpartition(".")[0].endswith(PERMUTED)


def to_config(
    config: LlamaConfig, seq_len: int, dtype: str, bos: int | None, eos: int | None
) -> dict[str, Any]:
    """config.json for transformers; `dtype` as torch names it, without `torch.`."""
    family = family_of(config)
    return {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _to_scaling(config.rope_scaling),
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": None,
        "use_cache": True,
        "torch_dtype": dtype,
        **_to_window(config, family),
    }


def family_of(config: LlamaConfig) -> str:
    """The family of transformers that has this model's blocks.

    Raises ConfigError if none has.
    """
    if config.qkv_bias and config.qk_norm:
        raise ConfigError(
            "model.qkv_bias with model.qk_norm: transformers has no such model; "
            "expected one of the two"
        )
    if config.qkv_bias and config.explicit_head_dim:
        raise ConfigError(
            "model.qkv_bias with model.head_dim: transformers has no such model; expected heads "
            "of width dim / num_heads"
        )
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias:
        return "qwen2"
    if not config.sliding_window:
        return "llama"
    return "mistral" if config.window_layers == "all" else "ministral"


def _to_window(config: LlamaConfig, family: str) -> dict[str, Any]:
    """The fields of a config.json that give the window."""
    if not config.sliding_window:
        return {}
    fields: dict[str, Any] = {"sliding_window": config.sliding_window}
    if family == "mistral":
        return fields
    numbers = layer_numbers(config.window_layers, config.num_layers)
    fields["layer_types"] = [
        WINDOWED if number in numbers else FULL for number in range(config.num_layers)
    ]
    if family in ("qwen2", "qwen3"):
        fields["use_sliding_window"] = True
        fields["max_window_layers"] = numbers[0]  # of transformers 4, the first with the window
    return fields


def _window_of(family: str, fields: dict[str, Any]) -> Any:
    """The window of a config.json, None if it has none."""
    if family in ("mistral", "ministral"):
        return fields.get("sliding_window", 4096)  # of transformers' MistralConfig
    if family in ("qwen2", "qwen3"):
        if not fields.get("use_sliding_window", False):
            return None  # the width of a window that is not used
        return fields.get("sliding_window", 4096)  # of Qwen2Config
    return fields.get("sliding_window")


def _window_layers(family: str, fields: dict[str, Any]) -> str:
    """Which layers of a config.json have the window, as in `LlamaConfig.window_layers`.

    Raises ValueError.
    """
    num_layers = fields["num_hidden_layers"]
    types = fields.get("layer_types")
    if types is not None:
        if len(types) != num_layers:
            raise ValueError(f"layer_types has {len(types)} entries for {num_layers} layers")
        windowed = [number for number, kind in enumerate(types) if kind == WINDOWED]
        return layer_ranges(windowed, num_layers)
    if family not in ("qwen2", "qwen3"):
        return "all"
    first = max(0, fields.get("max_window_layers", 28))  # of Qwen2Config
    return f"{first}-{num_layers - 1}" if first < num_layers else ""


def _to_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """`rope_scaling` of a config.json."""
    if scaling is None:
        return None
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        fields["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        fields["low_freq_factor"] = scaling.low_freq_factor
        fields["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        fields["beta_fast"] = scaling.beta_fast
        fields["beta_slow"] = scaling.beta_slow
        fields["attention_factor"] = scaling.attention_factor or None
    return fields


def _from_scaling(rope: dict[str, Any], kind: str, length: int) -> RopeScaling | None:
    """The inverse; `length`: `max_position_embeddings`, yarn's default of the original context."""
    if kind == "llama3":
        return RopeScaling(
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
    if kind == "linear":
        return RopeScaling(rope["factor"], kind=kind)
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or length
        return RopeScaling(
            length / original if rope["factor"] is None else rope["factor"],
            original_context=original,
            kind=kind,
            beta_fast=rope.get("beta_fast") or 32.0,
            beta_slow=rope.get("beta_slow") or 1.0,
            attention_factor=rope.get("attention_factor") or 0.0,
        )
    return None


def from_config(path: Path, fields: dict[str, Any]) -> LlamaConfig:
    """The model of a config.json.

    Raises ConfigError with every field that titanlite's Llama does not support.
    """
    family = fields.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{path}: model_type = {family!r:.99}; allowed: {', '.join(map(repr, FAMILIES))}"
        )
    typed(_Fields, {name: fields[name] for name in _Fields.__annotations__ if name in fields})
    rope = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    heads = fields["num_attention_heads"]
    dim = fields["hidden_size"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    window = _window_of(family, fields)
    fitting: tuple[str, ...] = (WINDOWED, FULL) if window else (FULL,)
    if family == "mistral" and window:
        fitting = (WINDOWED,)  # transformers' Mistral has the window in all layers
    layer_types = fields.get("layer_types") or ()
    allowed = {
        "hidden_act": (fields.get("hidden_act", "silu"), ("silu", "swish")),
        # In Llama and Qwen3 it stands for biases of all four layers; Qwen2 has those of q, k, v
        "attention_bias": (family != "qwen2" and fields.get("attention_bias", False), (False,)),
        "mlp_bias": (fields.get("mlp_bias", False), (False,)),
        "rope_type": (kind, ("default", *SCALINGS)),
        # DeepSeek's
        "mscale": (rope.get("mscale"), (None,)),
        "truncate": (rope.get("truncate", True), (True,)),
        "partial_rotary_factor": (
            rope.get("partial_rotary_factor", fields.get("partial_rotary_factor") or 1),
            (1,),
        ),
        # transformers' Llama ignores it; with 0 a query would attend to nothing
        "sliding_window": (window if family == "llama" or window == 0 else None, (None,)),
        "layer_types": (
            next((kind for kind in layer_types if kind not in fitting), fitting[0]),
            fitting,
        ),
        "quantization_config": (fields.get("quantization_config"), (None,)),
        "rope_parameters of a kind of layer": (
            next((name for name, value in rope.items() if isinstance(value, dict)), None),
            (None,),
        ),
    }
    wrong = {key: value for key, value in allowed.items() if value[0] not in value[1]}
    if wrong:
        raise ConfigError(
            [
                f"{path}: {key} = {value!r:.200}; allowed: {', '.join(map(repr, choices))}"
                for key, (value, choices) in wrong.items()
            ]
        )
    length = sequence_length(fields.get("max_position_embeddings", 0))
    try:
        scaling = _from_scaling(rope, kind, length)
    except KeyError as error:
        raise ValueError(f"RoPE scaling of type {kind} without {error}") from None
    head_dim = fields.get("head_dim") or 0
    if family == "qwen3" and not head_dim:
        head_dim = 128  # of transformers' Qwen3Config
    config = LlamaConfig(
        dim=dim,
        num_layers=fields["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        ffn_dim=fields["intermediate_size"],
        vocab_size=fields["vocab_size"],
        tied_embeddings=fields.get("tie_word_embeddings", False),
        rope_theta=rope.get("rope_theta", fields.get("rope_theta", 10000.0)),
        rope_scaling=scaling,
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        explicit_head_dim=head_dim,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        sliding_window=0 if window is None else window,
        window_layers=_window_layers(family, fields),
    )
    return checked(config)


def open_folder(folder: Path) -> FullState:
    """The checkpoint in a folder with config.json and safetensors files.

    Raises CorruptCheckpoint or ConfigError.
    """
    path = folder / "config.json"
    try:
        fields = typed(dict[str, Any], json.loads(read_bounded(path)))
        config = from_config(path, fields)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        if isinstance(error, ConfigError):
            raise
        raise CorruptCheckpoint(
            f"{path}: not the configuration of a Llama ({reason_of(error)})"
        ) from None
    stored = without_tables(read_folder(folder))
    tensors: dict[str, FullTensor] = {}
    for name, hf_name in names(config).items():
        tensor = stored.pop(hf_name, None)
        if tensor:
            width = config.head_dim if is_permuted(name) else 0
            tensors[name] = dataclasses.replace(tensor, half_split=width)
    # What is left in `stored` is not known: comparing the models reports it
    output = stored.get("lm_head.weight")
    embedding = tensors.get("tok_embeddings.weight")
    if config.tied_embeddings and output and embedding and same_numbers(output, embedding):
        del stored["lm_head.weight"]
    length = fields.get("max_position_embeddings", 0)
    about = About("hf", config, read_tokenizer(folder), seq_len=sequence_length(length))
    try:
        template = find_template(folder)
    except ConfigError as error:  # only a conversation needs it
        logger.warning("its chat template is not used: %s", error)
        template = ""
    if template:
        about.files[TEMPLATE_FILE] = template.encode()
    return FullState(folder, about, tensors | stored)
