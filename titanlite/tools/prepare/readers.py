"""The reader for a file: text, rows, or token ids."""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.documents import BadRow, Document, Skipped
from titanlite.tools.prepare.job import Job, Piece
from titanlite.tools.prepare.rows import row_documents
from titanlite.tools.prepare.text_files import text_documents
from titanlite.tools.prepare.token_files import token_documents


def read_documents(
    job: Job, piece: Piece, tokenizer: Tokenizer
) -> Iterator[Document | BadRow | Skipped]:
    """The documents that begin in a piece.

    Raises ConfigError for a file that is damaged as a whole.
    """
    if piece.file.kind == "text":
        return text_documents(piece, job.whole_documents)
    if piece.file.kind in ("tokens", "megatron"):
        return token_documents(piece, tokenizer)
    return row_documents(job, piece)
