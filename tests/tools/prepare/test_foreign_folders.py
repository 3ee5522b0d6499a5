"""Data sets of other programs that are folders: refused with a command that works."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from messages import refused
from preparing import documents_of, prepared

from titanlite.tools.cli.prepare_command import run

ROWS = [f"row {i} says {'x' * (i % 7)}" for i in range(60)]


def refused_with(folder: Path, *parts: str) -> None:
    with refused(str(folder), *parts):
        run([str(folder), "--out", str(folder.parent / "refused")])


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_a_saved_data_set_is_named_by_hf(tmp_path, monkeypatch, several):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = datasets.Dataset.from_dict({"text": ROWS})
    if several:
        data = datasets.DatasetDict({"train": data, "test": data.select(range(3))})
    folder = tmp_path / "saved"
    data.save_to_disk(str(folder))
    refused_with(folder, f"give it as hf:{folder}")
    part = next(folder.rglob("*.arrow")).parent
    refused_with(part, f"give it as hf:{part}")
    assert sorted(documents_of(prepared(tmp_path / "made", f"hf:{folder}"))) == sorted(ROWS)


def write_index(folder: Path, column: str, encoding: str, compression: str | None) -> None:
    """The index.json of MDS, as mosaicml-streaming 0.13.0 writes it, beside a shard."""
    folder.mkdir()
    (folder / "shard.00000.mds").write_bytes(np.arange(99, dtype="<u4").tobytes())
    shard = {"column_encodings": [encoding], "column_names": [column], "format": "mds"}
    shard["compression"] = compression
    (folder / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))


@pytest.mark.parametrize(
    ("column", "encoding", "compression", "expected"),
    [
        ("text", "str", None, "row[name] for name in ['text']"),
        ("text", "str", "zstd", "zstd -d "),
        ("tokens", "bytes", None, "bytes(row['tokens'])"),
        ("tokens", "ndarray:int32", None, "bytes(row['tokens'])"),
        ("image", "jpeg", None, "without a column of text or ids: image jpeg"),
    ],
)
def test_shards_of_mds_are_named_with_the_command(
    tmp_path, column, encoding, compression, expected
):
    write_index(tmp_path / "mds", column, encoding, compression)
    refused_with(tmp_path / "mds", "mosaicml-streaming", expected)


def test_shards_of_mds_without_their_index_are_named(tmp_path):
    write_index(tmp_path / "mds", "text", "str", None)
    (tmp_path / "mds/index.json").unlink()
    refused_with(tmp_path / "mds", "MDS", "index.json")


def test_a_shard_of_prepared_data_is_not_a_source(tmp_path):
    (tmp_path / "a.txt").write_text("x = 1\n" * 500)
    made = prepared(tmp_path / "made", tmp_path / "a.txt")
    for name in ("train-00000.bin", "train-00000.starts.bin"):
        with refused(str(made), "--data.path="):
            run([str(made / name), "--out", str(tmp_path / "again")])
