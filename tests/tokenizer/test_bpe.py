"""Byte-pair encoding: training against a slow twin."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import regex

from titanlite.tokenizer.bpe import PATTERN, train_bpe

KOREAN = "대규모 언어 모델을 처음부터 학습합니다. "


def slow_bpe(text: str, num_tokens: int) -> list[bytes]:
    """Counts every pair anew for each merge."""
    words = Counter(tuple(bytes([b]) for b in w.encode()) for w in regex.findall(PATTERN, text))
    tokens = [bytes([i]) for i in range(256)]
    while len(tokens) < num_tokens:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        rank = {token: i for i, token in enumerate(tokens)}
        best = min(pairs, key=lambda p: (-pairs[p], rank[p[0]], rank[p[1]]))
        tokens.append(best[0] + best[1])
        merged: Counter[tuple[bytes, ...]] = Counter()
        for word, count in words.items():
            out: list[bytes] = []
            for piece in word:
                if out and (out[-1], piece) == best:
                    out[-1] += piece
                else:
                    out.append(piece)
            merged[tuple(out)] += count
        words = merged
    return tokens


def test_training_equals_the_slow_way():
    text = "low lower lowest new newer newest wide wider widest the then there " * 3 + KOREAN * 2
    assert train_bpe([text], 340) == slow_bpe(text, 340)


def test_training_does_not_depend_on_how_the_text_is_cut_into_files():
    lines = [f"value_{i % 7} = {i}\n" for i in range(500)]
    shuffled = random.Random(0).sample(lines, len(lines))
    assert train_bpe(lines, 300) == train_bpe(shuffled, 300) == train_bpe(["".join(lines)], 300)


def test_text_without_pairs_gives_fewer_tokens():
    assert train_bpe(["a b"], 300)[256:] == [b" b"]
