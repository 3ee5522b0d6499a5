"""Models of other families than Llama: transformers is the judge of both directions."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from messages import refused
from model_builder import SMALL
from torch.nn.utils import parameters_to_vector
from transformers_models import TOKENS, make

from titanlite.model.attention import document_mask
from titanlite.model.flavors import RopeScaling, family_of
from titanlite.model.generate import generate
from titanlite.tools.formats import check_export, huggingface_config
from titanlite.tools.formats.convert import Options, convert
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.huggingface_config import to_config
from titanlite.tools.formats.load_weights import load_model

transformers = pytest.importorskip("transformers")
transformers.logging.disable_progress_bar()

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 8.0}
SLIDING = "sliding_attention"
WHOLE = "full_attention"
# config.json's fields beside those of `make`: odd shapes, and what each family adds
MODELS: dict[str, dict[str, Any]] = {
    "llama, wide heads": {"model_type": "llama", "head_dim": 24},
    "llama, linear": {"model_type": "llama", "rope_parameters": LINEAR},
    "llama, yarn": {"model_type": "llama", "rope_parameters": YARN, "hidden_size": 96},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral, wide heads": {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
    "mistral, one head for keys": {
        "model_type": "mistral",
        "sliding_window": None,
        "num_key_value_heads": 1,
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, yarn": {
        "model_type": "qwen2",
        "rope_parameters": {**YARN, "attention_factor": 1.2, "beta_fast": 16.0},
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen2, a window that is not used": {"model_type": "qwen2", "sliding_window": 16},
    "qwen3, tied and wide heads": {
        "model_type": "qwen3",
        "head_dim": 40,
        "tie_word_embeddings": True,
    },
    "qwen3, yarn": {"model_type": "qwen3", "head_dim": 16, "rope_parameters": YARN},
    "mistral, window": {"model_type": "mistral", "sliding_window": 7},
    "mistral, window of two": {"model_type": "mistral", "sliding_window": 2, "head_dim": 32},
    "ministral, window in two layers": {
        "model_type": "ministral",
        "head_dim": 8,
        "sliding_window": 7,
        "layer_types": [SLIDING, WHOLE, SLIDING],
    },
    "qwen2, window from a layer on": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen2, window that no layer has": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
    },
    "qwen3, window in one layer": {
        "model_type": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": [WHOLE, SLIDING, WHOLE],
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "qwen3_moe, tied, yarn, window": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "rope_parameters": YARN,
        "use_sliding_window": True,
        "sliding_window": 9,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "mixtral, one expert per token": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    },
    "mixtral, wide heads and window": {
        "model_type": "mixtral",
        "num_local_experts": 6,
        "num_experts_per_tok": 4,
        "head_dim": 24,
        "sliding_window": 7,
    },
}
WINDOWS = {  # (sliding_window, window_layers) of ours
    "mistral, window": (7, "all"),
    "mistral, window of two": (2, "all"),
    "ministral, window in two layers": (7, "0, 2"),
    "qwen2, window from a layer on": (9, "1-2"),
    "qwen3, window in one layer": (9, "1"),
    "qwen3_moe, tied, yarn, window": (9, "all"),
    "mixtral, wide heads and window": (7, "all"),
}


# One of each family without `slow`
QUICK = (
    *("llama, yarn", "mistral, window", "qwen2", "qwen3, tied and wide heads"),
    *("qwen3_moe", "mixtral, one expert per token"),
)
NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", NAMES)
def test_logits_text_and_weights_are_theirs(tmp_path, name):
    theirs = make(MODELS[name])
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    full = convert(tmp_path / "hf", tmp_path / "ours", Options("titanlite"), log=lambda text: None)
    ours = load_model(full, torch.device("cpu"), 128)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        difference = (ours(TOKENS) - expected).abs().max()
    assert difference <= 1e-5
    assert ours.config.num_parameters == theirs.num_parameters()
    window = (ours.config.sliding_window, ours.config.window_layers)
    assert window == WINDOWS.get(name, (0, "all"))

    prompt = TOKENS[0, :5].tolist()
    text = list(generate(ours, prompt, 64, stop=set(), temperature=0.0, top_k=0, seed=0))
    expected_text = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    assert text == expected_text[0, 5:].tolist()

    convert(tmp_path / "ours", tmp_path / "back", Options("hf"), log=lambda text: None)
    back, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    assert torch.equal(
        parameters_to_vector(back.parameters()), parameters_to_vector(theirs.parameters())
    )
    with torch.no_grad():
        assert torch.equal(back.eval()(TOKENS).logits, expected)


@pytest.mark.parametrize("name", ["mistral, window", "qwen2, window from a layer on"])
def test_one_position_more_is_seen(tmp_path, name):
    """So the test above shows that a window ends where theirs does."""
    theirs = make(MODELS[name])
    theirs.save_pretrained(tmp_path / "hf")
    ours = load_model(open_full_state(tmp_path / "hf"), torch.device("cpu"), 128)
    for change in (-1, 1):
        config = dataclasses.replace(
            ours.config, sliding_window=ours.config.sliding_window + change
        )
        ours.windows = config.windows(128)
        with torch.no_grad():
            assert (ours(TOKENS) - theirs(TOKENS).logits).abs().max() > 1e-2


SCALINGS = {
    "none": None,
    "llama3": RopeScaling(8.0, 1.0, 4.0, 32),
    "linear": RopeScaling(4.0, kind="linear"),
    "yarn": RopeScaling(4.0, original_context=64, kind="yarn"),
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_old_and_new_keys_of_rope_say_the_same(scaling):
    """mlx-lm 0.32 and transformers 4 read rope_theta and rope_scaling, transformers 5 either."""
    config = dataclasses.replace(SMALL, rope_theta=12345.0, rope_scaling=scaling)
    fields = to_config(config, 256, "float32")
    old = {name: value for name, value in fields.items() if name != "rope_parameters"}
    new = {name: fields[name] for name in old if name not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = fields["rope_parameters"]
    tables = []
    for version in (fields, old, new):
        read = transformers.LlamaConfig(**version)
        assert read.rope_parameters["rope_theta"] == 12345.0
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(read)
        tables.append(torch.cat([rotary.inv_freq, torch.tensor([rotary.attention_scaling])]))
    assert torch.equal(tables[0], tables[1])
    assert torch.equal(tables[0], tables[2])
    assert fields["rope_theta"] == 12345.0
    kind = scaling.kind if scaling else None
    assert (fields["rope_scaling"] or {}).get("rope_type") == kind


def test_older_files_say_the_first_layer_with_the_window(tmp_path):
    """Those of transformers 4 have no layer_types."""
    make(MODELS["qwen2, window from a layer on"]).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    fields = json.loads(path.read_text())
    del fields["layer_types"]
    path.write_text(json.dumps(fields))
    model = open_full_state(tmp_path / "hf").model
    assert (model.sliding_window, model.window_layers) == (9, "1-2")
    written = to_config(model, 128, "float32")
    assert written["max_window_layers"] == 1
    assert written["layer_types"] == [WHOLE, SLIDING, SLIDING]


def test_a_conversion_compares_the_window(tmp_path, monkeypatch):
    """Its number, and by a second implementation what it does."""
    make(MODELS["mistral, window"]).save_pretrained(tmp_path / "hf")
    with monkeypatch.context() as patched:
        patched.setattr(
            huggingface_config, "_to_window", lambda config, family: {"sliding_window": 8}
        )
        with refused("sliding_window is 8; expected 7"):
            convert(tmp_path / "hf", tmp_path / "a", Options("hf"), log=lambda text: None)

    def too_wide(documents, window):
        return document_mask(documents, window=window + 1)

    monkeypatch.setattr(check_export, "document_mask", too_wide)
    with refused("logits are", "apart from the source's"):
        convert(tmp_path / "hf", tmp_path / "b", Options("hf"), log=lambda text: None)


def test_a_model_that_transformers_does_not_have_is_refused(tmp_path):
    theirs = make(MODELS["qwen2"])
    theirs.save_pretrained(tmp_path / "hf")
    full = convert(tmp_path / "hf", tmp_path / "ours", Options("titanlite"), log=lambda text: None)
    model = dataclasses.replace(full.model, explicit_head_dim=10)
    with refused("model.qkv_bias with model.head_dim"):
        family_of(model)
