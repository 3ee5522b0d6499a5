"""config.json: which model it describes, and which it refuses. transformers is the judge."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from pathlib import Path

import pytest
import torch
from messages import refused
from transformers_models import TOKENS, make

from titanlite.model.flavors import FLAVORS
from titanlite.tools.formats import huggingface_config
from titanlite.tools.formats.convert import Options, convert
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.huggingface_config import (
    CLASSES,
    UNCHANGED,
    from_config,
    to_config,
)
from titanlite.tools.formats.load_weights import load_model
from titanlite.tools.formats.second_config import described_by_fields
from titanlite.tools.formats.second_llama import described

transformers = pytest.importorskip("transformers")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
# In a file of a dense family they have no effect
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
# Fields from which `from_config` makes a `LlamaConfig`
UNDERSTOOD = {
    *huggingface_config._Fields.__annotations__,
    *huggingface_config._MixtureFields.__annotations__,
    *("attention_bias", "hidden_act", "max_position_embeddings", "mlp_bias", "model_type"),
    *("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"),
    *("original_max_position_embeddings", "partial_rotary_factor", "sliding_window"),
}
# Fields that transformers reads and that change no logit of a causal model, with such a value
WITHOUT_EFFECT = {
    "architectures": ["LlamaForSequenceClassification"],
    "attention_dropout": 0.5,
    "attn_implementation": "sdpa",
    "bos_token_id": None,
    "chain_hidden_post_norm": True,
    "chunk_size_feed_forward": 3,
    "classifier_dropout": 0.5,
    "distributed_config": None,
    "dtype": "float32",
    "embed_dim": 96,  # head_dim x num_heads
    "eos_token_id": [3, 4],
    "experts_implementation": None,
    "first_k_dense_replace": 1,
    "gradient_checkpointing": True,
    "hidden_dropout": 0.5,
    "id2label": {"0": "a"},
    "init_std": 3.0,
    "initializer_factor": 3.0,
    "initializer_range": 0.5,
    "label2id": {"a": 0},
    "logits_mup_width_multiplier": 2.0,
    "mlp_layer_types": ["sparse"] * 3,
    "mtp_hidden_states_first": True,
    "mtp_layer_types": None,
    "mtp_mlp_layer_types": None,
    "mtp_per_layer_config": None,
    "num_heads": 6,
    "num_labels": 1,
    "num_mtp_layers": 1,
    "number_of_conv_states": 2,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": True,
    "pad_token_id": 2,
    "pretraining_tp": 4,
    "problem_type": "regression",
    "return_dict": True,
    "router_aux_loss_coef": 3.0,
    "router_jitter_noise": 0.5,
    "sep_token_id": 5,
    "token_classification_bias": False,
    "torch_dtype": "float16",
    "transformers_version": "1.2",
    "unpadded_vocab_size": 3,
    "use_cache": False,
}
# Arguments of `from_pretrained`, which are no fields of the file
ARGUMENTS = {
    *("base_model_pp_plan", "base_model_tp_plan", "cache_dir", "commit_message", "force_download"),
    *("gguf_file", "local_files_only", "name_or_path", "proxies", "repo_id", "revision"),
    *("return_unused_kwargs", "subfolder", "token", "trust_remote_code"),
}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_configuration_of_hugging_face_tells_the_model(flavor, tmp_path):
    config = dataclasses.replace(FLAVORS[flavor], vocab_size=128256)
    fields = to_config(config, 100, "float32")
    assert from_config(tmp_path, fields) == config


def names_read(path: Path) -> set[str]:
    """The fields of a configuration that a file of transformers reads."""
    is_of_configs = path.name.startswith("configuration_") or path.name == "modeling_rope_utils.py"
    configs = {"config", "layer_config", "effective_config", "text_config", "self.config"}
    if is_of_configs:
        configs |= {"self", "kwargs"}
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in configs - {
            "self",
            "kwargs",
        }:
            names.add(node.attr)
        if isinstance(node, ast.Call):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            called = ast.unparse(node.func)
            of_config = [called.rpartition(".")[0]] + [ast.unparse(a) for a in node.args[:1]]
            if configs & set(of_config) and called.split(".")[-1] in (
                *("getattr", "hasattr", "get", "pop", "setdefault"),
            ):
                names |= {text for text in texts[:1] if isinstance(text, str)}
    return names


@pytest.mark.parametrize("family", CLASSES)
def test_each_field_that_transformers_reads_is_known(family):
    """Read from its sources: a field of a new version of transformers fails here."""
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    root = Path(transformers.__file__).parent
    files = [
        *("configuration_utils", "modeling_rope_utils", "masking_utils", "cache_utils"),
        *("modeling_layers", "modeling_utils"),
        f"models/{family}/configuration_{family}",
        f"models/{family}/modeling_{family}",
    ]
    read = {field.name for field in dataclasses.fields(config_class)}
    for file in files:
        read |= names_read(root / f"{file}.py")
    of_class = {
        name
        for name in dir(config_class)
        if isinstance(inspect.getattr_static(config_class, name), property)
        or callable(getattr(config_class, name, None))
    }
    private = {name for name in read if name.startswith("_")}
    known = UNDERSTOOD | UNCHANGED.keys() | WITHOUT_EFFECT.keys() | ARGUMENTS
    assert {"rope_parameters", "rope_scaling", "is_causal", "kv_sharing_modes"} <= read
    assert sorted(read - of_class - private - known) == []


@pytest.mark.parametrize("family", CLASSES)
def test_fields_without_effect_are_read_as_transformers_reads_them(tmp_path, family):
    window = 200 if family == "ministral" else None  # which transformers cannot run without one
    theirs = make({"model_type": family, "sliding_window": window, "head_dim": 16, **EXPERTS})
    theirs.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | WITHOUT_EFFECT))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ours = load_model(open_full_state(tmp_path / "hf"), torch.device("cpu"), 128)
    with torch.no_grad():
        expected = again.eval()(TOKENS).logits
        assert torch.equal(expected, theirs(TOKENS).logits)
        assert (ours(TOKENS) - expected).abs().max() <= 1e-5


def edited(folder: Path, fields: dict, family: str = "llama") -> None:
    make({"model_type": family, **EXPERTS}).save_pretrained(folder)
    path = folder / "config.json"
    stored = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: v for name, v in stored.items() if v != "absent"}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_chunk_size", 4),
        ("fusion_config", {"a": 1}),
        ("is_causal", False),
        ("is_causal", None),
        ("is_encoder_decoder", True),
        ("kv_sharing_modes", ["reuse"] * 3),
        ("partial_rotary_factor", 0.5),
        ("per_layer_config", {"0": {"head_dim": 4}}),
        ("quantization_config", {"quant_method": "fp8"}),
        ("transformers_weights", "other.safetensors"),
    ],
)
def test_a_field_that_changes_the_model_is_refused_by_name(tmp_path, name, value):
    edited(tmp_path, {name: value})
    with refused("config.json", f"{name} = ", "allowed: "):
        open_full_state(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm_topk_prob", False),
        ("norm_topk_prob", "absent"),
        ("decoder_sparse_step", 2),
        ("mlp_only_layers", [1]),
        ("attention_bias", True),
        ("num_experts", 6),  # beside num_local_experts = 4
    ],
)
def test_a_field_that_makes_another_mixture_is_refused_by_name(tmp_path, name, value):
    edited(tmp_path, {name: value}, "qwen3_moe")
    shown = "num_local_experts = 4; allowed: 6" if name == "num_experts" else f"{name} = "
    with refused("config.json", shown, "allowed: "):
        open_full_state(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_absent_fields_of_a_mixture_have_the_defaults_of_its_class(tmp_path, family):
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    theirs = transformers.AutoConfig.for_model(family)
    fields = {name: getattr(theirs, name) for name in (*needed, "vocab_size")}
    fields |= {"model_type": family, "norm_topk_prob": True}
    ours = from_config(tmp_path, fields)
    assert ours.num_experts == theirs.num_experts
    assert ours.experts_per_token == theirs.num_experts_per_tok
    widths = {"qwen3_moe": "moe_intermediate_size", "mixtral": "intermediate_size"}
    assert ours.expert_ffn_dim == getattr(theirs, widths[family])
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.sliding_window == (theirs.sliding_window or 0)
    second = described_by_fields(fields)
    first = described(ours)
    assert second._replace(frequencies=()) == first._replace(frequencies=())
    assert second.frequencies == pytest.approx(first.frequencies)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", None, ["llama"]])
def test_other_families_are_refused(tmp_path, family):
    with refused(f"model_type = {family!r}; allowed: 'llama', 'mistral'"):
        from_config(tmp_path, {"model_type": family})


TWO_PLACES = {
    "the trained length beside the entry, as Phi-3": {
        "rope_parameters": YARN,
        "original_max_position_embeddings": 16,
    },
    "the trained length in both places": {
        "rope_parameters": YARN | {"original_max_position_embeddings": 64},
        "original_max_position_embeddings": 16,
    },
    "of llama3": {
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64},
        "original_max_position_embeddings": 16,
    },
    "no trained length": {"rope_parameters": LLAMA3, "max_position_embeddings": 32},
    "no length at all": {"rope_parameters": YARN, "max_position_embeddings": "absent"},
    "older names": {"rope_parameters": "absent", "rope_scaling": LLAMA3, "rope_theta": 300.0},
    "theta in both places": {"rope_parameters": {"rope_theta": 300.0}, "rope_theta": 9.0},
    "kind in both places": {"rope_parameters": {"rope_type": "default", "type": "yarn"}},
    "the same under both names": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
        "rope_scaling": {"type": "linear", "factor": 2},
        "rope_theta": 300,
    },
}


@pytest.mark.parametrize("fields", TWO_PLACES.values(), ids=TWO_PLACES)
def test_a_value_in_either_of_two_places_is_read_as_transformers_reads_it(tmp_path, fields):
    edited(tmp_path / "hf", fields)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32
    ).eval()
    ours = load_model(open_full_state(tmp_path / "hf"), torch.device("cpu"), 128)
    with torch.no_grad():
        assert (ours(TOKENS) - theirs(TOKENS).logits).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "fields",
    [
        {  # as tools of the change-over leave it: theta in one, and no theta in the other
            "rope_parameters": {"rope_theta": 300.0, "rope_type": "default"},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        {
            "rope_parameters": {"rope_theta": 300.0, "rope_type": "default"},
            "rope_scaling": {"type": "default"},
        },
        {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3 | {"factor": 32.0}},
    ],
)
def test_two_names_that_differ_are_refused(tmp_path, fields):
    edited(tmp_path, fields)
    with refused("config.json", "rope_scaling and rope_parameters differ", "expected one of them"):
        open_full_state(tmp_path)


def test_a_field_that_our_reader_drops_is_found_by_the_conversion(tmp_path, monkeypatch):
    edited(tmp_path / "hf", TWO_PLACES["the trained length in both places"])
    convert(tmp_path / "hf", tmp_path / "right", Options("titanlite"), log=lambda text: None)
    monkeypatch.setattr(huggingface_config, "SCALED_FROM", "trained_length_of_another_program")
    for to in ("titanlite", "hf"):
        with refused("by a second reading frequencies is"):
            convert(tmp_path / "hf", tmp_path / f"to_{to}", Options(to), log=lambda text: None)
