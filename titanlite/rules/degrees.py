"""The degrees of a layout: how many ranks each axis of the mesh has.

What it is: arithmetic on the config, done before torch is imported. A layout gives each of the five
mesh axes a degree; the product of the degrees is the world size. `check.py` has the conditions on
sizes and on combinations of techniques.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from titanlite.config.schema import ParallelConfig
from titanlite.runtime.errors import ConfigError

# Outermost first: inner axes communicate most
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def resolve_degrees(parallel: ParallelConfig, world_size: int) -> dict[str, int]:
    """Axis -> degree for `world_size` processes, -1 resolved.

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
    used = {axis: degree for axis, degree in fixed.items() if degree > 1} or {"dp_shard": 1}
    factors = " times ".join(f"parallel.{axis} = {degree}" for axis, degree in used.items())
    is_product = f" is {product}, which" if len(used) > 1 else ""
    if open_axes and world_size % product:
        remedies = []
        for axis, degree in used.items():
            others = product // degree
            fitting = nearest(degree, functools.partial(_divides, world_size, others), world_size)
            remedies += [f"parallel.{axis} = {fitting}"] if fitting else []
        near = f"; nearest that do: {', or '.join(remedies)}" if remedies else ""
        raise ConfigError(f"{factors}{is_product} does not divide the {world_size} processes{near}")
    if not open_axes and product != world_size:
        is_product = f" is {product}" if len(used) > 1 else ""
        raise ConfigError(
            f"{factors}{is_product}, but there are {world_size} processes (NGPU x NNODES); "
            f"start {product}, or set one degree to -1 (what remains)"
        )
    return {
        axis: world_size // product if degree == -1 else degree for axis, degree in degrees.items()
    }


def _divides(whole: int, others: int, n: int) -> bool:
    return whole % (others * n) == 0


def nearest(wanted: int, fits: Callable[[int], bool], limit: int) -> str:
    """The three numbers from 1 to `limit` nearest to `wanted` that fit, in words; empty if none
    does.
    """
    fitting = sorted(
        (n for n in range(1, limit + 1) if fits(n)), key=lambda n: (abs(n - wanted), n)
    )[:3]
    return " or ".join(str(n) for n in sorted(fitting))


def multiples(value: int, of: int) -> str:
    """The multiples of `of` nearest to `value`, in words."""
    below = value // of * of
    return " or ".join(str(n) for n in (below, below + of) if n > 0)


def world(degrees: dict[str, int]) -> int:
    return math.prod(degrees.values())
