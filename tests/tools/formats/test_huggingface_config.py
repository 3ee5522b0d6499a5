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


def edited(folder: Path, fields: dict) -> None:
    """A Llama of transformers with other fields in its config.json."""
    make({"model_type": "llama", **EXPERTS}).save_pretrained(folder)
    path = folder / "config.json"
    stored = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: v for name, v in stored.items() if v != "absent"}))


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


DEFAULT_ROPE = {"rope_theta": 300.0, "rope_type": "default"}
FAMILIES = "allowed: 'llama', 'mistral'"
EITHER = ("rope_scaling and rope_parameters differ", "expected one of them")
SLIDING = "sliding_attention"
WHOLE = "full_attention"
MIXTURE = {"model_type": "qwen3_moe"}
DAMAGED = "not the configuration of a Llama ("

# name -> (fields of a Llama's config.json that are changed, words of the message)
REFUSED = {
    "attention in chunks": ({"attention_chunk_size": 4}, ("attention_chunk_size = ", "allowed: ")),
    "a fusion": ({"fusion_config": {"a": 1}}, ("fusion_config = ", "allowed: ")),
    "not causal": ({"is_causal": False}, ("is_causal = ", "allowed: ")),
    "causal or not": ({"is_causal": None}, ("is_causal = ", "allowed: ")),
    "an encoder": ({"is_encoder_decoder": True}, ("is_encoder_decoder = ", "allowed: ")),
    "shared keys": ({"kv_sharing_modes": ["reuse"] * 3}, ("kv_sharing_modes = ", "allowed: ")),
    "part of a head turns": (
        {"partial_rotary_factor": 0.5},
        ("partial_rotary_factor = ", "allowed: "),
    ),
    "layers that differ": (
        {"per_layer_config": {"0": {"head_dim": 4}}},
        ("per_layer_config = ", "allowed: "),
    ),
    "quantized": (
        {"quantization_config": {"quant_method": "fp8"}},
        ("quantization_config = ", "allowed: "),
    ),
    "weights elsewhere": (
        {"transformers_weights": "other.safetensors"},
        ("transformers_weights = ", "allowed: "),
    ),
    "biases": ({"attention_bias": True}, ("attention_bias = True", "allowed: ")),
    "Qwen3's biases": (
        {"model_type": "qwen3", "attention_bias": True},
        ("attention_bias = True", "allowed: "),
    ),
    "a mixture's biases": (
        {**MIXTURE, "attention_bias": True},
        ("attention_bias = True", "allowed: "),
    ),
    "weights of experts that do not add up to 1": (
        {**MIXTURE, "norm_topk_prob": False},
        ("norm_topk_prob = False", "allowed: True"),
    ),
    "weights of experts that the class does not add up": (
        {**MIXTURE, "norm_topk_prob": "absent"},
        ("norm_topk_prob = ", "allowed: "),
    ),
    "experts in each second layer": (
        {**MIXTURE, "decoder_sparse_step": 2},
        ("decoder_sparse_step = ", "allowed: "),
    ),
    "a layer without experts": (
        {**MIXTURE, "mlp_only_layers": [1]},
        ("mlp_only_layers = ", "allowed: "),
    ),
    "two numbers of experts": (
        {**MIXTURE, "num_experts": 6, "num_local_experts": 4},
        ("num_local_experts = 4; allowed: 6",),
    ),
    "a family without a reader": (
        {"model_type": "deepseek_v3"},
        ("model_type = 'deepseek_v3'", FAMILIES),
    ),
    "a mixture without a reader": (
        {"model_type": "qwen2_moe"},
        ("model_type = 'qwen2_moe'", FAMILIES),
    ),
    "no family": ({"model_type": None}, ("model_type = None", FAMILIES)),
    "a list of families": ({"model_type": ["llama"]}, ("model_type = ['llama']", FAMILIES)),
    "a window of Llama's": ({"sliding_window": 64}, ("sliding_window = 64", "None")),
    "an empty window": (
        {"model_type": "mistral", "sliding_window": 0},
        ("sliding_window = 0", "None"),
    ),
    "a window that is text": (
        {"model_type": "mistral", "sliding_window": "x"},
        ("sliding_window = 'x'",),
    ),
    "a layer without the window": (
        {"model_type": "mistral", "layer_types": [SLIDING, WHOLE, SLIDING]},
        ("layer_types = 'full_attention'", "allowed: 'sliding_attention'"),
    ),
    "a layer with a window that is not used": (
        {"model_type": "qwen2", "layer_types": [WHOLE, SLIDING, WHOLE]},
        ("layer_types = 'sliding_attention'", "allowed: 'full_attention'"),
    ),
    "a layer of another kind": (
        {
            "model_type": "qwen3",
            "use_sliding_window": True,
            "layer_types": [WHOLE, "chunked_attention", SLIDING],
        },
        ("layer_types = 'chunked_attention'", "'sliding_attention', 'full_attention'"),
    ),
    "more kinds than layers": (
        {"model_type": "ministral", "layer_types": [WHOLE] * 4},
        ("layer_types has 4 entries for 3 layers",),
    ),
    "a scaling that depends on the length": (
        {"rope_parameters": {"rope_theta": 300.0, "rope_type": "dynamic", "factor": 2.0}},
        ("rope_type = 'dynamic'", "'llama3', 'linear', 'yarn'"),
    ),
    # As tools of the change-over leave it: theta in one, and no theta in the other
    "two scalings": (
        {"rope_parameters": DEFAULT_ROPE, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        EITHER,
    ),
    "two thetas": (
        {"rope_parameters": DEFAULT_ROPE, "rope_scaling": {"type": "default"}},
        EITHER,
    ),
    "two factors": (
        {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3 | {"factor": 32.0}},
        EITHER,
    ),
    "no width": ({"hidden_size": "absent"}, (DAMAGED, "hidden_size: is missing")),
    "a width that is text": (
        {"hidden_size": "48"},
        (DAMAGED, "hidden_size: expected int, found str"),
    ),
    "no layers": ({"num_hidden_layers": 0}, (DAMAGED, "num_hidden_layers: expected 1 to")),
    "heads that are no groups": (
        {"num_key_value_heads": 4},
        (DAMAGED, "4 heads of keys and values for 6 of queries"),
    ),
    "heads of an odd width": (
        {"head_dim": 7},
        (DAMAGED, "heads of width 7: expected an even width"),
    ),
    "a theta that YaRN divides by 0": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}},
        (DAMAGED, "rope_theta = 1.0: expected at least 2"),
    ),
    "an epsilon of 1": (
        {"rms_norm_eps": 1.0},
        (DAMAGED, "norm_eps = 1.0: expected a number above 0 and below 1)"),
    ),
    "a scaling that is text": (
        {"rope_parameters": "yarn"},
        (DAMAGED, "rope_parameters: expected dict, found str"),
    ),
    "a scaling without its factor": (
        {"rope_parameters": {"rope_type": "yarn"}},
        (DAMAGED, "type yarn without 'factor'"),
    ),
}


@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_a_model_of_ours_is_refused_by_name(tmp_path, fields, words):
    edited(tmp_path, fields)
    with refused(str(tmp_path / "config.json"), *words):
        open_full_state(tmp_path)


def test_a_description_that_is_a_list_is_refused(tmp_path):
    edited(tmp_path, {})
    (tmp_path / "config.json").write_text("[{}]")
    with refused(f"{tmp_path / 'config.json'}: {DAMAGED}", "the file: expected dict, found list"):
        open_full_state(tmp_path)


def test_a_field_that_our_reader_drops_is_found_by_the_conversion(tmp_path, monkeypatch):
    edited(tmp_path / "hf", TWO_PLACES["the trained length in both places"])
    convert(tmp_path / "hf", tmp_path / "right", Options("titanlite"), log=lambda text: None)
    monkeypatch.setattr(huggingface_config, "SCALED_FROM", "trained_length_of_another_program")
    for to in ("titanlite", "hf"):
        with refused("by a second reading frequencies is"):
            convert(tmp_path / "hf", tmp_path / f"to_{to}", Options(to), log=lambda text: None)
