"""`titanlite convert`: what it prints, and its answer to mistakes."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest
import torch
from checkpoints import write_step
from model_builder import SMALL, make_file, small_model

from titanlite.checkpoint.manifest import RunMetadata
from titanlite.model.flavors import FLAVORS, RopeScaling
from titanlite.tokenizer.tokenizer import BUNDLED
from titanlite.tools.cli.convert_command import file_size
from titanlite.tools.cli.main import main

TIED = dataclasses.replace(FLAVORS["debug"], dim=32, num_layers=2, ffn_dim=64, vocab_size=4112)
SCALED = dataclasses.replace(
    SMALL, vocab_size=103, rope_scaling=RopeScaling(8.0, original_context=64), norm_eps=1e-6
)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's folder with step 7."""
    weights = small_model(config=TIED).state_dict()
    config = {"training": {"seq_len": 16}, "model": {"flavor": "debug"}}
    files = {"model.json": TIED.to_json().encode(), "tokenizer.model": BUNDLED.read_bytes()}
    folder = tmp_path / "source"
    write_step(folder / "checkpoints", 7, {"model": weights}, files, RunMetadata({}, config, ""))
    return folder


MISTAKES = {
    "no source": (
        ["nowhere", "T.pt"],
        "nowhere: no such file or folder; expected a run's or a step's folder",
    ),
    "no format": (["S", "T"], "give --to: titanlite, dcp"),
    "another format": (["S", "T", "--to", "hff"], "did you mean hf?"),
    "another dtype": (["S", "T.pt", "--dtype", "fp64"], "allowed: bf16, fp16, fp32"),
    "another step": (["S", "T.pt", "--step", "8"], "allowed: 7"),
    "into itself": (["S", "S/checkpoints/step-7/x.pt"], "choose another path"),
    "it exists": (["S", "E.pt"], "E.pt: this file exists already"),
    "full model": (["S", "T", "--to", "hf", "--full"], "hf holds a model only"),
    "a text file": (
        ["E.pt", "T", "--to", "hf"],
        "neither a zip archive of torch.save nor a .safetensors file",
    ),
    "another flavor": (["X.pt", "T", "--to", "hf", "--model", "debgu"], "did you mean debug?"),
    "another's shape": (
        ["X.pt", "T", "--to", "hf", "--model", "debug"],
        "'layers.0.attention.wq.weight' is (32, 32)",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_error(run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("E.pt").write_text("mine")
    torch.save(dict(small_model(config=SCALED).state_dict()), "X.pt")
    run.rename("S")
    before = sorted(Path().rglob("*"))
    assert main(["convert", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told
    assert sorted(Path().rglob("*")) == before
    assert Path("E.pt").read_text() == "mine"


def test_what_is_said(run, tmp_path, capsys):
    assert main(["convert", str(run), str(tmp_path / "a"), "--to", "hf", "--dtype", "bf16"]) == 0
    told = capsys.readouterr().err
    for part in (
        "step 7",
        "flavor debug",
        "one process",
        "20 tensors",
        "0.001 GB, float32",
        "with its tokenizer",
    ):
        assert part in told, part
    assert re.search(
        r"wrote .*a: .* GB/s\nverified: 20 tensors bit by bit, and the model's logits", told
    )


@pytest.mark.parametrize("target", ["x.pt", "x.safetensors"])
def test_one_file_has_no_shards(tmp_path, capsys, target):
    source = tmp_path / "a.pt"
    make_file(source, SMALL)
    assert main(["convert", str(source), str(tmp_path / target), "--shard-size", "1MB"]) == 2
    assert "is one file; allowed: hf, safetensors, in folders" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_sizes_of_shards():
    assert [file_size(text) for text in ("5GB", "1.5 mb", "12", "2TB")] == [
        5 * 10**9,
        1_500_000,
        12,
        2 * 10**12,
    ]
    for text in ("", "0", "0.1", "5GiB", "-1GB", "GB"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a size as 5GB"):
            file_size(text)
