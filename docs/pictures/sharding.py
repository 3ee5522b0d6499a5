"""Which part of a matrix a rank holds: with FSDP, and with FSDP and tensor parallel.

What it is: two pictures of the placements that `parallelize.py` gives a block's parameters.
Why it is here: FSDP2 cuts each parameter by rows, where FSDP1 cut one flat tensor of all; and with
tp neighbouring ranks do not hold neighbouring rows. Both are easier seen than said.
"""

from __future__ import annotations

from docs.pictures.canvas import RANKS, WIDTH, Canvas
from docs.pictures.recorded import Held

GRID = ["(dp_shard 0, tp 0)", "(dp_shard 0, tp 1)", "(dp_shard 1, tp 0)", "(dp_shard 1, tp 1)"]


def _rows(held: Held) -> str:
    return f"rows {held.rows[0]}-{held.rows[1] - 1}"


def _columns(held: Held) -> str:
    return f"columns {held.columns[0]}-{held.columns[1] - 1}"


def draw_two_axes(ranks: list[list[Held]]) -> str:
    """wq and wo in dp_shard = 2, tp = 2. `ranks`: what each rank holds."""
    picture = Canvas(
        "Two matrices over dp_shard = 2 and tp = 2",
        "Ranks 0 to 3 hold rows 0-7, 16-23, 8-15 and 24-31 of wq, and a quarter of wo each",
    )
    y = picture.lines(
        8, 36, ["tp cuts first; then FSDP cuts by rows what a rank has.", "Same colour: same rank."]
    )
    for i, name in enumerate(GRID):
        x = 8 + (i % 2) * 174
        top = y + (i // 2) * 22
        picture.labelled(x, top, 170, 18, RANKS[i], [f"rank {i} {name}"], 10.5)
    y += 62
    for title, name, x in [("wq: tp cuts rows", "wq", 8), ("wo: tp cuts columns", "wo", 192)]:
        held = [next(h for h in own if h.name == f"attention.{name}") for own in ranks]
        side = 160
        picture.text(x, y, title, 11.5, bold=True)
        for rank, part in enumerate(held):
            scale = side / part.shape[0]
            left = x + part.columns[0] * scale
            top = y + 8 + part.rows[0] * scale
            width = (part.columns[1] - part.columns[0]) * scale
            height = (part.rows[1] - part.rows[0]) * scale
            labels = [f"rank {rank}", _rows(part)]
            if width < side:
                labels.append(_columns(part))
            else:
                labels = [f"rank {rank}: {_rows(part)}"]
            picture.labelled(left, top, width, height, RANKS[rank], labels, 10)
        picture.text(x, y + side + 24, f"{part.shape[0]} rows x {part.shape[1]} columns", 10.5)
    y += 206
    picture.lines(
        8,
        y,
        [
            "An all-gather over dp_shard (ranks 0 and 2; ranks 1 and 3) gives",
            "a rank the half that tp cut for it, with which it multiplies.",
        ],
        10.5,
    )
    return picture.finish(y + 24)


def draw_rows(ranks: list[list[Held]]) -> str:
    """The parameters of a block in dp_shard = 4."""
    picture = Canvas(
        "FSDP2 cuts every parameter by rows",
        "Each of four ranks holds a quarter of the rows of every parameter of a block",
    )
    y = picture.lines(8, 36, ["One block, dp_shard = 4: the parts of ranks 0, 1, 2, 3."])
    y += 2
    for rank in range(4):
        picture.labelled(8 + rank * 50, y, 46, 16, RANKS[rank], [f"rank {rank}"], 10.5)
    y += 38
    stored, whole = 150, 276
    picture.text(8, y, "parameter", 10.5, ink="soft")
    picture.text(stored, y, "between steps", 10.5, ink="soft")
    picture.text(whole, y, "while computing", 10.5, ink="soft")
    y += 10
    top = y
    scale = 0.95
    for i, first in enumerate(ranks[0]):
        height = first.shape[0] * scale
        y += max(28 - height, 0) / 2
        width = max(first.shape[1] * scale, 4)
        middle = y + height / 2
        picture.text(8, middle + 1, first.name, 11)
        shape = f"{first.shape[0]} x {first.shape[1]}" if first.shape[1] > 1 else first.shape[0]
        picture.text(8, middle + 14, f"{shape}, {first.rows[1]} rows each", 10, ink="soft")
        for rank, own in enumerate(ranks):
            part = own[i]
            rows = part.rows[1] - part.rows[0]
            picture.box(stored, y + part.rows[0] * scale, width, rows * scale, RANKS[rank])
        picture.box(whole, y, width, height, "plain")
        y += height + max(28 - height, 0) / 2 + 10
    arrow = (stored + 60, whole - 12)
    picture.arrow(arrow[0], top + 40, arrow[1], top + 40)
    picture.text(arrow[0] + 27, top + 32, "all-gather", 10, "middle")
    picture.arrow(arrow[1], top + 86, arrow[0], top + 86)
    picture.text(arrow[0] + 27, top + 78, "free", 10, "middle")
    picture.arrow(arrow[1], top + 132, arrow[0], top + 132)
    picture.text(arrow[0] + 27, top + 124, "reduce-scatter", 10, "middle")
    picture.text(arrow[0] + 27, top + 145, "of gradients", 10, "middle")
    picture.line(8, y, WIDTH - 8, y)
    picture.lines(
        8,
        y + 16,
        [
            "One all-gather carries all parameters of a block. Its gradients and",
            "AdamW's two moments are cut at the same rows.",
        ],
        10.5,
    )
    return picture.finish(y + 40)
