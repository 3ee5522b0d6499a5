"""What several trainers mean by the same words: batches, ZeRO stages, precision, schedules."""

from __future__ import annotations

import math

from titanlite.tools.import_config.mapping import Draft

PER_PROCESS = (
    "training.global_batch_size counts all processes, and the config does not say how many: give "
    "--processes N, or multiply it by the number of data-parallel processes"
)


def data_ranks(draft: Draft) -> int:
    """The number of data-parallel ranks; 0 if the number of processes is not known."""
    others = math.prod(int(draft.get(f"parallel.{axis}")) for axis in ("pp", "cp", "tp"))
    return max(0, draft.processes // max(1, others))


def batch_sizes(draft: Draft, local: str, accumulation: str, total: str) -> None:
    """Local and global batch size from three foreign keys, of which some have values.

    `accumulation` is a number of local batches, `total` a number of sequences over all processes.
    """
    names = f"{local} {accumulation} {total}"
    ranks = data_ranks(draft)
    num_local = whole(draft.number(local))
    num_batches = whole(draft.number(accumulation)) or 1
    num_global = whole(draft.number(total))
    if num_global and not num_local and ranks:
        num_local = num_global // (ranks * num_batches)
    if not num_global:
        num_global = (num_local or 1) * num_batches * max(1, ranks)
        if not ranks:
            draft.decide(PER_PROCESS)
    num_local = num_local or 1
    if num_global % num_local:
        fitting = math.gcd(num_global, num_local)
        draft.decide(
            f"training.local_batch_size = {fitting}: {num_local} does not divide the global batch "
            f"of {num_global} sequences"
        )
        num_local = fitting
    draft.set("training.local_batch_size", num_local, names)
    draft.set("training.global_batch_size", num_global, names)


def whole(number: float) -> int:
    """The number if it is whole and above 0, else 0."""
    if 0 < number < 1 << 53 and number == int(number):
        return int(number)
    return 0


def zero_stage(draft: Draft, name: str) -> None:
    """A ZeRO stage as what FSDP does with gathered weights."""
    stage = draft.value(name)
    if stage == 0:
        data_parallel(draft, name)
    elif stage in (1, 2):
        draft.set("parallel.reshard_after_forward", "never", name)
    elif stage == 3:
        draft.set("parallel.reshard_after_forward", "always", name)
    else:
        draft.lack(name, stage, "expected a stage from 0 to 3")


def data_parallel(draft: Draft, names: str) -> None:
    """Parameters on every process (DDP)."""
    draft.set("parallel.dp_replicate", -1, names)
    draft.set("parallel.dp_shard", 1, names)


STRATEGIES = {
    "1": "FULL_SHARD",
    "2": "SHARD_GRAD_OP",
    "3": "NO_SHARD",
    "4": "HYBRID_SHARD",
    "5": "HYBRID_SHARD_ZERO2",
}


def sharding_strategy(draft: Draft, name: str, given: str = "") -> None:
    """FSDP1's strategy, by name or number; `given` if the key's value has more words."""
    word = (given or str(draft.value(name))).upper()
    strategy = STRATEGIES.get(word, word).lstrip("_")
    if strategy in ("FULL_SHARD", "HYBRID_SHARD"):
        draft.set("parallel.reshard_after_forward", "always", name)
    elif strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2"):
        draft.set("parallel.reshard_after_forward", "never", name)
    elif strategy == "NO_SHARD":
        data_parallel(draft, name)
    else:
        draft.lack(name, word, f"expected one of {', '.join(STRATEGIES.values())}")
    if strategy.startswith("HYBRID"):
        draft.decide(
            f"{name} = {word}: set parallel.dp_shard to the processes of a node, and "
            "parallel.dp_replicate to the number of nodes"
        )


def offload(draft: Draft, name: str, key: str) -> None:
    """Where DeepSpeed keeps parameters or moments."""
    device = draft.value(name)
    if device == "cpu":
        draft.set(key, True, name)
    elif device != "none":
        draft.lack(name, device, "offload to NVMe is not built; parallel.cpu_offload uses memory")


def min_ratio(draft: Draft, lowest: str, peak: str) -> None:
    """The floor of the schedule, which we write as a fraction of the peak."""
    if draft.number(peak) > 0:
        ratio = draft.number(lowest) / draft.number(peak)
        draft.set("schedule.min_ratio", float(f"{ratio:.6g}"), f"{lowest} {peak}")
    else:
        draft.lack(lowest, draft.value(lowest), f"schedule.min_ratio is a fraction of {peak}")


def decide_flavor(draft: Draft) -> None:
    """Says what a shape that is given by keys leaves open."""
    draft.decide(
        "model: the shape is given by keys; a flavor (model.flavor) of the same model also sets "
        "RoPE and norms"
    )
