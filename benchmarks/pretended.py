"""One process as a rank of many: the tensors it would have, and the messages that the other ranks
would send.

The process group is torch's fake one. The layout is tp 8, the rest dp_shard.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import report

sys.path.insert(0, str(report.ROOT))

from titanlite.model.flavors import LlamaConfig

OPTIONS = [
    "--parallel.tp=8",
    "--run.device=cpu",
    "--compile.enabled=false",
    "--recompute.mode=none",
]
OPTIONS += ["--training.compute_dtype=bfloat16", "--training.reduce_dtype=float32"]


def state_of(llama: LlamaConfig, ranks: int, rank: int) -> dict[str, dict[str, Any]]:
    """The state of a run with AdamW, as this rank of so many would have it, on the meta device."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from titanlite.checkpoint.state import ModelState
    from titanlite.config.load import load_config
    from titanlite.distributed.mesh import Mesh
    from titanlite.model.llama import Llama
    from titanlite.parallel.parallelize import split_and_parallelize

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    config = load_config(["debug", *OPTIONS])
    mesh = Mesh("cpu", {"pp": 1, "dp_replicate": 1, "dp_shard": ranks // 8, "cp": 1, "tp": 8}, 600)
    with torch.device("meta"):
        model = Llama(llama, config.training.seq_len)
    weights = ModelState(split_and_parallelize(model, config, mesh, compiled=False)).state_dict()
    moments = {
        f"state.{n}.{key}": torch.empty_like(w)
        for n, w in weights.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {
        "model": weights,
        "optimizer": moments | {f"state.{n}.step": torch.zeros(()) for n in weights},
    }


def box_of(value: Any, rank: int) -> tuple[Any, Any]:
    """Offsets and sizes of a rank's part of a DTensor."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    mesh = value.device_mesh
    place = (mesh.mesh == rank).nonzero()[0].tolist()
    sizes, offsets = _compute_local_shape_and_global_offset(
        value.shape, tuple(mesh.shape), place, value.placements
    )
    return tuple(offsets), tuple(sizes)


def flat(state: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{part}.{name}": value for part, own in state.items() for name, value in own.items()}


def examples(
    state: dict[str, dict[str, Any]], table: dict[str, Any]
) -> dict[int, tuple[str, Any, int | None]]:
    """Layout -> name and value of its last tensor, and which replica writes it: replicas, along tp,
    take turns.
    """
    from torch.distributed.tensor import DTensor

    found: dict[int, tuple[str, Any, int | None]] = {}
    turns = itertools.count()
    for name, value in flat(state).items():
        if isinstance(value, DTensor):
            writer = (
                next(turns) % value.device_mesh.size(1)
                if value.placements[1].is_replicate()
                else None
            )
            found[table[name][2]] = (name, value, writer)
    return found


def pretended_report(layouts: dict[int, tuple[str, Any, int | None]], rank: int) -> list[Any]:
    """What `Plan.boxes` gives on another rank: its box in each layout that it writes."""
    from titanlite.checkpoint.grid import Box

    boxes = []
    for layout, (name, value, writer) in layouts.items():
        if writer is None or writer == rank % value.device_mesh.size(1):
            file = f"{'model' if name.startswith('model.') else 'training'}-{rank:05}.safetensors"
            boxes.append((0, layout, Box(file, *box_of(value, rank))))
    return boxes
