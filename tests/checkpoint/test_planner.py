"""Plans: every part of every tensor is written by exactly one rank, with any of torch's storages, and
a load names everything that does not fit.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import alone
from model_builder import EVEN, build_stages
from safetensors.torch import save_file
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titanlite.checkpoint.planner import (
    PlacementLoadPlanner,
    PlacementSavePlanner,
    StateMismatch,
)
from titanlite.checkpoint.shard_file import sharding_metadata
from titanlite.checkpoint.state import ModelState, OptimizerState, RandomState
from titanlite.config.schema import OptimizerConfig
from titanlite.optim.optimizer import build_optimizer


def states(parallel: dict[str, Any], tied: bool = False) -> dict[str, Stateful]:
    stages = build_stages(parallel, 0, dataclasses.replace(EVEN, tied_embeddings=tied))
    optimizer = build_optimizer(stages.model_parts, OptimizerConfig())
    parts = stages.model_parts
    return {
        "model": ModelState(parts),
        "optimizer": OptimizerState(parts, optimizer),
        "random": RandomState(),
    }


class Recorder(HuggingFaceStorageWriter):
    """torch's writer, which keeps this rank's plan and rank 0's metadata."""

    def write_data(self, plan, planner):
        self.plan = plan
        return super().write_data(plan, planner)

    def finish(self, metadata, results):
        self.metadata = metadata


def planned(folder: Path, parallel: dict[str, Any], tied: bool) -> tuple[list[Any], list[Any]]:
    """The names, offsets, sizes and bytes of what this rank writes; on rank 0 those of all parts in
    the metadata, with their writers.
    """
    state = {name: part.state_dict() for name, part in states(parallel, tied).items()}
    stock = DefaultSavePlanner()
    stock.set_up_planner(state, is_coordinator=True)
    expected = {item.index.fqn: item.tensor_data.chunk for item in stock.create_local_plan().items}
    planner = PlacementSavePlanner()
    writer = Recorder(folder, save_distributed=True)
    dcp.save(state, storage_writer=writer, planner=planner)
    written = []
    for item in writer.plan.items:
        chunk = item.tensor_data.chunk
        assert chunk == expected[item.index.fqn], item.index.fqn
        size = planner.resolve_data(item).nbytes
        written.append((item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), size))
    if dist.get_rank() != 0:
        return written, []
    parts = []
    for name, saved in writer.metadata.state_dict_metadata.items():
        for chunk, rank in zip(saved.chunks, planner.writers[name], strict=True):
            parts.append((name, tuple(chunk.offsets), tuple(chunk.sizes), rank))
    return written, parts


LAYOUTS = [
    ({"dp_shard": 2, "tp": 2}, False),
    ({"pp": 2, "dp_shard": 2, "pp_schedule": "Interleaved1F1B"}, True),
]
MORE_LAYOUTS = [
    ({"dp_replicate": 2, "dp_shard": 2}, False),
    ({"dp_replicate": 2, "tp": 2}, True),
    ({"pp": 2, "tp": 2}, True),
]


