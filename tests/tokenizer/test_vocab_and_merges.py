"""vocab.json and merges.txt: ids are those of transformers' class, or one error names the file."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import fuzz_samples
import pytest
from foreign_tokenizers import mixed_text, random_unicode, trained, write_vocab
from fuzz_samples import Reader, tokenizer_of_others
from messages import refused

from titanlite.tokenizer import vocab_and_merges
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tokenizer.vocab_and_merges import template
from titanlite.tools.formats.huggingface_tokenizer import files_of, read_tokenizer, to_files

transformers = pytest.importorskip("transformers")
END = "<|endoftext|>"
CLASSES = {"gpt2": "GPT2Tokenizer", "qwen": "Qwen2Tokenizer"}
TEXT = "def f(x):\n\treturn x + 1234  # 日本 'twas It'S e\u0301\n\n\n" * 3


def theirs(folder: Path, name: str) -> Any:
    """transformers' class, which is told not to look for special tokens in text."""
    tokenizer = getattr(transformers, name).from_pretrained(folder)
    tokenizer._tokenizer.encode_special_tokens = True
    return tokenizer


def assert_same(ours: Tokenizer, reference: Any, text: str) -> None:
    assert ours.encode(text) == reference(text, add_special_tokens=False)["input_ids"]


def entry(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, "special": True, "normalized": False, **flags}


@pytest.mark.slow
@pytest.mark.parametrize("style", CLASSES)
def test_ids_are_those_of_the_class(tmp_path, style):
    folder = write_vocab(tmp_path, style, tokenizer_config={"tokenizer_class": CLASSES[style]})
    ours = Tokenizer(folder)
    reference = theirs(folder, CLASSES[style])
    assert not ours.whole_documents, "tiktoken encodes it"
    assert_same(ours, reference, mixed_text(100_000))
    assert_same(ours, reference, random_unicode(20_000, seed=4))
    assert ours.special == {END: len(reference) - 1}
    assert ours.size == len(reference)
    assert ours.decode(ours.encode("naïve  x\n")) == "naïve  x\n"
    # The vocabulary may be named instead of the folder
    assert Tokenizer(folder / "vocab.json").content == ours.content


@pytest.mark.parametrize("style", CLASSES)
def test_the_two_classes_differ(tmp_path, style):
    """Both files are alike, so that the class decides."""
    ids = []
    for name in CLASSES.values():
        folder = write_vocab(
            tmp_path / name, style, tokenizer_config={"tokenizer_class": f"{name}Fast"}
        )
        ids.append(Tokenizer(folder).encode(TEXT))
        assert_same(Tokenizer(folder), theirs(folder, name), TEXT)
    assert ids[0] != ids[1]


QWEN = {"tokenizer_class": "Qwen2Tokenizer"}
SPECIAL: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "listed, in any order": (
        "qwen",
        {
            "tokenizer_config": {
                **QWEN,
                "added_tokens_decoder": {
                    "1502": entry("<|im_end|>"),
                    "1500": entry(END),
                    "1501": entry("<|im_start|>"),
                    "1503": entry("<tool_call>", special=False),
                },
                "eos_token": "<|im_end|>",
                "bos_token": None,
                "additional_special_tokens": ["<|im_start|>", "<|more|>"],
            },
            # Which are not used then
            "special_tokens_map": {"eos_token": "<|other|>"},
            "added_tokens": {"<|another|>": 1504},
        },
    ),
    "in two files": (
        "qwen",
        {
            "tokenizer_config": {**QWEN, "eos_token": END},
            "special_tokens_map": {
                "eos_token": {**entry("<|im_end|>"), "lstrip": False, "rstrip": False},
                "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            },
            "added_tokens": {"<|im_end|>": 1502, END: 1500, "<|im_start|>": 1501},
        },
    ),
    "by name only": (
        "gpt2",
        {"special_tokens_map": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}},
    ),
    "without a class": ("gpt2", {}),
    "of a model without a class": ("gpt2", {"config": {"model_type": "gpt2"}}),
    "a space before the text": ("gpt2", {"tokenizer_config": {"add_prefix_space": True}}),
    "and of Qwen": ("qwen", {"tokenizer_config": {**QWEN, "add_prefix_space": True}}),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_special_tokens_have_the_ids_of_the_class(tmp_path, case):
    style, files = SPECIAL[case]
    folder = write_vocab(tmp_path, style, **files)
    ours = Tokenizer(folder)
    reference = theirs(folder, CLASSES[style])
    added = {token.content: i for i, token in reference.added_tokens_decoder.items()}
    assert ours.special == added
    assert ours.size == len(reference)
    assert ours.eos == reference.eos_token_id
    if reference.bos_token_id is not None:
        assert ours.bos == reference.bos_token_id
    for text in (TEXT, "x", " x", "", " a"):
        assert_same(ours, reference, text)
    assert ours.whole_documents == ("space" in case or "Qwen" in case)


