"""Trains a byte-pair encoding with the `tokenizers` package, for large corpora.

What it is: `train_bpe` of bpe.py in Rust and on all cores: the same pattern, the same limits, and
tokens in the order in which they were learned, so the same rank file. Ties between equally frequent
pairs are broken in another way, so some tokens differ.
What it costs: the distinct words of the corpus and their counts are in memory, not the corpus.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.byte_level import CHARACTERS, to_bytes
from titanlite.tokenizer.tokenizer import MAX_TOKEN, PATTERN


def train_bpe_fast(texts: Iterable[str], num_tokens: int) -> list[bytes]:
    """Returns tokens in rank order, 256 bytes first; fewer than `num_tokens` if no pair is left.

    Raises ConfigError if the package is not installed.
    """
    try:
        import tokenizers  # optional
    except ImportError:
        raise ConfigError("--fast: needs the tokenizers package; pip install tokenizers") from None
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=num_tokens,
        min_frequency=1,
        initial_alphabet=[*CHARACTERS.values()],
        max_token_length=MAX_TOKEN,
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [bytes([i]) for i in range(256)]
    merged = [to_bytes(first + second) for first, second in merges]
    tokens += dict.fromkeys(merged)  # without repetitions: two merges may make the same token
    return tokens
