"""Plans: every part of every tensor is written by exactly one process, although none knows the plan
of another.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from model_builder import EVEN, build_stages
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from titanlite.checkpoint.state import ModelState, OptimizerState, RandomState
from titanlite.checkpoint.write_plan import Plan, local_parts, shared_tensors, tensor_entries
from titanlite.config.schema import OptimizerConfig
from titanlite.optim.optimizer import build_optimizer


def states(parallel: dict[str, Any], tied: bool = False) -> dict[str, Stateful]:
    import dataclasses

    stages = build_stages(parallel, 0, dataclasses.replace(EVEN, tied_embeddings=tied))
    optimizer = build_optimizer(stages.model_parts, OptimizerConfig())
    parts = stages.model_parts
    return {
        "model": ModelState(parts),
        "optimizer": OptimizerState(parts, optimizer),
        "random": RandomState(),
    }


def planned(parallel: dict[str, Any], tied: bool) -> tuple[Any, ...]:
    """This rank's table, parts with DCP's offsets and sizes, boxes, and the keys and bytes that it
    would write.
    """
    state = {name: part.state_dict() for name, part in states(parallel, tied).items()}
    plan, planner = Plan(state), DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    chunks = {item.index.fqn: item.tensor_data.chunk for item in planner.create_local_plan().items}
    for part, _ in local_parts(state):
        assert part.sizes == tuple(part.local.shape)
        assert (part.offsets, part.sizes) == (
            tuple(chunks[part.name].offsets),
            tuple(chunks[part.name].sizes),
        )
    table = plan.table if plan.rank == plan.first else {}
    files = plan.files(dict.fromkeys(("model.tok_embeddings.weight",), 0) if tied else {})
    written = {
        file: {key: tensor.nbytes for key, tensor in tensors.items()}
        for file, tensors in files.items()
    }
    return table, plan.boxes(), written


LAYOUTS = [
    ({"dp_replicate": 2, "dp_shard": 2}, False),
    ({"dp_shard": 2, "tp": 2}, False),
    ({"dp_replicate": 2, "tp": 2}, True),
    ({"pp": 2, "tp": 2}, True),
    ({"pp": 2, "dp_shard": 2, "pp_schedule": "Interleaved1F1B"}, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "tied"), LAYOUTS, ids=str)
def test_each_part_is_written_once_and_replicas_share_the_work(pool, parallel, tied):
    results = pool.run(4, planned, parallel, tied)
    tables, boxes = [table for table, _, _ in results], [boxes for _, boxes, _ in results]
    shared = shared_tensors(tables)
    stages = parallel.get("pp", 1)
    assert sum(map(bool, tables)) == stages
    assert ("model.tok_embeddings.weight" in shared) == (tied and stages > 1)
    assert {"random.torch", "random.python"} <= shared.keys() or stages == 1
    entries = tensor_entries(tables, boxes)  # raises if the parts of a tensor do not make it up
    keys = Counter(key for _, _, files in results for parts in files.values() for key in parts)
    doubled = {key for key, times in keys.items() if times > 1}
    # The test passes no `shared` for these
    assert all(key.split("[")[0] in shared for key in doubled)
    in_files = {
        (key.split("[")[0], file)
        for _, _, files in results
        for file, parts in files.items()
        for key in parts
    }
    assert all(
        (name, file) in in_files for name, entry in entries.items() for file in entry.grid.files
    )
    size = {
        rank: sum(sum(parts.values()) for parts in files.values())
        for rank, (_, _, files) in enumerate(results)
    }
    for stage in range(stages):
        ranks = range(4 // stages * stage, 4 // stages * (stage + 1))
        assert max(size[rank] for rank in ranks) < 1.3 * min(size[rank] for rank in ranks)


def stock(folder: Path) -> None:
    """The same Stateful objects with torch's own planner and files."""
    before, after = states({"dp_shard": 2}), states({"dp_shard": 2})
    dcp.save(before, checkpoint_id=folder)
    with torch.no_grad():
        for part in (p for stage in after["model"].parts for p in stage.parameters()):
            part.zero_()
    dcp.load(after, checkpoint_id=folder)
    for name, part in before.items():
        assert isinstance(part, Stateful)
        for key, value in part.state_dict().items():
            assert torch.equal(
                *(getattr(t, "_local_tensor", t) for t in (value, after[name].state_dict()[key]))
            ), key


@pytest.mark.slow
def test_torch_distributed_checkpoint_saves_and_loads_the_same_states(pool, tmp_path):
    pool.run(2, stock, tmp_path / "stock")


def test_parts_that_do_not_make_up_a_tensor_cannot_be_committed():
    table = {"model.a": ("F32", (4, 2), 0)}
    box = ["model-00000.safetensors", [0, 0], [2, 2]]
    assert (
        math.prod(
            tensor_entries([table], [[[0, 0, box]], [[0, 0, [box[0], [2, 0], [2, 2]]]]])[
                "model.a"
            ].shape
        )
        == 8
    )
    with pytest.raises(ValueError, match="do not make up its shape"):
        tensor_entries([table], [[[0, 0, box]]])


def test_plain_values_do_not_change_the_numbers_of_layouts():
    """A plain value may have another shape on each process; numbers of DTensors are compared
    between processes.
    """
    table = Plan({"data": {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(3)}}).table
    assert [number for _, _, number in table.values()] == [-1, -2, -1]


def misplaced() -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    value = DTensor.from_local(
        torch.zeros(3, 2), mesh, [Shard(0)], shape=torch.Size((4, 2)), stride=(2, 1)
    )
    with pytest.raises(
        ValueError, match=r"model.w: holds \(3, 2\), and by its placements \(2, 2\)"
    ):
        Plan({"model": {"w": value}})


def test_a_part_of_another_size_than_its_placements_say_is_not_saved(pool):
    pool.run(2, misplaced)


def test_what_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"progress\.step: a checkpoint holds tensors only"):
        Plan({"progress": {"step": 3}})
