"""Checkpoints: what one layout saves another loads, bit by bit, and only complete ones count."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import (
    TOKENS,
    build,
    everything,
    of_all_ranks,
    read_step,
    save_after_a_step,
)
from model_builder import EIGHT_LAYOUTS, EVEN, SMALL
from safetensors import safe_open
from safetensors.torch import load_file

from titanlite.checkpoint import retention, shard_file
from titanlite.checkpoint.folders import find_step_folder, list_steps, sweep
from titanlite.checkpoint.manager import Checkpointer, Newest
from titanlite.checkpoint.manifest import read_manifest
from titanlite.checkpoint.storage import SaveError
from titanlite.config.schema import CheckpointConfig
from titanlite.data.rows import Batch
from titanlite.model.flavors import LlamaConfig
from titanlite.rules.degrees import AXES
from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats.load_weights import load_model, tokenizer_of
from titanlite.tools.formats.shared_model import open_shared


def load_into_other_weights(
    folder: Path, parallel: dict, llama: LlamaConfig, name: str = "adamw"
) -> dict[str, torch.Tensor]:
    stages, optimizer, states = build(parallel, 1, llama, name)
    loaded = {name: state.state_dict() for name, state in states.items()}
    read_step(folder / "step-1", read_manifest(folder / "step-1"), loaded)
    for name, state in states.items():
        state.load_state_dict(loaded[name])
    assert optimizer.param_groups[-1]["betas"] == (0.9, 0.95)
    return everything(stages, optimizer, states["ema"])


def num_processes(layout: dict) -> int:
    return math.prod(layout.get(axis, 1) for axis in AXES)


MIXTURE = dataclasses.replace(EVEN, num_experts=4, experts_per_token=2, expert_ffn_dim=24)
TIED = dataclasses.replace(EVEN, tied_embeddings=True)
# Saved in the first, loaded in the second; with 3 processes 101 rows make uneven shards
LAYOUTS = [
    (SMALL, {"dp_shard": 3}, {"dp_shard": 1}),
    (EVEN, {"pp": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}),
    (TIED, {"pp": 2, "pp_schedule": "ZBVZeroBubble"}, {"dp_shard": 2, "tp": 2}),
    (TIED, {"dp_shard": 1}, {"pp": 2, "pp_schedule": "ZBVZeroBubble"}),
    (MIXTURE, {"dp_shard": 2, "ep": 2}, {"dp_shard": 1}),
]
MORE_LAYOUTS = [  # slow: each axis is in one above
    (SMALL, {"dp_shard": 1}, {"dp_replicate": 2, "dp_shard": 2}),
    (EVEN, {"dp_shard": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}),
    (SMALL, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 3}),
    (SMALL, {"dp_shard": 2}, {"dp_shard": 4}),
    (EVEN, {"dp_shard": 2, "tp": 2}, {"dp_shard": 1}),
    (EVEN, {"dp_shard": 2, "cp": 2}, {"tp": 2}),
    (TIED, {"pp": 2, "dp_shard": 2, "pp_schedule": "Interleaved1F1B"}, {"pp": 2}),
    (TIED, {"dp_shard": 1}, {"pp": 2, "tp": 2}),
    (MIXTURE, {"dp_shard": 4, "ep": 2}, {"dp_shard": 4, "ep": 4}),
    (MIXTURE, {"dp_shard": 1}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
    (MIXTURE, {"dp_shard": 2, "cp": 2, "ep": 4}, {"dp_shard": 2, "ep": 2, "tp": 2}),
    (MIXTURE, {"dp_shard": 2, "ep": 2, "pp": 2}, {"tp": 2}),
]


@pytest.mark.parametrize(
    ("llama", "before", "after"),
    [*LAYOUTS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE_LAYOUTS)],
)
def test_any_layout_loads_any_other_bit_by_bit(pool, tmp_path, llama, before, after):
    ranks = pool.run(num_processes(before), save_after_a_step, tmp_path, before, llama)
    saved = of_all_ranks(ranks)
    in_block = 10 if llama.num_experts else 9
    # With two moments, a count, and an average
    assert len(saved) == 5 * (in_block * llama.num_layers + (2 if llama.tied_embeddings else 3))
    ranks = pool.run(num_processes(after), load_into_other_weights, tmp_path, after, llama)
    found = of_all_ranks(ranks)
    assert found.keys() == saved.keys()
    for name in saved:
        assert torch.equal(found[name], saved[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("llama", "before", "after"),
    [
        (SMALL, {"dp_shard": 3}, {"dp_shard": 1}),
        (TIED, {"dp_shard": 2, "tp": 2}, {"pp": 2}),
        pytest.param(
            EVEN, {"pp": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.slow
        ),
        pytest.param(
            EVEN, {"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "tp": 2}, marks=pytest.mark.slow
        ),
        (MIXTURE, {"dp_shard": 4, "ep": 2}, {"dp_shard": 2, "ep": 2}),
        (MIXTURE, {"dp_shard": 2, "ep": 2}, {"dp_shard": 1}),
    ],
)
def test_muon_is_loaded_into_any_layout_bit_by_bit(pool, tmp_path, llama, before, after):
    ranks = pool.run(num_processes(before), save_after_a_step, tmp_path, before, llama, "muon")
    saved = of_all_ranks(ranks)
    matrices = [
        name for name in saved if f"{name}.exp_avg" in saved and f"{name}.step" not in saved
    ]
    assert len(matrices) == (8 if llama.num_experts else 7) * llama.num_layers
    assert all(saved[f"{name}.exp_avg"].any() for name in matrices)
    found = of_all_ranks(
        pool.run(num_processes(after), load_into_other_weights, tmp_path, after, llama, "muon")
    )
    assert found.keys() == saved.keys()
    assert not [name for name in saved if not torch.equal(found[name], saved[name])]


@pytest.mark.slow
@pytest.mark.parametrize("before", EIGHT_LAYOUTS, ids=str)
def test_each_of_eight_layouts_loads_each_bit_by_bit(pool, tmp_path, before):
    saved = of_all_ranks(
        pool.run(math.prod(before.values()), save_after_a_step, tmp_path, before, EVEN)
    )
    for after in EIGHT_LAYOUTS:
        found = of_all_ranks(
            pool.run(math.prod(after.values()), load_into_other_weights, tmp_path, after, EVEN)
        )
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved), after


def test_any_safetensors_tool_can_look_inside(pool, tmp_path):
    saved = of_all_ranks(pool.run(2, save_after_a_step, tmp_path, {"dp_shard": 2}, SMALL))
    folder, found = tmp_path / "step-1", {}
    files = {f"{kind}-0000{rank}" for kind in ("model", "training", "ema") for rank in (0, 1)}
    assert {path.stem for path in folder.glob("*.safetensors")} == files
    assert {path.name for path in folder.iterdir()} - {f"{name}.safetensors" for name in files} == {
        "manifest.json",
        "note.txt",
    }
    assert (folder / "note.txt").read_bytes() == b"hello"
    name = "layers.0.feed_forward.w1.weight"
    rows, columns = saved[name].shape
    offsets = []
    parts = []
    for path in sorted(folder.glob("model-*.safetensors")):
        parts.append(load_file(path)[f"model.{name}"])
        with safe_open(path, framework="pt") as file:
            places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
        offsets.append(places[f"model.{name}"]["saved_offsets"])
    assert offsets == [[0, 0], [(rows + 1) // 2, 0]]
    assert torch.equal(torch.cat(parts), saved[name])
    for path in folder.glob("training-*.safetensors"):
        found |= load_file(path)
    assert found[f"optimizer.state.{name}.step"] == 1
    manifest = read_manifest(folder)
    assert manifest.step == 1
    assert manifest.finite
    assert manifest.tensors[f"model.{name}"].shape == (rows, columns)
    for path in folder.glob("*.safetensors"):
        assert manifest.files[path.name] == (
            path.stat().st_size,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
    assert not list(tmp_path.glob("*.tmp*"))


def entries_after_an_evaluation() -> tuple[int, int]:
    """How many tensors the optimizer's state has before and after weights are left gathered."""
    stages, optimizer, states = build({"dp_shard": 2}, 0, SMALL, "adamw")
    stages.forward_backward(Batch(TOKENS[:, :-1], TOKENS[:, 1:]), torch.tensor(32))
    optimizer.step()
    before = len(states["optimizer"].state_dict())
    stages.evaluate(Batch(TOKENS[:, :-1], TOKENS[:, 1:]))
    return before, len(states["optimizer"].state_dict())


