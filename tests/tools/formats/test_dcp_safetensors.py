"""Folders that HuggingFaceStorageWriter of torch.distributed.checkpoint wrote: bit-equal, whatever
the layout, and one error if they are damaged.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fuzz_samples import SHAPE, Reader, read_any, weights
from model_builder import build_stages, full, small_model
from runs import train_run
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titanlite.checkpoint.shard_file import SHARDING_INFO
from titanlite.checkpoint.state import ModelState
from titanlite.model.flavors import FLAVORS
from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats.convert import Options, convert, load_full_state
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.selection import Selection

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Tensors = dict[str, torch.Tensor]

# What the runs of `arguments` train; of three processes, all its parts are uneven
TIED = dataclasses.replace(FLAVORS["debug"], dim=32, num_layers=2, ffn_dim=64, vocab_size=4112)


def quiet(text: str) -> None:
    pass


def save(state: dict[str, Any], folder: Path, **options: Any) -> None:
    writer = HuggingFaceStorageWriter(str(folder), **options)
    dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized())


def cut(weights: Tensors, dim: int) -> Tensors:
    """The weights as DTensors, those with this dimension cut along it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(w, mesh, [Shard(dim) if w.dim() > dim else Replicate()])
        for name, w in weights.items()
    }


def save_as_three(folder: Path) -> Tensors:
    """FSDP's rows beside training state, columns in two files, and Hugging Face's names."""
    rows = ModelState(build_stages({"dp_shard": 3}, 0, TIED).model_parts).state_dict()
    whole = {name: full(w).clone() for name, w in rows.items()}
    moments = {name: {"exp_avg": torch.ones_like(w)} for name, w in rows.items()}
    nested = {"model": rows, "optimizer": {"state": moments}}
    save(nested, folder / "rows", save_distributed=True)
    save(nested, folder / "consolidated", save_distributed=True, enable_consolidation=True)

    columns = {**cut(whole, 1), "dataloader": {"position": torch.tensor(7)}}
    names = [*whole, "dataloader.position"]
    places = {name: 1 + number % 2 for number, name in enumerate(names)}
    save(columns, folder / "columns", save_distributed=True, fqn_to_index_mapping=places)

    hf = load_file(folder / "hf/model.safetensors")
    save(cut(hf, 0), folder / "hf_shards", save_distributed=True)
    return whole


@pytest.fixture(scope="module")
def folder(pool, tmp_path_factory) -> Path:
    """Folders of three processes and of one, all with the weights of `small_model`."""
    folder = tmp_path_factory.mktemp("saved")
    weights = small_model(config=TIED).state_dict()
    (folder / "model.json").write_text(TIED.to_json())
    model = {"model": weights, "model_config": json.loads(TIED.to_json())}
    torch.save(model, folder / "source.pt")
    convert(folder / "source.pt", folder / "hf", Options("hf"), log=quiet)
    (of_three, *_) = pool.run(3, save_as_three, folder)
    assert all(torch.equal(of_three[name], weights[name]) for name in of_three)
    shutil.copy(folder / "hf/config.json", folder / "hf_shards")

    parameters = {name: weights[name] for name in of_three}
    save(parameters, folder / "one", save_distributed=True)
    save({"model": parameters}, folder / "undistributed")
    places = {name: 1 + number % 2 for number, name in enumerate(parameters)}
    (folder / "by_function").mkdir()
    consolidate_safetensors_files(str(folder / "columns"), str(folder / "by_function"), places)
    return folder


FOLDERS = [
    "rows",
    "columns",
    "consolidated",
    "consolidated/sharded",
    "by_function",
    "one",
    "undistributed",
    "hf_shards",
]
WITH_OTHERS = ("rows", "columns", "consolidated", "consolidated/sharded")


@pytest.mark.parametrize("name", FOLDERS)
def test_every_folder_has_all_bits(folder, name):
    found = open_full_state(folder / name, Selection(model=str(folder / "model.json")))
    original = open_full_state(folder / "source.pt")
    assert set(found) == set(original)
    assert all(torch.equal(found[key], original[key]) for key in original)
    for key, tensor in found.others.items():
        assert key == "dataloader.position" or bool((tensor.read() == 1).all())
    assert bool(found.others) == (name in WITH_OTHERS)