def test_special_tokens_of_the_vocabulary_keep_their_ids(tmp_path):
    """As in GPT-2's own files, whose last token is the only special one."""
    folder = write_vocab(tmp_path, "gpt2", special_tokens_map={"pad_token": "<pad>"})
    vocab = json.loads((folder / "vocab.json").read_text())
    at_the_end = {END: len(vocab), "<pad>": len(vocab) + 1}
    (folder / "vocab.json").write_text(json.dumps(vocab | at_the_end))
    ours = Tokenizer(folder)
    assert ours.special == at_the_end
    reference = theirs(folder, "GPT2Tokenizer")
    assert len(reference) == ours.size == len(vocab) + 2
    assert_same(ours, reference, TEXT)


def test_without_a_class_the_model_beside_decides(tmp_path):
    folder = write_vocab(tmp_path / "a", "qwen", config={"model_type": "qwen3"})
    assert Tokenizer(folder).nfc
    assert_same(Tokenizer(folder), theirs(folder, "Qwen2Tokenizer"), TEXT)
    assert not Tokenizer(write_vocab(tmp_path / "b", "qwen")).nfc


def test_what_it_adds_around_a_text_is_kept_for_exports(tmp_path):
    config = {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    folder = write_vocab(tmp_path / "a", "gpt2", tokenizer_config=config)
    files = to_files(Tokenizer(folder), 64)
    (tmp_path / "b").mkdir()
    for name, content in files.items():
        (tmp_path / "b" / name).write_bytes(content)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    original = transformers.GPT2Tokenizer.from_pretrained(folder)
    assert exported("a b")["input_ids"] == original("a b")["input_ids"]
    assert exported("a b")["input_ids"][0] == original.bos_token_id
    assert exported("a", "b")["input_ids"] == original("a", "b")["input_ids"]


def test_a_template_has_what_is_asked_for():
    assert template({}, {}) is None
    after = template({}, {"</s>": 2})
    assert after is not None
    assert after["single"] == [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
    ]
    assert after["special_tokens"] == {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}}


def test_a_folder_of_a_model_has_it(tmp_path, caplog):
    folder = write_vocab(tmp_path, "qwen", tokenizer_config=QWEN)
    content = read_tokenizer(folder)
    assert content is not None
    assert content == Tokenizer(folder).content
    assert files_of(content) == Tokenizer("x", content).files
    # A tokenizer.json comes first
    main = json.loads(trained("gpt2"))
    (folder / "tokenizer.json").write_text(json.dumps(main))
    assert not Tokenizer(folder).nfc
    (folder / "tokenizer.json").unlink()
    (folder / "merges.txt").unlink()
    assert read_tokenizer(folder) is None
    assert "its tokenizer is not used" in caplog.text


def test_carriage_returns_and_the_end_of_the_last_line(tmp_path):
    folder = write_vocab(tmp_path, "gpt2")
    expected = Tokenizer(folder).content
    lines = (folder / "merges.txt").read_text().strip().split("\n")
    (folder / "merges.txt").write_text("\r\n".join(lines[1:]))
    assert Tokenizer(folder).content == expected
    assert_same(Tokenizer(folder), theirs(folder, "GPT2Tokenizer"), TEXT)


