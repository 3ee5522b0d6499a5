"""Files that hold tensors by name: whose names are read, and which are refused."""

from __future__ import annotations

import dataclasses
import io
import pickle
from pathlib import Path

import pytest
import torch
from messages import refused
from model_builder import SMALL, assert_equal_bits, small_model
from safetensors.torch import save_file

from titanlite.model.flavors import FLAVORS
from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.main import main
from titanlite.tools.formats.convert import Options, convert, load_full_state

TIED = dataclasses.replace(FLAVORS["debug"], dim=32, num_layers=2, ffn_dim=64, vocab_size=4112)


def quiet(text: str) -> None:
    pass


@pytest.mark.parametrize("wrapped", ["plain", "model", "state_dict", "compiled", "a module's own"])
def test_other_peoples_torch_files(tmp_path, wrapped):
    model = small_model(config=TIED)
    weights = dict(model.state_dict())
    tree = {
        "plain": weights,
        "model": {
            "model": weights,
            "iteration": 5,
            "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]},
        },
        "state_dict": {"state_dict": weights, "epoch": 1},
        "compiled": {f"_orig_mod.{name}": value for name, value in weights.items()},
        "a module's own": model.state_dict(),
    }[wrapped]
    torch.save(tree, tmp_path / "theirs.bin")
    (tmp_path / "model.json").write_text(TIED.to_json())
    with pytest.raises(ConfigError, match="give --model"):
        convert(tmp_path / "theirs.bin", tmp_path / "hf", Options("hf"), log=quiet)
    shape = str(tmp_path / "model.json")
    assert_equal_bits(
        weights,
        convert(tmp_path / "theirs.bin", tmp_path / "hf", Options("hf", model=shape), log=quiet),
    )


NO_MODELS = {
    "parts of another": (
        {"encoder.w": torch.ones(2), "model.b": torch.ones(2)},
        ["encoder.w", "model.b"],
    ),
    "an extra one": (
        {**small_model(config=SMALL).state_dict(), "extra.bias": torch.ones(2)},
        "'extra.bias' is not a parameter",
    ),
    "the same twice": (
        {"norm.weight": torch.ones(2), "module.norm.weight": torch.zeros(2)},
        "parameters twice",
    ),
    "Hugging Face's": (
        {"model.embed_tokens.weight": torch.ones(2, 2)},
        "has a tensor named 'model.embed_tokens.weight'; expected names as",
    ),
    "integers": (
        {name: w.int() for name, w in small_model(config=SMALL).state_dict().items()},
        "is torch.int32; allowed: torch.float32",
    ),
    "no shape": ({"model": {"a": torch.ones(1)}, "model_config": {"a": torch.ones(1)}}, "x.pt: "),
    "odd company": ({"model": {"a": torch.ones(1)}, "training": torch.ones(1), "step": -3}, ["a"]),
}


@pytest.mark.parametrize(("tree", "found"), NO_MODELS.values(), ids=NO_MODELS)
def test_nothing_is_left_out_in_silence(tmp_path, capsys, tree, found):
    torch.save(tree, tmp_path / "x.pt")
    (tmp_path / "model.json").write_text(SMALL.to_json())
    if isinstance(found, list):
        assert list(convert(tmp_path / "x.pt", tmp_path / "y.safetensors", log=quiet)) == found
        return
    arguments = ["convert", str(tmp_path / "x.pt"), str(tmp_path / "y"), "--to", "safetensors"]
    assert main([*arguments, "--model", str(tmp_path / "model.json")]) == 2
    told = capsys.readouterr().err
    assert found in told
    assert "Traceback" not in told
    assert not (tmp_path / "y").exists()


def test_unknown_and_missing_names_are_listed(tmp_path):
    weights = dict(small_model(config=SMALL).state_dict())
    weights["layers.1.attention.wx.weight"] = weights.pop("layers.1.attention.wq.weight").clone()
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "model.json").write_text(SMALL.to_json())
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path, tmp_path.with_name("there"), Options("hf"), log=quiet)
    assert [problem.split(": ", 1)[1] for problem in caught.value.problems] == [
        "has no 'layers.1.attention.wq.weight'; did you mean layers.1.attention.wx.weight?",
        "'layers.1.attention.wx.weight' is not a parameter of this model",
    ]


def test_parts_that_are_no_model_are_named(tmp_path):
    save_file(
        {"model.layers.3.self_attn.q_proj.weight": torch.ones(2, 2)},
        tmp_path / "model-00003.safetensors",
    )
    with pytest.raises(ConfigError, match=r"has a tensor named 'model.layers.3.self_attn"):
        load_full_state(tmp_path / "model-00003.safetensors")
    save_file(
        {"optimizer.state.norm.weight.exp_avg": torch.ones(2)},
        tmp_path / "training-00000.safetensors",
    )
    with pytest.raises(ConfigError, match="holds only training state"):
        load_full_state(tmp_path / "training-00000.safetensors")


class NumberedStorages(pickle.Pickler):
    """Pickles tensors as litgpt's converter does: the names of storages are integers."""

    def __init__(self, file, records: list) -> None:
        super().__init__(file, protocol=2)
        self.records = records

    def persistent_id(self, value):
        if not isinstance(value, torch.storage.TypedStorage):
            return None
        self.records.append(value._untyped_storage)
        return ("storage", torch.FloatStorage, len(self.records) - 1, "cpu", value._size())


def save_numbered(tree: dict, path: Path) -> None:
    program = io.BytesIO()
    records: list = []
    NumberedStorages(program, records).dump(tree)
    archive = torch._C.PyTorchFileWriter(str(path))
    for i, record in enumerate(records):
        archive.write_record(f"data/{i}", record, record.nbytes())
    archive.write_record("data.pkl", program.getvalue(), len(program.getvalue()))
    archive.write_end_of_file()


def test_storages_may_be_numbered_by_integers(tmp_path):
    weights = dict(small_model().state_dict())
    save_numbered(weights, tmp_path / "a.pth")
    assert_equal_bits(weights, load_full_state(tmp_path / "a.pth"))


def test_a_folder_of_meta_names_what_to_give(tmp_path):
    (tmp_path / "params.json").write_text("{}")
    torch.save({"norm.weight": torch.ones(4)}, tmp_path / "consolidated.00.pth")
    with refused("a model folder of Meta", "Hugging Face, with config.json and safetensors files"):
        load_full_state(tmp_path)
