"""Best-fit packing: documents are placed whole into rows of S + 1 tokens (arXiv 2404.10830).

What it is: a document of more than S + 1 tokens is first cut into full windows, which overlap by
one token as those of `Windows` do, and a rest. Documents and rests are then placed by best-fit
decreasing, the longest first, each into the row with the least room that is enough. What remains of
a row is padding. A label never belongs to another document than its token, so padding and the ends
of documents have none, and every other token of the text is a target once an epoch.
Why it is here: cutting the text at every S tokens cuts most documents, and the model then sees the
rest of a document without its beginning.
What it costs: at each start, 0.4 CPU seconds for 2.5 million documents, since documents of equal
length are placed together; nothing is stored. In memory 12 bytes per document, 16 more per document
longer than a row, and 8 per row.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from titanlite.data.shards import Tokens
from titanlite.runtime.errors import ConfigError

Array = np.ndarray[Any, Any]
logger = logging.getLogger("titanlite")


class PackedRows:
    """The rows of a text: first the full windows of long documents, then those that are packed."""

    def __init__(self, tokens: Tokens, seq_len: int, what: str) -> None:
        """Logs the shares of padding and of cut documents.

        Raises ConfigError if the text, `what`, has no target.
        """
        self.tokens = tokens
        self.seq_len = seq_len
        self.masked = tokens.targets(0, 1) is not None
        starts = tokens.document_starts(0, len(tokens))
        lengths = np.diff(starts, append=len(tokens))
        windows = (lengths - 1) // seq_len  # full ones of each document
        long = np.flatnonzero(windows)
        self.long_starts = starts[long]
        self.window_ends = np.cumsum(windows[long])
        self.num_windows = int(self.window_ends[-1]) if len(long) else 0
        rests = np.flatnonzero(lengths - windows * seq_len > 1)  # a single token has no target
        self.starts = (starts + windows * seq_len)[rests]
        self.lengths = (lengths - windows * seq_len)[rests].astype(np.int32)
        rows = best_fit(self.lengths, seq_len + 1)
        order = np.argsort(rows, kind="stable")
        self.starts = self.starts[order]
        self.lengths = self.lengths[order]
        # Of the pieces of each row
        self.ends = np.cumsum(np.bincount(rows)) if len(rows) else np.empty(0, np.int64)
        self.count = self.num_windows + len(self.ends)
        if not self.count:
            raise ConfigError(
                f"data.packing = best_fit: the {what} has no document of two tokens or more"
            )
        self.padding = 1 - (self.num_windows * seq_len + int((self.lengths - 1).sum())) / (
            self.count * seq_len
        )
        self.cut = float((lengths > seq_len + 1).mean())
        logger.info(
            f"{what}: {len(starts):,} documents packed into {self.count:,} rows of {seq_len} tokens; "
            f"{100 * self.padding:.2f}% of the positions have no target, {100 * self.cut:.2f}% of the documents are "
            "longer than a row and cut"
        )

    def fill(self, index: int, ids: Array, ignored: Array, document_mask: bool) -> Array:
        """As `Windows.fill`. Returns where the pieces after the first, and the padding, start."""
        if index < self.num_windows:
            document = int(np.searchsorted(self.window_ends, index, "right"))
            before = int(self.window_ends[document - 1]) if document else 0
            pieces = [
                (
                    int(self.long_starts[document]) + (index - before) * self.seq_len,
                    self.seq_len + 1,
                )
            ]
        else:
            row = index - self.num_windows
            part = slice(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))
            pieces = list(zip(self.starts[part].tolist(), self.lengths[part].tolist(), strict=True))
        ignored[:] = True
        offset = 0
        begins = []
        for start, length in pieces:
            ids[offset : offset + length] = self.tokens.read(start, length)
            targets = self.tokens.targets(start + 1, length - 1) if self.masked else None
            ignored[offset : offset + length - 1] = False if targets is None else ~targets
            offset += length
            begins.append(offset)  # of the next document, or of the padding
        return np.array(begins)


def best_fit(lengths: Array, capacity: int) -> Array:
    """The row of each piece, by best-fit decreasing. Lengths are from 1 to `capacity`, which is
    that of a row.

    Pieces of one length are placed together: of the rows with the least room that is enough, each
    takes as many as fit. That is what placing one after the other would do.
    """
    rows = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    free: list[list[Array]] = [[] for _ in range(capacity + 1)]  # by room: rows that have it
    rooms = 0  # bit r: there are rows with room r
    placed = num_rows = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        end = placed + int(counts[length])
        while placed < end:
            enough = rooms >> length
            room = length + (enough & -enough).bit_length() - 1 if enough else capacity
            each = room // length
            needed = -(-(end - placed) // each)
            if enough:
                chosen = free[room].pop()
                if len(chosen) > needed:
                    free[room].append(chosen[needed:])
                    chosen = chosen[:needed]
                elif not free[room]:
                    rooms &= ~(1 << room)
            else:
                chosen = np.arange(num_rows, num_rows + needed)
                num_rows += needed
            number = min(len(chosen) * each, end - placed)
            rows[order[placed : placed + number]] = np.repeat(chosen, each)[:number]
            placed += number
            last = number - (len(chosen) - 1) * each  # pieces in the last row that was chosen
            for left, some in (
                (room - each * length, chosen[:-1]),
                (room - last * length, chosen[-1:]),
            ):
                if left and len(some):
                    free[left].append(some)
                    rooms |= 1 << left
    return rows
