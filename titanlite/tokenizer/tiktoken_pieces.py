"""Cuts a text into pieces that tiktoken can encode.

Why it is here: tiktoken's matcher recurses. It fails on about a million characters, and on long
runs of one kind.
What it costs: hardly any time. A text is cut at a space after another character, where all patterns
cut too, so the ids stay the same. Only runs of more than 25,000 characters with no white space, or
of white space alone, are cut elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.tokenizer.nfc import nfc

MAX_PIECE = 400_000
MAX_RUN = 25_000


def pieces(text: str, normalise: bool = False) -> Iterator[str]:
    """Yields the pieces in order; with `normalise`, normalises to NFC before the text is cut."""
    if normalise:
        text = nfc(text)
    start = 0
    while start < len(text):
        end = _end(text, start)
        yield from _short_runs(text[start:end])
        start = end


def _end(text: str, start: int) -> int:
    """Finds the end of the piece that begins at `start`.

    It ends before the last space that follows another character, if there is one.
    """
    limit = start + MAX_PIECE
    if limit >= len(text):
        return len(text)
    cut = text.rfind(" ", start + 1, limit)
    while cut > 0 and text[cut - 1].isspace():
        cut = text.rfind(" ", start + 1, cut)
    return cut if cut > 0 else limit


def _short_runs(piece: str) -> Iterator[str]:
    """Cuts a piece into parts without long runs; almost always the piece itself."""
    if not _has_long_run(piece):
        yield piece
        return
    begin = 0
    run = 1
    for i in range(1, len(piece)):
        if piece[i].isspace() == piece[i - 1].isspace():
            run += 1
        else:
            run = 1
        if run > MAX_RUN:
            yield piece[begin:i]
            begin = i
            run = 1
    yield piece[begin:]


def _has_long_run(piece: str) -> bool:
    """Tests fast whether a run of white space, or without it, may be longer than MAX_RUN.

    Such a run covers one of the blocks that begin at the multiples of half its length.
    """
    half = MAX_RUN // 2
    for start in range(0, len(piece) - half + 1, half):
        block = piece[start : start + half]
        if block.isspace() or block.split(None, 1) == [block]:
            return True
    return False
