"""The nearest match of a mistyped word.

What it is: an edit distance, and the sentence that names what is within a few letters.
"""

from __future__ import annotations


def suggestion(word: str, allowed: list[str], within: int = 0) -> str:
    """`; did you mean X?` for the nearest allowed word, "" where none is near. Ties are all named."""
    if not allowed:
        return ""
    distance = {other: _edits(word, other) for other in allowed}
    least = min(distance.values())
    if least > (within or max(2, len(word) // 3)):
        return ""
    return "; did you mean " + " or ".join(w for w in allowed if distance[w] == least) + "?"


def _edits(a: str, b: str) -> int:
    """Letters to insert, delete, replace or swap with a neighbour to turn `a` into `b` (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        older, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[-1] = min(row[-1], older[j - 2] + 1)
    return row[-1]
