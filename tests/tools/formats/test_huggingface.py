"""Hugging Face's folders of Llamas and of mixtures: transformers makes of our exports what we make of
its own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from model_builder import EXPORTED as MODELS
from model_builder import make_file
from safetensors.torch import load_file, save_file
from torch.nn.utils import parameters_to_vector
from transformers_models import MIXTRAL, QWEN3_MOE, TOKENS, make

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.model.generate import generate
from titanlite.tokenizer.tokenizer import BUNDLED, Tokenizer
from titanlite.tools.formats.convert import Options, convert, load_full_state
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.full_state import Part
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


GATE = "model.layers.1.mlp.experts.{}.gate_proj.weight"


def saved(folder: Path, fields: dict[str, Any] = QWEN3_MOE, **options: Any) -> Any:
    """A model of transformers, which it has saved."""
    theirs = make(fields)
    theirs.save_pretrained(folder, **options)
    return theirs


@pytest.mark.parametrize("fields", [QWEN3_MOE, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_experts_in_one_tensor_are_those_in_many(tmp_path, fields):
    """As transformers 5 has them in memory, and saves them with save_original_format=False."""
    theirs = saved(tmp_path / "many", fields)
    theirs.save_pretrained(tmp_path / "one", save_original_format=False)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert torch.equal(again(TOKENS).logits, theirs(TOKENS).logits)
    many = open_full_state(tmp_path / "many")
    one = convert(tmp_path / "one", tmp_path / "ours", Options("titanlite"), log=quiet)
    assert len(load_file(tmp_path / "one/model.safetensors")) < len(one) + 3
    assert set(one) == set(many)
    for name in many:
        assert torch.equal(one[name], many[name]), name


@pytest.mark.parametrize("fields", [QWEN3_MOE, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_what_is_written_is_what_transformers_writes(tmp_path, fields):
    """The same names, shapes and numbers, of which no reader of a folder can be surprised."""
    saved(tmp_path / "theirs", fields)
    convert(tmp_path / "theirs", tmp_path / "ours", Options("titanlite"), log=quiet)
    convert(tmp_path / "ours", tmp_path / "back", Options("hf"), log=quiet)
    theirs = load_file(tmp_path / "theirs/model.safetensors")
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)
    written = transformers.AutoConfig.from_pretrained(tmp_path / "back").to_dict()
    read = transformers.AutoConfig.from_pretrained(tmp_path / "theirs").to_dict()
    differ = {name for name in read if written.get(name) != read[name]}
    # Which say nothing of the model
    assert differ <= {
        "_name_or_path",
        "head_dim",
        "bos_token_id",
        "eos_token_id",
    }


def test_one_expert_is_read_and_written_at_a_time(tmp_path, monkeypatch):
    saved(tmp_path / "hf")
    sizes: set[int] = set()
    original = Part.read

    def noted(part: Part, *arguments: Any) -> torch.Tensor:
        block = original(part, *arguments)
        sizes.add(block.nbytes)
        return block

    monkeypatch.setattr(Part, "read", noted)
    full = open_full_state(tmp_path / "hf")
    full.tensors["layers.1.feed_forward.experts.w1.weight"].read(2, 3)
    assert sizes == {4 * 24 * 48}


def change(folder: Path, edit: str) -> None:
    """Edits the tensors of a folder."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if edit == "missing":
        del tensors[GATE.format(2)]
    if edit == "one more":
        tensors[GATE.format(4)] = tensors[GATE.format(3)].clone()
    if edit == "other shape":
        tensors[GATE.format(3)] = tensors[GATE.format(3)][1:].clone()
    if edit == "other dtype":
        tensors[GATE.format(3)] = tensors[GATE.format(3)].bfloat16()
    if edit == "shared expert":
        tensors["model.layers.1.mlp.shared_expert.up_proj.weight"] = torch.zeros(24, 48)
    if edit == "twice":
        tensors["model.layers.1.mlp.experts.down_proj"] = torch.zeros(4, 48, 24)
    save_file(tensors, path)


DAMAGED = {
    "missing": ("has 3 of the 4 tensors", GATE.format(0), GATE.format(3)),
    "one more": (GATE.format(4), "is not a parameter of this model"),
    "other shape": (GATE.format(3), "(23, 48)", "(24, 48)", "expected the same"),
    "other dtype": (GATE.format(3), "torch.bfloat16", "expected the same"),
    "shared expert": ("mlp.shared_expert.up_proj.weight", "is not a parameter of this model"),
    "twice": ("'layers.1.feed_forward.experts.w2.weight' twice", "expected one of them"),
}


@pytest.mark.parametrize("edit", DAMAGED)
def test_experts_that_do_not_fit_are_one_sentence(tmp_path, edit):
    saved(tmp_path / "hf")
    change(tmp_path / "hf", edit)
    with refused("hf", *DAMAGED[edit]):
        convert(tmp_path / "hf", tmp_path / "ours", Options("titanlite"), log=quiet)
    assert not (tmp_path / "ours").exists()


def test_more_experts_per_token_than_experts_are_refused(tmp_path):
    saved(tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts_per_tok": 5}))
    with refused(
        "config.json", "experts_per_token = 5: expected 1 to", "= 4", error=CorruptCheckpoint
    ):
        open_full_state(tmp_path / "hf")
