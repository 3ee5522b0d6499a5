"""Plain data about a step for `titanlite explain`.

What it is: the collectives of each rank in the order in which it calls them, with the memory that
it holds meanwhile, and what it stores of each parameter. Imports no torch: the processes that run
the step send this, and text, JSON and the page are made from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.tools.plan.counts import RING_PARTS

# The parts of a step, in the order in which they begin
PHASES = (
    "data",
    "forward",
    "backward",
    "gradient sum",
    "clip",
    "update",
    "balance",
    "agreement",
    "loss",
    "metrics",
)

# Roles of the place of a message between stages
ACTIVATIONS = "activations"
GRADIENTS = "gradients"


@dataclass(frozen=True)
class Place:
    """The place in the program that called a collective."""

    phase: str  # one of PHASES
    module: str  # its fully-qualified name; empty outside the model
    role: str  # input, inside or output of the module, in the backward of their gradients
    recomputed: bool  # a forward within the backward
    line: str  # of ours, the innermost that was running: file:number
    function: str  # that it is in
    parameters: tuple[str, ...]  # that FSDP gathers, or whose gradients it reduces


@dataclass(frozen=True)
class Event:
    """A collective of one rank, or its end of a message."""

    number: int  # on this rank, from 1
    kind: str
    axis: str
    ranks: tuple[int, ...]  # of the group; of a message the sender and the receiver
    operation: str  # sum, max, bitwise or; empty where nothing is combined
    shape: tuple[int, ...]  # of what this rank gives; of what it receives, if it gives nothing
    dtype: str
    whole_bytes: int  # of the gathered result, of what is reduced, of the message
    times: int  # how many equal ones it stands for
    flops: int  # of this rank's products and attention since the event before
    held: dict[str, int]  # bytes in memory, by category
    peak: int  # bytes at the fullest moment since the event before
    local_batch: int  # from 0; -1 outside forward and backward
    place: Place
    # Some numbers of what this rank gives, and of what it has afterwards; None: not finite
    before: tuple[float | None, ...] = ()
    after: tuple[float | None, ...] = ()
    # Said of it by `sentences.py`
    tensor: str = ""
    why: str = ""
    cause: str = ""  # the line of ours that set it up: file:number
    loop_line: str = ""  # the line of the step, or of train.py, that called it
    behind: str = ""  # the computation that it could overlap with
    hidden_flops: int = 0  # of that

    @property
    def sent_bytes(self) -> int:
        """Bytes sent in an ideal ring of n: (n - 1) / n of all, for an all-reduce twice that."""
        if self.kind in RING_PARTS:
            parts = len(self.ranks) - 1
            return RING_PARTS[self.kind] * self.whole_bytes * parts // len(self.ranks)
        return 0 if self.kind == "recv" else self.whole_bytes


@dataclass(frozen=True)
class Holding:
    """The part of a parameter that a rank stores: first and last index, -1 as the last of none."""

    rows: tuple[int, int]  # of dimension 0
    columns: tuple[int, int]  # of dimension 1; (0, 0) of a vector


@dataclass(frozen=True)
class Parameter:
    """One parameter, and who stores which part of it."""

    name: str
    shape: tuple[int, ...]
    placements: str  # as torch prints them, with the axes
    holdings: dict[int, Holding]  # by rank; a rank of another pipeline stage is not in it


@dataclass(frozen=True)
class Lane:
    """The events and the memory of one rank."""

    rank: int
    coordinates: dict[str, int]  # axis -> its place along it, from 0
    events: tuple[Event, ...]
    flops_after: int  # after its last event
    peak: dict[str, int]  # bytes in memory, by category, at the fullest moment of the step


@dataclass(frozen=True)
class Change:
    """The collectives of one kind along one axis, before and after a degree is doubled."""

    axis: str
    kind: str
    calls: int
    whole_bytes: int
    sent_bytes: int
    calls_doubled: int
    whole_bytes_doubled: int
    sent_bytes_doubled: int


@dataclass(frozen=True)
class Doubled:
    """The changes if one degree is doubled."""

    axis: str
    degree: int
    problem: str  # why that is not possible; empty if it is
    same_batch: bool  # else the global batch is doubled too, where it cannot be divided further
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Explanation:
    """The explanation of a step of a layout."""

    title: str
    degrees: dict[str, int]
    processes: int
    real: bool  # run on gloo with numbers; else on pretended ranks, whose tensors have only shapes
    local_batches: int
    tokens: int  # of all ranks in a step
    blocks: int  # of the model
    shown_blocks: int  # fewer, if equal blocks are shown once
    lanes: tuple[Lane, ...]
    parameters: tuple[Parameter, ...]
    doubled: tuple[Doubled, ...]
