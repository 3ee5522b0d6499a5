"""The nearest allowed word for a mistyped one, as the end of an error message."""

from __future__ import annotations

from difflib import SequenceMatcher


def suggestion(word: str, allowed: list[str], cutoff: float = 0.65) -> str:
    """`; did you mean X?` for the most similar allowed word, "" if none is similar. Equally similar ones are all named.

    `cutoff`: the similarity required, from 0 to 1 for the same word.
    """
    similarity = {other: SequenceMatcher(None, other, word, autojunk=False).ratio() for other in allowed}
    best = max(similarity.values(), default=0)
    if best < cutoff:
        return ""
    return "; did you mean " + " or ".join(other for other in allowed if similarity[other] == best) + "?"
