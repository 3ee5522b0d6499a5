"""Checkpoints: what one layout saves another loads, bit by bit, and only complete ones count."""

from __future__ import annotations

import dataclasses
import math
import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model_builder import EVEN, SMALL, build_stages

from titanlite.checkpoint.load import load_model, read_tokenizer
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.state import ModelState, OptimizerState, RandomState
from titanlite.checkpoint.storage import find_step_folder, list_steps, read_step, sweep, write_step
from titanlite.config import Checkpoint, ConfigError, Optimizer
from titanlite.model.flavors import LlamaConfig
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.stages import Stages

TOKENS = torch.randint(101, (2, 17), generator=torch.Generator().manual_seed(3))


def build(parallel: dict, seed: int, llama: LlamaConfig) -> tuple[Stages, torch.optim.Optimizer, dict]:
    """A model in some layout over all ranks, and its states."""
    stages = build_stages(parallel, seed, llama)
    optimizer = build_optimizer(stages.parts, Optimizer())
    states = {"model": ModelState(stages.parts), "optimizer": OptimizerState(stages.parts, optimizer)}
    return stages, optimizer, states


def everything(stages: Stages, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All weights and moments that this rank has a part of, whole."""
    named = [pair for part in stages.parts for pair in part.named_parameters()]
    whole = {name: p.full_tensor().detach().clone() for name, p in named}
    for name, parameter in named:
        for key, value in optimizer.state[parameter].items():
            whole[f"{name}.{key}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return whole


def save_after_a_step(folder: Path, parallel: dict, llama: LlamaConfig) -> dict[str, torch.Tensor]:
    stages, optimizer, states = build(parallel, 0, llama)
    stages.forward_backward(TOKENS[:, :-1], TOKENS[:, 1:], torch.tensor(32))
    optimizer.step()
    optimizer.zero_grad()
    write_step(folder, 1, states, {"note.txt": b"hello"})
    return everything(stages, optimizer)


def load_into_other_weights(folder: Path, parallel: dict, llama: LlamaConfig) -> dict[str, torch.Tensor]:
    stages, optimizer, states = build(parallel, 1, llama)
    loaded = {name: state.state_dict() for name, state in states.items()}
    read_step(folder / "step-1", loaded)
    for name, state in states.items():
        state.load_state_dict(loaded[name])
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    return everything(stages, optimizer)


def of_all_ranks(found: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One mapping of what the ranks have; where two have the same it is the same."""
    merged: dict[str, torch.Tensor] = {}
    for mine in found:
        for name, value in mine.items():
            assert torch.equal(merged.setdefault(name, value), value), name
    return merged


TIED = dataclasses.replace(EVEN, tied_embeddings=True)
LAYOUTS = [  # saved in the first, loaded in the second; with 3 processes 101 rows make uneven shards
    (SMALL, {"dp_shard": 3}, {"dp_shard": 1}),
    (SMALL, {"dp_shard": 1}, {"dp_replicate": 2, "dp_shard": 2}),
    (SMALL, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 3}),
    (SMALL, {"dp_shard": 2}, {"dp_shard": 4}),
    (EVEN, {"dp_shard": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}),
    (EVEN, {"dp_shard": 2, "tp": 2}, {"dp_shard": 1}),
    (EVEN, {"pp": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}),
    (EVEN, {"dp_shard": 2, "cp": 2}, {"tp": 2}),
    (TIED, {"dp_shard": 1}, {"pp": 2, "tp": 2}),
    (TIED, {"pp": 2, "pp_schedule": "ZBVZeroBubble"}, {"dp_shard": 2, "tp": 2}),
    (TIED, {"pp": 2, "dp_shard": 2, "pp_schedule": "Interleaved1F1B"}, {"pp": 2}),
]


@pytest.mark.parametrize(("llama", "before", "after"), LAYOUTS)
def test_any_layout_loads_any_other_bit_by_bit(pool, tmp_path, llama, before, after):
    def size(layout):
        return math.prod(degree for degree in layout.values() if isinstance(degree, int))

    saved = of_all_ranks(pool.run(size(before), save_after_a_step, tmp_path, before, llama))
    assert len(saved) == 4 * (9 * llama.num_layers + (2 if llama.tied_embeddings else 3))  # with two moments, a count
    found = of_all_ranks(pool.run(size(after), load_into_other_weights, tmp_path, after, llama))
    assert found.keys() == saved.keys()
    for name in saved:
        assert torch.equal(found[name], saved[name]), name


def test_a_checkpoint_holds_tensors_only(pool, tmp_path):
    pool.run(2, save_after_a_step, tmp_path, {"dp_shard": 2}, SMALL)
    metadata = dcp.FileSystemReader(tmp_path / "step-1").read_metadata()
    kinds = {type(entry).__name__ for entry in metadata.state_dict_metadata.values()}
    assert kinds == {"TensorStorageMetadata"}
    assert "model.layers.0.attention.wq.weight" in metadata.state_dict_metadata
    assert "optimizer.state.layers.0.attention.wq.weight.exp_avg" in metadata.state_dict_metadata
    assert (tmp_path / "step-1/note.txt").read_bytes() == b"hello"
    assert not list(tmp_path.glob("*.tmp"))


def entries_after_an_evaluation() -> tuple[int, int]:
    """How many tensors the optimizer's state has before and after weights are left gathered."""
    stages, optimizer, states = build({"dp_shard": 2}, 0, SMALL)
    stages.forward_backward(TOKENS[:, :-1], TOKENS[:, 1:], torch.tensor(32))
    optimizer.step()
    before = len(states["optimizer"].state_dict())
    stages.evaluate(TOKENS[:, :-1], TOKENS[:, 1:])
    return before, len(states["optimizer"].state_dict())


def test_an_evaluation_before_saving_loses_no_state(pool):
    assert pool.run(2, entries_after_an_evaluation) == [(90, 90)] * 2


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
            save_after_a_step(folder, {"dp_shard": 2}, SMALL)
    finally:
        dcp.FileSystemWriter.write_data = original
    return list_steps(folder)


def test_a_failed_save_is_not_visible_and_can_be_repeated(pool, tmp_path):
    assert pool.run(2, fail_in_the_middle, tmp_path) == [[], []]
    assert (tmp_path / "step-1.tmp").exists()
    pool.run(2, save_after_a_step, tmp_path, {"dp_shard": 2}, SMALL)
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
