"""Makes jobs of one file of rows, and reads the rows back."""

from __future__ import annotations

from pathlib import Path

from titanlite.tools.prepare.documents import BadRow
from titanlite.tools.prepare.job import File, Job, Piece
from titanlite.tools.prepare.rows import first_row_number, row_documents


def job_of(path: Path, kind: str, compression: str = "", prompt: str = "") -> Job:
    file = File(str(path), path.name, path.stat().st_size, "", kind, compression, "hash")
    return Job("x", ("/",), (file,), "text", prompt, "", "", 1)


def read(job: Job, cuts: list[int]) -> list:
    """(line, text or problem) of all rows of the pieces between these places."""
    file, found = job.files[0], []
    for begin, end in zip([0, *cuts], [*cuts, file.size], strict=True):
        piece = Piece(file, begin, end)
        for row in row_documents(job, piece):
            line = first_row_number(piece) + row.row
            found.append((line, row.problem if isinstance(row, BadRow) else "".join(row.blocks)))
    return found
