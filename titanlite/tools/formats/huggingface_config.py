"""Converts between config.json of Hugging Face's transformers and `LlamaConfig`.

What it is: the families of transformers whose blocks are Llama's with the differences that are
fields of `LlamaConfig`: biases, norms of q and k, windows, experts. Every field that transformers
reads for these families is understood, or has to be at the value that changes nothing
(`UNCHANGED`); all others are refused by name, in one error. A test compares this with transformers'
own code.
Reference: transformers 5, `LlamaConfig`, `MistralConfig`, `MinistralConfig`, `Qwen2Config`,
`Qwen3Config`, `Qwen3MoeConfig`, `MixtralConfig`
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, TypedDict

from titanlite.model.flavors import (
    SCALINGS,
    LlamaConfig,
    RopeScaling,
    family_of,
    layer_numbers,
    layer_ranges,
)
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.typed_json import typed
from titanlite.tools.formats.shape_file import LARGEST, checked, sequence_length

# Family of transformers -> its class
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
# Family -> default of its class, where the families differ
LENGTHS = {
    "llama": 2048,
    "mistral": 131072,
    "ministral": 131072,
    "qwen2": 32768,
    "qwen3": 32768,
    "qwen3_moe": 32768,
    "mixtral": 131072,
}
KV_HEADS = {"mistral": 8, "ministral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4, "mixtral": 8}
THETAS = {"mixtral": 1e6}  # others: 10,000
EPSILONS = {"mixtral": 1e-5}  # others: 1e-6
# Mixture of experts -> its class's number of experts, and of experts per token
EXPERTS = {"qwen3_moe": (128, 8), "mixtral": (8, 2)}
EXPERT_WIDTH = 768  # Qwen3MoeConfig's; the experts of a Mixtral have its intermediate_size
# Fields that transformers reads for any family, and the value with which they change nothing
UNCHANGED: dict[str, Any] = {
    "attention_chunk_size": None,
    "fusion_config": None,
    "is_causal": True,
    "is_encoder_decoder": False,
    "kv_sharing_modes": None,
    "per_layer_config": None,
    "quantization_config": None,
    "transformers_weights": None,
}
SCALED_FROM = "original_max_position_embeddings"
# Families whose window, if they have one, is in all layers
EVERY_LAYER = ("mistral", "qwen3_moe", "mixtral")
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
    """The fields that are read, of which others may be absent. Refused ones may have any type."""

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


class _MixtureFields(TypedDict, total=False):
    """The fields of a mixture of experts that are read."""

    num_experts: Size
    num_local_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size


def to_config(config: LlamaConfig, seq_len: int, dtype: str) -> dict[str, Any]:
    """The fields of a config.json, without the ids of tokens; `dtype` as torch names it, without
    `torch.`.
    """
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
        **_to_rope(config),
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        **_to_window(config, family),
        **_to_mixture(config, family),
    }


def _to_mixture(config: LlamaConfig, family: str) -> dict[str, Any]:
    """The fields of a config.json that give the experts; none for a dense model."""
    if not config.num_experts:
        return {}
    fields: dict[str, Any] = {"num_experts_per_tok": config.experts_per_token}
    if family == "mixtral":
        fields["num_local_experts"] = config.num_experts
        fields["intermediate_size"] = config.expert_ffn_dim
        return fields
    # The name of the released files. transformers 5 reads it, and writes num_local_experts
    fields["num_experts"] = config.num_experts
    fields["moe_intermediate_size"] = config.expert_ffn_dim
    fields["norm_topk_prob"] = True
    fields["decoder_sparse_step"] = 1
    fields["mlp_only_layers"] = []
    return fields


def _to_window(config: LlamaConfig, family: str) -> dict[str, Any]:
    """The fields of a config.json that give the window."""
    if not config.sliding_window:
        return {}
    fields: dict[str, Any] = {"sliding_window": config.sliding_window}
    if family == "qwen3_moe":
        fields["use_sliding_window"] = True
    if family in EVERY_LAYER:
        return fields
    numbers = layer_numbers(config.window_layers, config.num_layers)
    fields["layer_types"] = [
        WINDOWED if number in numbers else FULL for number in range(config.num_layers)
    ]
    if family in ("qwen2", "qwen3"):
        fields["use_sliding_window"] = True
        fields["max_window_layers"] = numbers[0]  # transformers 4: the first with the window
    return fields


def _window_of(family: str, fields: dict[str, Any]) -> Any:
    """The window of a config.json, None if it has none."""
    if family in ("mistral", "ministral"):
        return fields.get("sliding_window", 4096)  # the default of MistralConfig
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        if not fields.get("use_sliding_window", False):
            return None  # the width of a window that is not used
        return fields.get("sliding_window", 4096)  # the default of Qwen2Config
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
    first = max(0, fields.get("max_window_layers", 28))  # the default of Qwen2Config
    return f"{first}-{num_layers - 1}" if first < num_layers else ""


def _to_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The entry `rope_scaling` of a config.json."""
    if scaling is None:
        return None
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        fields[SCALED_FROM] = scaling.original_context
    if scaling.kind == "llama3":
        fields["low_freq_factor"] = scaling.low_freq_factor
        fields["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        fields["beta_fast"] = scaling.beta_fast
        fields["beta_slow"] = scaling.beta_slow
        fields["attention_factor"] = scaling.attention_factor or None
    return fields


def _to_rope(config: LlamaConfig) -> dict[str, Any]:
    """The entries of RoPE, as transformers 5 reads them, and as 4 and mlx-lm do.

    Other tools read one of the two, and transformers 5 the older ones where both are: they say the
    same.
    """
    scaling = _to_scaling(config.rope_scaling)
    parameters = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": parameters,
    }


