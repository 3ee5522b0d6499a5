"""Tokenizers that tiktoken cannot express, against the `tokenizers` package itself."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from foreign_tokenizers import SENTENCEPIECE_SPECIAL as SPECIAL
from foreign_tokenizers import SENTENCEPIECE_TEXT as TEXT
from foreign_tokenizers import sentencepiece
from messages import refused
from tokenizers import decoders, models, pre_tokenizers, trainers

from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.formats.huggingface_tokenizer import files_of, to_files


def several_splits() -> Any:
    """As DeepSeek's: three Splits before ByteLevel."""
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(tokenizers.Regex("[一-龥]+"), "isolated"),
            pre_tokenizers.Split(tokenizers.Regex(r"\s+\w+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    encoder.train_from_iterator([TEXT] * 3, trainer)
    return encoder


def without_some_bytes() -> Any:
    """As SmolLM2's: bytes that are not in its text have no token."""
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL)
    encoder.train_from_iterator([TEXT] * 3, trainer)
    return encoder


def save(encoder: Any, folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(encoder.to_str())
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    return folder


@pytest.mark.parametrize("make", [sentencepiece, several_splits, without_some_bytes])
def test_ids_and_text_are_those_of_the_package(tmp_path, make):
    encoder = make()
    ours = Tokenizer(save(encoder, tmp_path))
    assert ours.whole_documents
    assert (ours.bos, ours.eos) == (0, 1)
    assert ours.size == encoder.get_vocab_size()
    for text in (TEXT.replace("<s>", "").replace("<|im_start|>", ""), "", " ", "a  b", "x"):
        ids = encoder.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == encoder.decode(ids, skip_special_tokens=False)
    # The names of special tokens are ordinary text, which they give back
    assert not {0, 1, 2, 3} & set(ours.encode(TEXT))
    assert ours.decode(ours.encode(TEXT)) == TEXT
    assert ours.decode([0, *ours.encode("a s"), 1]) == "<s>a s</s>"
    text = "return 12345"
    assert sum(ours.token_bytes[i] for i in ours.encode(text)) in (len(text), len(text) + 1)


@pytest.mark.parametrize("make", [sentencepiece, without_some_bytes])
def test_a_checkpoint_keeps_the_tokenizer(tmp_path, make):
    ours = Tokenizer(save(make(), tmp_path))
    again = Tokenizer("again", ours.content)
    assert again.encode(TEXT) == ours.encode(TEXT)
    assert again.sha256 == ours.sha256
    assert files_of(ours.content) == ours.files
    exported = to_files(ours, 128)
    for name, content in exported.items():
        (tmp_path / name).write_bytes(content)
    assert Tokenizer(tmp_path).encode(TEXT) == ours.encode(TEXT)


def test_without_the_package_the_reason_is_given(tmp_path, monkeypatch):
    folder = tmp_path / ("a_long_name" * 20)
    folder.mkdir()
    save(sentencepiece(), folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError) as error:
        Tokenizer(folder)
    (problem,) = error.value.problems
    for words in ("pip install tokenizers", "normalizer Prepend", str(folder)):
        assert problem.count(words) == 1
    assert problem.endswith(")")


def test_without_the_package_a_file_that_is_no_tokenizer_is_not_its_fault(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with refused("not a tokenizer.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("i", [1 << 22, 20_000_000])
def test_ids_are_limited(i):
    """A list has an entry for each id."""
    main = json.loads(sentencepiece().to_str())
    vocab = main["model"]["vocab"]
    vocab[next(reversed(vocab))] = i
    with refused("damaged", f"its largest id is {i}", "at most 4194303"):
        Tokenizer("damaged", json.dumps(main).encode())


def test_random_merges_are_refused(tmp_path):
    main = json.loads(without_some_bytes().to_str())
    main["model"]["dropout"] = 0.1
    save(tokenizers.Tokenizer.from_str(json.dumps(main)), tmp_path)
    with refused("dropout"):
        Tokenizer(tmp_path)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in a JSON value, but for the tokens of a vocabulary and most of a list."""
    if isinstance(value, dict):
        entries = [(name, value[name]) for name in value if path[-1:] != ("vocab",)]
    elif isinstance(value, list):
        entries = list(enumerate(value[:2]))
    else:
        return
    for key, entry in entries:
        yield (*path, key)
        yield from places(entry, (*path, key))


WRONG = (None, {}, [], "x", -1, 10**12, True, ["a"], {"type": "Metaspace"}, {"type": "Sequence"})


def damage_all(main: dict[str, Any], chance: random.Random, share: float) -> int:
    """Reads a file with each place replaced by each wrong value. How many were read."""
    num_read = 0
    for path in places(main):
        for wrong in WRONG:
            if chance.random() > share:
                continue
            damaged = copy.deepcopy(main)
            target = damaged
            for key in path[:-1]:
                target = target[key]
            target[path[-1]] = wrong
            with contextlib.suppress(ConfigError):
                ours = Tokenizer("damaged", json.dumps(damaged).encode())
                ours.decode(ours.encode("abc 12"))
                num_read += 1
    return num_read


@pytest.mark.parametrize("share", [0.03, pytest.param(0.4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [sentencepiece, several_splits])
def test_damaged_files_are_one_error(make, share):
    main = json.loads(make().to_str())
    assert damage_all(main, random.Random(0), share) > 0


def test_a_file_that_ends_the_process_of_the_package_is_one_error():
    """By a panic while it makes the message of an error, in tokenizers 0.23."""
    main = json.loads(several_splits().to_str())
    main["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "(" * 5000}
    with refused("damaged", "cannot read it"):
        Tokenizer("damaged", json.dumps(main).encode())
