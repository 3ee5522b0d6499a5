"""FSDP's streams: what a GPU gathers, computes and reduces at the same time.

What it is: the calls that FSDP2 makes in a step, in their recorded order, placed on the streams of
a GPU by the rules of FSDP2. The lengths of the bars are assumed (`LENGTHS`), and so is that the
host makes the calls of a unit when the device begins with the unit before.
    An all-gather starts after the one before it and, in the backward, after that one was copied to
    where its block reads it. A block computes after its weights were copied. A reduce-scatter
    starts after the backward of its block; the device waits for it before the block after the next.
Why it is here: on a CPU nothing of this overlaps, and a trace of a GPU is not at hand; the order of
the calls is the same on both.
Reference: `_fsdp_param_group.py` of torch 2.13, `wait_for_unshard` and `post_backward`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from docs.pictures.canvas import WIDTH, Canvas

# What is assumed: (kind, of the model's own unit) -> length
LENGTHS = {
    ("all-gather", True): 2,
    ("all-gather", False): 3,
    ("reduce-scatter", True): 2,
    ("reduce-scatter", False): 3,
    ("forward", False): 4,
    ("backward", False): 8,
    ("embedding", True): 1,
    ("output, loss", True): 2,
    ("backward of output, loss", True): 4,
    ("backward of embedding", True): 1,
}


class Bar(NamedTuple):
    """What a stream does from `start` to `end`; the unit of the model itself is empty."""

    kind: str
    unit: str
    start: int
    end: int


@dataclass
class Streams:
    """When each stream is free, and what it has done."""

    gathers: list[Bar] = field(default_factory=list)
    computes: list[Bar] = field(default_factory=list)
    reduces: list[Bar] = field(default_factory=list)
    gather_free: int = 0
    compute_free: int = 0

    def gather(self, unit: str) -> None:
        called = self.computes[-1].start if self.computes else 0
        start = max(self.gather_free, called)
        self.gather_free = start + LENGTHS["all-gather", not unit]
        self.gathers.append(Bar("all-gather", unit, start, self.gather_free))

    def copy_out(self, unit: str, in_backward: bool) -> None:
        gathered = max(bar.end for bar in self.gathers if bar.unit == unit)
        self.compute_free = max(self.compute_free, gathered)
        if in_backward:
            self.gather_free = max(self.gather_free, self.compute_free)

    def compute(self, kind: str, unit: str) -> None:
        end = self.compute_free + LENGTHS[kind, not unit]
        self.computes.append(Bar(kind, unit, self.compute_free, end))
        self.compute_free = end

    def reduce(self, unit: str) -> None:
        free = self.reduces[-1].end if self.reduces else 0
        start = max(free, self.compute_free)
        end = start + LENGTHS["reduce-scatter", not unit]
        self.reduces.append(Bar("reduce-scatter", unit, start, end))

    def wait_for_reduce(self) -> None:
        self.compute_free = max(self.compute_free, self.reduces[-1].end)


def place(calls: list[tuple[str, str]]) -> Streams:
    """The bars of the calls of a step: (label in a trace, unit)."""
    streams = Streams()
    in_backward = False
    for what, unit in calls:
        if what == "all_gather":
            streams.gather(unit)
        elif what == "all_gather_copy_out":
            streams.copy_out(unit, in_backward)
            if not unit:
                streams.compute("embedding", unit)
        elif what == "post_forward":
            streams.compute("forward" if unit else "output, loss", unit)
        elif what == "pre_backward" and not unit:
            in_backward = True
            streams.compute("backward of output, loss", unit)
        elif what == "post_backward_accumulate":
            streams.compute("backward" if unit else "backward of embedding", unit)
        elif what == "post_backward_rs_wait":
            streams.wait_for_reduce()
        elif what == "post_backward_reduce":
            streams.reduce(unit)
    return streams


def draw_streams(calls: list[tuple[str, str]]) -> str:
    streams = place(calls)
    picture = Canvas(
        "FSDP: communication beside computation",
        "Each block is gathered while the block before it computes; gradients are reduced while "
        "the backward of the next block computes",
    )
    y = picture.lines(
        8,
        36,
        [
            "Recorded order of FSDP's calls in a step with blocks 0, 1, 2,",
            "placed on a GPU's streams. Lengths are assumed. E: the unit of",
            "embedding, last norm and output.",
        ],
        10.5,
    )
    end = max(bar.end for bar in (*streams.computes, *streams.reduces))
    middle = next(bar.start for bar in streams.computes if bar.kind.startswith("backward"))
    for title, first, last in (("Forward", 0, middle), ("Backward", middle, end)):
        y = _draw_part(picture, streams, title, first, last, y)
    picture.lines(
        8,
        y + 4,
        [
            "Block 2 stays gathered from forward to backward, and so does E;",
            "blocks 0 and 1 are gathered again. Only the first all-gathers and",
            "the last reduce-scatters have no computation beside them.",
        ],
        10.5,
    )
    return picture.finish(y + 40)


def _draw_part(
    picture: Canvas, streams: Streams, title: str, first: int, last: int, y: float
) -> float:
    """Draws the three streams from time `first` to `last`; returns where the next part begins."""
    left = 82
    scale = (WIDTH - 8 - left) / (last - first)
    lanes = [
        ("all-gather", streams.gathers, "a"),
        ("compute", streams.computes, "c"),
        ("reduce-scatter", streams.reduces, "b"),
    ]
    picture.text(8, y + 10, title, 11.5, bold=True)
    y += 18
    for name, bars, fill in lanes:
        inside = [bar for bar in bars if bar.end > first and bar.start < last]
        picture.box(left, y, WIDTH - 8 - left, 22, "plain", edge=False)
        picture.text(8, y + 15, name, 10.5)
        for bar in inside:
            start = max(bar.start, first)
            stop = min(bar.end, last)
            label = bar.unit.removeprefix("layers.") or "E"
            x = left + (start - first) * scale
            picture.labelled(x, y, (stop - start) * scale, 22, fill, [label], 10.5)
        y += 26
    return y + 8
