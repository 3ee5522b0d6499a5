"""The model sizes: hyperparameters of each Llama flavor.

What it is: `LlamaConfig`, a table with one entry per flavor, the exact parameter count as a
formula, and the name and shape of every parameter. Imports no torch.
Reference: Llama 3 herd of models (arXiv 2407.21783), Llama 3.2 model cards.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from titanlite.config.schema import ModelConfig
from titanlite.runtime.errors import ConfigError

# The parameters of a block in the model's order: shapes (out, in) as attributes of LlamaConfig
BLOCK_PARAMETERS: dict[str, tuple[str, ...]] = {
    "attention_norm": ("dim",),
    "attention.wq": ("dim", "dim"),
    "attention.wk": ("kv_dim", "dim"),
    "attention.wv": ("kv_dim", "dim"),
    "attention.wo": ("dim", "dim"),
    "ffn_norm": ("dim",),
    "feed_forward.w1": ("ffn_dim", "dim"),
    "feed_forward.w2": ("dim", "ffn_dim"),
    "feed_forward.w3": ("ffn_dim", "dim"),
}
BLOCK_LINEAR = tuple(name for name, shape in BLOCK_PARAMETERS.items() if len(shape) == 2)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of RoPE's frequencies: extends `original_context` tokens by `factor`."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


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

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Exact count; tied embeddings count once."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_dim
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * block + self.dim

    def to_json(self) -> str:
        """The text of a model.json, which `shape_file.py` reads."""
        return json.dumps(asdict(self), indent=1)


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the order of the model's `state_dict()`."""
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (config.vocab_size, config.dim)}
    for i in range(config.num_layers):
        for name, sizes in BLOCK_PARAMETERS.items():
            shapes[f"layers.{i}.{name}.weight"] = tuple(getattr(config, size) for size in sizes)
    shapes["norm.weight"] = (config.dim,)
    if not config.tied_embeddings:
        shapes["output.weight"] = (config.vocab_size, config.dim)
    return shapes


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
}


def resolve_flavor(section: ModelConfig, tokenizer_size: int) -> LlamaConfig:
    """The flavor with the section's overrides; a `vocab_size` of 0 becomes `tokenizer_size`.

    Raises ConfigError for impossible shapes.
    """
    names = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size")
    overrides = {name: getattr(section, name) for name in names if getattr(section, name)}
    config = replace(FLAVORS[section.flavor], **overrides)
    if section.embeddings != "flavor":
        config = replace(config, tied_embeddings=section.embeddings == "tied")
    if not config.vocab_size:
        config = replace(config, vocab_size=tokenizer_size)
    heads = config.num_heads
    problems = []
    if config.dim % heads or config.head_dim % 2:
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
    if config.vocab_size < tokenizer_size:
        problems.append(
            f"model.vocab_size = {config.vocab_size} (flavor {section.flavor}): "
            f"expected at least the tokenizer's {tokenizer_size} ids"
        )
    if problems:
        raise ConfigError(problems)
    return config
