"""Which bytes of a checkpoint's tensors each process reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from messages import refused
from model_builder import EVEN, build_stages, make_file
from torch.distributed.tensor import DTensor

from titanlite.model.flavors import LlamaConfig
from titanlite.tokenizer.tokenizer import BUNDLED
from titanlite.tools.formats.convert import Options, convert
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.full_state import Part
from titanlite.tools.formats.load_weights import read_weights, tokenizer_of

MODEL = dataclasses.replace(EVEN, qkv_bias=True)
EXPERTS = dataclasses.replace(EVEN, num_experts=4, experts_per_token=2, expert_ffn_dim=24)


def bytes_read(
    folder: Path, model: LlamaConfig, layouts: list[dict[str, int]]
) -> list[tuple[int, int, int]]:
    """Bytes read of the folder's tensors, and of this process's parts, all and those that are read
    in whole rows because columns are cut, in each layout.
    """
    total = 0
    original = Part.read

    def counted(part: Part, *arguments: Any) -> torch.Tensor:
        nonlocal total
        block = original(part, *arguments)
        total += block.nbytes
        return block

    Part.read = counted  # type: ignore[method-assign]
    found = []
    for layout in layouts:
        state: dict[str, torch.Tensor] = {}
        for part in build_stages(layout, llama=model).model_parts:
            state |= part.to_empty(device="cpu").state_dict()
        total = 0
        read_weights(folder, state, model, b"")
        own = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in state.items()
        }
        by_columns = [
            own[name].nbytes for name in own if name.endswith((".wo.weight", ".w2.weight"))
        ]
        found.append((total, sum(value.nbytes for value in own.values()), sum(by_columns)))
    return found


def test_each_rank_reads_its_part_of_a_folder(pool, tmp_path):
    make_file(tmp_path / "a.pt", MODEL)
    convert(
        tmp_path / "a.pt", tmp_path / "hf", Options("hf", shard_size=20_000), log=lambda text: None
    )
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    layouts = [{"dp_shard": 2}, {"pp": 2}, {"tp": 2}]
    for found in pool.run(2, bytes_read, tmp_path / "hf", MODEL, layouts):
        for layout, (total, own, by_columns) in zip(layouts, found, strict=True):
            assert total == own + (by_columns if "tp" in layout else 0), layout


def test_each_rank_reads_its_experts_of_a_folder(pool, tmp_path):
    make_file(tmp_path / "a.pt", EXPERTS)
    convert(
        tmp_path / "a.pt", tmp_path / "hf", Options("hf", shard_size=20_000), log=lambda text: None
    )
    layouts = [{"dp_shard": 2}, {"dp_shard": 2, "ep": 2}, {"pp": 2}]
    for found in pool.run(2, bytes_read, tmp_path / "hf", EXPERTS, layouts):
        for layout, (total, own, _) in zip(layouts, found, strict=True):
            assert total == own, layout


def test_a_tokenizer_of_more_ids_than_the_model_is_refused(tmp_path):
    make_file(tmp_path / "x.pt", EVEN)
    full = open_full_state(tmp_path / "x.pt")
    with refused("has 4112 ids", f"the model {EVEN.vocab_size}"):
        tokenizer_of(full, str(BUNDLED))
