"""Weights of any format into a model under any layout, each process reading what it holds.

What it is: DCP plans which part of which tensor a process needs; the storage it reads from is here a `FullState`, whose
tensors are whole and read by rows.
What it costs: each process reads the rows that its parameters lie in, once; no collective but one to agree on errors.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from titanlite.checkpoint.dcp import TensorStorageReader
from titanlite.config.schema import ConfigError
from titanlite.config.spelling import suggestion
from titanlite.distributed.agreement import raise_together
from titanlite.formats.full_state import BLOCK, FullState

logger = logging.getLogger("titanlite")
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fill(full: FullState, state: dict[str, Any]) -> None:
    """Fills `state` (parameter name -> Tensor or DTensor) in place. Dtypes may differ: this takes weights, not a run.

    Raises ConfigError with all that does not fit, nothing filled then; CorruptCheckpoint where a file is not whole.
    """
    if problems := differences(full, state):
        raise ConfigError(problems)
    converted = {f"{full.tensors[name].dtype} -> {tensor.dtype}" for name, tensor in state.items()}
    logger.info("%s: %d tensors, %s", full.path, len(state), ", ".join(sorted(converted)))
    try:
        with warnings.catch_warnings():
            # Loading needs no collectives: each process plans for itself.
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp.load(state, storage_reader=_Reader(full), planner=planner, no_dist=True)
    except CheckpointException as error:  # a BaseException
        raise next(iter(error.failures.values()))[0] from None


def agree_on(work: Any) -> Any:
    """What `work()` returns, on all processes; ConfigError on all where it is raised on any of them."""
    result, problems = None, []
    try:
        result = work()
    except ConfigError as error:
        problems = error.problems
    except Exception as error:
        problems = [f"{type(error).__name__}: {str(error)[:200]}"]
    raise_together(problems)
    return result


def differences(full: FullState, state: dict[str, Any]) -> list[str]:
    """What keeps the tensors there from filling `state`: missing names with their nearest, shapes, dtypes."""
    missing = [name for name in state if name not in full.tensors]
    problems = []
    for name in missing[:8]:
        near = [
            other
            for other, tensor in full.tensors.items()
            if tensor.shape == tuple(state[name].shape) and other not in state and len(other) < 200
        ]
        problems.append(f"{full.path}: has no {name!r}{suggestion(name, near[:500])}")
    if len(missing) > 8:
        problems.append(f"{full.path}: lacks {len(missing) - 8} more of the model's {len(state)} parameters")
    for name, target in state.items():
        if (tensor := full.tensors.get(name)) is None:
            continue
        if tensor.shape != tuple(target.shape):
            problems.append(f"{full.path}: {name!r} is {tensor.shape}; the model's is {tuple(target.shape)}")
        elif tensor.dtype not in WEIGHTS:
            allowed = ", ".join(str(dtype) for dtype in WEIGHTS)
            problems.append(f"{full.path}: {name!r} is {tensor.dtype}; weights are {allowed}")
    return problems


class _Reader(TensorStorageReader):
    """Rows of a FullState for DCP's planners."""

    def __init__(self, full: FullState) -> None:
        self._full = full

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found: dict[str, Any] = {}
        for name, tensor in self._full.tensors.items():
            shape = torch.Size(tensor.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            found[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), shape, [whole])
        return Metadata(found)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            source, target = self._full.tensors[item.storage_index.fqn], planner.resolve_tensor(item).detach()
            if not source.shape:
                target.copy_(source.read().reshape(target.shape))
            elif target.numel():
                (top, *left), (height, *widths) = list(item.storage_offsets), list(item.lengths)
                sides = tuple(slice(start, start + width) for start, width in zip(left, widths, strict=True))
                rows = max(1, BLOCK // max(1, source.nbytes // source.shape[0]))
                for start in range(0, height, rows):
                    stop = min(start + rows, height)
                    target[start:stop] = source.read(top + start, top + stop)[(slice(None), *sides)]
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future
