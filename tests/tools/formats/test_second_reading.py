"""The second readings of config.json and of names, which find a mistake that a reader and a writer
share; transformers is the judge.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from messages import refused
from transformers_models import MIXTRAL, QWEN3_MOE, TOKENS, make

from titanlite.model.flavors import LlamaConfig
from titanlite.tools.formats import huggingface
from titanlite.tools.formats.convert import Options, convert
from titanlite.tools.formats.full_state import half_split
from titanlite.tools.formats.huggingface import names
from titanlite.tools.formats.second_config import described_by_fields
from titanlite.tools.formats.second_names import FolderWeights

pytest.importorskip("transformers")

ROPES = {
    "plain": {},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn by lengths": {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 32,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
    },
    "yarn of a factor below 1": {"rope_type": "yarn", "factor": 0.5, "attention_factor": None},
    "yarn with its own amplitude": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_frequencies_and_amplitude_are_those_of_transformers(rope):
    theirs = make({"model_type": "llama", "rope_parameters": rope, "head_dim": 24})
    fields = theirs.config.to_dict()
    # As the file may have it: what transformers has added is left out
    fields["rope_parameters"] = {"rope_theta": 20000.0, **rope}
    found = described_by_fields(fields)
    rotary = theirs.model.rotary_emb
    expected = rotary.inv_freq.double()
    torch.testing.assert_close(
        torch.tensor(found.frequencies, dtype=torch.float64), expected, rtol=1e-5, atol=0
    )
    assert found.amplitude == pytest.approx(rotary.attention_scaling, rel=1e-6)


FAMILIES = {
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "ministral": {
        "model_type": "ministral",
        "sliding_window": 7,
        "head_dim": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "qwen2": {
        "model_type": "qwen2",
        "sliding_window": 9,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "qwen2, not used": {"model_type": "qwen2", "sliding_window": 9},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "sliding_window": 9,
        "use_sliding_window": True,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "mixtral": {"model_type": "mixtral", "sliding_window": 7, "num_local_experts": 4},
}


@pytest.mark.parametrize("fields", FAMILIES.values(), ids=FAMILIES)
def test_windows_and_shapes_are_those_of_transformers(fields):
    theirs = make(fields)
    written = theirs.config.to_dict()
    for name in ("layer_types", "head_dim"):  # a file of transformers 4, or by hand, may lack them
        if name not in fields:
            written.pop(name, None)
    found = described_by_fields(written)
    attention = theirs.model.layers[0].self_attn
    assert found.head_width == attention.head_dim
    assert found.num_kv_heads * attention.num_key_value_groups == found.num_heads == 6
    assert found.qkv_bias == (attention.q_proj.bias is not None)
    assert found.qk_norm == hasattr(attention, "q_norm")
    router = getattr(theirs.model.layers[0].mlp, "gate", None)
    assert found.experts_per_token == getattr(router, "top_k", 0)
    assert found.tied == (theirs.lm_head.weight is theirs.model.embed_tokens.weight)
    for layer, window in enumerate(found.windows):
        of_layer = getattr(theirs.model.layers[layer].self_attn, "sliding_window", None)
        if fields["model_type"] in (
            "mistral",
            "mixtral",
        ):  # its attention asks the configuration each time
            of_layer = theirs.config.sliding_window
        assert window == (of_layer or 0)
    assert theirs(TOKENS[:1, :4]).logits.shape[-1] == written["vocab_size"]


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