@pytest.mark.parametrize(
    ("parallel", "tied"),
    [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.slow) for layout in MORE_LAYOUTS)],
    ids=str,
)
def test_each_part_is_written_once_and_replicas_share_the_work(pool, tmp_path, parallel, tied):
    results = pool.run(4, planned, tmp_path, parallel, tied)
    in_metadata = results[0][1]
    by_rank = [(name, *box, r) for r, (own, _) in enumerate(results) for name, *box, _ in own]
    assert Counter(by_rank) == Counter(in_metadata)
    assert max(Counter(part[:3] for part in by_rank).values()) == 1
    names = {name for name, *_ in in_metadata}
    assert {"model.tok_embeddings.weight", "random.torch", "random.python"} <= names
    size = [sum(part[3] for part in own) for own, _ in results]
    stages = parallel.get("pp", 1)
    for stage in range(stages):
        of_stage = size[4 // stages * stage : 4 // stages * (stage + 1)]
        assert max(of_stage) < 1.3 * min(of_stage)


def save_with_torch(folder: Path) -> None:
    """This planner with torch's two storages, by four ranks."""
    random.seed(0)  # equal on all ranks, as in a run
    state = {name: part.state_dict() for name, part in states({"dp_shard": 2, "tp": 2}).items()}
    planner = PlacementSavePlanner()
    dcp.save(
        state,
        storage_writer=FileSystemWriter(folder / "stock"),
        planner=planner,
    )
    dcp.save(
        state,
        storage_writer=HuggingFaceStorageWriter(folder / "hf", save_distributed=True),
        planner=planner,
    )
    dcp.save(state, storage_writer=FileSystemWriter(folder / "expected"))


READERS = {"stock": FileSystemReader, "hf": HuggingFaceStorageReader}


def load_into_another_layout(folder: Path) -> None:
    """What torch's own planner saved, by this and by torch's planner from what this one saved."""
    loaded = {}
    for name, reader, planner in (
        ("expected", FileSystemReader, None),
        ("expected", FileSystemReader, PlacementLoadPlanner()),
        ("stock", FileSystemReader, None),
        ("stock", FileSystemReader, PlacementLoadPlanner()),
        ("hf", HuggingFaceStorageReader, None),
        ("hf", HuggingFaceStorageReader, PlacementLoadPlanner()),
    ):
        state = {part: own.state_dict() for part, own in states({"dp_shard": 2}).items()}
        for value in (value for part in state.values() for value in part.values()):
            value.zero_()
        dcp.load(state, storage_reader=reader(folder / name), planner=planner)
        loaded[name, planner is None] = {
            f"{part}.{key}": value.to_local() if isinstance(value, DTensor) else value
            for part, values in state.items()
            for key, value in values.items()
        }
    expected = loaded.pop(("expected", True))
    for case, found in loaded.items():
        assert found.keys() == expected.keys()
        different = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not different, (case, different)


@pytest.mark.slow
def test_torchs_own_storages_save_and_load_with_these_planners(pool, tmp_path):
    pool.run(4, save_with_torch, tmp_path)
    pool.run(2, load_into_another_layout, tmp_path)


def messages_of_three_saves(folder: Path) -> list[bool]:
    """Whether this rank reports something, in the first save, the second, and after a change."""
    mesh = init_device_mesh("cpu", (2,))
    state = {f"w{i}": distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]) for i in range(3)}
    planner = PlacementSavePlanner()
    reported = []

    class Listener(HuggingFaceStorageWriter):
        def prepare_local_plan(self, plan):
            reported.append(plan.planner_data is not None)
            return super().prepare_local_plan(plan)

    for number in range(3):
        if number == 2:
            state["new"] = distribute_tensor(torch.randn(5), mesh, [Replicate()])
        else:
            state["w0"].add_(1.0)
        saved = {name: value.full_tensor() for name, value in state.items()}
        path = folder / str(number)
        dcp.save(state, storage_writer=Listener(path, save_distributed=True), planner=planner)
        loaded = {name: torch.zeros_like(value) for name, value in saved.items()}
        dcp.load(loaded, storage_reader=HuggingFaceStorageReader(path))
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    return reported


def test_a_plan_is_reported_once_unless_tensors_change(pool, tmp_path):
    assert pool.run(2, messages_of_three_saves, tmp_path) == [[True, False, True]] * 2


def save_on_two_meshes(folder: Path) -> None:
    """A norm that tensor parallel leaves alone lies on the ranks of each tp coordinate: the parts of
    the other coordinate are the same.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(8, 6, generator=generator)
    norm = torch.randn(7, generator=generator)
    state = {
        "matrix": distribute_tensor(matrix, mesh, [Shard(0), Shard(1)]),
        "norm": distribute_tensor(norm, mesh["dp"], [Shard(0)]),
    }
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    dcp.save(state, storage_writer=writer, planner=PlacementSavePlanner())
    loaded = {"matrix": torch.zeros(8, 6), "norm": torch.zeros(7)}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(folder))
    assert torch.equal(loaded["matrix"], matrix)
    assert torch.equal(loaded["norm"], norm)


def test_a_tensor_on_a_part_of_the_mesh_is_written_once(pool, tmp_path):
    pool.run(4, save_on_two_meshes, tmp_path)


class Sharded(torch.Tensor):
    """A tensor that is a part of a larger one, by DCP's own interface."""

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        raise NotImplementedError


