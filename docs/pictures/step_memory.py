"""The memory of a step, from operator to operator.

What it is: what rank 0 holds after each change, by category, recorded in a step on pretended
tensors by the recorder of `titanlite plan`.
Why it is here: where the peak is, and what recomputation takes away from it.
What it costs: five seconds for each recorded step.
"""

from __future__ import annotations

import itertools

from docs.pictures.canvas import WIDTH, Canvas
from docs.pictures.recorded import Step

# Lowest first: (name, categories of the recorder, colour)
LAYERS = [
    ("parameters", ("parameters",), "a"),
    ("moments of AdamW", ("optimizer",), "e"),
    ("gradients, sharded", ("gradients",), "b"),
    ("gathered weights", ("gathered",), "c"),
    ("whole gradients, copies", ("whole_gradients", "buffers"), "f"),
    ("activations", ("activations",), "d"),
    ("logits", ("logits",), "g"),
]
GIB = 2**30
COLUMNS = 120  # of a curve; each shows the fullest of its moments
LEFT = 30
HEIGHT = 120


def draw_memory(steps: list[tuple[str, Step]]) -> str:
    """`steps`: (title, step), all drawn to one scale."""
    picture = Canvas(
        "Memory of a rank over one step",
        "The peak is at the turn from forward to backward; recomputation keeps it low",
    )
    y = picture.lines(
        8,
        36,
        [
            "Llama 3.2 1B, dp_shard = 8, one sequence of 4,096 tokens per",
            "rank, bf16 compute. From left to right: operators, in order.",
        ],
        10.5,
    )
    x = 8.0
    for name, _, fill in LAYERS:
        if x + 20 + 5.4 * len(name) > WIDTH:
            x = 8.0
            y += 16
        picture.box(x, y - 7, 11, 10, fill)
        picture.text(x + 15, y + 2, name, 10)
        x += 26 + 5.4 * len(name)
    y += 26
    largest = max(sum(held.values()) for _, step in steps for held in step.held)
    for title, step in steps:
        y = _draw_step(picture, title, step, largest, y)
    return picture.finish(y - 8)


def _draw_step(picture: Canvas, title: str, step: Step, largest: int, y: float) -> float:
    """Returns where the next one begins."""
    peak = max(sum(held.values()) for held in step.held)
    picture.text(8, y, title, 11.5, bold=True)
    picture.text(WIDTH - 8, y, f"at most {peak / GIB:.1f} GiB", 10.5, "end")
    top = y + 8
    bottom = top + HEIGHT
    scale = HEIGHT / largest
    moments = _fullest(step.held)
    width = (WIDTH - 8 - LEFT) / len(moments)
    for gib in range(0, int(largest / GIB) + 1, 4):
        level = bottom - gib * GIB * scale
        picture.line(LEFT, round(level, 1), WIDTH - 8, round(level, 1), dashed=gib > 0)
        picture.text(LEFT - 4, round(level + 3.5, 1), str(gib), 10, "end", ink="soft")
    picture.text(LEFT + 3, top + 10, "GiB", 10, ink="soft")
    below = [0] * len(moments)
    for _, categories, fill in LAYERS:
        above = [
            low + sum(held[category] for category in categories)
            for low, held in zip(below, moments, strict=True)
        ]
        edge = _outline(above, width, bottom, scale)
        floor = _outline(below, width, bottom, scale)
        picture.area(edge + floor[::-1], fill)
        below = above
    for name, index in _parts(step):
        x = round(LEFT + (WIDTH - 8 - LEFT) * index / len(step.held), 1)
        picture.line(x, top, x, bottom + 14)
        picture.text(
            x + 3 if x < 300 else x - 3, bottom + 12, name, 10, "start" if x < 300 else "end"
        )
    return bottom + 40


def _fullest(held: list[dict[str, int]]) -> list[dict[str, int]]:
    """The fullest moment of each of `COLUMNS` equal parts of a step."""
    edges = [len(held) * i // COLUMNS for i in range(COLUMNS + 1)]
    return [
        max(held[first:last], key=lambda moment: sum(moment.values()))
        for first, last in itertools.pairwise(edges)
    ]


def _outline(
    levels: list[int], width: float, bottom: float, scale: float
) -> list[tuple[float, float]]:
    """A curve of steps, from left to right: the corners."""
    points: list[tuple[float, float]] = []
    for i, level in enumerate(levels):
        height = round(bottom - level * scale, 1)
        if points and points[-1][1] == height:
            points.pop()  # the step is as high as the one before
        else:
            points.append((round(LEFT + i * width, 1), height))
        points.append((round(LEFT + (i + 1) * width, 1), height))
    return points


def _parts(step: Step) -> list[tuple[str, int]]:
    """Where forward, backward and update begin; the recorder halves the backward."""
    return [(name, index) for name, index in step.parts if name != "late backward"]
