"""Rows: JSON lines, Parquet, and data sets of the package `datasets`. A row is a document.

What it is: for each row its text, and the prompt before it if there is a prompt field. A row that
cannot be used (broken JSON, not UTF-8, no such field, another type) becomes a `BadRow`; an empty
text is passed over, as an empty file is.
What it costs: a row must fit into memory; a longer line than 64 MB, or a longer text with its
prompt, is a bad row.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import ConfigError
from titanlite.tools.prepare.compressed import (
    LINE,
    ROW,
    Allowance,
    ExpandsTooFar,
    damaged,
    decompression,
    open_file,
    unreadable,
)
from titanlite.tools.prepare.documents import (
    BYTE_ORDER_MARK,
    MAX_DOCUMENT,
    BadRow,
    Document,
    Skipped,
)
from titanlite.tools.prepare.filter_report import Example
from titanlite.tools.prepare.job import File, Job, Piece
from titanlite.tools.prepare.parquet_reader import (
    Table,
    UnreadableParquet,
    describe,
    installed,
    read_rows,
)
from titanlite.tools.prepare.sources import HUB

# Bytes that are read at a time, and after which progress is reported also without a document
COUNTED = 1 << 22


def row_documents(job: Job, piece: Piece) -> Iterator[Document | BadRow | Skipped]:
    """The rows that begin in a piece.

    Raises ConfigError for a file that is damaged as a whole, or expands too far.
    """
    read: dict[str, Callable[[Job, Piece], Iterator[Document | BadRow | Skipped]]]
    read = {"jsonl": _json_lines, "parquet": _parquet, "hf": _hub}
    return read[piece.file.kind](job, piece)


def _document(row: int, values: Any, job: Job, split: str) -> Document | BadRow | None:
    """The document of a row, which should be a dict; None for an empty text."""
    if not isinstance(values, dict):
        return BadRow(
            row, f"expected an object with a field {job.field!r}, found {type(values).__name__}"
        )
    texts = []
    size = 0
    for name in (job.field, job.prompt_field):
        value = values.get(name, values) if name else ""  # a value cannot contain itself
        if value is values:
            return BadRow(row, f"no field {name!r}")
        if value is None and name == job.prompt_field:
            value = ""
        if not isinstance(value, str):
            return BadRow(row, f"field {name!r} is of type {type(value).__name__}, expected text")
        if "\0" in value:
            return BadRow(row, f"field {name!r} contains a NUL character")
        try:
            size += len(value) if value.isascii() else len(value.encode("utf-8"))
        except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can express
            return BadRow(row, f"field {name!r} is not Unicode text: {error.reason}")
        texts.append(value)
    if size > MAX_DOCUMENT:
        return BadRow(row, f"a text of {size} bytes, more than {MAX_DOCUMENT}")
    text, prompt = texts
    if not text:
        return None
    label = str(len(prompt))
    return Document(row, split, (text,), prompt=prompt, label=label, length=len(text))


def _json_lines(job: Job, piece: Piece) -> Iterator[Document | BadRow | Skipped]:
    """The lines that begin in the piece.

    Blank lines are passed over, and counted for line numbers.
    """
    file = piece.file
    row = 0
    try:
        with open_file(Path(file.path), file.compression) as stream:
            compressed = decompression(stream)
            if piece.begin:  # the line that begins before the piece belongs to the one before
                stream.seek(piece.begin - 1)
                _skip_line(stream)
            offset = 0 if compressed else stream.tell()  # in the text
            offset_reported = offset
            place_reported = offset  # in the file, which for compressed text is another place
            while compressed or offset < piece.end:
                line = stream.readline(MAX_DOCUMENT + 1)
                if not line:
                    break
                offset += len(line)
                found: Document | BadRow | Skipped | None = None
                cut = len(line) > MAX_DOCUMENT and not line.endswith(b"\n")
                if row == 0 and piece.begin == 0:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                if cut:
                    offset += _skip_line(stream)
                    found = BadRow(row, f"a line of more than {MAX_DOCUMENT} bytes")
                elif line.strip():
                    found = _line(row, line, job, file.split)
                if compressed:
                    compressed.allowance.spend(LINE)
                if found is None and offset - offset_reported >= COUNTED:
                    found = Skipped()
                if found is not None:
                    place = compressed.position if compressed else offset
                    yield found._replace(progress=place - place_reported)
                    place_reported = place
                    offset_reported = offset
                row += 1
    except damaged() as error:
        if not file.compression:
            raise
        raise unreadable(file.path, file.compression, error, row + 1) from None


def _line(row: int, line: bytes, job: Job, split: str) -> Document | BadRow | None:
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(row, f"not UTF-8 ({error.reason})")
    except json.JSONDecodeError as error:
        return BadRow(row, f"not JSON: {error.msg} (column {error.colno})")
    except (ValueError, RecursionError) as error:  # a number or a nesting without end
        return BadRow(row, f"not JSON: {error}")
    return _document(row, values, job, split)


def _skip_line(stream: IO[bytes]) -> int:
    """Reads to the end of the line; returns its bytes."""
    size = 0
    while block := stream.readline(COUNTED):
        size += len(block)
        if block.endswith(b"\n"):
            break
    return size


def _parquet(job: Job, piece: Piece) -> Iterator[Document | BadRow | Skipped]:
    """The rows of the row groups that begin in the piece, as if all groups had equal sizes in
    bytes.
    """
    file = piece.file
    columns = [name for name in (job.field, job.prompt_field) if name]
    table = _table(file, columns)
    _check_columns(file, columns, table)
    bounds = _group_bounds(file, table)
    groups = [
        i for i, rows in enumerate(table.rows) if rows > 0 and piece.begin <= bounds[i] < piece.end
    ]
    if not groups:
        return
    # What a file states can be untrue
    size_of_groups = min(file.size, sum(table.sizes[group] for group in groups))
    allowance = Allowance(
        size_of_groups, f"each row counts {ROW} bytes", "write Parquet as JSON lines"
    )
    row = 0
    skipped = 0  # bytes that counted since something was yielded
    reported = bounds[groups[0]]  # a place in the file
    starts = itertools.accumulate((table.rows[group] for group in groups), initial=0)
    first_row = dict(zip(groups, starts, strict=False))  # the last start is the number of rows
    try:
        for group, values in read_rows(file.path, columns, groups, MAX_DOCUMENT):
            size = ROW + sum(_length(value) for value in values)
            allowance.spend(size)
            skipped += size
            found: Document | BadRow | Skipped | None = _parquet_document(
                row, columns, values, job, file.split
            )
            row += 1
            if found is None and skipped >= COUNTED:
                found = Skipped()
            if found is not None:
                share = min(1.0, (row - first_row[group]) / table.rows[group])
                place = bounds[group] + int(share * (bounds[group + 1] - bounds[group]))
                yield found._replace(progress=place - reported)
                reported = place
                skipped = 0
    except (UnreadableParquet, ExpandsTooFar) as error:
        problem = "" if isinstance(error, ExpandsTooFar) else "damaged Parquet data: "
        number = first_row_number(job, piece) + row
        raise ConfigError(f"{file.path}: row {number}: {problem}{error}") from None


def _length(value: bytes | int | str | None) -> int:
    if isinstance(value, int):
        return value
    return len(value) if isinstance(value, bytes) else 0


def _parquet_document(
    row: int, columns: list[str], values: list[bytes | int | str | None], job: Job, split: str
) -> Document | BadRow | None:
    texts: dict[str, str | None] = {}
    for name, value in zip(columns, values, strict=True):
        if isinstance(value, int):
            return BadRow(row, f"a text of {value} bytes, more than {MAX_DOCUMENT}")
        if isinstance(value, str):
            return BadRow(row, f"field {name!r} is of type {value}, expected text")
        try:
            texts[name] = None if value is None else value.decode("utf-8")
        except UnicodeDecodeError as error:
            return BadRow(row, f"not UTF-8 ({error.reason})")
    return _document(row, texts, job, split)


def _table(file: File, columns: list[str]) -> Table:
    """What a Parquet file says of itself. Raises ConfigError if it cannot be read."""
    if not installed():
        raise ConfigError(f"{file.path}: Parquet needs pyarrow: pip install 'titanlite[parquet]'")
    try:
        return describe(file.path, columns)
    except UnreadableParquet as error:
        raise ConfigError(f"{file.path}: damaged Parquet data: {error}") from None


def _group_bounds(file: File, table: Table) -> list[int]:
    """Where each row group begins if all have equal sizes in bytes, and the end of the file."""
    groups = len(table.rows)
    return [file.size * group // groups for group in range(groups)] + [file.size]


def _check_columns(file: File, columns: list[str], table: Table) -> None:
    """Raises ConfigError if a column is absent or has no text."""
    for name in columns:
        if name not in table.types:
            near = suggestion(name, table.names) or f"; it has {', '.join(table.names[:20])}"
            raise ConfigError(f"{file.path}: has no column {name!r}{near}")
        if "string" not in table.types[name]:
            raise ConfigError(
                f"{file.path}: column {name!r} is of type {table.types[name]}, expected string"
            )


def _hub(job: Job, piece: Piece) -> Iterator[Document | BadRow]:
    """The rows of one shard of a data set, which is `hf:NAME:CONFIG:SPLIT#SHARD`."""
    spec, _, index = piece.file.path.rpartition("#")
    data = open_hub(spec)
    try:
        shard = (
            data.shard(num_shards=data.num_shards, index=int(index))
            if data.num_shards > 1
            else data
        )
        for row, values in enumerate(shard):
            found = _document(row, values, job, piece.file.split)
            if isinstance(found, Document):
                found = found._replace(
                    progress=sum(len(text.encode()) for text in (found.prompt, *found.blocks))
                )
            if found is not None:
                yield found
    except Exception as error:  # datasets raises whatever its readers raise
        raise ConfigError(
            f"{spec}: {type(error).__name__}: {(str(error) or '?').splitlines()[0]}"
        ) from None


@functools.lru_cache(4)
def open_hub(spec: str) -> Any:
    """A streamed data set `hf:NAME[:CONFIG[:SPLIT]]`. Raises ConfigError if there is none."""
    name, config, split = (*spec.removeprefix(HUB).split(":"), "", "")[:3]
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{spec}: needs the package datasets: pip install 'titanlite[hf]'"
        ) from None
    try:
        # From save_to_disk
        if Path(name, "state.json").is_file() or Path(name, "dataset_dict.json").is_file():
            data = datasets.load_from_disk(name)
            data = data[split or "train"] if isinstance(data, dict) else data
            return data.to_iterable_dataset(num_shards=max(1, len(data.cache_files)))
        return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:  # not found, no network, a wrong config or split, a damaged file
        raise ConfigError(
            f"{spec}: {type(error).__name__}: {(str(error) or '?').splitlines()[0]}"
        ) from None


def numbered(job: Job, examples: list[Example]) -> list[Example]:
    """Examples of rows with their number in the file in place of that in a piece, which begins at
    byte `begin`.

    Only for those that are shown, after all parts: the lines before a piece have to be read and
    counted.
    """
    files = {file.path: file for file in job.files}
    found = list[Example]()
    for example in examples:
        file = files[example["file"]]
        begin = example["begin"]
        row = first_row_number(job, Piece(file, begin, file.size)) + example["row"]
        found.append({"file": file.path, "row": row, "text": example["text"]})
    return found


def hub_columns(spec: str) -> list[str]:
    """The columns of a data set; if it does not list them, those of its first row, which is read
    for that.
    """
    data = open_hub(spec)
    try:
        return list(data.column_names or next(iter(data), {}))
    except Exception as error:  # datasets raises whatever its readers raise
        raise ConfigError(
            f"{spec}: {type(error).__name__}: {(str(error) or '?').splitlines()[0]}"
        ) from None


def first_row_number(job: Job, piece: Piece) -> int:
    """The number of a piece's first row in its file, from 1 on.

    A piece within a JSONL file has to count lines.
    """
    if piece.begin and piece.file.kind == "jsonl":
        with open(piece.file.path, "rb") as stream:
            stream.seek(piece.begin - 1)
            left = piece.begin - 1 + _skip_line(stream)
            stream.seek(0)
            lines = 1
            while left > 0 and (block := stream.read(min(COUNTED, left))):
                lines = lines + block.count(b"\n")
                left = left - len(block)
        return lines
    if piece.begin and piece.file.kind == "parquet":
        table = _table(piece.file, [])
        bounds = _group_bounds(piece.file, table)
        return 1 + sum(
            rows for rows, begin in zip(table.rows, bounds, strict=False) if begin < piece.begin
        )
    return 1
