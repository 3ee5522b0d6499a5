"""Trains with Ray Train: one worker per node, whose call of titanlite starts the training processes
of that node.

    pip install 'ray[train]'
    python docs/orchestrators/ray_train.py --nodes 1 --processes 2 --steps 20

The workers have a process group of Ray, which is not used: the training processes form another one.
On a cluster, set `--nodes`, give each worker the GPUs of its node with `resources_per_worker`, and
`run.folder` and the `storage_path` of Ray folders that all nodes share.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchTrainer


def train_on_node(options: dict[str, Any]) -> dict[str, Any]:
    """The worker of a node. Returns the last metrics."""
    import titanlite

    context = train.get_context()
    nodes, node = context.get_world_size(), context.get_world_rank()
    address = broadcast_from_rank_zero(ray.util.get_node_ip_address())
    several = (
        {"NNODES": str(nodes), "NODE_RANK": str(node), "MASTER_ADDR": address} if nodes > 1 else {}
    )
    result = titanlite.launch(
        options["config"], options["overrides"], processes=options["processes"], env=several
    )
    # Ray starts the workers again if its FailureConfig allows it; the run resumes
    if result.exit_code:
        raise RuntimeError(
            f"training ended with exit code {result.exit_code}; see {result.folder / 'log.txt'}"
        )
    return result.metrics


def run(options: dict[str, Any], nodes: int, storage: str | None = None) -> Any:
    """Ray's result of a run on `nodes` nodes; `return_value` is that of the first worker."""
    scaling = ScalingConfig(num_workers=nodes, resources_per_worker={"CPU": 1})
    return TorchTrainer(
        train_on_node,
        train_loop_config=options,
        scaling_config=scaling,
        run_config=RunConfig(storage_path=storage),
    ).fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="debug")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2, help="of each node")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    keys = {"training.steps": given.steps}
    found = run(
        {"config": given.config, "processes": given.processes, "overrides": keys}, given.nodes
    )
    print(found.return_value)