def refused(folder: Path, kind: str) -> str:
    """The first line of the error of a save that cannot be."""
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, Any] = {"a": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])}
    if kind == "other names":
        state[f"b{dist.get_rank()}"] = torch.zeros(2)
    elif kind == "misplaced":
        state["a"] = DTensor.from_local(
            torch.zeros(3, 2), mesh, [Shard(0)], shape=torch.Size((4, 2)), stride=(2, 1)
        )
    elif kind == "numbers":
        state |= {"lr": 0.1, "steps": [1, 2]}
    elif kind == "another kind of shard":
        state["b"] = torch.zeros(2).as_subclass(Sharded)
    elif kind == "two of one name":  # each rank is a stage of its own
        state = {"a": torch.zeros(2 + dist.get_rank())}
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=writer, planner=PlacementSavePlanner())
    error, _ = caught.value.failures[0]
    assert isinstance(error, StateMismatch)
    return str(error)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("other names", "ranks 0 and 1 hold other tensors on the same mesh"),
        ("misplaced", "a: holds (3, 2), and by its placements (2, 2)"),
        ("another kind of shard", "b: is of type Sharded; expected plain tensors and DTensors"),
        ("two of one name", "a is float32 [2], and on rank 1 float32 [3]"),
        (
            "numbers",
            "lr: is of type float; expected plain tensors and DTensors; "
            "steps: is of type list; expected plain tensors and DTensors",
        ),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused(pool, tmp_path, kind, expected):
    assert pool.run(2, refused, tmp_path, kind) == [expected] * 2


def test_everything_that_does_not_fit_is_named_and_nothing_is_loaded(tmp_path):
    saved = {"w": torch.ones(2, 3), "steps": torch.tensor([3]), "same": torch.ones(2)}
    with alone():
        dcp.save(saved, storage_writer=FileSystemWriter(tmp_path))
    same = torch.zeros(2)
    state = {"w": torch.zeros(3, 2), "steps": torch.zeros(1), "same": same, "more": torch.ones(1)}
    with alone(), pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=FileSystemReader(tmp_path), planner=PlacementLoadPlanner())
    error, _ = caught.value.failures[0]
    assert error.problems == [
        "has no more",
        "steps is int64 [1]; expected float32 [1]",
        "w is float32 [2, 3]; expected float32 [3, 2]",
    ]
    assert not same.any()
    state = {"same": same.double(), "more": torch.ones(1)}
    planner = PlacementLoadPlanner(allow_partial_load=True)
    with alone():
        dcp.load(state, storage_reader=FileSystemReader(tmp_path), planner=planner)
    assert state["same"].tolist() == [1.0, 1.0]  # another precision is rounded to
    assert state["more"].tolist() == [1.0]


def save_with_a_new_planner(folder: Path) -> str:
    """Rank 0 has a new planner in the second save, the other one that of the first."""
    mesh = init_device_mesh("cpu", (2,))
    state = {"a": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])}
    planner = PlacementSavePlanner()
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    dcp.save(state, storage_writer=writer, planner=planner)
    if dist.get_rank() == 0:
        planner = PlacementSavePlanner()
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=writer, planner=planner)
    error, _ = caught.value.failures[0]
    return str(error)


def test_planners_of_different_age_are_refused(pool, tmp_path):
    expected = "rank 1 has a planner of earlier saves, and rank 0 a new one"
    assert pool.run(2, save_with_a_new_planner, tmp_path) == [expected] * 2


def test_a_hole_between_the_saved_parts_is_an_error(tmp_path):
    """torch's planner leaves these rows as they were."""
    for number, begin in enumerate((0, 4)):
        places = sharding_metadata({"w": [begin]})
        save_file({"w": torch.ones(2)}, tmp_path / f"shard-{number}.safetensors", places)
    reader = HuggingFaceStorageReader(tmp_path)
    planner = PlacementLoadPlanner()
    with alone(), pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(6)}, storage_reader=reader, planner=planner)
    error, _ = caught.value.failures[0]
    assert str(error) == "w: its saved parts have 4 of the 6 numbers of this rank's [6] at [0]"


def test_of_many_problems_the_first_are_kept():
    """Rank 0 receives them from all ranks."""
    error = StateMismatch([f"has no w{number}" for number in range(100)])
    assert len(error.problems) == 6
    assert error.problems[-1] == "and 95 more like these"
