"""The tokenizer in a GGUF file encodes as the one that it was written from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from foreign_tokenizers import trained

from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.formats.gguf_tokenizer import read_tokenizer

TEXT = "def f(x):\n\treturn x + 1234  # 日本 'twas it's\n\n\n" * 3


def fields_of(main: dict, pre: str) -> dict:
    """What llama.cpp's converter writes of a tokenizer.json."""
    vocab = dict(main["model"]["vocab"])
    special = {entry["content"]: entry["id"] for entry in main["added_tokens"]}
    vocab |= special
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in main["model"]["merges"]
        ],
        "tokenizer.ggml.eos_token_id": next(iter(special.values())),
    }


@pytest.mark.parametrize(
    ("style", "pre"), [("gpt2", "gpt-2"), ("llama3", "llama-bpe"), ("qwen", "qwen2")]
)
def test_it_encodes_as_the_original(style, pre):
    main = trained(style)
    content = read_tokenizer(Path("a.gguf"), fields_of(json.loads(main), pre))
    assert content is not None
    expected = tokenizers.Tokenizer.from_str(main).encode(TEXT, add_special_tokens=False).ids
    assert Tokenizer("a", content).encode(TEXT) == expected


@pytest.mark.parametrize(
    ("style", "pre", "more", "adds_bos"),
    [
        ("llama3", "llama-bpe", {}, True),
        ("llama3", "llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
        ("qwen", "qwen2", {}, False),
        ("qwen", "qwen2", {"tokenizer.ggml.add_bos_token": True}, True),
    ],
)
def test_bos_begins_a_text_as_in_llama_cpp(style, pre, more, adds_bos):
    main = trained(style)
    bos = {"tokenizer.ggml.bos_token_id": json.loads(main)["added_tokens"][0]["id"]}
    content = read_tokenizer(Path("a.gguf"), {**fields_of(json.loads(main), pre), **bos, **more})
    assert content is not None
    made = tokenizers.Tokenizer.from_str(Tokenizer("a", content).files["tokenizer.json"].decode())
    expected = tokenizers.Tokenizer.from_str(main).encode("x y", add_special_tokens=False).ids
    assert made.encode("x y").ids == [*bos.values()] * adds_bos + expected


def test_digits_are_single_in_smollm():
    content = read_tokenizer(Path("a"), fields_of(json.loads(trained("gpt2")), "smollm"))
    assert content is not None
    ours = Tokenizer("a", content)
    texts = [ours.decode([i]) for i in ours.encode("x 1234")]
    assert [text for text in texts if text.strip().isdigit()] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokenizer.ggml.model", "t5", "'t5'"),
        ("tokenizer.ggml.model", "llama", "it has no 'tokenizer.ggml.scores'"),
        ("tokenizer.ggml.pre", "other", "'other'"),
        ("tokenizer.ggml.pre", ["gpt-2"], "['gpt-2']"),
        ("tokenizer.ggml.merges", ["a"], "is not used"),
        ("tokenizer.ggml.token_type", [1], "is not used"),
        ("tokenizer.ggml.eos_token_id", 10**9, "is not used"),
    ],
)
def test_others_are_left_out_with_a_warning(caplog, key, value, words):
    fields = fields_of(json.loads(trained("gpt2")), "gpt-2")
    assert read_tokenizer(Path("a.gguf"), {**fields, key: value}) is None
    assert words in caplog.text
