"""The formats that are written: what chooses each, and what each refuses and why."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from messages import refused
from model_builder import SMALL, make_file, small_model

from titanlite.model.flavors import RopeScaling
from titanlite.tools.formats.convert import Options, convert
from titanlite.tools.formats.targets import TARGETS

EVERY_MODEL = "allowed: titanlite, dcp, safetensors, torch, hf"


def quiet(text: str) -> None:
    pass


@pytest.mark.parametrize(
    ("suffix", "form"),
    [
        (".gguf", "gguf"),
        (".safetensors", "safetensors"),
        (".pt", "torch"),
        (".pth", "torch"),
        (".bin", "torch"),
    ],
)
def test_a_suffix_chooses_the_format(tmp_path, suffix, form):
    if form == "gguf":
        pytest.importorskip("gguf")
    make_file(tmp_path / "source.pt", SMALL)
    result = convert(tmp_path / "source.pt", tmp_path / f"x{suffix}", log=quiet)
    assert result.about.format == form
    assert list(result) == list(small_model(config=SMALL).state_dict())
    with refused(f"names a file of {form}, and --to is titanlite"):
        convert(tmp_path / "source.pt", tmp_path / f"y{suffix}", Options("titanlite"), log=quiet)


@pytest.mark.parametrize("form", TARGETS)
def test_only_gguf_has_q8_0(tmp_path, form):
    options = Options(form, dtype="q8_0")
    if form == "gguf":
        pytest.importorskip("gguf")
        make_file(tmp_path / "a.pt", dataclasses.replace(SMALL, ffn_dim=64))
        assert convert(tmp_path / "a.pt", tmp_path / "x", options, log=quiet).tensors
        return
    with refused("--dtype q8_0", f"allowed in {form}: bf16, fp16, fp32"):
        convert(tmp_path / "a.pt", tmp_path / "x", options, log=quiet)


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_formats_of_a_model_alone_refuse_training_state(tmp_path, form):
    make_file(tmp_path / "a.pt", SMALL)
    with refused(f"--full: {form} holds a model only", "titanlite, dcp, safetensors, torch"):
        convert(tmp_path / "a.pt", tmp_path / "x", Options(form, full=True), log=quiet)


@pytest.mark.parametrize("form", [name for name in TARGETS if name != "peft"])
def test_a_model_without_a_shape_fits_formats_of_named_tensors_only(tmp_path, form):
    weights = dict(small_model(config=SMALL).state_dict())
    torch.save(weights, tmp_path / "a.pt")
    if TARGETS[form].needs_model:
        with refused("a.pt (torch) holds no model shape", "give --model"):
            convert(tmp_path / "a.pt", tmp_path / "x", Options(form), log=quiet)
        return
    result = convert(tmp_path / "a.pt", tmp_path / "x", Options(form), log=quiet)
    assert all(torch.equal(result[name], weight) for name, weight in weights.items())


MODELS_WITHOUT_A_PLACE = {
    "gguf, experts": (
        "gguf",
        {"num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 24},
        "4 experts",
    ),
    "gguf, window": ("gguf", {"sliding_window": 8}, "a sliding window of 8"),
    "gguf, RoPE": (
        "gguf",
        {"qk_norm": True, "rope_scaling": RopeScaling(4.0, kind="linear")},
        "RoPE scaling linear, and qwen3 is written with none",
    ),
}


@pytest.mark.parametrize(
    ("form", "change", "difference"), MODELS_WITHOUT_A_PLACE.values(), ids=MODELS_WITHOUT_A_PLACE
)
def test_a_model_that_a_format_cannot_describe_is_refused(tmp_path, form, change, difference):
    make_file(tmp_path / "a.pt", dataclasses.replace(SMALL, **change))
    with refused(f"--to {form}", difference, EVERY_MODEL):
        convert(tmp_path / "a.pt", tmp_path / "x", Options(form), log=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_peft_takes_adapters_from_a_run_only(tmp_path):
    make_file(tmp_path / "a.pt", SMALL)
    with refused("holds no adapters; expected a run with lora.rank > 0"):
        convert(tmp_path / "a.pt", tmp_path / "x", Options("peft"), log=quiet)
    with refused("--adapter has no effect with --to peft"):
        options = Options("peft", adapter=Path("x"))
        convert(tmp_path / "a.pt", tmp_path / "x", options, log=quiet)
