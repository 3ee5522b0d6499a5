"""Shards: reads across them, the width of a token, and damage that is named."""

from __future__ import annotations

import json

from messages import refused

from titanlite.config.schema import DataConfig
from titanlite.data.prepare import prepare
from titanlite.data.shards import ShardWriter, Tokens, read_manifest, token_dtype
from titanlite.data.tokenizer import Tokenizer

TOKENIZER = Tokenizer()


def quiet(message: str) -> None:
    pass


def test_damaged_shards_are_named(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("x = 1\n" * 1000)
    folder = prepare(DataConfig(path=str(path), cache=str(tmp_path / "cache")), TOKENIZER, quiet)
    manifest = read_manifest(folder)
    shard = folder / "train-00000.bin"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    with refused("train-00000.bin", f"{size - 1} bytes", f"{size}", "delete the folder"):
        Tokens(folder, manifest, "train")
    shard.unlink()
    with refused("train-00000.bin", "missing"):
        Tokens(folder, manifest, "train")
    (folder / "manifest.json").write_text("{")
    with refused("manifest.json", "delete the folder"):
        read_manifest(folder)


def test_reads_cross_shards(tmp_path):
    writer = ShardWriter(tmp_path, "train", token_dtype(70_000), shard_tokens=7)
    ids = list(range(69_970, 70_000))
    writer.write(ids[:5])
    writer.write(ids[5:])
    manifest = {"dtype": token_dtype(70_000).str, "splits": {"train": writer.finish()}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    tokens = Tokens(tmp_path, read_manifest(tmp_path), "train")
    assert len(tokens) == 30
    assert [shard["tokens"] for shard in manifest["splits"]["train"]["shards"]] == [7, 7, 7, 7, 2]
    for start in range(30):
        for count in range(30 - start):
            assert tokens.read(start, count).tolist() == ids[start : start + count]


def test_token_width():
    assert token_dtype(65_536).itemsize == 2
    assert token_dtype(65_537).itemsize == 4
