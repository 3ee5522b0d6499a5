"""Damage: every flipped bit of what is used is found by a hash or a CRC-32."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from model_builder import SMALL, small_model

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats import full_state
from titanlite.tools.formats import load_weights as load
from titanlite.tools.formats.convert import convert, load_full_state
from titanlite.tools.formats.intact import require_intact
from titanlite.tools.formats.load_weights import read_weights


@pytest.fixture
def path(tmp_path) -> Path:
    """A file with three storages."""
    tensors = {"a": torch.randn(5, 3), "b": torch.arange(7), "c": torch.ones(2).bfloat16()}
    torch.save(tensors, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_flipped_bits_of_storages_are_found(path):
    content = path.read_bytes()
    full = load_full_state(path)
    require_intact(full)
    assert {record.length for record in full.records} == {60, 56, 4}
    for record in full.records:
        for bit in range(0, record.length * 8, 5):
            changed = bytearray(content)
            changed[record.begin + bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            with pytest.raises(
                CorruptCheckpoint, match=rf"a\.pt: '{record.name}' is damaged: its CRC-32"
            ):
                require_intact(full)


def test_a_damaged_source_is_not_converted(tmp_path):
    torch.save(small_model().state_dict(), tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="CRC-32"):
        convert(tmp_path / "a.pt", tmp_path / "there.safetensors")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.pt"]


def test_a_share_of_the_storages_may_be_compared(path):
    full = load_full_state(path)
    (last,) = (record for record in full.records if record.name == "2")
    content = bytearray(path.read_bytes())
    content[last.begin] ^= 1
    path.write_bytes(content)
    require_intact(full, share=slice(0, None, 3))
    require_intact(full, share=slice(1, None, 3))
    with pytest.raises(CorruptCheckpoint, match="'2' is damaged"):
        require_intact(full, share=slice(2, None, 3))


def test_training_state_is_compared_only_if_it_is_used(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"model": {"a": torch.ones(5)}, "training": {"optimizer.a": torch.ones(7)}}, path)
    full = load_full_state(path)
    assert list(full.others) == ["optimizer.a"]
    content = bytearray(path.read_bytes())
    content[next(record.begin for record in full.records if record.length == 28)] ^= 1
    path.write_bytes(content)
    require_intact(full)
    with pytest.raises(CorruptCheckpoint, match="CRC-32"):
        require_intact(full, everything=True)
    content[next(record.begin for record in full.records if record.length == 20)] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="CRC-32"):
        require_intact(full)


def test_a_failing_disk_names_the_source(path, monkeypatch):
    full = load_full_state(path)
    monkeypatch.setattr(
        full_state.zlib, "crc32", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    )
    with pytest.raises(CorruptCheckpoint, match=r"a\.pt: .* is damaged: Input/output error"):
        require_intact(full)


def read_on_all(folder: Path) -> str:
    """The error on this rank, which compares the CRC-32 of every second storage only."""
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "LOCAL_WORLD_SIZE": "2"}
    state = {name: torch.zeros(5) for name in ("a", "b", "c")}
    with pytest.MonkeyPatch.context() as patch:
        # The file holds no model
        patch.setattr(load, "require_same_model", lambda *arguments: None)
        try:
            read_weights(folder / "a.pt", state, SMALL, b"")
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [*(pytest.param(i, marks=pytest.mark.slow) for i in (0, 1)), 2])
def test_a_flipped_bit_is_an_error_on_all_ranks(pool, tmp_path, damaged):
    torch.save({name: torch.ones(5) for name in ("a", "b", "c")}, tmp_path / "a.pt")
    assert pool.run(2, read_on_all, tmp_path) == ["", ""]
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[load_full_state(tmp_path / "a.pt").records[damaged].begin] ^= 1
    (tmp_path / "a.pt").write_bytes(content)
    first, second = pool.run(2, read_on_all, tmp_path)
    assert first == second
    assert f"'{damaged}' is damaged: its CRC-32" in first
