"""Byte-pair encoding: training against a slow twin, and the trainer of the `tokenizers` package."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from pathlib import Path

import pytest
import regex
from foreign_tokenizers import CHARACTERS, pre_tokenizer, theirs, tokenizers

from titanlite.tokenizer.bpe import rank_file, train_bpe, train_bpe_fast
from titanlite.tokenizer.byte_level import to_text
from titanlite.tokenizer.tokenizer import MAX_TOKEN, PATTERN, Tokenizer

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
    assert train_bpe_fast(["a b"], 300)[256:] == train_bpe(["a b"], 300)[256:] == [b" b"]


def source(size: int) -> tuple[str, str]:
    """Text of the standard library for training, and other files of it that are held out."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [path.read_text(errors="replace") for path in files]
    return "".join(t for i, t in enumerate(texts) if i % 10)[:size], "".join(texts[::10])[:size]


def test_the_tokens_are_those_of_a_plain_tokenizer_of_the_package():
    text, other = source(200_000)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer("llama3")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(CHARACTERS.values()), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    ours = Tokenizer("x", rank_file(train_bpe_fast([text], 600)))
    assert ours.tokens.keys() == Tokenizer("x", with_end(tokenizer)).tokens.keys()
    texts = {i: to_text(token) for token, i in ours.tokens.items()}
    assert [texts[i] for i in ours.encode(other)] == theirs(tokenizer.to_str()).encode(other).tokens


def with_end(tokenizer) -> bytes:
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer.to_str().encode()


def assert_same_compression(size: int, num_tokens: int) -> None:
    text, held_out = source(size)
    counts = []
    for train in (train_bpe, train_bpe_fast):
        tokenizer = Tokenizer("x", rank_file(train([text], num_tokens)))
        assert tokenizer.size == num_tokens + 16
        counts.append(len(tokenizer.encode(held_out)))
    assert abs(counts[0] / counts[1] - 1) < 0.005, counts


@pytest.mark.slow
def test_both_trainers_compress_alike():
    assert_same_compression(400_000, 800)


@pytest.mark.slow
def test_both_trainers_compress_a_larger_text_alike():
    assert_same_compression(4_000_000, 8192)


def test_no_longer_token_is_trained():
    assert (
        MAX_TOKEN // 2 < max(map(len, train_bpe_fast(["=" * 5000, "=" * 5000], 300))) <= MAX_TOKEN
    )
