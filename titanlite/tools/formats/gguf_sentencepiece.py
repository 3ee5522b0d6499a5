"""Converts SentencePiece's byte-pair encoding in a GGUF file to a tokenizer.json.

What it is: `tokenizer.ggml.model = "llama"`, as of Llama 2, Mistral 7B and TinyLlama: tokens with
scores, and no list of merges. llama.cpp joins the two neighbours whose text together is the token
with the highest score, the leftmost of equals. `tokenizers` merges the pair that is first in its
list.
When the list is exact: what is joined between two ends of tokens depends only on the characters
between them. So a token arises as it does when its own characters are encoded alone, and only the
last pair of that ever makes it. These pairs by score are the list, and both choose the same pair in
every step, whatever the scores are, if three things hold, which are checked:
- These tokens have different scores. Of two with the same one llama.cpp would take the leftmost,
  and a list has an order. Scores are equal in files that were made from a tokenizer.json. Excepted
  are repetitions of a character, the runs of spaces of Llama 2 and Mistral: the longer ones come
  first, and runs of up to four times the longest token are tried in both ways.
- The characters of these tokens are tokens: `tokenizers` cannot merge others.
- There is a token for each byte, which both use for characters without a token.
One difference is left: llama.cpp joins text to a control token, such as `<s>`, where two neighbours
happen to give its name. Here, as in SentencePiece, text never gives one.
What it costs: every token is encoded alone, 0.6 s for Mistral's 32,000 tokens.
Reference: llama.cpp, `llm_tokenizer_spm` in `llama-vocab.cpp`; tokenizer.json of Llama 2
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer_hf import SPACE
from titanlite.tokenizer.tokenizer_json import Json

NORMAL = 1  # types of tokens: text,
UNUSED = 5  # and text that is not used: llama.cpp makes no difference
NEVER = -math.inf  # the score of a pair that no token joins
LONGEST = 256  # characters; Llama 2's longest token has 16
MOST_WORK = 1 << 25  # characters of each token, squared; those of Gemma's 256,000 give less
LONGEST_RUN = 32  # a repeated character that has the score of others
MOST_RUNS = 6 * LONGEST_RUN**3  # lengths of the longest such run of each character, cubed
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

Pair: TypeAlias = tuple[str, str]


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


def merges_of(scores: Mapping[str, float]) -> list[Pair]:
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
    pairs: dict[str, Pair] = {}
    for token in scores:
        parts, pair = join(token, lambda pair: scores.get(pair[0] + pair[1], NEVER))
        if pair is None or len(parts) > 1:
            continue
        for part in pair:
            if part not in scores:
                raise ConfigError(f"token {token!r}: its character {part!r} is not a token")
        pairs[token] = pair
    order = sorted(pairs, key=lambda token: (-scores[token], -len(token)))
    merges = [pairs[token] for token in order]
    check = _Runs(scores, pairs)
    for score, group in itertools.groupby(order, scores.__getitem__):
        equal = list(group)
        if len(equal) > 1 and not check.may_be_equal(equal, score):
            raise ConfigError(
                f"tokens {equal[0]!r} and {equal[1]!r} have the same score, {score:g}, so that a "
                "list of merges cannot encode as llama.cpp does"
            )
    return merges


class _Runs:
    """Compares runs of a character: encoded by score, and by a list with the longest first."""

    def __init__(self, scores: Mapping[str, float], pairs: Mapping[str, Pair]) -> None:
        self.scores = scores
        self.pairs = pairs
        self.work = 0  # cubes of lengths so far
        self.joined_by: dict[str, list[str]] = {}  # part -> tokens whose last pair has it
        self.of_character: dict[str, list[str]] = {}  # character -> tokens that repeat it
        for token, pair in pairs.items():
            for part in set(pair):
                self.joined_by.setdefault(part, []).append(token)
            if token == token[0] * len(token):
                self.of_character.setdefault(token[0], []).append(token)

    def may_be_equal(self, equal: list[str], score: float) -> bool:
        """Whether a list may have these tokens of one score. Raises ConfigError for too many."""
        group = set(equal)
        for part in equal:
            for token in self.joined_by.get(part, []):
                # It would be joined between two of the group
                if token not in group and self.scores[token] >= score:
                    return False
        longest: dict[str, int] = {}
        for token in equal:
            if token != token[0] * len(token) or len(token) > LONGEST_RUN:
                return False
            longest[token[0]] = max(len(token), longest.get(token[0], 0))
        for character, length in longest.items():
            self.work += length**3
            if self.work > MOST_RUNS:
                raise ConfigError("its repetitions of characters are too many to compare")
            if not self._list_gives_the_same(character, 4 * length):
                return False
        return True

    def _list_gives_the_same(self, character: str, longest: int) -> bool:
        """Whether runs of a character are encoded by the list of `pairs` as by `scores`."""
        tokens = list(self.of_character[character])
        tokens.sort(key=lambda token: (self.scores[token], len(token)))  # the list from its end
        places = {self.pairs[token]: float(place) for place, token in enumerate(tokens)}
        for length in range(longest):
            run = character * length
            by_score, _ = join(run, lambda pair: self.scores.get(pair[0] + pair[1], NEVER))
            by_place, _ = join(run, lambda pair: places.get(pair, NEVER))
            if by_score != by_place:
                return False
        return True


def join(text: str, priority: Callable[[Pair], float]) -> tuple[list[str], Pair | None]:
    """The parts of a text after all neighbours are joined, and the pair that was joined last.

    First those of the highest priority, and of these the leftmost.
    """
    parts = list(text)
    last = None
    while len(parts) > 1:
        priorities = [priority(pair) for pair in itertools.pairwise(parts)]
        best = max(priorities)
        if best == NEVER:
            break
        i = priorities.index(best)
        last = (parts[i], parts[i + 1])
        parts[i : i + 2] = ["".join(last)]
    return parts, last
