"""Files that torch.save and DCP lay out with gaps, which are filled afterwards."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from titanlite.checkpoint.manifest import DTYPES
from titanlite.tools.formats import full_state
from titanlite.tools.formats.convert import load_full_state
from titanlite.tools.formats.export import Outgoing
from titanlite.tools.formats.torch_output import save_file, save_folder


def outgoing(tensor: Tensor, rows: int = 2) -> Outgoing:
    """The tensor in blocks of some rows."""

    def blocks() -> Iterator[Tensor]:
        return iter(tensor.split(rows) if tensor.ndim else [tensor])

    return Outgoing(tensor.dtype, tuple(tensor.shape), blocks)


def tensors_of_all_kinds() -> dict[str, Tensor]:
    tensors = {name: torch.arange(1, 16).reshape(5, 3).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(3, dtype=torch.int16), "empty": torch.empty(0, 3)}
    return tensors


def test_a_file_has_the_records_of_torch_save(tmp_path):
    """All but the identifier, which torch computes of the CRC-32 before the gaps are filled."""
    tensors = tensors_of_all_kinds()
    beside = {"step": 7, "config": {"dim": 32}}
    filled = {name: outgoing(tensor) for name, tensor in tensors.items()}
    save_file(tmp_path / "a.pt", {"model": filled, **beside, "bytes": outgoing(tensors["U8"])})
    torch.save({"model": tensors, **beside, "bytes": tensors["U8"].clone()}, tmp_path / "b.pt")
    records = []
    for path in (tmp_path / "a.pt", tmp_path / "b.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            names = [name.partition("/")[2] for name in archive.namelist()]
            contents = dict(zip(names, map(archive.read, archive.namelist()), strict=True))
        del contents[".data/serialization_id"]
        records.append(contents)
    assert records[0] == records[1]
    loaded = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)
    assert all(torch.equal(loaded["model"][name], tensors[name]) for name in tensors)


def test_a_folder_is_read_by_dcp_and_has_each_crc(tmp_path):
    tensors = tensors_of_all_kinds()
    (tmp_path / "a").mkdir()
    save_folder(tmp_path / "a", {name: outgoing(tensor) for name, tensor in tensors.items()})
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "a", no_dist=True)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".metadata", "__0_0.distcp"]
    (file,) = (tmp_path / "a").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(tensors["I64"].numpy().tobytes()) + 9] ^= 1
    file.write_bytes(content)
    state = load_full_state(tmp_path / "a")
    assert torch.equal(state["F32"], tensors["F32"])
    with pytest.raises(full_state.CorruptCheckpoint, match="CRC-32"):
        state["I64"].sum()


def test_what_lies_beyond_4_gb_is_found(tmp_path):
    """The first tensor stays a gap, which takes no disk space."""
    large = Outgoing(torch.int8, (5 << 30,), lambda: iter([]))
    last = torch.arange(7.0)
    save_file(tmp_path / "a.pt", {"large": large, "last": outgoing(last)})
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.getinfo("archive/data/0").file_size == 5 << 30
        assert archive.read("archive/data/1") == last.numpy().tobytes()  # compares its CRC-32
    assert (tmp_path / "a.pt").stat().st_blocks * 512 < 1 << 20
    loaded = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)
    assert torch.equal(loaded["last"], last)
    (_, record) = load_full_state(tmp_path / "a.pt").records
    assert record.begin > 5 << 30
    assert record.problem() == ""
    assert record.crc