def test_the_formats_of_three_are_sharded_unevenly(folder):
    """Otherwise the tests above would show less than they say."""
    assert len(list((folder / "rows").iterdir())) == 3
    assert len(list((folder / "columns").iterdir())) == 6
    rows = open_full_state(folder / "rows").tensors["layers.0.attention.wk.weight"]
    assert [part.sizes for part in rows.parts] == [(6, 32), (6, 32), (4, 32)]
    columns = open_full_state(folder / "columns").tensors["layers.0.attention.wk.weight"]
    assert [part.offsets for part in columns.parts] == [(0, 0), (0, 11), (0, 22)]


@pytest.mark.parametrize("name", ["rows", "hf_shards"])
def test_a_step_is_made_of_it(folder, tmp_path, name):
    model = "" if name == "hf_shards" else str(folder / "model.json")
    there = convert(
        folder / name, tmp_path / "step-1", Options("titanlite", model=model), log=quiet
    )
    original = open_full_state(folder / "source.pt")
    assert there.model == TIED
    assert all(torch.equal(there[key], original[key]) for key in original)


def test_a_run_in_another_layout_begins_with_it(pool, arguments, folder, tmp_path):
    run = [*arguments, "--parallel.tp=2", "--training.steps=1", "--optimizer.lr=1e-12"]
    initial = f"--checkpoint.initial_load={folder / 'rows'}"
    assert pool.run(2, train_run, [*run, initial]) == [0, 0]
    trained = load_full_state(tmp_path / "debug")
    original = open_full_state(folder / "source.pt")
    for key in original:
        assert (trained[key] - original[key]).abs().max() < 1e-9, key


def test_the_last_shard_is_missed_by_the_model(folder, tmp_path):
    shutil.copytree(folder / "rows", tmp_path / "rows")
    (last,) = (tmp_path / "rows").glob("shard-00003-*")
    last.unlink()
    model = str(folder / "model.json")
    with pytest.raises(ConfigError, match=r"is \(2742, 32\); the model's is \(4112, 32\)"):
        convert(
            tmp_path / "rows", tmp_path / "step-1", Options("titanlite", model=model), log=quiet
        )


def shard(folder: Path, number: int, tensor: torch.Tensor, saved: Any = (0, 0)) -> Path:
    """A shard of "norm.weight". `saved`: its offsets, or the whole text."""
    text = saved if type(saved) is str else json.dumps({"norm.weight": {"saved_offsets": saved}})
    path = folder / f"shard-{number:05}-model-00001-of-00001.safetensors"
    save_file({"norm.weight": tensor}, path, {SHARDING_INFO: text})
    return path


TWO_ROWS = torch.ones(2, 6)


def second(saved: Any, tensor: torch.Tensor = TWO_ROWS) -> Callable[[Path], object]:
    """Writes another second shard."""
    return lambda folder: shard(folder, 2, tensor, saved)


def truncate(folder: Path) -> None:
    path = shard(folder, 2, TWO_ROWS, (2, 0))
    path.write_bytes(path.read_bytes()[:-1])


def huge_and_empty(folder: Path) -> None:
    """torch has no such sizes, and the library accepts them."""
    header = json.dumps({"norm.weight": {"dtype": "F32", "shape": [1 << 63, 0]}})
    header = header[:-2] + ', "data_offsets": [0, 0]}}'
    path = folder / "shard-00002-model-00001-of-00001.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())


def saved_with_a_number(folder: Path) -> None:
    save({"norm.weight": TWO_ROWS, "lr": 0.1}, folder, save_distributed=True)


