"""The large flavors on their clusters, without either: built, cut and sharded on a process group
that is pretended.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from titanlite.config.load import load_config
from titanlite.distributed.mesh import Mesh
from titanlite.model.flavors import resolve_flavor
from titanlite.model.llama import Llama
from titanlite.parallel.parallelize import split_and_parallelize
from titanlite.rules.check import check_layout


def account(
    arguments: list[str], vocab_size: int, world_size: int, rank: int
) -> tuple[dict[str, int], int]:
    """For one process of the cluster: the whole size of each parameter that it has a part of, and
    the size of its parts.
    """
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    config = load_config(arguments)
    llama = resolve_flavor(config.model, vocab_size)
    mesh = Mesh("cpu", check_layout(config, llama, world_size), 60)
    with torch.device("meta"):
        model = Llama(llama, config.training.seq_len)
    parts = split_and_parallelize(model, config, mesh, compiled=False)
    named = {name: p for part in parts for name, p in part.named_parameters()}
    return {name: p.numel() for name, p in named.items()}, sum(
        p.to_local().numel() for p in named.values()
    )


CLUSTERS = [  # flavor, processes, options, parameters of the whole model
    ("llama3_8b", 64, ["parallel.tp=8"], 8_030_261_248),
    ("llama3_70b", 256, ["parallel.pp=4", "parallel.dp_shard=8"], 70_553_706_496),
    pytest.param(  # slow: sixteen stages; the smaller two hold the promise
        "llama3_405b",
        512,
        ["parallel.pp=8", "parallel.cp=2", "parallel.pp_schedule=Interleaved1F1B"],
        405_853_388_800,
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("flavor", "processes", "options", "parameters"), CLUSTERS)
def test_every_parameter_of_a_large_model_is_held_once(
    pool, flavor, processes, options, parameters
):
    arguments = [flavor, "--training.local_batch_size=8", "--training.global_batch_size=512"]
    arguments += [f"--{option}" for option in options]
    # a pretended rank resolves no `auto`
    arguments += ["--compile.enabled=false", "--training.compute_dtype=bfloat16"]
    pp = int(dict(option.split("=") for option in options).get("parallel.pp", 1))
    started, whole, per_process = time.monotonic(), {}, []
    for stage in range(pp):  # the first process of each
        rank = stage * processes // pp
        ((sizes, held),) = pool.run(1, account, arguments, 128256, processes, rank, timeout=60)
        assert not whole.keys() & sizes.keys(), "a parameter on two stages"
        whole |= sizes
        norms = sum(size for name, size in sizes.items() if "norm" in name)
        # Matrices are cut over all other axes, norms over all but tp = 8. All of these sizes
        # divide.
        assert held == (sum(sizes.values()) - norms) * pp // processes + norms * pp * 8 // processes
        per_process.append(held)
    assert sum(whole.values()) == parameters
    assert max(per_process) < 1.3 * parameters / processes, "no stage is much heavier than the mean"
    assert time.monotonic() - started < 60