def test_an_evaluation_before_saving_loses_no_state(pool):
    assert pool.run(2, entries_after_an_evaluation) == [(90, 90)] * 2


def fail_in_the_middle(folder: Path) -> list[int]:
    """Rank 1 fails while it writes; returns the steps that are visible afterwards."""

    def write(path, shard):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        shard_file.write_file = write
    with pytest.raises(
        SaveError, match=r"step 1 could not be saved in .*: \[Errno 28\] No space left on device"
    ):
        save_after_a_step(folder, {"dp_shard": 2}, SMALL)
    return list_steps(folder)


def test_a_failed_save_leaves_nothing_and_can_be_repeated(pool, tmp_path):
    assert pool.run(2, fail_in_the_middle, tmp_path) == [[], []]
    assert not list(tmp_path.iterdir())
    pool.run(2, save_after_a_step, tmp_path, {"dp_shard": 2}, SMALL)
    assert list_steps(tmp_path) == [1]


def fake_step(folder: Path, step: int, name: str = "") -> None:
    path = folder / (name or f"step-{step}")
    path.mkdir(parents=True)
    (path / "manifest.json").write_bytes(b"")


def test_steps_are_numbers_and_only_complete_ones_count(tmp_path):
    for step in (9000, 10000, 200):
        fake_step(tmp_path, step)
    for name in (
        "step-20000.tmp-1a",
        "step-30000.deleted",
        "step-50000.damaged",
        "step-x",
        "other",
    ):
        fake_step(tmp_path, 0, name)
    (tmp_path / "step-40000").write_text("a file")
    assert list_steps(tmp_path) == [200, 9000, 10000]