def _from_scaling(rope: dict[str, Any], kind: str, length: int) -> RopeScaling | None:
    """The scaling that a config.json has; None for plain RoPE.

    `length`: `max_position_embeddings`.
    """
    if kind == "llama3":
        return RopeScaling(
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope[SCALED_FROM],
        )
    if kind == "linear":
        return RopeScaling(rope["factor"], kind=kind)
    if kind == "yarn":
        original = rope[SCALED_FROM]
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

    Raises ConfigError with every field that titanlite's Llama does not support; KeyError,
    ValueError or TypeError if it is no config.json.
    """
    family = fields.get("model_type")
    if family not in tuple(CLASSES):  # it may be of any type, also one without a hash
        allowed = ", ".join(map(repr, CLASSES))
        raise ConfigError(f"{path}: model_type = {family!r:.99}; allowed: {allowed}")
    if family in EXPERTS:
        of_mixture = _MixtureFields.__annotations__
        typed(_MixtureFields, {name: fields[name] for name in of_mixture if name in fields})
    typed(_Fields, {name: fields[name] for name in _Fields.__annotations__ if name in fields})
    length = sequence_length(fields.get("max_position_embeddings", LENGTHS[family]))
    rope = _rope(path, fields, length)
    kind = rope["rope_type"]
    window = _window_of(family, fields)
    _require_supported(path, family, fields, rope, kind, window)
    try:
        scaling = _from_scaling(rope, kind, length)
    except KeyError as error:
        raise ValueError(f"RoPE scaling of type {kind} without {error}") from None
    head_dim = fields.get("head_dim") or 0
    if family == "qwen3" and not head_dim:
        head_dim = 128  # the default of Qwen3Config
    heads = fields["num_attention_heads"]
    experts = _experts(family, fields)
    config = LlamaConfig(
        dim=fields["hidden_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", KV_HEADS.get(family)) or heads,
        ffn_dim=fields["intermediate_size"],
        vocab_size=fields["vocab_size"],
        tied_embeddings=fields.get("tie_word_embeddings", False),
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling,
        norm_eps=fields.get("rms_norm_eps", EPSILONS.get(family, 1e-6)),
        explicit_head_dim=head_dim,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        sliding_window=0 if window is None else window,
        window_layers=_window_layers(family, fields),
        num_experts=experts.number,
        experts_per_token=experts.per_token,
        expert_ffn_dim=experts.width,
    )
    return checked(config)


class _Experts(NamedTuple):
    """The experts of each block: `number` of them, `per_token` for a token, each `width` wide."""

    number: int
    per_token: int
    width: int


def _experts(family: str, fields: dict[str, Any]) -> _Experts:
    """The experts of this config.json; all zeros for a dense model."""
    if family not in EXPERTS:
        return _Experts(0, 0, 0)
    number, per_token = EXPERTS[family]
    width = fields["intermediate_size"]
    if family == "qwen3_moe":
        width = fields.get("moe_intermediate_size", EXPERT_WIDTH)
    return _Experts(
        fields.get("num_experts", fields.get("num_local_experts", number)),
        fields.get("num_experts_per_tok", per_token),
        width,
    )


def _rope(path: Path, fields: dict[str, Any], length: int) -> dict[str, Any]:
    """The parameters of RoPE, complete, as transformers 5 reads them.

    They can be in `rope_parameters` and, with other defaults, in `rope_scaling`. transformers takes
    the second whole if it is there and drops the first. A file with both is refused unless they are
    equal: its author meant neither that nor a mixture. Raises ConfigError.
    """
    places = {}
    for name in ("rope_scaling", "rope_parameters"):
        if fields.get(name):
            places[name] = _completed(fields[name], fields, length)
    if not places:
        return _completed({}, fields, length)
    used, *others = places.values()
    if others and _stated(others[0]) != _stated(used):
        shown = "; ".join(f"{name} means {value!r:.300}" for name, value in places.items())
        raise ConfigError(
            f"{path}: rope_scaling and rope_parameters differ, and transformers reads the first "
            f"only ({shown}); expected one of them, or the same in both"
        )
    return used


def _stated(rope: dict[str, Any]) -> dict[str, Any]:
    """The entries that say something: null stands for an absent one."""
    return {name: value for name, value in rope.items() if value is not None}


def _completed(rope: dict[str, Any], fields: dict[str, Any], length: int) -> dict[str, Any]:
    """One of these entries with what transformers adds from the other fields."""
    complete = {name: value for name, value in rope.items() if name != "type"}
    complete.setdefault("rope_type", rope.get("type", "default"))
    complete.setdefault(
        "rope_theta", fields.get("rope_theta", THETAS.get(fields["model_type"], 10000.0))
    )
    if fields.get("partial_rotary_factor") is not None:
        complete.setdefault("partial_rotary_factor", fields["partial_rotary_factor"])
    if complete["rope_type"] in ("llama3", "yarn"):
        complete.setdefault(SCALED_FROM, length)
        if SCALED_FROM in fields:  # as Phi-3's files have it: before the entry's own
            complete[SCALED_FROM] = fields[SCALED_FROM]
    return complete


def _require_supported(
    path: Path, family: str, fields: dict[str, Any], rope: dict[str, Any], kind: str, window: Any
) -> None:
    """Raises ConfigError with each field whose value makes another model than `LlamaConfig` can."""
    fitting: tuple[str, ...] = (WINDOWED, FULL) if window else (FULL,)
    if family in EVERY_LAYER and window:
        fitting = (WINDOWED,)
    layer_types = fields.get("layer_types") or ()
    other_types = [layer for layer in layer_types if layer not in fitting]
    by_kind_of_layer = [name for name, value in rope.items() if isinstance(value, dict)]
    # field -> its value, and those that make this model
    allowed: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "hidden_act": (fields.get("hidden_act", "silu"), ("silu", "swish")),
        # In Llama and Qwen3 it stands for biases of all four layers; Qwen2 has those of q, k, v
        "attention_bias": (family != "qwen2" and fields.get("attention_bias", False), (False,)),
        "mlp_bias": (fields.get("mlp_bias", False), (False,)),
        "rope_type": (kind, ("default", *SCALINGS)),
        "mscale": (rope.get("mscale"), (None,)),  # DeepSeek's
        "truncate": (rope.get("truncate", True), (True,)),
        # As a number it would make all scores 0; in `RopeScaling` 0 stands for the default
        "attention_factor": (
            0 if kind == "yarn" and rope.get("attention_factor") == 0 else None,
            (None,),
        ),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1), (1,)),
        # transformers' Llama ignores it; with 0 a query would attend to nothing
        "sliding_window": (window if family == "llama" or window == 0 else None, (None,)),
        "layer_types": (other_types[0] if other_types else fitting[0], fitting),
        "rope_parameters of a kind of layer": (
            by_kind_of_layer[0] if by_kind_of_layer else None,
            (None,),
        ),
    }
    if family in EXPERTS:
        number = _experts(family, fields).number
        # If there are both, transformers reads this one in a Mixtral, num_experts in a Qwen3-MoE
        allowed["num_local_experts"] = (fields.get("num_local_experts", number), (number,))
    if family == "qwen3_moe":
        allowed |= {
            "norm_topk_prob": (fields.get("norm_topk_prob", False), (True,)),
            "decoder_sparse_step": (fields.get("decoder_sparse_step", 1), (1,)),
            "mlp_only_layers": (fields.get("mlp_only_layers") or [], ([],)),
        }
    for name, value in UNCHANGED.items():
        allowed[name] = (fields.get(name, value), (value,))
    problems = [
        f"{path}: {key} = {value!r:.200}; allowed: {', '.join(map(repr, choices))}"
        for key, (value, choices) in allowed.items()
        if value not in choices
    ]
    if problems:
        raise ConfigError(problems)
