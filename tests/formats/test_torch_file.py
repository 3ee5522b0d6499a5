"""Files of torch.save: the CRC-32 of their storages, and tensors that are views."""

from __future__ import annotations

import zipfile

import pytest
import torch
from model_builder import small_model

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.formats.convert import convert, load_full_state
from titanlite.formats.load import require_intact


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    torch.save(
        {"a": torch.randn(5, 3), "b": torch.arange(7), "c": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "a.pt"
    )
    return tmp_path / "a.pt"


def test_each_flipped_bit_of_a_storage_is_found(path):
    content = path.read_bytes()
    full = load_full_state(path)
    require_intact(full)
    assert {record.length for record in full.records} == {60, 56, 4}
    for record in full.records:
        for bit in range(0, record.length * 8, 5):
            changed = bytearray(content)
            changed[record.begin + bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            with pytest.raises(CorruptCheckpoint, match=rf"a\.pt: '{record.name}' is damaged: its CRC-32"):
                require_intact(full)


def test_a_damaged_source_is_not_converted(tmp_path):
    torch.save(small_model().state_dict(), tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="CRC-32"):
        convert(tmp_path / "a.pt", tmp_path / "there.safetensors")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.pt"]


def test_ranks_share_the_work(path):
    full = load_full_state(path)
    (last,) = (record for record in full.records if record.name == "2")
    content = bytearray(path.read_bytes())
    content[last.begin] ^= 1
    path.write_bytes(content)
    require_intact(full, share=slice(0, None, 3))
    require_intact(full, share=slice(1, None, 3))
    with pytest.raises(CorruptCheckpoint, match="'2' is damaged"):
        require_intact(full, share=slice(2, None, 3))


def test_a_file_saved_without_crc_is_read(path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(7.0)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(path) as archive:
        assert not any(info.CRC for info in archive.infolist())
    full = load_full_state(path)
    require_intact(full)
    assert torch.equal(full["a"], torch.arange(7.0))


def test_an_expanded_tensor_is_refused_with_what_to_do(path):
    torch.save({"a": torch.ones(1).expand(2**20)}, path)
    with pytest.raises(CorruptCheckpoint, match=r"more numbers than its storage; save \.contiguous\(\)"):
        load_full_state(path)