def test_leftovers_are_swept_and_nothing_else(tmp_path):
    fake_step(tmp_path, 7)
    for name in ("step-8.tmp-0f", "step-6.deleted", "step-5.damaged", "step-x", "other"):
        fake_step(tmp_path, 0, name)
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-7",
        "step-5.damaged",
        "step-x",
        "other",
    }


def test_setting_aside_twice_loses_nothing(tmp_path):
    for name in ("step-5.damaged", "step-5.damaged-2", "step-5"):
        fake_step(tmp_path, 0, name)
    assert retention.set_aside(tmp_path / "step-5", "damaged").name == "step-5.damaged-3"
    assert len(list(tmp_path.iterdir())) == 3


SHARD = "model-00000.safetensors"
DAMAGES = {
    "a shard is gone": lambda folder: (folder / SHARD).unlink(),
    "a shard is cut short": lambda folder: os.truncate(folder / SHARD, 1000),
    "a shard is longer": lambda folder: os.truncate(
        folder / SHARD, (folder / SHARD).stat().st_size + 1
    ),
    "a bit of a shard flipped": lambda folder: flip(folder / SHARD, 12345),
    "the manifest is gone": lambda folder: (folder / "manifest.json").unlink(),
    "the manifest is empty": lambda folder: (folder / "manifest.json").write_bytes(b""),
    "the manifest is cut short": lambda folder: os.truncate(folder / "manifest.json", 500),
    "the shape is gone": lambda folder: (folder / "model.json").unlink(),
    "the shape is another": lambda folder: (folder / "model.json").write_text('{"dim": 3}'),
    "the tokenizer is gone": lambda folder: (folder / "tokenizer.model").unlink(),
}


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 16
    path.write_bytes(content)


# One of each kind; tests/checkpoint/test_manifest.py finds the others in the folder of a checkpoint
# without a run.
OF_EACH_KIND = (
    "a shard is gone",
    "a bit of a shard flipped",
    "the manifest is cut short",
    "the shape is another",
)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(damage, id=name, marks=[] if name in OF_EACH_KIND else pytest.mark.slow)
        for name, damage in DAMAGES.items()
    ],
)
def test_a_damaged_checkpoint_is_named_set_aside_and_passed_over(
    pool, arguments, whole_run, tmp_path, damage
):
    from runs import curve, train_run

    options = ["--checkpoint.freq=1", "--training.steps=3"]
    run = [*arguments, *options]
    shutil.copytree(whole_run(*options), tmp_path / "debug")
    before, folder = curve(tmp_path / "debug"), tmp_path / "debug/checkpoints/step-3"
    damage(folder)
    with pytest.raises(ConfigError, match="step-3"):
        load_model(open_shared(folder), torch.device("cpu"), 4112)
    assert pool.run(2, train_run, run) == [0, 0]
    log = (tmp_path / "debug/log.txt").read_text()
    assert "damaged: " in log
    assert f"renamed to {folder}.damaged" in log
    assert "resumed from" in log.split("renamed to")[1]
    assert "step-2 (saved by one process)" in log
    assert list_steps(folder.parent) == [1, 2, 3]
    after = curve(tmp_path / "debug")
    assert {step: pytest.approx(row, rel=1e-5) for step, row in before.items()} == after


