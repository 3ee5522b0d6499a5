"""Plans: every part of every tensor is written by exactly one rank, with any of torch's storages, and
a load names everything that does not fit.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable
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
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
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


def recipe(mesh: DeviceMesh) -> dict[str, Any]:
    """The state of torch's recipe, whose learning rates are plain numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments}


def own_keys(mesh: DeviceMesh) -> dict[str, Any]:
    """Keys that only this rank has, of bytes and tensors, beside keys that all ranks have."""
    rank = mesh.get_rank()
    weight = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
    return {
        "weight": weight,
        "step": 3,
        f"flat_{rank}": torch.arange(rank),
        "loader": {f"rank_{rank}": f"position {rank}".encode(), "world_size": 4},
        "nested": {"groups": [{"weight": weight, f"own_{rank}": torch.ones(2)}, {"lr": 0.1}]},
    }


def own_tensors(mesh: DeviceMesh) -> dict[str, Any]:
    """The same without what a safetensors file cannot hold."""
    rank = mesh.get_rank()
    weight = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
    return {"weight": weight, f"flat_{rank}": torch.full((2,), rank), "all": torch.ones(3)}


def no_elements(mesh: DeviceMesh) -> dict[str, Any]:
    """Tensors without elements; and one whose parts on some ranks have none."""
    return {
        "plain": torch.zeros(0),
        "matrix": torch.zeros(4, 0, dtype=torch.int64),
        "sharded": distribute_tensor(torch.zeros(4, 0), mesh, [Shard(0)]),
        "no rows": distribute_tensor(torch.zeros(0, 3), mesh, [Shard(0)]),
        "replicated": distribute_tensor(torch.zeros(0), mesh, [Replicate()]),
        "uneven": distribute_tensor(torch.arange(3.0), mesh, [Shard(0)]),
    }


def several_meshes(mesh: DeviceMesh) -> dict[str, Any]:
    """Tensors on both axes of a mesh, on each axis alone, and on one half of the ranks."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    halves = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    return {
        "matrix": distribute_tensor(torch.arange(48.0).view(8, 6), square, [Shard(0), Shard(1)]),
        "norm": distribute_tensor(torch.arange(7.0), square["dp"], [Shard(0)]),
        "bias": distribute_tensor(torch.arange(5.0), square["tp"], [Shard(0)]),
        "first": distribute_tensor(torch.arange(3.0), halves[0], [Shard(0)]),
        "second": distribute_tensor(torch.arange(2.0), halves[1], [Replicate()]),
    }


def zeroed(value: Any) -> Any:
    """The same nested state with other values."""
    if isinstance(value, dict):
        return {key: zeroed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [zeroed(each) for each in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def on_this_rank(state: dict[str, Any]) -> dict[str, Any]:
    """Flat: this rank's part of each tensor as numbers, and the other values."""
    planner = DefaultSavePlanner()  # flattens the state
    planner.set_up_planner(state)
    values = {}
    for name, value in planner.state_dict.items():
        if isinstance(value, DTensor):
            if value.device_mesh.get_coordinate() is None:
                continue
            value = value.to_local()
        values[name] = value.tolist() if isinstance(value, torch.Tensor) else value
    return values


def save_and_load_by_both(folder: Path, state_of: Callable[..., Any], option: str) -> None:
    """What one planner has saved the other loads, with every storage that can hold the state."""
    logging.disable(logging.WARNING)  # DCP's, that there is no metadata of all ranks
    rank = dist.get_rank()
    arguments: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "rank"))
    mesh_of_state = mesh["rank"] if option == "group" else init_device_mesh("cpu", (4,))
    if option == "group":
        arguments = {"process_group": mesh["rank"].get_group()}
        folder = folder / str(mesh["pair"].get_local_rank())
    elif option == "no_dist":
        arguments = {"no_dist": True}
        folder = folder / str(rank)
    state = state_of(mesh_of_state)
    storages = [(FileSystemWriter, FileSystemReader)]
    values = on_this_rank(state).values()
    if option in ("", "group") and not any(isinstance(v, int | float | bytes) for v in values):
        distributed = functools.partial(HuggingFaceStorageWriter, save_distributed=True)
        storages.append((distributed, HuggingFaceStorageReader))
    planner = PlacementSavePlanner()  # for both storages
    for number, (writer, reader) in enumerate(storages):
        for saved_by in (None, planner):
            path = folder / f"{number} {saved_by is None}"
            collectives = {"use_collectives": option != "no collectives"}
            for _ in range(2):  # the second save uses the plan of the first
                dcp.save(
                    state, storage_writer=writer(path), planner=saved_by, **arguments, **collectives
                )
            for loaded_by in (None, PlacementLoadPlanner()):
                if saved_by is None and loaded_by is None:
                    continue
                loaded = zeroed(state)
                dcp.load(loaded, storage_reader=reader(path), planner=loaded_by, **arguments)
                case = (writer, saved_by, loaded_by)
                assert on_this_rank(loaded) == on_this_rank(state), case


