"""A shard is complete or absent, and its entry of the manifest says what is in it."""

from __future__ import annotations

import hashlib

import numpy as np

from titanlite.data.prepared_manifest import token_dtype
from titanlite.tools.prepare.shard_writer import ShardWriter


def test_the_entry_describes_the_files(tmp_path):
    writer = ShardWriter(tmp_path, "train", 3, token_dtype(100), masked=True)
    for count in (3, 10):
        writer.begin_document()
        writer.write([1], targets=False)
        writer.write(list(range(count)))
    assert not list(tmp_path.glob("*.bin"))
    entry = writer.finish()
    assert (entry["tokens"], entry["documents"]) == (15, 2)
    for part in (entry, entry["starts"], entry["mask"]):
        assert part["sha256"] == hashlib.sha256((tmp_path / part["file"]).read_bytes()).hexdigest()
    assert np.fromfile(tmp_path / "train-00003.starts.bin", "<u8").tolist() == [0, 4]
    mask = np.unpackbits(np.fromfile(tmp_path / "train-00003.mask.bin", np.uint8), count=15)
    assert mask.tolist() == [0, 1, 1, 1, 0] + [1] * 10


def test_what_is_discarded_leaves_nothing(tmp_path):
    writer = ShardWriter(tmp_path, "train", 0, token_dtype(100), masked=True)
    writer.write([1, 2, 3])
    writer.discard()
    assert not list(tmp_path.iterdir())
