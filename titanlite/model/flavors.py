"""The model sizes: hyperparameters of each flavor.

What it is: `LlamaConfig`, a table with one entry per flavor, the exact parameter count, and the
name and shape of every parameter. Imports no torch. Other dense families have Llama's blocks with
small differences, each of which is a field: biases of q, k and v (Qwen2), norms of q and k (Qwen3),
heads of another width (Qwen3, Mistral Nemo), a sliding window (Mistral 7B v0.1), and how RoPE is
scaled beyond the lengths of pretraining.
Reference: Llama 3 herd of models (arXiv 2407.21783), Llama 3.2 model cards, Mistral 7B (arXiv
2310.06825), Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv 2505.09388), YaRN (arXiv 2309.00071),
config.json of the released models.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from titanlite.config.schema import FROM_CHECKPOINT, ModelConfig
from titanlite.runtime.errors import ConfigError

# The linear layers of a block
BLOCK_LINEAR = (
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.wo",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
)
SCALINGS = ("llama3", "linear", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies change so that `original_context` tokens become `factor` times as
    many; `rope_frequencies` in llama.py has the formulas.
    """

    factor: float
    low_freq_factor: float = 1.0  # llama3, as the next one
    high_freq_factor: float = 4.0
    original_context: int = 8192  # all kinds but linear
    kind: str = "llama3"  # one of SCALINGS
    beta_fast: float = 32.0  # yarn, as the next two
    beta_slow: float = 1.0
    attention_factor: float = 0.0  # multiplies queries and keys; 0: 0.1 ln(factor) + 1


@dataclass(frozen=True)
class LlamaConfig:
    """Hyperparameters of one Llama. `vocab_size` 0 stands for the size of the tokenizer."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int = 128256
    tied_embeddings: bool = False
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    explicit_head_dim: int = 0  # 0: dim / num_heads
    qkv_bias: bool = False
    qk_norm: bool = False  # an RMSNorm of each head of q and k, before RoPE
    num_experts: int = 0  # in place of the feed-forward, as the next two (moe.py); 0: dense
    experts_per_token: int = 0
    expert_ffn_dim: int = 0
    sliding_window: int = 0  # positions that a query attends to, up to its own; 0: all
    window_layers: str = "all"  # the blocks that have the window, as in `0-2, 5`

    @property
    def head_dim(self) -> int:
        return self.explicit_head_dim or self.dim // self.num_heads

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    def windows(self, seq_len: int) -> list[int]:
        """Returns each block's window in sequences of this length.

        0 means that a query attends to all positions up to its own: the block has no window, or the
        window is at least as long as the sequence.
        """
        windows = [0] * self.num_layers
        if self.sliding_window < seq_len:
            for number in layer_numbers(self.window_layers, self.num_layers):
                windows[number] = self.sliding_window
        return windows

    @property
    def num_parameters(self) -> int:
        """The exact number of parameters; tied embeddings count once."""
        block = sum(math.prod(shape) for shape in block_shapes(self).values())
        embeddings = self.vocab_size * self.dim
        if not self.tied_embeddings:
            embeddings *= 2
        return embeddings + self.num_layers * block + self.dim

    @property
    def num_active_parameters(self) -> int:
        """The parameters that one token uses: those of its experts, not those of the others."""
        unused = self.num_experts - self.experts_per_token
        return self.num_parameters - self.num_layers * unused * 3 * self.dim * self.expert_ffn_dim

    def to_json(self) -> str:
        """Writes the text of a model.json, which `tools/formats/shape_file.py` reads."""
        return json.dumps(asdict(self), indent=1)


def layer_numbers(text: str, num_layers: int) -> list[int]:
    """Parses the numbers of blocks: `0-2, 5` -> [0, 1, 2, 5]; `all` names every block.

    Raises ValueError for any other text, and for numbers that do not ascend.
    """
    if text == "all":
        return list(range(num_layers))
    numbers: list[int] = []
    for word in text.replace(",", " ").split():
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", word)
        first = int(match[1]) if match else -1
        last = int(match[2] or match[1]) if match else -1
        lowest = numbers[-1] + 1 if numbers else 0
        if not lowest <= first <= last < num_layers:
            raise ValueError(
                f"{word:.20}: expected ascending numbers from 0 to {num_layers - 1}, or ranges as "
                f"0-{num_layers - 1}, or all"
            )
        numbers += range(first, last + 1)
    return numbers


def layer_ranges(numbers: Sequence[int], num_layers: int) -> str:
    """Writes the shortest text for which `layer_numbers` returns these ascending numbers."""
    if len(numbers) == num_layers:
        return "all"
    ranges: list[tuple[int, int]] = []  # (first, last)
    for number in numbers:
        first = number
        if ranges and ranges[-1][1] == number - 1:
            first, _ = ranges.pop()
        ranges.append((first, number))
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def with_one_window(config: LlamaConfig) -> LlamaConfig:
    """Normalizes how the window is written, so that two configs of one model are equal.

    Raises ValueError.
    """
    numbers = layer_numbers(config.window_layers, config.num_layers)
    if not numbers or not config.sliding_window:
        return replace(config, sliding_window=0, window_layers="all")
    return replace(config, window_layers=layer_ranges(numbers, config.num_layers))


def block_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Maps each parameter of a block to its shape (out, in), in the model's order."""
    dim = config.dim
    shapes: dict[str, tuple[int, ...]] = {"attention_norm.weight": (dim,)}
    widths = {"wq": config.q_dim, "wk": config.kv_dim, "wv": config.kv_dim}
    for name, width in widths.items():
        shapes[f"attention.{name}.weight"] = (width, dim)
        if config.qkv_bias:
            shapes[f"attention.{name}.bias"] = (width,)
    shapes["attention.wo.weight"] = (dim, config.q_dim)
    if config.qk_norm:
        shapes["attention.q_norm.weight"] = (config.head_dim,)
        shapes["attention.k_norm.weight"] = (config.head_dim,)
    shapes["ffn_norm.weight"] = (dim,)
    if config.num_experts:
        num = config.num_experts
        hidden = config.expert_ffn_dim
        shapes["feed_forward.router.weight"] = (num, dim)
        shapes["feed_forward.experts.w1.weight"] = (num, hidden, dim)
        shapes["feed_forward.experts.w2.weight"] = (num, dim, hidden)
        shapes["feed_forward.experts.w3.weight"] = (num, hidden, dim)
        return shapes
    shapes["feed_forward.w1.weight"] = (config.ffn_dim, dim)
    shapes["feed_forward.w2.weight"] = (dim, config.ffn_dim)
    shapes["feed_forward.w3.weight"] = (config.ffn_dim, dim)
    return shapes


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Maps each parameter to its shape, in the order of the model's `state_dict()`."""
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (config.vocab_size, config.dim)}
    of_block = block_shapes(config)
    for i in range(config.num_layers):
        for name, shape in of_block.items():
            shapes[f"layers.{i}.{name}"] = shape
    shapes["norm.weight"] = (config.dim,)
    if not config.tied_embeddings:
        shapes["output.weight"] = (config.vocab_size, config.dim)
    return shapes


