"""Expert parallel: what each of four ranks holds of a block, and the rows that it sends.

What it is: the placements of a block's parameters with dp_shard = 4 and ep = 2, and the sizes of
the first all-to-all of a forward.
Why it is here: the same four ranks are cut in two ways, for experts and for the rest, so the ranks
that gather weights together are not those that exchange rows.
"""

from __future__ import annotations

from docs.pictures.canvas import RANKS, WIDTH, Canvas
from docs.pictures.recorded import Expert, Held

COLUMN = 86
BOX = 82


def draw_experts(ranks: list[Expert]) -> str:
    picture = Canvas(
        "dp_shard = 4, ep = 2: a block of four experts",
        "Each rank stores one expert and a quarter of the other weights; it computes two experts "
        "for the tokens of two ranks",
    )
    y = picture.lines(
        8,
        36,
        [
            "Experts 0 and 1 belong to ep 0, experts 2 and 3 to ep 1. A token",
            "chooses two; a rank has 32 tokens, so 64 rows.",
        ],
        10.5,
    )
    for i, rank in enumerate(ranks):
        x = _left(i)
        picture.text(x + BOX / 2, y + 8, f"rank {i}", 11.5, "middle", bold=True)
        place = f"shard {rank.expert_shard}, ep {rank.ep}"
        picture.text(x + BOX / 2, y + 21, place, 10.5, "middle", ink="soft")
    y += 42
    y = _row(picture, y, "Between steps", [_stored(rank) for rank in ranks])
    together = " and ".join(_same(ranks, "ep", value) for value in (0, 1))
    y = _band(picture, y, f"all-gather of experts: ranks {together}")
    y = _band(picture, y, "all-gather of the rest: all four ranks")
    y = _row(picture, y, "While the block computes", [_gathered(rank, ranks) for rank in ranks])
    together = " and ".join(_same(ranks, "expert_shard", value) for value in (0, 1))
    y = _band(picture, y, f"all-to-all of rows: ranks {together}")
    y = _row(
        picture, y, "Rows of 32 numbers", [_rows(i, rank, ranks) for i, rank in enumerate(ranks)]
    )
    y = _band(picture, y, "all-to-all of the results: the same rows back")
    picture.line(8, y + 2, WIDTH - 8, y + 2)
    picture.lines(
        8,
        y + 18,
        [
            "Gradients of experts: a reduce-scatter over the ranks that gather",
            "them. The rows of both ranks of ep are in them already.",
        ],
        10.5,
    )
    return picture.finish(y + 44)


def _left(rank: int) -> float:
    return 8 + rank * COLUMN


def _row(picture: Canvas, y: float, title: str, labels: list[list[str]]) -> float:
    """A box with lines for each rank; returns where the next part begins."""
    picture.text(8, y, title, 10.5, ink="soft")
    height = 13 * max(len(lines) for lines in labels) + 9
    for i, lines in enumerate(labels):
        picture.labelled(_left(i), y + 6, BOX, height, RANKS[i], lines, 10.5)
    return y + height + 16


def _band(picture: Canvas, y: float, text: str) -> float:
    picture.labelled(8, y - 4, WIDTH - 16, 19, "f", [text], 10.5)
    return y + 32 if "all-to-all" in text or "rest" in text else y + 23


def _part(rank: Expert, name: str) -> Held:
    return next(held for held in rank.held if held.name == name)


def _experts(numbers: list[int]) -> str:
    word = "expert" if len(numbers) == 1 else "experts"
    return f"{word} {', '.join(map(str, numbers))}"


def _stored_experts(rank: Expert) -> list[int]:
    parts = {_part(rank, f"feed_forward.experts.{name}").rows for name in ("w1", "w2", "w3")}
    (rows,) = parts
    return list(range(*rows))


def _stored(rank: Expert) -> list[str]:
    wq = _part(rank, "attention.wq")
    router = _part(rank, "feed_forward.router")
    return [
        _experts(_stored_experts(rank)),
        f"wq rows {wq.rows[0]}-{wq.rows[1] - 1}",
        f"router row {', '.join(map(str, range(*router.rows)))}",
    ]


def _gathered(rank: Expert, ranks: list[Expert]) -> list[str]:
    experts = [e for other in ranks if other.ep == rank.ep for e in _stored_experts(other)]
    return [_experts(sorted(experts)), "whole wq, ...", "whole router"]


def _rows(number: int, rank: Expert, ranks: list[Expert]) -> list[str]:
    peers = [i for i, other in enumerate(ranks) if other.expert_shard == rank.expert_shard]
    lines = []
    for peer, sent in zip(peers, rank.sent, strict=True):
        lines.append(f"keeps {sent}" if peer == number else f"sends {sent} to {peer}")
    return [*sorted(lines), f"computes {sum(rank.received)}"]


def _same(ranks: list[Expert], axis: str, value: int) -> str:
    """The ranks that have this place on an axis, as "0, 2"."""
    return ", ".join(str(i) for i, rank in enumerate(ranks) if getattr(rank, axis) == value)
