"""Tensor parallel: a block on two ranks, from module to module.

What it is: the forward of a block with tp = 2: recorded outputs of its modules and collectives, in
order, with the rows or columns that each rank has of each weight.
Why it is here: the pair of a matrix cut by rows and one cut by columns, with one all-gather before
and one reduce-scatter after, is the whole idea; attention and feed-forward both have it.
"""

from __future__ import annotations

from docs.pictures.canvas import RANKS, WIDTH, Canvas
from docs.pictures.recorded import Collective, Held, Output

NAMES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}


def draw_block(ranks: list[list[Output | Collective]], held: list[list[Held]]) -> str:
    picture = Canvas(
        "tp = 2: one block on two ranks",
        "Each rank computes half of the heads and half of the hidden columns; an all-gather before "
        "and a reduce-scatter after each pair of matrices",
    )
    y = picture.lines(
        8,
        36,
        [
            "B = 2 sequences of S = 16 tokens, D = 32, 4 query heads and 2",
            "key/value heads of 8, F = 48. Shapes are those that a rank has.",
        ],
        10.5,
    )
    width = 168
    lefts = (8, WIDTH - 8 - width)
    for rank, x in enumerate(lefts):
        picture.text(x + width / 2, y + 6, f"rank {rank}", 11.5, "middle", bold=True)
    y += 14
    for group in _groups(ranks[0]):
        if isinstance(group, Collective):
            picture.labelled(8, y, WIDTH - 16, 19, "f", [_words(group)], 10.5)
        else:
            height = 15 * sum(len(_lines(name, held[0], ranks[0])) for name in group) + 7
            for rank, x in enumerate(lefts):
                lines = [line for name in group for line in _lines(name, held[rank], ranks[rank])]
                picture.labelled(x, y, width, height, RANKS[rank], lines, 10.5)
                picture.arrow(x + width / 2, y + height, x + width / 2, y + height + 9)
            y += height - 19
        y += 28
    for x in lefts:
        picture.text(x + width / 2, y + 12, "to the next block: (2, 8, 32)", 10.5, "middle")
    return picture.finish(y + 22)


def _groups(events: list[Output | Collective]) -> list[Collective | list[str]]:
    """Collectives, and modules that compute one after the other between them.

    A matrix cut by columns reports its output after its reduce-scatter: its product comes before.
    """
    groups: list[Collective | list[str]] = []
    for event in events:
        if isinstance(event, Collective):
            groups.append(event)
        elif event.module.endswith((".wo", ".w2")):
            groups[-1:] = [[event.module], groups[-1]]
        elif event.module in ("attention", "feed_forward"):
            groups.append([f"{event.module}: residual"])
        elif groups and isinstance(groups[-1], list) and "residual" not in groups[-1][0]:
            groups[-1].append(event.module)
        else:
            groups.append([event.module])
    return _with_kernel(groups)


def _with_kernel(groups: list[Collective | list[str]]) -> list[Collective | list[str]]:
    """Adds what has no weights: attention between wv and wo, and the product in the feed-forward."""
    for group in groups:
        if isinstance(group, list) and group[0] == "attention.wo":
            group.insert(0, "heads")
        if isinstance(group, list) and group[0] == "feed_forward.w2":
            group.insert(0, "gate")
    return groups


def _lines(name: str, held: list[Held], events: list[Output | Collective]) -> list[str]:
    """What the picture says of a module."""
    shapes = {event.module: event.shape for event in events if isinstance(event, Output)}
    if name == "heads":
        heads = shapes["attention.wq"][2] // 8
        return [f"attention with {heads} of 4 heads"]
    if name == "gate":
        return ["silu(w1 x) · (w3 x)"]
    if name.endswith(": residual"):
        return [f"+ residual {shapes[name.removesuffix(': residual')]}"]
    part = next(own for own in held if own.name == name)
    short = name.rpartition(".")[2]
    if part.columns[1] - part.columns[0] < part.shape[1]:
        return [f"{short} columns {part.columns[0]}-{part.columns[1] - 1}", "partial sums"]
    if part.rows[1] - part.rows[0] < part.shape[0]:
        return [f"{short} rows {part.rows[0]}-{part.rows[1] - 1} → {shapes[name]}"]
    return [f"{short} → {shapes[name]}"]


def _words(collective: Collective) -> str:
    means = {
        "all_gather": "all tokens to both ranks",
        "reduce_scatter": "sum; half of the tokens to each",
    }
    return f"{NAMES[collective.kind]} over {collective.axis}: {means[collective.kind]}"
