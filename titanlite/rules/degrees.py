"""The degrees of a layout: the number of ranks of each mesh axis.

What it is: arithmetic on the config, done before torch is imported. A layout gives each of the five
mesh axes a degree; the product of the degrees is the world size. Conditions on sizes and on
combinations of techniques are in `divides.py` and `excludes.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

from titanlite.config.schema import ParallelConfig, TrainingConfig
from titanlite.runtime.errors import ConfigError

# Outermost first: inner axes communicate most
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def resolve_degrees(parallel: ParallelConfig, world_size: int) -> dict[str, int]:
    """Resolves -1 and returns axis -> degree for `world_size` processes.

    Raises ConfigError if the product differs.
    """
    degrees = {axis: getattr(parallel, axis) for axis in AXES}
    zeros = [axis for axis in AXES if degrees[axis] == 0]
    if zeros:
        raise ConfigError(
            [f"parallel.{axis} = 0: expected -1 (what remains) or at least 1" for axis in zeros]
        )
    open_axes = [axis for axis in AXES if degrees[axis] == -1]
    if len(open_axes) > 1:
        names = " and ".join(f"parallel.{axis}" for axis in open_axes)
        raise ConfigError(f"{names} are both -1 (what remains): only one can be")
    fixed = {axis: degree for axis, degree in degrees.items() if degree != -1}
    product = math.prod(fixed.values())
    if open_axes and world_size % product:
        raise ConfigError(_does_not_divide(fixed, world_size, parallel.ep))
    if not open_axes and product != world_size:
        used = _above_1(fixed)
        is_product = f" is {product}" if len(used) > 1 else ""
        raise ConfigError(
            f"{_factors(used)}{is_product}, but there are {world_size} processes (NGPU x NNODES): "
            f"{start(product)}, or set one degree to -1 (what remains)"
        )
    for axis in open_axes:
        degrees[axis] = world_size // product
    return degrees


def _does_not_divide(fixed: dict[str, int], world_size: int, ep: int) -> str:
    """Writes the message for degrees whose product does not divide the number of processes."""
    used = _above_1(fixed)
    product = math.prod(fixed.values())
    remedies = []
    for axis, degree in used.items():
        others = product // degree
        fitting = nearest(degree, functools.partial(_divides, world_size, others), world_size)
        if fitting:
            remedies.append(f"parallel.{axis} = {fitting}")
    is_product = f" is {product}, which" if len(used) > 1 else ""
    fewest = product
    if "dp_shard" not in fixed:  # what remains must make dp_shard x cp a multiple of ep
        fewest *= ep // math.gcd(ep, fixed["cp"])
    hint = ", or ".join([start(fewest * -(-world_size // fewest)), *remedies])
    return (
        f"{_factors(used)}{is_product} does not divide the {world_size} processes (NGPU x NNODES): "
        f"{hint}"
    )


def start(num_processes: int) -> str:
    """Writes the remedy of a layout that needs so many processes."""
    return f"start {num_processes} (on one node: NGPU={num_processes} ./run_train.sh ...)"


def _above_1(degrees: dict[str, int]) -> dict[str, int]:
    """Selects the degrees that a message shows: those above 1, or else `dp_shard`."""
    return {axis: degree for axis, degree in degrees.items() if degree > 1} or {"dp_shard": 1}


def _factors(degrees: dict[str, int]) -> str:
    return " times ".join(f"parallel.{axis} = {degree}" for axis, degree in degrees.items())


def _divides(whole: int, others: int, n: int) -> bool:
    return whole % (others * n) == 0


def needs_fsdp(parallel: ParallelConfig, world_size: int) -> bool:
    """Whether FSDP has anything to shard, or a key (offload, reshard) requires it.

    Without it, one process casts its parameters to the compute dtype where they are used.
    """
    by_key = parallel.cpu_offload or parallel.reshard_after_forward != "default"
    return world_size > 1 or by_key


def num_processes(degrees: Mapping[str, int]) -> int:
    """Computes the world size of a layout."""
    return math.prod(degrees.values())


def data_ranks(degrees: Mapping[str, int]) -> int:
    """Counts the ranks that read different batches."""
    return degrees["dp_replicate"] * degrees["dp_shard"]


def local_batches(training: TrainingConfig, degrees: Mapping[str, int]) -> int:
    """Counts the local batches of a rank in a step of the first batch size."""
    return training.global_batch_size // (training.local_batch_size * data_ranks(degrees))


def nearest(wanted: int, fits: Callable[[int], bool], limit: int) -> str:
    """Lists the three numbers up to `limit` nearest to `wanted` that fit; "" if none does."""
    fitting = [n for n in range(1, limit + 1) if fits(n)]
    fitting.sort(key=lambda n: (abs(n - wanted), n))
    return " or ".join(str(n) for n in sorted(fitting[:3]))


def multiples(value: int, of: int) -> str:
    """Lists the multiples of `of` nearest to `value`."""
    below = value // of * of
    return " or ".join(str(n) for n in (below, below + of) if n > 0)
