"""SentencePiece's byte-pair encoding in a GGUF file, as a tokenizer.json.

What it is: `tokenizer.ggml.model = "llama"`, as of Llama 2, Mistral 7B and TinyLlama: tokens with
scores, and no list of merges. llama.cpp joins the two neighbours whose text together is the token
with the highest score, the leftmost of equals. `tokenizers` merges the pair that is first in its
list.
When the list is exact: what is joined between two ends of tokens depends only on the characters
between them. So a token arises as it does when its own characters are encoded alone, and only the
last pair of that ever makes it. These pairs by score are the list, and both choose the same pair in
every step, whatever the scores are, if three things hold, which are checked:
- These tokens have different scores. Of two with the same one llama.cpp would take the leftmost,
  and a list has an order. Scores are equal in files that were made from a tokenizer.json.
- The characters of these tokens are tokens: `tokenizers` cannot merge others.
- There is a token for each byte, which both use for characters without a token.
One difference is left: llama.cpp joins text to a control token, such as `<s>`, where two neighbours
happen to give its name. Here, as in SentencePiece, text never gives one.
What it costs: every token is encoded alone, half a second for 32,000 tokens.
Reference: llama.cpp, `llm_tokenizer_spm` in `llama-vocab.cpp`; tokenizer.json of Llama 2
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from titanlite.data.tokenizer_hf import SPACE
from titanlite.data.tokenizer_json import Json
from titanlite.runtime.errors import ConfigError

NORMAL = 1  # types of tokens: text,
UNUSED = 5  # and text that is not used: llama.cpp makes no difference
NEVER = -math.inf  # the score of a pair that no token joins
LONGEST = 256  # characters; Llama 2's longest token has 16
MOST_WORK = (
    1 << 26
)  # characters of each token, squared; those of Gemma's 256,000 give less than half
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def parts_of(fields: dict[str, Any]) -> Json:
    """The entries of tokenizer.json that say how text is encoded. Raises ConfigError."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    scores: list[float] = fields["tokenizer.ggml.scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    missing = [name for name in BYTES if name not in vocab]
    if missing:
        raise ConfigError(f"no token for {len(missing)} of the 256 bytes, the first {missing[0]}")
    of_text = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind in (NORMAL, UNUSED)
    }
    has_prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    prepend = {"type": "Prepend", "prepend": SPACE}
    mark_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    unmark_spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    unprepend = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders = [unmark_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [prepend, mark_spaces] if has_prefix else [mark_spaces],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [*decoders, unprepend] if has_prefix else decoders,
        },
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges_of(of_text)],
        },
    }


def merges_of(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The pairs that make tokens, in the order of these tokens' scores.

    `scores`: of the tokens that text can give. Raises ConfigError if a list cannot be exact.
    """
    for token, score in scores.items():
        if len(token) > LONGEST:
            raise ConfigError(f"a token of {len(token)} characters; at most {LONGEST} are read")
        if not math.isfinite(score):
            raise ConfigError(f"token {token!r} has the score {score}")
    if sum(len(token) ** 2 for token in scores) > MOST_WORK:
        raise ConfigError("its tokens are too many and too long to find their merges")
    pairs: dict[str, tuple[str, str]] = {}
    for token in scores:
        pair = last_pair(token, scores)
        if pair is not None:
            pairs[token] = pair
    by_score: dict[float, str] = {}
    for token, pair in pairs.items():
        other = by_score.setdefault(scores[token], token)
        if other != token:
            raise ConfigError(
                f"tokens {other!r} and {token!r} have the same score, {scores[token]:g}, so that a "
                "list of merges cannot encode as llama.cpp does"
            )
        for part in pair:
            if part not in scores:
                raise ConfigError(f"token {token!r}: its character {part!r} is not a token")
    return [pairs[by_score[score]] for score in sorted(by_score, reverse=True)]


def last_pair(token: str, scores: Mapping[str, float]) -> tuple[str, str] | None:
    """The pair that is joined last when the characters of a token are encoded alone.

    None if that gives several tokens, or if it is one character.
    """
    parts = list(token)
    pair = None
    while len(parts) > 1:
        joined = [scores.get(first + second, NEVER) for first, second in itertools.pairwise(parts)]
        best = max(joined)
        if best == NEVER:
            return None
        i = joined.index(best)  # the leftmost
        pair = (parts[i], parts[i + 1])
        parts[i : i + 2] = ["".join(pair)]
    return pair