QWEN25 = LlamaConfig(
    896,
    24,
    14,
    2,
    4864,
    vocab_size=151936,
    tied_embeddings=True,
    rope_theta=1e6,
    norm_eps=1e-6,
    qkv_bias=True,
)
QWEN3 = LlamaConfig(
    1024,
    28,
    16,
    8,
    3072,
    vocab_size=151936,
    tied_embeddings=True,
    rope_theta=1e6,
    norm_eps=1e-6,
    explicit_head_dim=128,
    qk_norm=True,
)

FLAVORS: dict[str, LlamaConfig] = {
    "debug": LlamaConfig(128, 4, 4, 2, 352, vocab_size=0, tied_embeddings=True),
    "cpu_25m": LlamaConfig(512, 8, 8, 4, 1408, vocab_size=0, tied_embeddings=True),
    "llama3_1b": LlamaConfig(
        2048, 16, 32, 8, 8192, tied_embeddings=True, rope_scaling=RopeScaling(32.0)
    ),
    "llama3_3b": LlamaConfig(
        3072, 28, 24, 8, 8192, tied_embeddings=True, rope_scaling=RopeScaling(32.0)
    ),
    "llama3_8b": LlamaConfig(4096, 32, 32, 8, 14336),
    "llama3_70b": LlamaConfig(8192, 80, 64, 8, 28672),
    "llama3_405b": LlamaConfig(16384, 126, 128, 8, 53248, rope_scaling=RopeScaling(8.0)),
    "llama2_7b": LlamaConfig(4096, 32, 32, 32, 11008, vocab_size=32000, rope_theta=10000.0),
    "mistral_7b": LlamaConfig(4096, 32, 32, 8, 14336, vocab_size=32768, rope_theta=1e6),
    "mistral_7b_v0.1": LlamaConfig(
        4096, 32, 32, 8, 14336, vocab_size=32000, rope_theta=10000.0, sliding_window=4096
    ),
    "smollm2_135m": LlamaConfig(
        576, 30, 9, 3, 1536, vocab_size=49152, tied_embeddings=True, rope_theta=1e5
    ),
    "smollm2_360m": LlamaConfig(
        960, 32, 15, 5, 2560, vocab_size=49152, tied_embeddings=True, rope_theta=1e5
    ),
    "smollm2_1.7b": LlamaConfig(
        2048, 24, 32, 32, 8192, vocab_size=49152, tied_embeddings=True, rope_theta=130000.0
    ),
    "qwen2.5_0.5b": QWEN25,
    "qwen2.5_1.5b": replace(QWEN25, dim=1536, num_layers=28, num_heads=12, ffn_dim=8960),
    "qwen2.5_7b": LlamaConfig(
        3584,
        28,
        28,
        4,
        18944,
        vocab_size=152064,
        rope_theta=1e6,
        norm_eps=1e-6,
        qkv_bias=True,
    ),
    "qwen3_0.6b": QWEN3,
    "qwen3_1.7b": replace(QWEN3, dim=2048, ffn_dim=6144, explicit_head_dim=0),
    "qwen3_8b": replace(
        QWEN3,
        dim=4096,
        num_layers=36,
        num_heads=32,
        ffn_dim=12288,
        tied_embeddings=False,
        explicit_head_dim=0,
    ),
    "debug_moe": LlamaConfig(
        128,
        4,
        4,
        2,
        128,
        vocab_size=0,
        tied_embeddings=True,
        qk_norm=True,
        num_experts=8,
        experts_per_token=2,
        expert_ffn_dim=128,
    ),
    "qwen3_30b_a3b": replace(
        QWEN3,
        dim=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        ffn_dim=6144,
        tied_embeddings=False,
        num_experts=128,
        experts_per_token=8,
        expert_ffn_dim=768,
    ),
}


