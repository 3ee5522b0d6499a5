"""The bound is what a run holds in an update, to the byte; a run that exceeds it is not started."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused, run_refused
from model_builder import build_stages
from runs import train_run
from torch import Tensor

from titanlite.config.schema import Config, OptimizerConfig, ParallelConfig, TrainingConfig
from titanlite.distributed.dtensor import local_part
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel import required_memory
from titanlite.parallel.required_memory import Required
from titanlite.runtime import limits

MIB = 1 << 20


def nbytes(tensor: Tensor) -> int:
    return local_part(tensor).nbytes


def needed_and_held(
    parallel: dict[str, Any], optimizer: OptimizerConfig, training: dict[str, Any]
) -> tuple[int, int]:
    """The bound of this rank, and the bytes of what it holds after an update."""
    config = Config(
        parallel=ParallelConfig(**parallel),
        optimizer=optimizer,
        training=TrainingConfig(**training),
    )
    parts = build_stages(parallel, **training).model_parts
    needed = required_memory.required_memory(parts, config, torch.device("cpu"))
    assert needed.on_gpu == 0
    update = build_optimizer(parts, optimizer)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    update.step()
    held = sum(map(nbytes, parameters))
    held += sum(nbytes(parameter.grad) for parameter in parameters if parameter.grad is not None)
    for state in update.state_dict()["state"].values():
        held += sum(nbytes(value) for name, value in state.items() if name != "step")
    return needed.on_host, held


@pytest.mark.parametrize(
    ("parallel", "optimizer", "training"),
    [
        ({"dp_shard": 2}, OptimizerConfig(), {"frozen": "tok_embeddings.*"}),
        ({"pp": 2}, OptimizerConfig(name="muon"), {}),
        ({"tp": 2}, OptimizerConfig(state_dtype="bfloat16"), {"param_dtype": "bfloat16"}),
    ],
    ids=["FSDP, some frozen", "stages, Muon", "tp, bfloat16"],
)
def test_the_bound_is_what_an_update_holds(pool, parallel, optimizer, training):
    for needed, held in pool.run(2, needed_and_held, parallel, optimizer, training):
        assert needed == held > 0


def train_with_little_memory(arguments: list[str], meminfo: Path) -> int:
    limits.MEMORY = meminfo
    return train_run(arguments)


def test_a_run_that_does_not_fit_is_refused(pool, arguments, tmp_path):
    """On two processes, whose parts do not fit together."""
    (tmp_path / "meminfo").write_text("MemAvailable: 1500 kB\n")
    numbers = ("this host: parameters, gradients and moments need 0.00", "and 0.00143 GiB are free")
    with run_refused(*numbers):
        pool.run(2, train_with_little_memory, arguments, tmp_path / "meminfo")
    assert not (tmp_path / "debug/metrics.jsonl").exists()


def test_each_gpu_is_its_own_and_a_host_is_shared(caplog):
    gpu = Required(0, 70 * MIB, 100 * MIB, 2 * MIB, 10 * MIB)
    required_memory._require([gpu, gpu, gpu])
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "titanlite"):
        required_memory._require([gpu, gpu._replace(on_gpu=81 * MIB)])
    assert "the GPU of rank 1: parameters" in caplog.text
    with refused("the GPU of rank 2: ", "need 0.0986 GiB", "0.0977 GiB are free"):
        required_memory._require([gpu, gpu, gpu._replace(on_gpu=101 * MIB)])
    # Ranks 2 and 3 are another host
    with refused("the host of ranks 2 to 3: ", "need 0.0117 GiB, and 0.00977 GiB are free"):
        required_memory._require([gpu, gpu, *2 * [gpu._replace(first=2, on_host=6 * MIB)]])
    required_memory._require([gpu._replace(on_host=1 << 60, free_on_host=math.inf)])  # not known
