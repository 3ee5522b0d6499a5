"""Verification of prepared data: damage is named, and each version of a file is read once."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from fuzz_samples import Reader, prepare_data, read_data, read_data_with
from messages import refused

from titanlite.config.schema import DataConfig
from titanlite.data import verification as verify
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.cache import prepare

TOKENIZER = Tokenizer()


def quiet(message: str) -> None:
    pass


def rewrite(folder: Path, name: str, values: np.ndarray) -> None:
    """Other content of a file, with the hash that belongs to it in the manifest."""
    path, manifest = folder / name, folder / "manifest.json"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(values.tobytes())
    manifest.write_text(
        manifest.read_text().replace(before, hashlib.sha256(path.read_bytes()).hexdigest())
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda starts: starts[[1, 0, *range(2, 90)]], "the first document starts at token"),
        (lambda starts: starts[[0, 2, 1, *range(3, 90)]], "at byte 16; expected more than"),
        (lambda starts: starts[[0, 0, *range(2, 90)]], "token 0, at byte 8; expected more than 0"),
        (
            lambda starts: np.append(starts[:-1], np.uint64(2**64 - 1)),
            "token 18446744073709551615, at byte",
        ),
    ],
)
def test_wrong_document_starts_are_found(tmp_path, change, problem):
    (tmp_path / "text").mkdir()
    for i in range(100):
        (tmp_path / f"text/{i}.txt").write_text("x = 1\n")
    section = DataConfig(path=str(tmp_path / "text"), cache=str(tmp_path / "cache"))
    folder = prepare(section, TOKENIZER, quiet)
    starts = np.fromfile(folder / "train-00000.starts.bin", "<u8")
    assert len(starts) == 90
    rewrite(folder, "train-00000.starts.bin", change(starts).astype("<u8"))
    with refused("train-00000.starts.bin", problem):
        prepare(section, TOKENIZER, quiet)


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
    names = [
        f"{split}-00000{kind}.bin" for split in ("train", "validation") for kind in ("", ".starts")
    ]
    assert sorted(read) == sorted([*names, "train-00000.bin"])


def test_an_id_beyond_the_vocabulary_is_found(section, folder):
    shard = folder / "train-00000.bin"
    ids = np.fromfile(shard, "<u2")
    ids[7] = TOKENIZER.size
    rewrite(folder, shard.name, ids)
    with refused(
        "train-00000.bin", f"token id {TOKENIZER.size} at byte 14", f"below {TOKENIZER.size}"
    ):
        prepare(section, TOKENIZER, quiet)


def verified_data(folder: Path) -> list[bytes]:
    """Prepares data and reads it once; returns the record of what was verified."""
    prepare_data(folder)
    read_data(folder / "data")
    return [(folder / "data" / verify.RECORD).read_bytes()]


FUZZED = {
    "verified.json": Reader(
        "text", verified_data, functools.partial(read_data_with, verify.RECORD)
    ),
}
