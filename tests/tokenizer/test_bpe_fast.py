"""The trainer of the `tokenizers` package, and ours beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from foreign_tokenizers import CHARACTERS, pre_tokenizer, theirs, tokenizers

from titanlite.tokenizer.bpe import rank_file, train_bpe
from titanlite.tokenizer.bpe_fast import train_bpe_fast
from titanlite.tokenizer.byte_level import to_text
from titanlite.tokenizer.tokenizer import MAX_TOKEN, Tokenizer


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


def test_text_without_pairs_gives_fewer_tokens():
    assert train_bpe_fast(["a b"], 300)[256:] == train_bpe(["a b"], 300)[256:] == [b" b"]