@pytest.mark.parametrize(
    ("state_of", "option"),
    [
        (recipe, ""),
        (own_keys, ""),
        (own_keys, "no collectives"),
        (own_keys, "no_dist"),
        (own_keys, "group"),
        (own_tensors, ""),
        (no_elements, ""),
        (no_elements, "group"),
        (several_meshes, ""),
    ],
)
def test_each_planner_loads_what_the_other_has_saved(pool, tmp_path, state_of, option):
    pool.run(4, save_and_load_by_both, tmp_path, state_of, option)


def save_by_a_copy(folder: Path) -> None:
    """A planner that has saved is sent to another process, as `async_save` may do."""
    mesh = init_device_mesh("cpu", (2,))
    state = own_keys(mesh)
    planner = PlacementSavePlanner()
    dcp.save(state, storage_writer=FileSystemWriter(folder / "first"), planner=planner)
    copy = pickle.loads(pickle.dumps(planner))
    dcp.save(state, storage_writer=FileSystemWriter(folder / "second"), planner=copy)
    loaded = zeroed(state)
    dcp.load(loaded, storage_reader=FileSystemReader(folder / "second"))
    assert on_this_rank(loaded) == on_this_rank(state)


def test_a_planner_can_be_pickled(pool, tmp_path):
    pool.run(2, save_by_a_copy, tmp_path)


class MakesFolder:
    """A value whose pickle makes a folder when it is read."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def test_plain_values_are_loaded_and_no_code_runs(tmp_path):
    saved = {
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}],
        "by number": {7: {8: "a"}},
        "none": None,
    }
    made = tmp_path / "made"
    with alone():
        dcp.save(
            saved | {"code": MakesFolder(str(made))},
            storage_writer=FileSystemWriter(tmp_path),
            planner=PlacementSavePlanner(),
        )
    reader = FileSystemReader(tmp_path)
    loaded = {"groups": [{"lr": 0.0, "betas": ()}], "by number": {7: {8: ""}}, "none": 1}
    with alone():
        dcp.load(loaded, storage_reader=reader, planner=PlacementLoadPlanner())
    assert loaded == saved
    as_they_are = {"none": 1}
    with alone():
        planner = PlacementLoadPlanner(flatten_state_dict=False)
        dcp.load(as_they_are, storage_reader=reader, planner=planner)
    assert as_they_are == {"none": None}

    with alone(), pytest.raises(CheckpointException) as caught:
        dcp.load({"code": 0}, storage_reader=reader, planner=PlacementLoadPlanner())
    error, _ = caught.value.failures[0]
    assert str(error) == (
        "code: is not read, because its pickle may run code; expected numbers, text, bytes, "
        "tensors, and lists and dicts of these"
    )
    assert not made.exists()


class Sharded(torch.Tensor):
    """A tensor that is a part of a larger one, by DCP's own interface."""

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        raise NotImplementedError


def refused(folder: Path, kind: str) -> str:
    """The first line of the error of a save that cannot be."""
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, Any] = {"a": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])}
    if kind == "other names":
        state[f"b{dist.get_rank()}"] = state["a"]
    elif kind == "misplaced":
        state["a"] = DTensor.from_local(
            torch.zeros(3, 2), mesh, [Shard(0)], shape=torch.Size((4, 2)), stride=(2, 1)
        )
    elif kind == "another kind of shard":
        state["b"] = torch.zeros(2).as_subclass(Sharded)
    elif kind == "a tensor that says its place":
        state["b"] = torch.zeros(2)
        for attribute in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
            setattr(state["b"], attribute, ((2,),))
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
        (
            "another kind of shard",
            "b: is a Sharded with shards of its own; expected plain tensors and DTensors",
        ),
        (
            "a tensor that says its place",
            "b: is a Tensor with shards of its own; expected plain tensors and DTensors",
        ),
        ("two of one name", "a is float32 [2], and on rank 1 float32 [3]"),
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