def test_a_folder_whose_name_is_not_its_step_is_passed_over(pool, arguments, whole_run, tmp_path):
    from runs import train_run

    options = ["--checkpoint.freq=1", "--training.steps=3"]
    shutil.copytree(whole_run(*options), tmp_path / "debug")
    folder = tmp_path / "debug/checkpoints"
    shutil.copytree(folder / "step-3", folder / "step-7")
    assert pool.run(1, train_run, [*arguments, *options, "--training.steps=4"]) == [0]
    assert (folder / "step-7.damaged").is_dir()
    log = (tmp_path / "debug/log.txt").read_text()
    assert "step-7: its manifest is that of step 3" in log
    assert f"resumed from {folder}/step-3 " in log


def test_without_a_whole_checkpoint_nothing_is_started_over(pool, arguments, tmp_path):
    from runs import curve, train_run

    assert pool.run(1, train_run, [*arguments, "--training.steps=2"]) == [0]
    before = curve(tmp_path / "debug")
    flip(tmp_path / f"debug/checkpoints/step-2/{SHARD}", 5000)
    for _ in range(2):  # also when it has been renamed already
        with pytest.raises(AssertionError, match=r"ConfigError: .*/checkpoints: .*step-2.damaged"):
            pool.run(2, train_run, arguments)
    assert curve(tmp_path / "debug") == before
    assert [path.name for path in (tmp_path / "debug/checkpoints").iterdir()] == ["step-2.damaged"]


def test_a_path_means_a_step_or_the_newest_of_a_run(tmp_path):
    fake_step(tmp_path / "run/checkpoints", 2)
    fake_step(tmp_path / "run/checkpoints", 10)
    newest = tmp_path / "run/checkpoints/step-10"
    assert find_step_folder(tmp_path / "run") == find_step_folder(newest) == newest
    assert find_step_folder(tmp_path / "run/checkpoints") == newest
    with pytest.raises(ConfigError, match="no checkpoint; expected a run's folder"):
        find_step_folder(tmp_path)


def due_steps(
    folder: Path, freq: int, last: bool = False, newest: int = 0, asked: int = 0
) -> list[int]:
    config = CheckpointConfig(freq=freq)
    checkpointer = Checkpointer(config, folder, {}, None, torch.device("cpu"), None)
    checkpointer.newest = Newest(newest)
    return [
        step
        for step in range(1, 7)
        if checkpointer.due(step, (last and step == 6) or step == asked)
    ]


def test_when_saving_is_due(pool, tmp_path):
    cases = {
        (0,): [],
        (0, True): [6],
        (3,): [3, 6],
        (3, True): [3, 6],
        (3, False, 3): [6],
        (3, False, 0, 4): [3, 4, 6],
    }
    for case, steps in cases.items():
        assert pool.run(1, due_steps, tmp_path, *case) == [steps], case


def test_one_process_reads_a_run_back(pool, arguments, tmp_path):
    """What `titanlite generate` loads is what a sharded run saved, without a process group."""
    from runs import train_run

    assert pool.run(2, train_run, arguments) == [0, 0]
    folder = find_step_folder(tmp_path / "debug")
    assert {"config.toml", "data.json", "tokenizer.model", "manifest.json"} <= {
        path.name for path in folder.iterdir()
    }
    full = open_shared(folder)
    model = load_model(full, torch.device("cpu"), seq_len=100)
    assert model.rope.shape[0] == 100
    assert tokenizer_of(full).size == model.config.vocab_size
    files = [load_file(path) for path in sorted(folder.glob("model-*"))]
    for name, parameter in model.named_parameters():
        parts = [file[f"model.{name}"] for file in files if f"model.{name}" in file]
        assert torch.equal(parameter, torch.cat(parts))
        assert torch.isfinite(parameter).all()
