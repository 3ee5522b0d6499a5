"""GGUF: the `gguf` package opens what was written, and llama.cpp continues a text as we do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from model_builder import EXPORTED as MODELS
from model_builder import SMALL, make_file, small_model

from titanlite.model.generate import generate
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.cli.main import main
from titanlite.tools.formats import gguf_file
from titanlite.tools.formats.convert import Options, convert, load_full_state
from titanlite.tools.formats.load_weights import load_model

gguf = pytest.importorskip("gguf")


def quiet(text: str) -> None:
    pass


def field(reader, name: str):
    return reader.get_field(name).contents()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("debug", ""), ("debug", "q8_0")]  # with a tokenizer, which does not depend on the dtype
    + [
        (name, dtype)
        for name in ("untied", "llama 3.1")
        for dtype in ("", "fp32", "fp16", "bf16", "q8_0")
    ],
)
def test_the_package_opens_what_was_written(tmp_path, name, dtype):
    config = MODELS[name]
    make_file(tmp_path / "model.pt", config)
    convert(tmp_path / "model.pt", tmp_path / "model.gguf", Options(dtype=dtype), log=quiet)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    weights = load_full_state(tmp_path / "model.pt")
    found = {tensor.name: tensor for tensor in reader.tensors}
    kinds = {"": "F32", "fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
    for ours, theirs in gguf_file.names(config).items():
        tensor = found.pop(theirs)
        assert tensor.tensor_type.name == (kinds[dtype] if weights[ours].ndim > 1 else "F32")
        values = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        values = values.reshape(weights[ours].shape)
        if dtype == "q8_0" and weights[ours].ndim > 1:
            scale = weights[ours].unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
            apart = (values - weights[ours]).unflatten(-1, (-1, 32)).abs()
            # Half a step, and 127 roundings of the scale to fp16
            assert bool((apart <= 0.57 * scale).all())
        elif weights[ours].ndim > 1 and dtype in ("fp16", "bf16"):
            assert torch.equal(
                values,
                weights[ours].to({"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]).float(),
            )
        else:
            assert torch.equal(values, weights[ours])
    assert list(found) == ([gguf_file.FREQUENCIES] if config.rope_scaling else [])
    described = {
        "general.architecture": "llama",
        "llama.block_count": config.num_layers,
        "llama.context_length": 512,
        "llama.embedding_length": config.dim,
        "llama.feed_forward_length": config.ffn_dim,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
    }
    assert {key: field(reader, key) for key in described} == described
    assert field(reader, "llama.attention.layer_norm_rms_epsilon") == pytest.approx(config.norm_eps)
    assert field(reader, "llama.rope.freq_base") == config.rope_theta
    if config.vocab_size >= 4112:
        tokenizer = Tokenizer()
        assert len(field(reader, "tokenizer.ggml.tokens")) == config.vocab_size
        assert field(reader, "tokenizer.ggml.tokens")[tokenizer.bos] == "<|begin_of_text|>"
        assert field(reader, "tokenizer.ggml.eos_token_id") == tokenizer.eos
        assert field(reader, "tokenizer.ggml.add_bos_token") is True


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_continues_as_we_do(tmp_path, name):
    llama_cpp = pytest.importorskip("llama_cpp")
    config = dataclasses.replace(MODELS[name], vocab_size=4112)
    make_file(tmp_path / "model.pt", config)
    convert(tmp_path / "model.pt", tmp_path / "model.gguf", log=quiet)
    ours = load_model(load_full_state(tmp_path / "model.pt"), torch.device("cpu"), 512)
    theirs = llama_cpp.Llama(
        str(tmp_path / "model.gguf"), n_ctx=256, n_threads=1, verbose=False, logits_all=True
    )
    tokenizer, text = Tokenizer(), "def héllo(self): 漢字 12345\n    return x"
    prompt = [tokenizer.bos, *tokenizer.encode(text)]
    assert theirs.tokenize(text.encode(), add_bos=True) == prompt
    mine = list(generate(ours, prompt, 16, stop=set(), temperature=0.0, top_k=0, seed=0))
    found: list[int] = []
    for token in theirs.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
        found.append(token)
        if len(found) == 16:
            break
    assert found == mine


def test_what_does_not_fit_is_one_error(tmp_path, capsys, monkeypatch):
    config = dataclasses.replace(SMALL, explicit_head_dim=12, ffn_dim=64)
    make_file(tmp_path / "model.pt", config)
    arguments = ["convert", str(tmp_path / "model.pt"), str(tmp_path / "model.gguf")]
    assert main([*arguments, "--dtype", "q8_0"]) == 2
    assert "--dtype q8_0: rows of 48 numbers; allowed: multiples of 32" in capsys.readouterr().err
    assert main([*arguments[:2], str(tmp_path / "hf"), "--to", "hf", "--dtype", "q8_0"]) == 2
    assert "allowed in hf: bf16, fp16, fp32" in capsys.readouterr().err
    assert main(arguments) == 0

    def absent() -> None:
        raise ConfigError("a GGUF file needs the gguf package; pip install gguf")

    monkeypatch.setattr(gguf_file, "package", absent)
    (tmp_path / "model.gguf").unlink()
    assert main(arguments) == 2
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["model.pt"]


def test_frequencies_are_divided_as_ours_are():
    config = dataclasses.replace(MODELS["llama 3.1"])
    plain, scaled = (
        small_model(config=c).rope for c in (dataclasses.replace(config, rope_scaling=None), config)
    )
    angle = torch.atan2(plain[1, :, 1], plain[1, :, 0]) / torch.from_numpy(
        gguf_file.frequency_factors(config)
    )
    assert torch.allclose(torch.atan2(scaled[1, :, 1], scaled[1, :, 0]), angle, atol=1e-6)
    assert gguf_file.frequency_factors(SMALL) is None
