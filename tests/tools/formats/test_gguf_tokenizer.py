"""The tokenizer in a GGUF file encodes as the one that it was written from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from foreign_tokenizers import trained
from messages import refused
from transformers_models import make

from titanlite.tokenizer.byte_level import CHARACTERS
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.formats.convert import Options, convert
from titanlite.tools.formats.detect_format import open_full_state
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


def write_folder(folder: Path, main: dict) -> tokenizers.Tokenizer:
    """A model of transformers with this tokenizer."""
    original = tokenizers.Tokenizer.from_str(json.dumps(main))
    make({"model_type": "llama", "vocab_size": original.get_vocab_size()}).save_pretrained(folder)
    original.save(str(folder / "tokenizer.json"))
    return original


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


@pytest.mark.parametrize("nfc", [None, {"type": "NFC"}])
@pytest.mark.parametrize("style", ["gpt2", "llama3", "qwen"])
def test_what_is_written_is_read_back(tmp_path, style, nfc):
    pytest.importorskip("gguf")
    main = json.loads(trained(style)) | {"normalizer": nfc}
    original = write_folder(tmp_path / "a", main)
    convert(tmp_path / "a", tmp_path / "a.gguf", Options(verify=False), log=lambda text: None)
    content = open_full_state(tmp_path / "a.gguf").about.tokenizer
    assert content is not None
    text = TEXT + "e\u0301 \u1100\u1161\u11a8"  # of which NFC makes two characters
    expected = original.encode(text, add_special_tokens=False).ids
    assert Tokenizer("a", content).encode(text) == expected


def test_a_tokenizer_without_merges_is_not_written(tmp_path):
    pytest.importorskip("gguf")
    main = json.loads(trained("gpt2"))
    main["model"] |= {"merges": [], "vocab": {c: i for i, c in enumerate(CHARACTERS.values())}}
    for number, entry in enumerate(main["added_tokens"]):
        entry["id"] = 256 + number
    write_folder(tmp_path / "a", main)
    with refused("--to gguf", "merges no tokens", "llama.cpp"):
        convert(tmp_path / "a", tmp_path / "a.gguf", Options(verify=False), log=lambda text: None)


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
