"""What others make of our exports, and we of theirs: Hugging Face's transformers is the judge."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from model_builder import EXPORTED as MODELS
from model_builder import make_file
from torch.nn.utils import parameters_to_vector

from titanlite.model.generate import generate
from titanlite.tokenizer.tokenizer import BUNDLED, Tokenizer
from titanlite.tools.formats.convert import Options, convert, load_full_state
from titanlite.tools.formats.load_weights import load_model

transformers = pytest.importorskip("transformers")
transformers.logging.disable_progress_bar()


def quiet(text: str) -> None:
    pass


@pytest.mark.parametrize("name", MODELS)
def test_transformers_gives_our_logits_and_our_text(tmp_path, name):
    config = MODELS[name]
    make_file(tmp_path / "model.pt", config)
    convert(tmp_path / "model.pt", tmp_path / "hf", Options("hf"), log=quiet)
    ours = load_model(load_full_state(tmp_path / "model.pt"), torch.device("cpu"), 512)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32
    ).eval()
    tokens = torch.randint(config.vocab_size, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        a, b = ours(tokens), theirs(tokens).logits
    assert (a - b).abs().max() <= 1e-5
    assert theirs.num_parameters() == config.num_parameters
    prompt = tokens[0, :5].tolist()
    mine = list(generate(ours, prompt, 64, stop=set(), temperature=0.0, top_k=0, seed=0))
    found = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    assert found[0, 5:].tolist() == mine
    assert len(mine) == 64


@pytest.mark.parametrize("name", MODELS)
def test_their_models_give_their_logits_here(tmp_path, name):
    config = MODELS[name]
    scaling = config.rope_scaling
    rope = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
        rope |= {"original_max_position_embeddings": scaling.original_context}
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            vocab_size=config.vocab_size,
            tie_word_embeddings=config.tied_embeddings,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            initializer_range=0.06,  # attention looks about, and rounding is not blown up
        )
    ).eval()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    full = convert(tmp_path / "hf", tmp_path / "ours", Options("titanlite"), log=quiet)
    assert full.model == config
    ours = load_model(full, torch.device("cpu"), 512)
    tokens = torch.randint(config.vocab_size, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        a, b = ours(tokens), theirs(tokens).logits
    assert (a - b).abs().max() <= 1e-5
    convert(tmp_path / "ours", tmp_path / "back", Options("hf"), log=quiet)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert torch.equal(
        parameters_to_vector(back.parameters()), parameters_to_vector(theirs.parameters())
    )


@pytest.mark.slow
def test_their_tokenizer_encodes_as_ours(tmp_path):
    make_file(tmp_path / "model.pt", MODELS["debug"])
    convert(tmp_path / "model.pt", tmp_path / "hf", Options("hf"), log=quiet)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), Tokenizer()
    texts = [
        path.read_text(errors="replace") for path in sorted(Path(os.__file__).parent.glob("*.py"))
    ]
    texts += [
        "héllo 漢字 😀 \r\n\t  x  ",
        " don't I'LL 12345 a1b2\n\n\n  ",
        "\u00a0\u2028 z",
        "aaaaaaaaaaaaaaaaaaaaaaa",
        "",
    ]
    assert sum(map(len, texts)) > 1_000_000
    for text in texts:
        assert theirs(text, add_special_tokens=False, verbose=False)["input_ids"] == ours.encode(
            text
        )
        assert theirs.decode(ours.encode(text)) == text
    assert theirs("def")["input_ids"] == [ours.bos, *ours.encode("def")]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos, ours.eos)
    assert load_full_state(tmp_path / "hf").about.tokenizer == BUNDLED.read_bytes()
