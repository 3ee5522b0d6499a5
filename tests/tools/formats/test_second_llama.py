"""The second Llama: its logits are those of the model, and other ones for another order of rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from model_builder import SMALL, make_file

from titanlite.model.flavors import RopeScaling
from titanlite.tools.formats.check_export import TOLERANCE, logits_difference
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.full_state import FullTensor, half_split
from titanlite.tools.formats.huggingface import is_permuted
from titanlite.tools.formats.second_llama import Weights, described, second_logits

MODELS = {
    "plain": SMALL,
    "tied": dataclasses.replace(SMALL, tied_embeddings=True, num_kv_heads=1),
    "biases": dataclasses.replace(SMALL, qkv_bias=True),
    "norms": dataclasses.replace(SMALL, qk_norm=True, explicit_head_dim=16),
    "window": dataclasses.replace(SMALL, sliding_window=5),
    "llama3": dataclasses.replace(SMALL, rope_scaling=RopeScaling(8.0, original_context=64)),
    "linear": dataclasses.replace(SMALL, rope_scaling=RopeScaling(4.0, kind="linear")),
    "yarn": dataclasses.replace(
        SMALL, rope_scaling=RopeScaling(4.0, original_context=32, kind="yarn")
    ),
}


def unrounded(tensor: FullTensor, rows: torch.Tensor) -> torch.Tensor:
    return rows


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_its_logits_are_the_model_s(tmp_path, config):
    make_file(tmp_path / "a.pt", config)
    full = open_full_state(tmp_path / "a.pt")
    difference, largest = logits_difference(full, full, unrounded, half_split=False)
    assert difference <= TOLERANCE * largest
    # The same rows, understood as Hugging Face's
    difference, largest = logits_difference(full, full, unrounded, half_split=True)
    assert difference > 100 * TOLERANCE * largest


def test_rows_in_hugging_face_s_order_give_the_same_logits(tmp_path):
    make_file(tmp_path / "a.pt", SMALL)
    full = open_full_state(tmp_path / "a.pt")
    permuted = {
        name: half_split(weight, SMALL.head_dim) if is_permuted(name) else weight
        for name, weight in full.items()
    }
    torch.save(permuted, tmp_path / "b.pt")
    theirs = open_full_state(tmp_path / "b.pt")
    tokens = torch.arange(9)
    expected = second_logits(described(SMALL), Weights(full.tensors), tokens, half_split=False)
    actual = second_logits(described(SMALL), Weights(theirs.tensors), tokens, half_split=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
