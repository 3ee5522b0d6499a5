"""Best-fit packing: documents are placed whole into rows of S + 1 tokens (arXiv 2404.10830).

What it is: a document of more than S + 1 tokens is first cut into full windows, which overlap by
one token as those of `Windows` do, and a rest. Documents and rests are then placed by best-fit
decreasing: the longest first, each into the fullest row that has room for it. What remains of a
row is padding. A label always belongs to the document of its token, so padding and the last tokens
of documents have no label, and every other token of the text is a target once an epoch.
Why it is here: cutting the text every S tokens cuts most documents, and the model then sees parts
of documents without their beginnings.
What it costs: at each start, 0.4 CPU seconds for 2.5 million documents (documents of equal length
are placed together); nothing is stored on disk. In memory 12 bytes per document, 16 more per
document longer than a row, and 8 per row.
"""

from __future__ import annotations

import logging

import numpy as np

from titanlite.data.shards import Array, Tokens
from titanlite.runtime.errors import ConfigError

logger = logging.getLogger("titanlite")


class PackedRows:
    """The rows of a text: first the full windows of long documents, then the packed rows."""

    def __init__(self, tokens: Tokens, seq_len: int, description: str) -> None:
        """`description` names the text in messages.

        Logs the shares of padding and of cut documents. Raises ConfigError if the text has no
        target.
        """
        self.tokens = tokens
        self.seq_len = seq_len
        self.masked = tokens.targets(0, 1) is not None  # the same for the whole text
        starts = tokens.document_starts(0, len(tokens))
        lengths = np.diff(starts, append=len(tokens))

        # Long documents: their full windows are rows
        windows = (lengths - 1) // seq_len  # per document
        long = np.flatnonzero(windows)
        self.long_starts = starts[long]
        self.window_ends = np.cumsum(windows[long])
        self.num_windows = int(windows.sum())

        # Pieces: short documents, and the rests of long ones
        piece_lengths = lengths - windows * seq_len
        with_target = np.flatnonzero(piece_lengths > 1)  # a single token has no target
        piece_starts = (starts + windows * seq_len)[with_target]
        self._pack(piece_starts, piece_lengths[with_target])
        if not self.count:
            raise ConfigError(
                f"data.packing = best_fit: the {description} has no document of two tokens or more"
            )
        used = self.num_windows * seq_len + self.packed_tokens
        self.padding = 1 - used / (self.count * seq_len)
        is_cut = lengths > seq_len + 1
        self.cut = float(is_cut.mean())
        logger.info(
            f"{description}: {len(starts):,} documents packed into {self.count:,} rows of "
            f"{seq_len} tokens; {100 * self.padding:.2f}% of the positions are padding, "
            f"{is_cut.sum():,} documents ({100 * self.cut:.2f}%) are longer than a row and cut"
        )

    def _pack(self, starts: Array, lengths: Array) -> None:
        """Places pieces of at most S + 1 tokens into the rows after the windows."""
        lengths = lengths.astype(np.int32)
        rows = best_fit(lengths, self.seq_len + 1)
        by_row = np.argsort(rows, kind="stable")
        self.starts = starts[by_row]
        self.lengths = lengths[by_row]
        self.ends = np.cumsum(np.bincount(rows))  # end of each row's pieces in `starts`
        num_tokens = np.bincount(rows, weights=lengths)  # of each row
        # The last token of a full row is a label only
        self.packed_tokens = int(num_tokens.clip(max=self.seq_len).sum())
        self.count = self.num_windows + len(self.ends)

    def fill(self, index: int, ids: Array, ignored: Array, document_mask: bool) -> Array:
        """Writes row `index`: see `Rows.fill`. Padding counts as another document."""
        offset = 0
        starts = []
        for start, length in self._pieces(index):
            ids[offset : offset + length] = self.tokens.read(start, length)
            if self.masked:
                targets = self.tokens.targets(start + 1, length - 1)
                assert targets is not None
                np.logical_not(targets, out=ignored[offset : offset + length - 1])
            offset += length
            starts.append(offset)  # the next document or the padding starts here
        return np.array(starts)

    def _pieces(self, index: int) -> list[tuple[int, int]]:
        """Lists the pieces of a row as (first token in the text, number of tokens)."""
        if index < self.num_windows:
            document = int(np.searchsorted(self.window_ends, index, "right"))
            earlier = int(self.window_ends[document - 1]) if document else 0
            start = int(self.long_starts[document]) + (index - earlier) * self.seq_len
            return [(start, self.seq_len + 1)]
        row = index - self.num_windows
        first = int(self.ends[row - 1]) if row else 0
        part = slice(first, int(self.ends[row]))
        return list(zip(self.starts[part].tolist(), self.lengths[part].tolist(), strict=True))


class _Rooms:
    """The rows that have room left, grouped by their room."""

    def __init__(self, capacity: int) -> None:
        self.rows: list[list[Array]] = [[] for _ in range(capacity + 1)]
        self.present = 0  # bit r: there are rows with room r

    def smallest(self, length: int) -> int:
        """Returns the smallest room that fits a piece; 0 if no row has enough."""
        enough = self.present >> length
        if not enough:
            return 0
        lowest_bit = enough & -enough
        return length + lowest_bit.bit_length() - 1

    def take(self, room: int, number: int) -> Array:
        """Removes and returns rows with this room: at least one, at most `number`."""
        rows = self.rows[room].pop()
        if len(rows) > number:
            self.rows[room].append(rows[number:])
            rows = rows[:number]
        elif not self.rows[room]:
            self.present &= ~(1 << room)
        return rows

    def add(self, room: int, rows: Array) -> None:
        if room and len(rows):
            self.rows[room].append(rows)
            self.present |= 1 << room


def best_fit(lengths: Array, capacity: int) -> Array:
    """Assigns each piece to a row, by best-fit decreasing.

    Lengths are from 1 to `capacity`, the capacity of a row. Pieces of one length are placed
    together: each of the fullest rows that have room takes as many as fit. The result is the same
    as if they were placed one by one.
    """
    rows = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    rooms = _Rooms(capacity)
    num_rows = 0
    placed = 0  # how many pieces of `order` are placed
    for length in np.flatnonzero(counts)[::-1].tolist():
        end = placed + int(counts[length])
        while placed < end:
            room = rooms.smallest(length)
            is_new = room == 0
            if is_new:  # no row has enough room: begin new ones
                room = capacity
            each = room // length  # pieces per row
            needed = -(-(end - placed) // each)  # rows for the rest of this length
            if is_new:
                chosen = np.arange(num_rows, num_rows + needed)
                num_rows += needed
            else:
                chosen = rooms.take(room, needed)

            number = min(len(chosen) * each, end - placed)
            rows[order[placed : placed + number]] = np.repeat(chosen, each)[:number]
            placed += number
            in_last = number - (len(chosen) - 1) * each  # the last row may have fewer
            rooms.add(room - each * length, chosen[:-1])
            rooms.add(room - in_last * length, chosen[-1:])
    return rows
