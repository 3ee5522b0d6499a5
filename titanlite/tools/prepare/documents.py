"""Defines the documents that every reader yields.

What it is: a reader is a function of a piece of a file (`job.py`) that yields documents in a fixed
order, and a `BadRow` for each that it cannot read. There is one reader for text (`text_files.py`),
one for rows (`rows.py`), one for token ids (`token_files.py`) and one for datatrove's token ids
(`datatrove_files.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from titanlite.tools.chat.conversation import Piece

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # at the start of a file, where it is not part of the text
MAX_DOCUMENT = 1 << 26  # bytes of a row, and of a text that is compared with others


class Document(NamedTuple):
    """A document, or a range of a large one. Blocks are read once, and may come from a file."""

    row: int  # in its piece, from 0 on
    split: str  # train or validation; hash: by the hash of the text
    blocks: Iterable[str] = ()
    ids: Iterable[np.ndarray[Any, Any]] | None = None  # instead of text, in blocks
    enclosed: bool = False  # bos and eos are put around the ids
    prompt: str = ""  # before the text, and not a target
    pieces: tuple[Piece, ...] = ()  # a conversation; its whole text is the only block
    begins: bool = True  # the document begins here
    ends: bool = True
    label: str = ""  # in the fingerprint
    length: int = 0  # likewise


class BadRow(NamedTuple):
    """A row that is left out and counted."""

    row: int
    problem: str
