"""Shards: reads across them, the width of a token, and damage that is named."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from messages import refused

from titanlite.config.schema import DataConfig
from titanlite.data import verify
from titanlite.data.prepare import prepare
from titanlite.data.prepared import PreparedData
from titanlite.data.shards import Tokens, token_dtype
from titanlite.data.tokenise import ShardWriter
from titanlite.data.tokenizer import Tokenizer

TOKENIZER = Tokenizer()


def quiet(message: str) -> None:
    pass


@pytest.fixture
def section(tmp_path) -> DataConfig:
    path = tmp_path / "one.txt"
    path.write_text("x = 1\n" * 1000)
    return DataConfig(path=str(path), cache=str(tmp_path / "cache"))


@pytest.fixture
def folder(section) -> Path:
    return prepare(section, TOKENIZER, quiet)


def zeros(shard: Path) -> None:
    shard.write_bytes(bytes(shard.stat().st_size))


def cut(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [(zeros, "its SHA-256 has changed"), (cut, "bytes, expected"), (Path.unlink, "No such file")],
)
def test_damaged_shards_are_named(section, folder, damage, problem):
    damage(folder / "train-00000.bin")
    with refused("train-00000.bin", problem, "delete the folder"):
        prepare(section, TOKENIZER, quiet)


def test_each_version_of_a_file_is_verified_once(section, folder, monkeypatch):
    read = []
    monkeypatch.setattr(verify, "_problem", lambda path, *rest: read.append(path.name))
    prepare(section, TOKENIZER, quiet)
    assert read == []
    os.utime(folder / "train-00000.bin")
    prepare(section, TOKENIZER, quiet)
    prepare(section, TOKENIZER, quiet)
    assert read == ["train-00000.bin"]
    (folder / "verified.json").write_text("[")
    prepare(section, TOKENIZER, quiet)
    assert sorted(read) == ["train-00000.bin", "train-00000.bin", "validation-00000.bin"]


def test_an_id_beyond_the_vocabulary_is_found(section, folder):
    shard, manifest = folder / "train-00000.bin", folder / "manifest.json"
    ids = np.fromfile(shard, "<u2")
    ids[7] = TOKENIZER.size
    before, after = hashlib.sha256(shard.read_bytes()).hexdigest(), hashlib.sha256(ids.tobytes()).hexdigest()
    shard.write_bytes(ids.tobytes())
    manifest.write_text(manifest.read_text().replace(before, after))
    with refused("train-00000.bin", f"token id {TOKENIZER.size}", f"below {TOKENIZER.size}"):
        prepare(section, TOKENIZER, quiet)


def edits(manifest: dict) -> dict[str, Callable[[], object]]:
    """Changes of a manifest after which it must be refused."""
    split, shard = manifest["splits"]["train"], manifest["splits"]["train"]["shards"][0]
    return {
        "no splits": lambda: manifest.pop("splits"),
        "no validation": lambda: manifest["splits"].pop("validation"),
        "splits a list": lambda: manifest.update(splits=[]),
        "shards a text": lambda: split.update(shards="train-00000.bin"),
        "a shard elsewhere": lambda: shard.update(file="../train-00000.bin"),
        "a shard of no name": lambda: shard.update(file=None),
        "other tokens": lambda: shard.update(tokens=shard["tokens"] - 1),
        "tokens below 0": lambda: (shard.update(tokens=-1), split.update(tokens=-1)),
        "tokens no integer": lambda: (shard.update(tokens=1.0), split.update(tokens=1.0)),
        "tokens beyond 64 bits": lambda: (shard.update(tokens=10**40), split.update(tokens=10**40)),
        "no hash": lambda: shard.update(sha256=""),
        "another format": lambda: manifest.update(format=99),
        "another dtype": lambda: manifest.update(dtype="<u4"),
        "no dtype": lambda: manifest.update(dtype="object"),
        "a name that moves the cursor": lambda: manifest.update(name="\x1b[2J"),
        "no tokenizer": lambda: manifest.update(tokenizer=None),
        "another tokenizer": lambda: manifest["tokenizer"].update(sha256="0" * 64),
    }


EDITS = list(edits({"splits": {"train": {"shards": [{"tokens": 0}]}}}))


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_manifest_is_refused(section, folder, edit):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    edits(manifest)[edit]()
    path.write_text(json.dumps(manifest))
    with refused(str(folder), "delete the folder"):
        PreparedData(prepare(section, TOKENIZER, quiet), TOKENIZER)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "5", "\udcff", ""])
def test_what_is_no_manifest_is_refused(section, folder, text):
    (folder / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with refused("manifest.json", "delete the folder"):
        prepare(section, TOKENIZER, quiet)


def test_reads_cross_shards(tmp_path):
    writer = ShardWriter(tmp_path, "train", token_dtype(70_000), shard_tokens=7)
    ids = list(range(69_970, 70_000))
    writer.write(ids[:5])
    writer.write(ids[5:])
    split = writer.finish()
    tokens = Tokens(tmp_path, {"dtype": token_dtype(70_000).str, "splits": {"train": split}}, "train")
    assert len(tokens) == 30
    assert [shard["tokens"] for shard in split["shards"]] == [7, 7, 7, 7, 2]
    for start in range(30):
        for count in range(30 - start):
            assert tokens.read(start, count).tolist() == ids[start : start + count]


def test_token_width():
    assert token_dtype(65_536).itemsize == 2
    assert token_dtype(65_537).itemsize == 4
