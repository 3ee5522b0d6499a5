"""Which bytes of a checkpoint's tensors each process reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from model_builder import EVEN, build_stages, make_file
from torch.distributed.tensor import DTensor

from titanlite.tools.formats.convert import convert
from titanlite.tools.formats.full_state import Part
from titanlite.tools.formats.load_weights import read_weights

MODEL = dataclasses.replace(EVEN, qkv_bias=True)


def bytes_read(folder: Path, parallel: dict[str, int]) -> tuple[int, int]:
    """Of the tensors in the folder, and of this process's parts of the model."""
    total = 0
    original = Part.read

    def counted(part: Part, *arguments: Any) -> torch.Tensor:
        nonlocal total
        block = original(part, *arguments)
        total += block.nbytes
        return block

    state: dict[str, torch.Tensor] = {}
    for part in build_stages(parallel, llama=MODEL).model_parts:
        state |= part.to_empty(device="cpu").state_dict()
    Part.read = counted  # type: ignore[method-assign]
    try:
        read_weights(folder, state, MODEL, b"")
    finally:
        Part.read = original  # type: ignore[method-assign]
    own = [value.to_local() if isinstance(value, DTensor) else value for value in state.values()]
    return total, sum(value.nbytes for value in own)


@pytest.mark.parametrize("axis", ["dp_shard", "pp", "tp"])
def test_each_rank_reads_its_part_of_a_folder(pool, tmp_path, axis):
    make_file(tmp_path / "a.pt", MODEL)
    convert(tmp_path / "a.pt", tmp_path / "hf", "hf", shard_size=20_000, log=lambda text: None)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    for total, own in pool.run(2, bytes_read, tmp_path / "hf", {axis: 2}):
        if axis == "tp":  # which cuts wo and w2 by columns: they are read in whole rows
            rows_of_all = 4 * MODEL.num_layers * MODEL.dim * (MODEL.q_dim + MODEL.ffn_dim)
            own += rows_of_all // 2
        assert total == own