def index_of_a_part(folder: Path) -> None:
    """As three processes leave it that save without save_distributed: the last has won."""
    path = shard(folder, 2, TWO_ROWS, (2, 0))
    index = {"weight_map": {"norm.weight": path.name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


FILL = "do not fill the shape"
UNUSABLE = f"shard-00002.*{SHARDING_INFO} cannot be used"
DAMAGED = {
    "gap": (
        lambda folder: shard(folder, 1, torch.ones(1, 6)),
        rf"2 part\(s\) of 'norm.weight' {FILL}",
    ),
    "first absent": (lambda folder: next(folder.glob("shard-00001*")).unlink(), FILL),
    "overlap": (second((1, 0)), FILL),
    "of another save": (lambda folder: shard(folder, 3, TWO_ROWS, (2, 0)), FILL),
    "other width": (second((2, 0), torch.ones(2, 5)), FILL),
    "other dimensions": (second((2,), torch.ones(2)), FILL),
    "far away": (second((1 << 40, 0)), FILL),
    "dtype": (second((2, 0), TWO_ROWS.bfloat16()), "float32 in shard-00001.*bfloat16 in shard-000"),
    "negative": (second((-2, 0)), UNUSABLE),
    "too few": (second((2,)), "2 dimensions, and its saved_offsets are"),
    "too many": (second((2, 0, 0)), "2 dimensions, and its saved_offsets are"),
    "fraction": (second((2.0, 0)), UNUSABLE),
    "boolean": (second((True, False)), UNUSABLE),
    "text": (second('{"norm.weight": {"saved_offsets": "20"}}'), UNUSABLE),
    "object": (second({"2": 0, "0": 0}), UNUSABLE),
    "absurd": (second((10**30, 0)), UNUSABLE),
    "digits": (second(f'{{"norm.weight": {{"saved_offsets": [{"9" * 5000}, 0]}}}}'), UNUSABLE),
    "not JSON": (second("{"), UNUSABLE),
    "not an object": (second("[]"), UNUSABLE),
    "nested": (second("[" * 100_000), UNUSABLE),
    "no name": (second("{}"), "it has no 'norm.weight'"),
    "no offsets": (second('{"norm.weight": {}}'), "it has no 'saved_offsets'"),
    "null": (second('{"norm.weight": null}'), UNUSABLE),
    "truncated": (truncate, "shard-00002.*: not a complete safetensors file"),
    "impossible shape": (huge_and_empty, "shard-00002.*has the impossible shape"),
    "with a number": (saved_with_a_number, "shard-00001.*begins with a zip archive: torch's Hugg"),
    "index of a part": (index_of_a_part, FILL),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_folder_is_one_error(tmp_path, damage, message):
    shard(tmp_path, 1, TWO_ROWS)
    shard(tmp_path, 2, TWO_ROWS, (2, 0))
    assert open_full_state(tmp_path)["norm.weight"].shape == (4, 6)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        open_full_state(tmp_path)
    assert len(caught.value.problems) == 1
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_empty_parts_and_single_files(tmp_path):
    """A process without rows may have saved none; a file alone must hold whole tensors."""
    shard(tmp_path, 1, TWO_ROWS)
    shard(tmp_path, 2, TWO_ROWS[:0], (7, 0))
    assert open_full_state(tmp_path)["norm.weight"].shape == (2, 6)
    path = shard(tmp_path, 2, TWO_ROWS, (2, 0))
    with pytest.raises(ConfigError, match=rf"{path}: its 1 part\(s\) of 'norm.weight' {FILL}"):
        open_full_state(path)
    for number, columns in enumerate((4, 2), 1):
        shard(tmp_path, number, torch.ones(0, columns), (0, 6 - columns if number > 1 else 0))
    assert open_full_state(tmp_path)["norm.weight"].shape == (0, 6)


def half(which: int) -> Tensors:
    """The first or second half of the rows of each weight."""
    return {name: weight.tensor_split(2)[which].clone() for name, weight in weights().items()}


def two_shards(folder: Path) -> list[bytes]:
    """Writes the first of two shards to `folder/x`; returns where the parts of the second are."""
    (folder / "x").mkdir()
    (folder / "x/model.json").write_bytes(SHAPE)
    save_file(half(0), folder / "x/shard-00001-model-00001-of-00001.safetensors")
    places = {}
    for name, weight in weights().items():
        rows = weight.shape[0]
        places[name] = {"saved_offsets": [rows - rows // 2, *[0] * (weight.dim() - 1)]}
    return [json.dumps(places).encode()]


def read_two_shards(folder: Path, data: bytes) -> None:
    path = folder / "x/shard-00002-model-00001-of-00001.safetensors"
    save_file(half(1), path, {SHARDING_INFO: data.decode("utf-8", "replace")})
    read_any(folder / "x")


FUZZED = {SHARDING_INFO: Reader("text", two_shards, read_two_shards)}
