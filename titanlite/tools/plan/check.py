"""Compares the memory and speed of a run with its plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig
from titanlite.tools.plan.advice import GIB
from titanlite.tools.plan.machines import MACHINES, Machine
from titanlite.tools.plan.plan import make_plan

# Words that mark another product with the same number: a slower card, or a slice of a GPU
OTHER_PARTS = {"PCIE", "NVL", "HBM2E", "MIG", "LAPTOP", "D"}
OF_NODES = {"NVL72"}  # words for the size of a node, which no device name has


def machine_of(device_name: str) -> Machine | None:
    """The machine of the table with the longest name whose words are all in the device's name.

    `NVIDIA H100 80GB HBM3` is an H100, and no H100-96GB-500W. Returns None for other products, such
    as `NVIDIA H100 PCIe`.
    """
    words = set(re.split(r"[^A-Za-z0-9]+", device_name.upper()))
    if words & OTHER_PARTS:
        return None
    fitting = [
        machine
        for name, machine in MACHINES.items()
        if set(name.upper().split("-")) - OF_NODES <= words
    ]
    return max(fitting, key=lambda machine: len(machine.name), default=None)


def comparison(
    config: Config, llama: LlamaConfig, gpus: int, device_name: str, row: Mapping[str, Any]
) -> str:
    """One line: the estimate's memory and speed, and those of a row of metrics.jsonl.

    Empty for a device that is not in the table.
    """
    machine = machine_of(device_name)
    if machine is None:
        return ""
    plan = make_plan(config, llama, gpus, machine)
    need = plan.worst
    predicted = plan.time.tokens_per_second
    measured = row["tps"]
    return (
        f"plan: predicted {need.low / GIB:.1f} to {need.high / GIB:.1f} GiB and "
        f"{predicted:,.0f} tokens/s per GPU, measured {row['memory_gib']:.1f} GiB and "
        f"{measured:,.0f} ({100 * (measured / predicted - 1):+.0f} %)"
    )
