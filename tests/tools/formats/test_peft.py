"""Folders of PEFT's adapters from others; `tests/parallel/test_lora.py` compares their numbers."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from fuzz_samples import LLAMA, Reader, header_of, torch_file
from safetensors.torch import save_file

from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.peft import CONFIG, WEIGHTS, hf_names
from titanlite.tools.formats.selection import Selection

RANK = 2


def prepare(name: str, folder: Path) -> list[bytes]:
    """Writes a model and adapters of all its layers; returns a file of the adapters."""
    (folder / "x.pt").write_bytes(torch_file())
    (folder / "x").mkdir()
    shapes = open_full_state(folder / "x.pt").tensors
    factors = {}
    for ours, theirs in hf_names(LLAMA).items():
        weight = shapes.get(ours.replace(".lora_a", "").replace(".lora_b", ""))
        if weight is not None and len(weight.shape) == 2:
            rows, columns = weight.shape
            is_a = ".lora_a." in ours
            factors[theirs] = torch.ones((RANK, columns) if is_a else (rows, RANK))
    save_file(factors, folder / "x" / WEIGHTS)
    fields = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 4,
        "lora_dropout": 0.1,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "layers_to_transform": None,
        "use_rslora": False,
        "bias": "none",
    }
    (folder / "x" / CONFIG).write_text(json.dumps(fields))
    path = folder / "x" / name
    if name == CONFIG:
        return [path.read_bytes()]
    header = header_of(path)
    (folder / "data").write_bytes(path.read_bytes()[8 + len(header) :])
    return [header]


def read(name: str, folder: Path, data: bytes) -> None:
    """Adds the adapters to their model."""
    if name == WEIGHTS:
        data = len(data).to_bytes(8, "little") + data + (folder / "data").read_bytes()
    (folder / "x" / name).write_bytes(data)
    for tensor in open_full_state(
        folder / "x.pt", Selection(adapter=folder / "x")
    ).tensors.values():
        tensor.read().clone()


def test_the_sum_is_that_of_the_product(tmp_path):
    """Factors of ones: each weight gains alpha / r * r."""
    prepare(CONFIG, tmp_path)
    before = open_full_state(tmp_path / "x.pt")
    after = open_full_state(tmp_path / "x.pt", Selection(adapter=tmp_path / "x"))
    name = "layers.0.attention.wv.weight"
    torch.testing.assert_close(after[name], before[name] + 4 / RANK * RANK)


FUZZED = {
    "adapter_config.json": Reader(
        "text", functools.partial(prepare, CONFIG), functools.partial(read, CONFIG)
    ),
    "adapter header": Reader(
        "text", functools.partial(prepare, WEIGHTS), functools.partial(read, WEIGHTS)
    ),
}
