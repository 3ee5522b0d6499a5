"""Conversion reads and writes each byte once, and finds damage before the output is published."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from model_builder import SMALL, make_file
from torch import Tensor

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.tools.formats import in_place
from titanlite.tools.formats.convert import Options, convert
from titanlite.tools.formats.export import Outgoing
from titanlite.tools.formats.full_state import FullState, FullTensor, Part
from titanlite.tools.formats.in_place import blocks_of
from titanlite.tools.formats.intact import require_intact

TO = {"b.pt": "torch", "b.safetensors": "safetensors", "dcp": "dcp"}


def converted(source: Path, target: Path, to: str) -> FullState:
    return convert(source, target, Options(to, verify=False), lambda text: None)


def make_step(folder: Path) -> Path:
    """A step folder of one process."""
    make_file(folder / "a.pt", dataclasses.replace(SMALL, ffn_dim=16384))
    converted(folder / "a.pt", folder / "step-7", "titanlite")
    (folder / "a.pt").unlink()
    return folder / "step-7"


class Counted(NamedTuple):
    """Bytes of this process's calls of read and write."""

    read: int
    written: int


def counted() -> Counted:
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return Counted(int(counts["rchar"]), int(counts["wchar"]))


@pytest.mark.parametrize("target", [*TO, "hf"])
def test_bytes_are_written_once_and_read_once_into_one_file(tmp_path, target):
    """Small files have less than 5,000,000 bytes, with what is imported."""
    step = make_step(tmp_path)
    before = counted()
    state = converted(step, tmp_path / target, TO.get(target, "hf"))
    after = counted()
    size = state.nbytes()
    assert size > 10_000_000
    assert size <= after.written - before.written < size + 5_000_000
    reads = 2 if target == "hf" else 1  # the hash is a pass of its own
    assert reads * size <= after.read - before.read < reads * size + 5_000_000
    require_intact(state)


@pytest.mark.parametrize("target", TO)
@pytest.mark.parametrize("where", ["header", "middle", "end"])
def test_damage_is_found_before_the_output_is_published(tmp_path, target, where):
    step = make_step(tmp_path)
    shard = step / "model-00000.safetensors"
    content = bytearray(shard.read_bytes())
    if where == "header":
        at = content.index(b'"pt"') + 1
    else:
        at = len(content) // 2 if where == "middle" else -1
    content[at] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="its SHA-256") as caught:
        converted(step, tmp_path / target, TO[target])
    assert str(shard) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "another order"])
def test_parts_come_in_the_order_of_the_rows(tmp_path, monkeypatch, order):
    """Files in whose order the rows are, or are not: with blocks of three elements."""
    monkeypatch.setattr(in_place, "BLOCK", 12)
    whole = torch.arange(28.0).reshape(7, 4)
    rows = {0: whole[:3], 1: whole[3:]}
    hashes = {}
    parts = []
    for number, half in enumerate(order):
        path = tmp_path / f"{number}"
        path.write_bytes(b"head" + rows[half].numpy().tobytes() + b"tail")
        hashes[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        parts.append(Part(path, 4, (3 * half, 0), tuple(rows[half].shape)))
    stored = FullTensor(torch.float32, (7, 4), tuple(parts))
    halved = Outgoing(
        torch.bfloat16, (7, 4), lambda: (b.bfloat16() for b in stored.blocks()), stored, to_bfloat16
    )
    again = Outgoing(torch.float32, (7, 4), stored.blocks, stored)
    found: dict[str, list[Tensor]] = {"halved": [], "again": []}
    for name, block in blocks_of({"halved": halved, "again": again}, hashes):
        found[name].append(block.flatten().clone())
    assert torch.equal(torch.cat(found["halved"]), whole.flatten().bfloat16())
    assert torch.equal(torch.cat(found["again"]), whole.flatten())
    assert len(found["halved"]) == (4 + 6 if order == (0, 1) else 1)
    assert len(found["again"]) == 1


def to_bfloat16(elements: Tensor) -> Tensor:
    return elements.bfloat16()
