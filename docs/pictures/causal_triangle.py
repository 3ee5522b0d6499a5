"""Context parallel: which rank computes which part of a causal attention.

What it is: a square for each query (row) and key (column) that it attends to, in the colour of the
rank that has the query, from the positions that `context_parallel.py` gives each rank.
Why it is here: why a rank has a chunk of each half of the sequence.
"""

from __future__ import annotations

from docs.pictures.canvas import RANKS, Canvas


def keys_of(positions: list[int]) -> int:
    """How many keys the queries at these positions attend to, all together."""
    return sum(position + 1 for position in positions)


def _ranges(positions: list[int]) -> str:
    """0, 1, 2, 6, 7 -> 0-2, 6-7."""
    firsts = [position for position in positions if position - 1 not in positions]
    lasts = [position for position in positions if position + 1 not in positions]
    return ", ".join(f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True))


def draw_triangle(consecutive: list[list[int]], balanced: list[list[int]]) -> str:
    """`consecutive`, `balanced`: the positions of each rank, cut in either way."""
    seq_len = sum(len(positions) for positions in balanced)
    picture = Canvas(
        "cp = 2: who computes which attention",
        "With consecutive tokens rank 1 has most of the work; with a chunk of each half both have "
        "the same",
    )
    y = picture.lines(
        8,
        36,
        [
            f"{seq_len} tokens. A row is a query, a column a key; the colour is the",
            "rank that has the query. A query attends to no later key.",
        ],
        10.5,
    )
    cell = 10
    for x, title, ranks in (
        (8, "consecutive tokens", consecutive),
        (192, "a chunk of each half", balanced),
    ):
        picture.text(x, y + 8, title, 11.5, bold=True)
        top = y + 15
        for rank, positions in enumerate(ranks):
            for query in positions:
                for key in range(query + 1):
                    picture.box(x + key * cell, top + query * cell, cell, cell, RANKS[rank])
        below = top + seq_len * cell + 14
        for rank, positions in enumerate(ranks):
            picture.box(x, below - 9, 10, 10, RANKS[rank])
            text = f"rank {rank}: {_ranges(positions)}: {keys_of(positions)} keys"
            picture.text(x + 15, below, text, 10)
            below += 15
    picture.lines(
        8,
        below + 6,
        [
            "Right, as with cp_method all_gather: 2 cp chunks, of which",
            "rank r has r and 2 cp - 1 - r. Then all ranks have the same work.",
        ],
        10.5,
    )
    return picture.finish(below + 32)
