"""Trains a byte-pair encoding (BPE, arXiv 1508.07909), in Python to read, or fast by a package.

What it is: text -> the list of tokens of a tokenizer. The first tokens are the 256 bytes. Then the
most frequent pair of neighbouring tokens becomes a new token, until there are enough. Llama 3's
pattern first splits the text into words, and no token contains parts of two words. The result is
written as a tiktoken rank file, one `base64 rank` line per token, the format of Llama 3's
tokenizer.model.
What it costs: pairs are counted once, and a merge visits only the words that contain its pair:
seconds for 10 MB. For large corpora `train_bpe_fast` does the same in Rust and on all cores. Both
keep the distinct words of the corpus and their counts in memory, not the corpus.
"""

from __future__ import annotations

import base64
import heapq
import itertools
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import regex  # a dependency of tiktoken; the standard library's re does not support \p{L}

from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.byte_level import CHARACTERS, to_bytes
from titanlite.tokenizer.tokenizer import MAX_TOKEN, PATTERN


def train_bpe(texts: Iterable[str], num_tokens: int) -> list[bytes]:
    """Returns tokens in rank order, 256 bytes first; fewer than `num_tokens` if no pair is left.

    Ties are broken by the smaller pair of ids, so the same text always gives the same tokens.
    """
    counts: Counter[str] = Counter()
    pattern = regex.compile(PATTERN)
    for text in texts:
        counts.update(pattern.findall(text))
    tokens = [bytes([i]) for i in range(256)]
    # Each distinct word as the ids of its bytes; `weights`: how often it occurs
    words = [list(word.encode("utf-8", "surrogatepass")) for word in counts]
    weights = list(counts.values())

    pair_counts: Counter[tuple[int, int]] = Counter()
    words_with: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # pair -> words
    for index, word in enumerate(words):
        for pair in itertools.pairwise(word):
            pair_counts[pair] += weights[index]
            words_with[pair].add(index)
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(heap)

    while len(tokens) < num_tokens and heap:
        negative, pair = heapq.heappop(heap)
        if pair_counts[pair] != -negative:
            continue  # outdated: the current count has a newer entry
        if negative == 0:
            break
        new = len(tokens)
        token = tokens[pair[0]] + tokens[pair[1]]
        if len(token) > MAX_TOKEN:
            continue
        tokens.append(token)

        # Only words that contain the pair change, and the counts of their pairs
        changed: Counter[tuple[int, int]] = Counter()
        for index in words_with.pop(pair):
            old = words[index]
            word = _merge(old, pair, new)
            words[index] = word
            for removed in itertools.pairwise(old):
                changed[removed] -= weights[index]
            for added in itertools.pairwise(word):
                changed[added] += weights[index]
                words_with[added].add(index)
        for other, difference in changed.items():
            if difference:
                pair_counts[other] += difference
                heapq.heappush(heap, (-pair_counts[other], other))
    return tokens


def _merge(word: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """Replaces each occurrence of `pair` in the word, left to right, by `new`."""
    merged = []
    i = 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            merged.append(new)
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return merged


def train_bpe_fast(texts: Iterable[str], num_tokens: int) -> list[bytes]:
    """Returns the tokens of `train_bpe`, trained by the package `tokenizers`.

    The pattern, the limits and the order in which tokens are learned are the same. Ties between
    equally frequent pairs are broken in another way, so some tokens differ. Raises ConfigError if
    the package is not installed.
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


def rank_file(tokens: list[bytes]) -> bytes:
    """Builds the content of a rank file with these tokens, in their order."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def write_rank_file(tokens: list[bytes], path: Path) -> None:
    path.write_bytes(rank_file(tokens))
