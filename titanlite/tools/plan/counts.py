"""The counts of an optimizer step: what a rank of a layout holds, computes and sends.

What it is: numbers without times. `trace.py` counts them in the real program, `estimate.py`
computes them by formula; memory, step time and the text of `titanlite plan` are made from them.
Imports no torch. The ranks of a pipeline differ, the others are equal: there is one `RankCounts`
for each rank of the pp axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

FLOAT8 = ("float8", "float8, scale per row")
# How many times (n - 1) / n of the whole tensor a rank sends in an ideal ring of n ranks
RING_PARTS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}


@dataclass(frozen=True)
class Collective:
    """The calls of one kind along one axis in a step."""

    # pp, dp_replicate, dp_shard, cp or tp; dp_shard_cp: weights, where cp is used; ep, and
    # expert_shard: weights of experts that ep divides; world: all ranks
    axis: str
    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send or recv
    size: int  # ranks of the group
    count: int
    whole_bytes: int  # sum over the calls: gathered results, reduced tensors, or messages

    @property
    def sent_bytes(self) -> int:
        """Bytes sent in an ideal ring of n: (n - 1) / n of all, for an all-reduce twice that."""
        if self.kind in RING_PARTS:
            return RING_PARTS[self.kind] * self.whole_bytes * (self.size - 1) // self.size
        return 0 if self.kind == "recv" else self.whole_bytes


@dataclass(frozen=True)
class Calls:
    """Calls of one kind, each of the same size; an estimate of a `Collective` is a sum of them."""

    axis: str
    kind: str
    size: int
    count: int
    bytes_each: float


@dataclass(frozen=True)
class Product:
    """Equal matrix products of a step: (rows, inner) times (inner, columns)."""

    rows: int
    inner: int
    columns: int
    dtype: str  # of the operands: bfloat16, float32, or one of FLOAT8
    count: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns * self.count


# (rows, inner, columns, dtype) of a product, and how often it is computed
Counted: TypeAlias = tuple[tuple[int, int, int, str], float]


def equal_parts(total: int, parts: int) -> Iterator[tuple[int, int]]:
    """Divides a number into integers that differ by at most 1: yields (integer, how many).

    So the rows of experts are divided if all are chosen equally often.
    """
    size, larger = divmod(total, parts)
    for part, count in ((size, parts - larger), (size + 1, larger)):
        if part and count:
            yield part, count


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank at the moment of the step when it holds most."""

    parameters: int  # as stored: sharded, in param_dtype
    gradients: int  # as the optimizer reads them
    optimizer: int  # moments and other states
    whole_gradients: int  # not yet reduced over the ranks that share the weights
    gathered: int  # weights of units that compute, in compute_dtype
    activations: int  # what the backward needs, logits not counted
    logits: int  # logits, their gradient, and what the loss keeps
    buffers: int  # of communication

    @property
    def total(self) -> int:
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.whole_gradients
            + self.gathered
            + self.activations
            + self.logits
            + self.buffers
        )


@dataclass(frozen=True)
class RankCounts:
    """One rank in one optimizer step, all local batches together."""

    pp_rank: int
    stages: tuple[int, ...]  # the pipeline stages that it holds; (0,) without a pipeline
    num_parameters: int  # stored by this rank
    num_trained: int  # those that the optimizer updates
    memory: Memory
    products: tuple[Product, ...]  # recomputed ones too
    attention_flops: int  # forward, backward and recomputed; the causal mask is not discounted
    pointwise_bytes: int  # read and written by the other operators, in eager mode
    # The part of `pointwise_bytes` in experts that are never compiled; 0 in a trace
    never_compiled_bytes: int = field(default=0, kw_only=True)
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class StepCounts:
    """A step of a layout."""

    source: str  # traced or estimated
    degrees: dict[str, int]  # axis -> ranks, outermost first
    local_batches: int  # of one rank in a step
    tokens: int  # of all ranks in a step
    ranks: tuple[RankCounts, ...]  # by pp_rank
