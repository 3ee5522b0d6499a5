"""Checkpoints: what one layout saves another loads, bit by bit, and only complete ones count."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model_builder import SMALL

from titanlite.checkpoint.load import load_model, read_tokenizer
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.state import ModelState, OptimizerState, RandomState
from titanlite.checkpoint.storage import find_step_folder, list_steps, read_step, sweep, write_step
from titanlite.config import Checkpoint, ConfigError, Optimizer, Parallel
from titanlite.model.llama import Llama
from titanlite.optim.loss import cross_entropy_sum
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.shard import apply_shard, assign_shard

TOKENS = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(3))


def build(dp_replicate: int, seed: int) -> tuple[Llama, torch.optim.Optimizer, dict]:
    """A model sharded over all ranks, and its states."""
    mesh = build_mesh(
        "cpu", dp_replicate=dp_replicate, dp_shard=dist.get_world_size() // dp_replicate, timeout_seconds=77
    )
    with torch.device("meta"):
        model = Llama(SMALL, 16)
    apply_shard(model, [[block] for block in model.layers.values()], Parallel(), mesh, torch.float32, torch.float32)
    model.to_empty(device="cpu")
    model.init_weights(seed, assign_shard)
    optimizer = build_optimizer(model, Optimizer())
    return model, optimizer, {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)}


def everything(model: Llama, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All weights and moments, whole."""
    whole = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            whole[f"{name}.{key}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return whole


def save_after_a_step(folder: Path, dp_replicate: int) -> dict[str, torch.Tensor]:
    model, optimizer, states = build(dp_replicate, seed=0)
    cross_entropy_sum(model(TOKENS[:, :-1]), TOKENS[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()
    write_step(folder, 1, states, {"note.txt": b"hello"})
    return everything(model, optimizer)


def load_into_other_weights(folder: Path, dp_replicate: int) -> dict[str, torch.Tensor]:
    model, optimizer, states = build(dp_replicate, seed=1)
    loaded = {name: state.state_dict() for name, state in states.items()}
    read_step(folder / "step-1", loaded)
    for name, state in states.items():
        state.load_state_dict(loaded[name])
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    return everything(model, optimizer)


@pytest.mark.parametrize(("before", "after"), [((3, 1), (1, 1)), ((1, 1), (4, 2)), ((4, 2), (3, 1)), ((2, 2), (4, 1))])
def test_any_layout_loads_any_other_bit_by_bit(pool, tmp_path, before, after):
    """(processes, replicas): 101 rows and 3 processes make uneven shards."""
    saved = pool.run(before[0], save_after_a_step, tmp_path, before[1])[0]
    assert len(saved) == 4 * 30  # weight, two moments and a step count each
    for found in pool.run(after[0], load_into_other_weights, tmp_path, after[1]):
        assert found.keys() == saved.keys()
        for name in saved:
            assert torch.equal(found[name], saved[name]), name


def test_a_checkpoint_holds_tensors_only(pool, tmp_path):
    pool.run(2, save_after_a_step, tmp_path, 1)
    metadata = dcp.FileSystemReader(tmp_path / "step-1").read_metadata()
    kinds = {type(entry).__name__ for entry in metadata.state_dict_metadata.values()}
    assert kinds == {"TensorStorageMetadata"}
    assert "model.layers.0.attention.wq.weight" in metadata.state_dict_metadata
    assert "optimizer.state.layers.0.attention.wq.weight.exp_avg" in metadata.state_dict_metadata
    assert (tmp_path / "step-1/note.txt").read_bytes() == b"hello"
    assert not list(tmp_path.glob("*.tmp"))


def fail_in_the_middle(folder: Path) -> list[int]:
    """Rank 1 fails while it writes; returns the steps that are visible afterwards."""
    original = dcp.FileSystemWriter.write_data

    def write_data(self, *args, **kwargs):
        if dist.get_rank() == 1:
            raise OSError("disk full")
        return original(self, *args, **kwargs)

    dcp.FileSystemWriter.write_data = write_data
    try:
        with pytest.raises(BaseException, match="disk full"):  # CheckpointException is no Exception
            save_after_a_step(folder, 1)
    finally:
        dcp.FileSystemWriter.write_data = original
    return list_steps(folder)


def test_a_failed_save_is_not_visible_and_can_be_repeated(pool, tmp_path):
    assert pool.run(2, fail_in_the_middle, tmp_path) == [[], []]
    assert (tmp_path / "step-1.tmp").exists()
    pool.run(2, save_after_a_step, tmp_path, 1)
    assert list_steps(tmp_path) == [1]
    assert not (tmp_path / "step-1.tmp").exists()


def fake_step(folder: Path, step: int, name: str = "") -> None:
    path = folder / (name or f"step-{step}")
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"")


def test_steps_are_numbers_and_only_complete_ones_count(tmp_path):
    for step in (9000, 10000, 200):
        fake_step(tmp_path, step)
    for name in ("step-20000.tmp", "step-30000.deleted", "step-x", "other"):
        fake_step(tmp_path, 0, name)
    (tmp_path / "step-40000").mkdir()
    assert list_steps(tmp_path) == [200, 9000, 10000]


def test_leftovers_are_swept_and_nothing_else(tmp_path):
    fake_step(tmp_path, 7)
    for name in ("step-8.tmp", "step-6.deleted", "step-x", "other"):
        fake_step(tmp_path, 0, name)
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-7", "step-x", "other"}


DAMAGES = {
    "a shard is gone": lambda folder: next(folder.glob("*.distcp")).unlink(),
    "a shard is cut short": lambda folder: os.truncate(next(folder.glob("*.distcp")), 1000),
    "the index is empty": lambda folder: (folder / ".metadata").write_bytes(b""),
    "the index is cut short": lambda folder: os.truncate(folder / ".metadata", 500),
    "the shape is gone": lambda folder: (folder / "model.json").unlink(),
    "the shape is another": lambda folder: (folder / "model.json").write_text('{"dim": 3}'),
    "the tokenizer is gone": lambda folder: (folder / "tokenizer.model").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_one_error_that_names_it(pool, arguments, tmp_path, damage):
    from runs import train_run

    assert pool.run(1, train_run, [*arguments, "--training.steps=1"]) == [0]
    folder = find_step_folder(tmp_path / "debug")
    damage(folder)
    with pytest.raises(ConfigError, match="step-1"):
        load_model(folder, torch.device("cpu"), read_tokenizer(folder).size)
    if (folder / "tokenizer.model").exists():
        with pytest.raises(AssertionError, match=r"ConfigError: .*step-1"):
            pool.run(2, train_run, [*arguments, "--training.steps=2"])


def test_a_path_means_a_step_or_the_newest_of_a_run(tmp_path):
    fake_step(tmp_path / "run/checkpoints", 2)
    fake_step(tmp_path / "run/checkpoints", 10)
    newest = tmp_path / "run/checkpoints/step-10"
    assert find_step_folder(tmp_path / "run") == find_step_folder(newest) == newest
    assert find_step_folder(tmp_path / "run/checkpoints") == newest
    with pytest.raises(ConfigError, match="no checkpoint; expected a run's folder"):
        find_step_folder(tmp_path)


def test_when_saving_is_due(tmp_path):
    def due(freq: int, last: bool = False, newest: int = 0) -> list[int]:
        checkpointer = Checkpointer(Checkpoint(freq=freq), tmp_path, {}, {})
        checkpointer.newest = newest
        return [step for step in range(1, 7) if checkpointer.due(step, last and step == 6)]

    assert due(0) == []
    assert due(0, last=True) == [6]
    assert due(3) == due(3, last=True) == [3, 6]
    assert due(3, newest=3) == [6]


def test_random_state_round_trips():
    state = RandomState()
    saved = state.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in saved.values())
    expected = (random.random(), torch.rand(3).tolist())
    random.random()
    state.load_state_dict(saved)
    assert (random.random(), torch.rand(3).tolist()) == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_reads_a_run_back(pool, arguments, tmp_path):
    """What `titanlite generate` loads is what a sharded run saved, without a process group."""
    from runs import train_run

    assert pool.run(2, train_run, arguments) == [0, 0]
    folder = find_step_folder(tmp_path / "debug")
    assert {"config.toml", "data.json", "tokenizer.model", ".metadata"} <= {path.name for path in folder.iterdir()}
    model = load_model(folder, torch.device("cpu"), seq_len=100)
    assert model.rope.shape[0] == 100
    assert read_tokenizer(folder).size == model.config.vocab_size
    raw = {name: torch.empty_like(p) for name, p in model.named_parameters()}
    dcp.load({"model": raw}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, raw[name])
        assert torch.isfinite(parameter).all()