def family_of(config: LlamaConfig) -> str:
    """The family of transformers that has this model's blocks.

    Raises ConfigError if none has.
    """
    if config.num_experts:
        return _family_of_mixture(config)
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


def _family_of_mixture(config: LlamaConfig) -> str:
    """The family of transformers that has this mixture of experts. Raises ConfigError."""
    if config.qkv_bias:
        raise ConfigError(
            f"model.qkv_bias with model.num_experts = {config.num_experts}: transformers has no "
            "such model; expected a dense model, or no biases"
        )
    if config.sliding_window and config.window_layers != "all":
        raise ConfigError(
            f"model.window_layers = {config.window_layers!r} with model.num_experts = "
            f"{config.num_experts}: transformers' mixtures have the window in all blocks; expected "
            "model.window_layers = all, or no window"
        )
    return "qwen3_moe" if config.qk_norm else "mixtral"


# Keys of [model] that have the same name in a LlamaConfig
SAME_NAME = (
    "dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "ffn_dim",
    "num_experts",
    "experts_per_token",
    "expert_ffn_dim",
    "vocab_size",
    "rope_theta",
    "norm_eps",
    "qkv_bias",
    "qk_norm",
    "sliding_window",
    "window_layers",
)


def _resolve_scaling(section: ModelConfig, scaling: RopeScaling | None) -> RopeScaling | None:
    """Applies the section's overrides to the flavor's RoPE scaling. Raises ConfigError."""
    if section.rope_scaling == "none":
        return None
    if section.rope_scaling is not None:
        factor = scaling.factor if scaling else 0.0
        scaling = RopeScaling(factor, kind=section.rope_scaling)
    if scaling is None:
        if section.rope_factor is not None or section.rope_original_context is not None:
            raise ConfigError(
                "model.rope_factor and model.rope_original_context have no effect: the flavor "
                f"{section.flavor} has no scaling; expected model.rope_scaling = one of "
                f"{', '.join(SCALINGS)}"
            )
        return None
    if section.rope_factor is not None:
        scaling = replace(scaling, factor=section.rope_factor)
    if section.rope_original_context is not None:
        scaling = replace(scaling, original_context=section.rope_original_context)
    if scaling.factor < 1:
        raise ConfigError(
            f"model.rope_scaling = {scaling.kind} with model.rope_factor = {scaling.factor:g}: "
            "expected a factor of at least 1"
        )
    return scaling


