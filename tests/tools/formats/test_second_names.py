"""The second reading of names: it finds a mistake that a reader and a writer share."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from messages import refused
from transformers_models import MIXTRAL, QWEN3_MOE, make

from titanlite.model.flavors import LlamaConfig
from titanlite.tools.formats import huggingface
from titanlite.tools.formats.convert import Options, convert
from titanlite.tools.formats.full_state import half_split
from titanlite.tools.formats.huggingface import names
from titanlite.tools.formats.second_names import FolderWeights

pytest.importorskip("transformers")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
}


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_each_name_is_read_as_the_first_reading_does(tmp_path, fields):
    make(fields).save_pretrained(tmp_path)
    full = huggingface.open_folder(tmp_path)
    second = FolderWeights(tmp_path)
    for name, first in full.items():
        if ".experts." in name:
            for number, matrix in enumerate(first):
                assert torch.equal(second.one(name, number), matrix.double()), name
            continue
        if huggingface.is_permuted(name):
            first = half_split(first, full.model.head_dim)
        assert torch.equal(second(name), first.double()), name


def exchanged(config: LlamaConfig) -> dict[str, list[str]]:
    """The names of Hugging Face with the last expert in the place of the first."""
    return {ours: theirs[::-1] for ours, theirs in names(config).items()}


def gate_for_up(config: LlamaConfig) -> dict[str, list[str]]:
    """The names of Hugging Face with w1 in the place of w3."""
    other = {".w1.": ".w3.", ".w3.": ".w1."}
    result = names(config)
    return {
        ours: result[re.sub(r"\.w[13]\.", lambda match: other[match[0]], ours)] for ours in result
    }


MISTAKES = [(exchanged, "qwen3_moe"), (gate_for_up, "mixtral"), (gate_for_up, "llama")]


@pytest.mark.parametrize(("mistake", "family"), MISTAKES)
@pytest.mark.parametrize("to", ["titanlite", "hf"])
def test_a_mistake_in_names_is_found_by_a_conversion(tmp_path, monkeypatch, mistake, family, to):
    """The bits of such a round trip are right."""
    make(MODELS[family]).save_pretrained(tmp_path / "hf")
    monkeypatch.setattr(huggingface, "names", mistake)
    with refused("logits are", "apart from the source's"):
        convert(tmp_path / "hf", tmp_path / "there", Options(to), log=lambda text: None)
