"""Shards: reads across them, document starts, target masks, and the width of a token."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
from fuzz_samples import Reader, prepare_data, read_data_with

from titanlite.data.prepared_manifest import token_dtype
from titanlite.data.shards import Tokens
from titanlite.tools.prepare.shard_writer import ShardWriter


def written(folder: Path, documents: list[list[int]], masked: dict[int, list[bool]]) -> Tokens:
    """Documents in shards of 7 tokens, which they may cross; the shards in `masked` get these
    target masks.
    """
    ids = [i for document in documents for i in document]
    starts = set(itertools.accumulate((len(document) for document in documents), initial=0))
    shards = []
    for number, begin in enumerate(range(0, len(ids), 7)):
        writer = ShardWriter(folder, "train", number, token_dtype(70_000), masked=number in masked)
        for i in range(begin, min(begin + 7, len(ids))):
            if i in starts:
                writer.begin_document()
            writer.write(
                ids[i : i + 1], targets=masked[number][i - begin] if number in masked else True
            )
        shards.append(writer.finish())
    totals = {name: sum(shard[name] for shard in shards) for name in ("tokens", "documents")}
    splits = {"train": {**totals, "shards": shards}}
    return Tokens(folder, {"dtype": token_dtype(70_000).str, "splits": splits}, "train")


def test_reads_cross_shards(tmp_path):
    ids = list(range(69_970, 70_000))
    tokens = written(tmp_path, [ids[:5], ids[5:]], {})
    assert len(tokens) == 30
    assert len(list(tmp_path.glob("train-*.starts.bin"))) == 5
    for start in range(30):
        for count in range(30 - start):
            assert tokens.read(start, count).tolist() == ids[start : start + count]
    assert tokens.targets(0, 30) is None


def test_document_starts_cross_shards(tmp_path):
    # a shard that begins with a document, one without a start, one that ends there
    lengths = [1, 6, 1, 16, 7, 2, 3]
    tokens = written(tmp_path, [[1] * length for length in lengths], {})
    expected = [sum(lengths[:i]) for i in range(len(lengths))]
    assert tokens.documents == len(lengths)
    for start in range(40):
        for end in range(start, 40):
            assert tokens.document_starts(start, end).tolist() == [
                i for i in expected if start <= i < end
            ]


def test_target_masks_cross_shards(tmp_path):
    mask = np.random.default_rng(0).random(30) < 0.5
    tokens = written(tmp_path, [[1] * 30], {1: mask[7:14].tolist(), 4: mask[28:].tolist()})
    mask[:7] = mask[14:28] = True  # shards without a mask
    for start in range(30):
        for count in range(31 - start):
            assert tokens.targets(start, count).tolist() == mask[start : start + count].tolist()


def test_token_width():
    assert token_dtype(65_536).itemsize == 2
    assert token_dtype(65_537).itemsize == 4


def file_of_data(name: str, folder: Path) -> list[bytes]:
    prepare_data(folder)
    return [(folder / "data" / name).read_bytes()]


def read_shard(folder: Path, data: bytes) -> None:
    """Reads a shard whose length and hash in the manifest are made to fit."""
    manifest = json.loads((folder / "data/manifest.json").read_text())
    split = manifest["splits"]["train"]
    (shard,) = split["shards"]
    (folder / "data" / shard["file"]).write_bytes(data)
    shard["tokens"] = len(data) // np.dtype(manifest["dtype"]).itemsize
    shard["sha256"] = hashlib.sha256(data).hexdigest()
    split["tokens"] = shard["tokens"]
    read_data_with("manifest.json", folder, json.dumps(manifest).encode())


def read_starts(folder: Path, data: bytes) -> None:
    """Reads starts of documents whose number and hash in the manifest are made to fit."""
    manifest = json.loads((folder / "data/manifest.json").read_text())
    split = manifest["splits"]["train"]
    (shard,) = split["shards"]
    (folder / "data" / shard["starts"]["file"]).write_bytes(data)
    shard["starts"]["sha256"] = hashlib.sha256(data).hexdigest()
    shard["documents"] = len(data) // 8
    split["documents"] = shard["documents"]
    read_data_with("manifest.json", folder, json.dumps(manifest).encode())


FUZZED = {
    "shard": Reader("bytes", functools.partial(file_of_data, "train-00000.bin"), read_shard),
    "starts": Reader(
        "bytes", functools.partial(file_of_data, "train-00000.starts.bin"), read_starts
    ),
}
