"""Models of other families than Llama: transformers is the judge of both directions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from messages import refused
from torch.nn.utils import parameters_to_vector
from transformers_models import TOKENS, make

from titanlite.model.generate import generate
from titanlite.tools.formats.convert import convert
from titanlite.tools.formats.huggingface import family_of
from titanlite.tools.formats.load_weights import load_model

transformers = pytest.importorskip("transformers")
transformers.logging.disable_progress_bar()

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 8.0}
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
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_text_and_weights_are_theirs(tmp_path, name):
    theirs = make(MODELS[name])
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    full = convert(tmp_path / "hf", tmp_path / "ours", "titanlite", log=lambda text: None)
    ours = load_model(full, torch.device("cpu"), 128)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        difference = (ours(TOKENS) - expected).abs().max()
    assert difference <= 1e-5
    assert ours.config.num_parameters == theirs.num_parameters()

    prompt = TOKENS[0, :5].tolist()
    text = list(generate(ours, prompt, 64, stop=-1, temperature=0.0, top_k=0, seed=0))
    expected_text = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    assert text == expected_text[0, 5:].tolist()

    convert(tmp_path / "ours", tmp_path / "back", "hf", log=lambda text: None)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert torch.equal(
        parameters_to_vector(back.parameters()), parameters_to_vector(theirs.parameters())
    )
    with torch.no_grad():
        assert torch.equal(back.eval()(TOKENS).logits, expected)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, ("sliding_window = 64",)),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32},
            ("sliding_window = 32",),
        ),
        ({"model_type": "qwen3", "attention_bias": True}, ("attention_bias = True",)),
        ({"model_type": "llama", "attention_bias": True}, ("attention_bias = True",)),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            ("rope_type = 'dynamic'", "'llama3', 'linear', 'yarn'"),
        ),
        ({"model_type": "qwen3_moe"}, ("model_type = 'qwen3_moe'", "'llama'", "'qwen3'")),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, fields, parts):
    theirs = make({"model_type": "llama"})
    theirs.save_pretrained(tmp_path / "hf")
    config = transformers.AutoConfig.for_model(**{**theirs.config.to_dict(), **fields})
    config.save_pretrained(tmp_path / "hf")
    with refused("config.json", *parts):
        convert(tmp_path / "hf", tmp_path / "ours", "titanlite", log=lambda text: None)


def test_a_model_that_transformers_does_not_have_is_refused(tmp_path):
    theirs = make(MODELS["qwen2"])
    theirs.save_pretrained(tmp_path / "hf")
    full = convert(tmp_path / "hf", tmp_path / "ours", "titanlite", log=lambda text: None)
    model = dataclasses.replace(full.model, explicit_head_dim=10)
    with refused("model.qkv_bias with model.head_dim"):
        family_of(model)
