"""Computes which rank stores which rows of a parameter.

What it is: the arithmetic of DTensor's placements, for every rank of a mesh. A placement
`Shard(d)` on an axis of n ranks cuts dimension d into n parts, in the order of the axes. A
`_StridedShard(d, split_factor)` is made by FSDP where tensor parallelism has cut the same dimension
already: the inner axis cuts first, and FSDP cuts what each rank then has.

    wq of 32 rows, dp_shard = 2 and tp = 2, placements (_StridedShard(0, split_factor=2), Shard(0)):
    tp cuts into 0 - 15 and 16 - 31, then dp_shard cuts each in two. Rank 1 is (dp_shard 0, tp 1):
    the first half of 16 - 31.

Why it is here: torch computes it for the calling rank only; here no rank has to exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from titanlite.tools.explain.events import Holding, Parameter
from titanlite.tools.explain.step import Stored


def holding(stored: Stored, place: Mapping[str, int], cp: int) -> Holding:
    """The part that the rank at this place of the mesh stores."""
    shard = place["dp_shard"] * cp + place["cp"]
    places = {**place, "dp_shard_cp": shard}
    if "ep" in stored.axes:  # experts: ep divides these ranks, neighbours first
        ep = stored.sizes[stored.axes.index("ep")]
        places |= {"expert_shard": shard // ep, "ep": shard % ep}
    # A strided axis cuts last
    order = sorted(range(len(stored.axes)), key=lambda i: stored.cuts[i][1] > 1)
    ends = []
    for dimension in (0, 1):
        start = 0
        stop = stored.shape[dimension] if dimension < len(stored.shape) else 1
        for i in order:
            if stored.cuts[i][0] % max(1, len(stored.shape)) != dimension or stored.cuts[i][0] < 0:
                continue
            start, stop = _part(start, stop, stored.sizes[i], places[stored.axes[i]])
        ends.append((start, stop - 1 if stop > start else -1))
    return Holding(ends[0], ends[1])


def _part(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """One of so many parts; the last ones are smaller or empty."""
    size = -(-(stop - start) // parts)
    return min(stop, start + index * size), min(stop, start + (index + 1) * size)


def holdings(
    by_stage: Mapping[int, Sequence[Stored]], degrees: Mapping[str, int]
) -> tuple[Parameter, ...]:
    """Who stores the parameters of all stages. `by_stage`: pp rank -> what one of its ranks has."""
    ranges: Iterable[Sequence[int]] = [range(degree) for degree in degrees.values()]
    places = [dict(zip(degrees, place, strict=True)) for place in product(*ranges)]
    found: dict[str, Parameter] = {}
    for stage, parameters in by_stage.items():
        for stored in parameters:
            held = {
                rank: holding(stored, place, degrees["cp"])
                for rank, place in enumerate(places)
                if place["pp"] == stage
            }
            if stored.name in found:  # a tied embedding, which two stages hold
                held |= found[stored.name].holdings
            found[stored.name] = Parameter(stored.name, stored.shape, stored.placements, held)
    return tuple(found.values())