def _resolve_window(section: ModelConfig, config: LlamaConfig) -> LlamaConfig:
    """Normalizes how the window is written. Raises ConfigError if no block has the window."""
    try:
        resolved = with_one_window(config)
    except ValueError as error:
        raise ConfigError(f"model.window_layers = {config.window_layers!r}: {error}") from None
    if section.window_layers not in (None, "all") and not resolved.sliding_window:
        raise ConfigError(
            f"model.window_layers = {section.window_layers!r} with model.sliding_window = "
            f"{config.sliding_window}: no block has a window; expected a window above 0 and the "
            "number of a block or more, or model.window_layers = all"
        )
    return resolved


def without_unused_experts(config: LlamaConfig) -> LlamaConfig:
    """Removes the sizes of experts from a dense model, so that its configs are equal."""
    if config.num_experts:
        return config
    return replace(config, experts_per_token=0, expert_ffn_dim=0)


def expert_problems(config: LlamaConfig) -> list[str]:
    """Describes what is wrong with the sizes of a mixture of experts, trained or not."""
    num = config.num_experts
    if not num:
        return []
    problems = []
    if not 1 <= config.experts_per_token <= num:
        problems.append(
            f"model.experts_per_token = {config.experts_per_token}: expected 1 to "
            f"model.num_experts = {num}"
        )
    if not config.expert_ffn_dim:
        problems.append("model.expert_ffn_dim is missing: expected the hidden width of an expert")
    return problems


def _untrainable_experts(config: LlamaConfig) -> list[str]:
    """Describes why these experts can be read and computed, but not trained."""
    num = config.num_experts
    if not num:
        return []
    problems = []
    if config.experts_per_token == 1:
        problems.append(
            f"model.experts_per_token = 1: expected 2 to model.num_experts = {num} to train (with "
            "1 the weight of the only expert is always 1, and the router gets no gradient)"
        )
    for name in ("dim", "expert_ffn_dim"):
        width = getattr(config, name)
        if width % 8:
            below = width - width % 8
            nearest = f"{below} or {below + 8}" if below else "8"
            problems.append(
                f"model.{name} = {width} with model.num_experts = {num}: expected a multiple of 8 "
                "(torch's product of experts takes rows of whole 16 bytes, 8 numbers in bfloat16); "
                f"nearest: {nearest}"
            )
    return problems


def resolve_flavor(section: ModelConfig, tokenizer_size: int) -> LlamaConfig:
    """Applies the section's overrides to a flavor; `vocab_size` defaults to `tokenizer_size`.

    Raises ConfigError for impossible shapes.
    """
    if section.flavor == FROM_CHECKPOINT:  # train, plan and prepare have set every key
        if section.dim is None:
            raise ConfigError(
                "model.flavor = from_checkpoint: only train, plan and prepare read the checkpoint; "
                f"expected a run's config.toml, which has its model, or one of {', '.join(FLAVORS)}"
            )
        config = FLAVORS["debug"]
    else:
        config = FLAVORS[section.flavor]
    overrides = {name: getattr(section, name) for name in SAME_NAME}
    overrides["explicit_head_dim"] = section.head_dim
    if section.embeddings is not None:
        overrides["tied_embeddings"] = section.embeddings == "tied"
    present = {name: value for name, value in overrides.items() if value is not None}
    config = replace(config, **present)
    config = replace(config, rope_scaling=_resolve_scaling(section, config.rope_scaling))
    config = without_unused_experts(_resolve_window(section, config))
    if not config.vocab_size:
        config = replace(config, vocab_size=tokenizer_size)
    if config.explicit_head_dim * config.num_heads == config.dim:
        config = replace(config, explicit_head_dim=0)  # so that two configs of one model are equal
    heads = config.num_heads
    problems = []
    if config.explicit_head_dim:
        if config.head_dim % 2:
            problems.append(f"model.head_dim = {config.head_dim}: expected an even number")
    elif config.dim % heads or config.head_dim % 2:
        problems.append(
            f"model.dim = {config.dim} over model.num_heads = {heads}: "
            "expected an even width per head"
        )
    if heads % config.num_kv_heads:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        problems.append(
            f"model.num_kv_heads = {config.num_kv_heads} does not divide "
            f"model.num_heads = {heads}; allowed: {', '.join(divisors)}"
        )
    problems += expert_problems(config) + _untrainable_experts(config)
    if config.vocab_size < tokenizer_size:
        problems.append(
            f"model.vocab_size = {config.vocab_size} (flavor {section.flavor}): "
            f"expected at least the tokenizer's {tokenizer_size} ids"
        )
    if problems:
        raise ConfigError(problems)
    return config
