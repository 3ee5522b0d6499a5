"""Pipeline schedules in colour: which rank computes what, and when.

What it is: the orders of `draw_schedule.py`, which are those that torch runs, placed in time: a
forward takes 1, a backward 2, each half of a divided backward 1. With two stages per rank a stage
has half of the layers, so its tasks take half of that.
Why it is here: warmup, steady state, cooldown and the bubble are shapes.
"""

from __future__ import annotations

from docs.draw_schedule import SCHEDULES, Timed, idle_time, place_in_time, rank_orders
from docs.pictures.canvas import WIDTH, Canvas

# Kind of task -> colour
KINDS = {"F": "a", "B": "b", "I": "d", "W": "c"}
LEGEND = [
    ("a", "forward"),
    ("b", "backward"),
    ("d", "gradients of inputs"),
    ("c", "of weights"),
]
LEFT = 44


def stages_of(schedule: str) -> int:
    """Stages of a rank, as the config's default has them."""
    return 1 if schedule in ("GPipe", "1F1B") else 2


def most_kept(row: list[Timed]) -> int:
    """The largest number of microbatches whose activations a rank keeps, with one stage."""
    kept = most = 0
    for timed in row:
        kept += {"F": 1, "B": -1}[timed.task.kind]
        most = max(most, kept)
    return most


def draw_one_stage() -> str:
    """GPipe and 1F1B on four ranks."""
    pp, microbatches = 4, 6
    picture = Canvas(
        "GPipe and 1F1B on four ranks",
        "Both have the same idle time; with 1F1B a rank keeps the activations of fewer microbatches",
    )
    y = picture.lines(
        8, 36, ["6 microbatches, pp = 4. The number is that of the microbatch."], 10.5
    )
    y = _legend(picture, y, LEGEND[:2])
    for schedule in ("GPipe", "1F1B"):
        placed = place_in_time(rank_orders(schedule, pp, microbatches))
        y = _draw_schedule(picture, schedule, placed, y, 1, 58)
        top = y - 17 - 19 * pp
        picture.text(WIDTH - 8, top - 7, "keeps", 10, "end", ink="soft")
        for rank, row in enumerate(placed):
            picture.text(WIDTH - 8, top + 13 + 19 * rank, str(most_kept(row)), 10.5, "end")
    picture.lines(
        8,
        y,
        [
            "keeps: microbatches whose activations the rank holds at most.",
            "Idle: (pp - 1) / (M + pp - 1) = 3/9 of the time in both.",
        ],
        10.5,
    )
    return picture.finish(y + 24)


def draw_all() -> str:
    """Every schedule on two ranks."""
    pp, microbatches = 2, 4
    picture = Canvas(
        "Seven pipeline schedules on two ranks",
        "From GPipe to DualPipeV, the idle time falls from 1/5 to 1/25",
    )
    y = picture.lines(
        8,
        36,
        [
            "4 microbatches, pp = 2. GPipe and 1F1B have one stage per rank,",
            "the others two: the lower half of a row is the later stage.",
        ],
        10.5,
    )
    y = _legend(picture, y, LEGEND)
    for schedule in SCHEDULES:
        stages = stages_of(schedule)
        placed = place_in_time(rank_orders(schedule, pp, microbatches, stages))
        y = _draw_schedule(picture, schedule, placed, y, stages, 16)
    return picture.finish(y + 2)


def _legend(picture: Canvas, y: float, entries: list[tuple[str, str]]) -> float:
    x = 8.0
    for fill, name in entries:
        picture.box(x, y - 7, 12, 10, fill)
        picture.text(x + 16, y + 2, name, 10)
        x += 30 + 5.1 * len(name)
    return y + 20


def _draw_schedule(
    picture: Canvas, name: str, placed: list[list[Timed]], y: float, stages: int, right: float
) -> float:
    """Its name and a row for each rank; returns where the next one begins."""
    end = max(timed.end for row in placed for timed in row)
    scale = (WIDTH - right - LEFT) / end
    part = f"idle {idle_time(placed)}"
    picture.text(8, y, name, 11.5, bold=True)
    picture.text(WIDTH - right, y, part, 10.5, "end")
    y += 7
    height = 17 if stages == 1 else 30
    for rank, row in enumerate(placed):
        picture.text(8, y + height / 2 + 4, f"rank {rank}", 10)
        picture.box(LEFT, y, end * scale, height, "plain", edge=False)
        first_stage = min(timed.task.stage for timed in row)
        for timed in row:
            later = timed.task.stage > first_stage
            top = y + height / 2 if later else y
            picture.labelled(
                LEFT + timed.start * scale,
                top,
                (timed.end - timed.start) * scale,
                height if stages == 1 else height / 2,
                KINDS[timed.task.kind],
                [str(timed.task.microbatch)],
                10,
            )
        y += height + (2 if stages == 1 else 4)
    return y + 17