DAMAGED: dict[str, tuple[str, bytes | None, tuple[str, ...]]] = {
    "no merges": ("merges.txt", None, ("merges.txt: No such file",)),
    "nothing merged": ("merges.txt", b"#version\n", ("merges.txt: has no merges",)),
    "a token alone": ("merges.txt", b"#version\na b\nabc\n", ("merges.txt:3: 'abc'", "two tokens")),
    "three tokens": ("merges.txt", b"a b c\n", ("merges.txt:1: ", "two tokens")),
    "a space at the end": ("merges.txt", b"a \n", ("merges.txt:1: ",)),
    "merges that are no text": ("merges.txt", b"\xff\xfe a\n", ("merges.txt: not UTF-8", "byte 0")),
    "merges of other tokens": (
        "merges.txt",
        b"a b\nzzz yyy\n",
        ("merges.txt:2: ", "'zzz' is not in vocab"),
    ),
    "no JSON": ("vocab.json", b"{", ("vocab.json: not a JSON object",)),
    "a list": ("vocab.json", b"[1]", ("vocab.json: not a JSON object",)),
    "deep": ("vocab.json", b"[" * 100_000, ("vocab.json: not a JSON object",)),
    "not UTF-8": ("vocab.json", b'{"\xff": 1}', ("vocab.json: not a JSON object",)),
    "an id that is text": ("vocab.json", b'{"a": "1"}', ("vocab.json: 'a': '1'", "token -> id")),
    "a tokenizer.json": ("vocab.json", b'{"model": {}}', ("vocab.json: 'model'", "token -> id")),
    "equal ids": ("vocab.json", b'{"a": 1, "b": 1}', ("vocab.json", "the same id")),
    "another class": (
        "tokenizer_config.json",
        b'{"tokenizer_class": "CLIPTokenizer"}',
        ("'CLIPTokenizer'", "GPT2Tokenizer, Qwen2Tokenizer"),
    ),
    "a class that is no text": ("tokenizer_config.json", b'{"tokenizer_class": 3}', ("= 3",)),
    "a config that is a list": ("tokenizer_config.json", b"[3]", ("not a JSON object",)),
    "a token that is a number": ("tokenizer_config.json", b'{"eos_token": 3}', ("special tokens",)),
    "an id that is a word": (
        "tokenizer_config.json",
        b'{"added_tokens_decoder": {"x": {"content": "a"}}}',
        ("special tokens", "'x'"),
    ),
    "an infinite id": ("added_tokens.json", b'{"<x>": Infinity}', ("inf is not an id",)),
    "an id with a gap": ("added_tokens.json", b'{"<x>": 2000}', ("'<x>' has id 2000", "1500")),
    "others that are no list": (
        "special_tokens_map.json",
        b'{"additional_special_tokens": {"a": "b"}}',
        ("is not a list",),
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_one_error_that_names_the_file(tmp_path, case):
    name, content, words = DAMAGED[case]
    folder = write_vocab(tmp_path / "folder", "gpt2")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with refused(str(folder), *words):
        Tokenizer(folder)


def test_sizes_are_limited(tmp_path, monkeypatch):
    folder = write_vocab(tmp_path, "gpt2")
    size = (folder / "vocab.json").stat().st_size
    monkeypatch.setattr(vocab_and_merges, "MAX_JSON_FILE", size)
    with refused("its tokenizer.json would have", f"at most {size}"):
        Tokenizer(folder)
    with (folder / "merges.txt").open("ab") as file:
        file.truncate(size + 1)
    with refused("merges.txt", f"at most {size} bytes"):
        Tokenizer(folder)


def write_files(name: str, folder: Path) -> list[bytes]:
    """Writes the files that precede tokenizer.json; returns the one of this name."""
    main = tokenizer_of_others()["model"]
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        "added_tokens_decoder": {str(len(main["vocab"])): {"content": "<a>", "special": True}},
        "additional_special_tokens": ["<b>"],
    }
    contents = {
        "vocab.json": json.dumps(main["vocab"]),
        "merges.txt": "\n".join(["#version: 0.2", *(" ".join(pair) for pair in main["merges"])]),
        "tokenizer_config.json": json.dumps(config),
    }
    for file, content in contents.items():
        (folder / file).write_text(content)
    return [contents[name].encode()]


def read_files(name: str, folder: Path, data: bytes) -> None:
    (folder / name).write_bytes(data)
    tokenizer = Tokenizer(folder)
    tokenizer.decode(tokenizer.encode(fuzz_samples.TEXT))
    to_files(tokenizer, 16)


def one_of_three(name: str) -> Reader:
    prepare = functools.partial(write_files, name)
    return Reader("text", prepare, functools.partial(read_files, name))


FUZZED = {
    "vocab.json": one_of_three("vocab.json"),
    "merges.txt": one_of_three("merges.txt"),
    "special tokens": one_of_three("tokenizer_config.json"),
}
