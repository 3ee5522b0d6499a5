"""Converts what several trainers have: batch sizes, replicas, weight decay, the lowest rate."""

from __future__ import annotations

import math

from titanlite.tools.import_config.draft import Draft


def data_ranks(draft: Draft) -> int:
    """The number of data-parallel ranks; 0 if it is not known.

    A number of processes for which the degrees leave no layout makes no file.
    """
    others = math.prod(draft.get(f"parallel.{axis}") for axis in ("pp", "cp", "tp"))
    replicas = [draft.get("parallel.dp_replicate"), draft.get("parallel.dp_shard")]
    layout = others * math.prod(degree for degree in replicas if degree > 0)
    is_open = -1 in replicas  # one of them is what the others leave
    if not draft.processes:
        return 0 if is_open else layout // others
    if draft.processes % layout or (draft.processes != layout and not is_open):
        expected = f"a multiple of {layout}" if is_open else str(layout)
        draft.refusals.append(
            f"--processes {draft.processes}: expected {expected}, the product of the degrees"
        )
    return draft.processes // others


def set_batch(draft: Draft, local: int, steps: int, total: int, names: str) -> None:
    """Sets the batch sizes from any of: local batch, number of local batches, global batch.

    A number of 0 is not given. `total` counts the sequences of all processes.
    """
    ranks = data_ranks(draft)
    if total and not local and ranks:
        local = total // (ranks * (steps or 1))
    if not total or not local:
        if not ranks:
            draft.refusals.append(
                f"{draft.origin(names)}: the batch depends on the number of processes (GPUs): "
                "give --processes N"
            )
            return
        local = local or 1
        total = total or local * (steps or 1) * ranks
    parts = local * (steps or 1) * (ranks or 1)
    if steps and ranks and total != parts:
        expected = f"expected {local} x {steps} on {ranks} data-parallel ranks"
        draft.refuse(names, f"{total} sequences", expected)
    elif total % parts:
        draft.refuse(names, f"{total} sequences", f"expected a multiple of {parts}")
    draft.set("training.local_batch_size", local, names)
    draft.set("training.global_batch_size", total, names)


def replicate(draft: Draft, names: str) -> None:
    """Keeps all parameters on every process, as DDP does."""
    draft.set("parallel.dp_replicate", -1, names)
    draft.set("parallel.dp_shard", 1, names)


def spare_norms_and_biases(draft: Draft, names: str) -> None:
    """Limits weight decay to matrices, the embedding's too, unlike `optimizer.decayed`."""
    if draft.get("optimizer.weight_decay") == 0:
        return
    groups = [{"pattern": "*norm.weight", "weight_decay": 0.0}]
    if draft.get("model.qkv_bias"):
        groups.append({"pattern": "*.bias", "weight_decay": 0.0})
    draft.set("optimizer.groups", groups, names)


def set_floor(draft: Draft, lowest: float, peak: float, names: str) -> None:
    """Sets the lowest rate, which is a fraction of the peak here."""
    if peak > 0:
        draft.set("schedule.min_ratio", float(f"{lowest / peak:.6g}"), names)
