"""Which bytes of a checkpoint's tensors each process reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from messages import refused
from model_builder import EVEN, build_stages, make_file
from torch.distributed.tensor import DTensor

from titanlite.tokenizer.tokenizer import BUNDLED
from titanlite.tools.formats.convert import Options, convert
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.full_state import Part
from titanlite.tools.formats.load_weights import read_weights, tokenizer_of

MODEL = dataclasses.replace(EVEN, qkv_bias=True)


def bytes_read(folder: Path) -> dict[str, tuple[int, int]]:
    """Bytes read of the folder's tensors, and bytes of this process's parts, in three layouts."""
    total = 0
    original = Part.read

    def counted(part: Part, *arguments: Any) -> torch.Tensor:
        nonlocal total
        block = original(part, *arguments)
        total += block.nbytes
        return block

    Part.read = counted  # type: ignore[method-assign]
    found = {}
    for axis in ("dp_shard", "pp", "tp"):
        state: dict[str, torch.Tensor] = {}
        for part in build_stages({axis: 2}, llama=MODEL).model_parts:
            state |= part.to_empty(device="cpu").state_dict()
        total = 0
        read_weights(folder, state, MODEL, b"")
        own = [
            value.to_local() if isinstance(value, DTensor) else value for value in state.values()
        ]
        found[axis] = total, sum(value.nbytes for value in own)
    return found


def test_each_rank_reads_its_part_of_a_folder(pool, tmp_path):
    make_file(tmp_path / "a.pt", MODEL)
    convert(
        tmp_path / "a.pt", tmp_path / "hf", Options("hf", shard_size=20_000), log=lambda text: None
    )
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    # Which tp cuts by columns: they are read in whole rows
    of_columns = 4 * MODEL.num_layers * MODEL.dim * (MODEL.q_dim + MODEL.ffn_dim)
    for found in pool.run(2, bytes_read, tmp_path / "hf"):
        for axis, (total, own) in found.items():
            assert total == own + (of_columns // 2 if axis == "tp" else 0), axis


def test_a_tokenizer_of_more_ids_than_the_model_is_refused(tmp_path):
    make_file(tmp_path / "x.pt", EVEN)
    full = open_full_state(tmp_path / "x.pt")
    with refused("has 4112 ids", f"the model {EVEN.vocab_size}"):
        tokenizer_of(full, str(BUNDLED))
