"""The formats that are written: what chooses each, and what each refuses and why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from messages import refused
from model_builder import SMALL, make_file, small_model

from titanlite.tools.formats.convert import Options, convert, load_full_state
from titanlite.tools.formats.targets import TARGETS


def quiet(text: str) -> None:
    pass


@pytest.mark.parametrize(
    ("suffix", "form"),
    [
        (".safetensors", "safetensors"),
        (".pt", "torch"),
        (".pth", "torch"),
        (".bin", "torch"),
    ],
)
def test_a_suffix_chooses_the_format(tmp_path, suffix, form):
    make_file(tmp_path / "source.pt", SMALL)
    result = convert(tmp_path / "source.pt", tmp_path / f"x{suffix}", log=quiet)
    assert result.about.format == form
    assert list(result) == list(small_model(config=SMALL).state_dict())
    with refused(f"names a file of {form}, and --to is titanlite"):
        convert(tmp_path / "source.pt", tmp_path / f"y{suffix}", Options("titanlite"), log=quiet)


@pytest.mark.parametrize(("target", "to"), [("x.gguf", ""), ("x", "gguf")])
def test_gguf_is_made_by_llama_cpp(tmp_path, target, to):
    make_file(tmp_path / "a.pt", SMALL)
    with refused("convert_hf_to_gguf.py", "--to hf"):
        convert(tmp_path / "a.pt", tmp_path / target, Options(to), log=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_gguf_file_is_read_by_transformers(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF\3\0\0\0")
    for source in (tmp_path / "a.gguf", tmp_path):
        with refused(f"{tmp_path / 'a.gguf'}: is a GGUF file", "docs/models.md"):
            load_full_state(source)


def test_a_format_of_a_model_alone_refuses_training_state(tmp_path):
    make_file(tmp_path / "a.pt", SMALL)
    with refused("--full: hf holds a model only", "titanlite, dcp, safetensors, torch"):
        convert(tmp_path / "a.pt", tmp_path / "x", Options("hf", full=True), log=quiet)


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


def test_peft_takes_adapters_from_a_run_only(tmp_path):
    make_file(tmp_path / "a.pt", SMALL)
    with refused("holds no adapters; expected a run with lora.rank > 0"):
        convert(tmp_path / "a.pt", tmp_path / "x", Options("peft"), log=quiet)
    for name, value in {"adapter": Path("x"), "model": "debug"}.items():
        with refused(f"--{name} has no effect with --to peft"):
            options = Options("peft", **{name: value})
            convert(tmp_path / "a.pt", tmp_path / "x", options, log=quiet)
