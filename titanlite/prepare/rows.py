"""Rows: JSON lines, Parquet, and data sets of the package `datasets`. A row is a document.

What it is: for each row its text, and the prompt before it if there is a prompt field. A row that cannot be used
(broken JSON, not UTF-8, no such field, another type) becomes a `BadRow`; an empty text is passed over, as an empty file
is.
What it costs: a row must fit into memory; a longer line than 64 MB, or a longer text with its prompt, is a bad row.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from titanlite.config.mistakes import suggestion
from titanlite.config.schema import ConfigError
from titanlite.prepare.compressed import damaged, open_file
from titanlite.prepare.documents import BYTE_ORDER_MARK, MAX_DOCUMENT, BadRow, Document
from titanlite.prepare.filter_report import Example
from titanlite.prepare.job import File, Job, Piece
from titanlite.prepare.sources import HUB

BATCH = 256  # rows of a Parquet file that are in memory at a time
COUNTED = 1 << 22  # bytes


def row_documents(job: Job, piece: Piece) -> Iterator[Document | BadRow]:
    """The rows that begin in a piece. Raises ConfigError for a file that is damaged as a whole."""
    read: dict[str, Callable[[Job, Piece], Iterator[Document | BadRow]]]
    read = {"jsonl": _json_lines, "parquet": _parquet, "hf": _hub}
    return read[piece.file.kind](job, piece)


def _document(row: int, values: Any, job: Job, split: str, progress: int) -> Document | BadRow | None:
    """The document of a row, which should be a dict; None for an empty text."""
    if not isinstance(values, dict):
        return BadRow(row, f"expected an object with a field {job.field!r}, found {type(values).__name__}", progress)
    texts, size = [], 0
    for name in (job.field, job.prompt_field):
        value = values.get(name, values) if name else ""  # a value cannot contain itself
        if value is values:
            return BadRow(row, f"no field {name!r}", progress)
        if value is None and name == job.prompt_field:
            value = ""
        if not isinstance(value, str):
            return BadRow(row, f"field {name!r} is of type {type(value).__name__}, expected text", progress)
        if "\0" in value:
            return BadRow(row, f"field {name!r} contains a NUL character", progress)
        try:
            size += len(value) if value.isascii() else len(value.encode("utf-8"))
        except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can express
            return BadRow(row, f"field {name!r} is not Unicode text: {error.reason}", progress)
        texts.append(value)
    if size > MAX_DOCUMENT:
        return BadRow(row, f"a text of {size} bytes, more than {MAX_DOCUMENT}", progress)
    text, prompt = texts
    if not text:
        return None
    label = str(len(prompt))
    return Document(row, split, (text,), prompt=prompt, label=label, length=len(text), progress=progress)


def _json_lines(job: Job, piece: Piece) -> Iterator[Document | BadRow]:
    """The lines that begin in the piece. Blank lines are passed over, and counted for line numbers."""
    file = piece.file
    try:
        with open_file(Path(file.path), file.compression) as stream:
            if piece.begin:  # the line that begins before the piece belongs to the one before
                stream.seek(piece.begin - 1)
                _skip_line(stream)
            row, offset = 0, stream.tell() if not file.compression else 0
            while offset < piece.end or file.compression:
                line = stream.readline(MAX_DOCUMENT + 1)
                if not line:
                    break
                size = len(line) if not file.compression else 0
                cut = len(line) > MAX_DOCUMENT and not line.endswith(b"\n")
                if row == 0 and piece.begin == 0:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                if cut:
                    size += _skip_line(stream)
                    yield BadRow(row, f"a line of more than {MAX_DOCUMENT} bytes", size)
                elif line.strip() and (found := _line(row, line, job, file.split, size)) is not None:
                    yield found
                row, offset = row + 1, offset + size
    except damaged() as error:
        if not file.compression:
            raise
        raise ConfigError(f"{file.path}: damaged {file.compression} data: {error}") from None


def _line(row: int, line: bytes, job: Job, split: str, size: int) -> Document | BadRow | None:
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(row, f"not UTF-8 ({error.reason})", size)
    except json.JSONDecodeError as error:
        return BadRow(row, f"not JSON: {error.msg} (column {error.colno})", size)
    except (ValueError, RecursionError) as error:  # a number or a nesting without end
        return BadRow(row, f"not JSON: {error}", size)
    return _document(row, values, job, split, size)


def _skip_line(stream: IO[bytes]) -> int:
    """Reads to the end of the line; returns its bytes."""
    size = 0
    while block := stream.readline(COUNTED):
        size += len(block)
        if block.endswith(b"\n"):
            break
    return size


def _parquet(job: Job, piece: Piece) -> Iterator[Document | BadRow]:
    """The rows of the row groups that begin in the piece, as if all groups had equal sizes in bytes."""
    arrow = _pyarrow(piece.file)
    path, size = piece.file.path, piece.file.size
    try:
        with arrow.parquet.ParquetFile(path) as table:
            columns = _columns(job, piece.file, table.schema_arrow)
            groups, row = table.num_row_groups, 0
            for group in range(groups):
                begin, end = size * group // groups, size * (group + 1) // groups
                rows = table.metadata.row_group(group).num_rows
                if piece.begin <= begin < piece.end and rows:
                    for batch in table.iter_batches(BATCH, [group], columns, use_threads=False):
                        share = (end - begin) * len(batch) // rows
                        for i, values in enumerate(_values(batch)):
                            bad = isinstance(values, BadRow)
                            found = values if bad else _document(row + i, values, job, piece.file.split, 0)
                            if found is not None:
                                yield found._replace(row=row + i, progress=share // len(batch))
                        row += len(batch)
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: of a column's name
        raise ConfigError(f"{path}: damaged Parquet data: {str(error).splitlines()[0]}") from None


def _values(batch: Any) -> Iterator[Any]:
    """The rows of a batch, each a dict or a BadRow; read one by one only if the text of some of them is not UTF-8."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(len(batch)):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield BadRow(index, f"not UTF-8 ({error.reason})")


def _pyarrow(file: File) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{file.path}: Parquet needs pyarrow: pip install 'titanlite[parquet]'") from None
    return pyarrow


def _columns(job: Job, file: File, schema: Any) -> list[str]:
    """The columns to read. Raises ConfigError if one is absent or has no text."""
    names = [name for name in (job.field, job.prompt_field) if name]
    for name in names:
        if name not in schema.names:
            near = suggestion(name, schema.names) or f"; it has {', '.join(schema.names[:20])}"
            raise ConfigError(f"{file.path}: has no column {name!r}{near}")
        kind = str(schema.field(name).type)
        if "string" not in kind:
            raise ConfigError(f"{file.path}: column {name!r} is of type {kind}, expected string")
    return names


def _hub(job: Job, piece: Piece) -> Iterator[Document | BadRow]:
    """The rows of one shard of a data set, which is `hf:NAME:CONFIG:SPLIT#SHARD`."""
    spec, _, index = piece.file.path.rpartition("#")
    data = open_hub(spec)
    try:
        shard = data.shard(num_shards=data.num_shards, index=int(index)) if data.num_shards > 1 else data
        for row, values in enumerate(shard):
            found = _document(row, values, job, piece.file.split, 0)
            if isinstance(found, Document):
                found = found._replace(progress=sum(len(text.encode()) for text in (found.prompt, *found.blocks)))
            if found is not None:
                yield found
    except Exception as error:  # datasets raises whatever its readers raise
        raise ConfigError(f"{spec}: {type(error).__name__}: {(str(error) or '?').splitlines()[0]}") from None


@functools.lru_cache(4)
def open_hub(spec: str) -> Any:
    """A streamed data set `hf:NAME[:CONFIG[:SPLIT]]`. Raises ConfigError if there is none."""
    name, config, split = (*spec.removeprefix(HUB).split(":"), "", "")[:3]
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{spec}: needs the package datasets: pip install 'titanlite[hf]'") from None
    try:
        if Path(name, "state.json").is_file() or Path(name, "dataset_dict.json").is_file():  # from save_to_disk
            data = datasets.load_from_disk(name)
            data = data[split or "train"] if isinstance(data, dict) else data
            return data.to_iterable_dataset(num_shards=max(1, len(data.cache_files)))
        return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:  # not found, no network, a wrong config or split, a damaged file
        raise ConfigError(f"{spec}: {type(error).__name__}: {(str(error) or '?').splitlines()[0]}") from None


def numbered(job: Job, examples: list[Example]) -> list[Example]:
    """Examples of rows with their number in the file in place of that in a piece, which begins at byte `begin`.

    Only for those that are shown, after all parts: the lines before a piece have to be read and counted.
    """
    files, found = {file.path: file for file in job.files}, list[Example]()
    for example in examples:
        file, begin = files[example["file"]], example["begin"]
        row = first_row_number(job, Piece(file, begin, file.size)) + example["row"]
        found.append({"file": file.path, "row": row, "text": example["text"]})
    return found


def hub_columns(spec: str) -> list[str]:
    """The columns of a data set; if it does not list them, those of its first row, which is read for that."""
    data = open_hub(spec)
    try:
        return list(data.column_names or next(iter(data), {}))
    except Exception as error:  # datasets raises whatever its readers raise
        raise ConfigError(f"{spec}: {type(error).__name__}: {(str(error) or '?').splitlines()[0]}") from None


def first_row_number(job: Job, piece: Piece) -> int:
    """The number of a piece's first row in its file, from 1 on. A piece within a JSONL file has to count lines."""
    if piece.begin and piece.file.kind == "jsonl":
        with open(piece.file.path, "rb") as stream:
            stream.seek(piece.begin - 1)
            left = piece.begin - 1 + _skip_line(stream)
            stream.seek(0)
            lines = 1
            while left > 0 and (block := stream.read(min(COUNTED, left))):
                lines, left = lines + block.count(b"\n"), left - len(block)
        return lines
    if piece.begin and piece.file.kind == "parquet":
        table, size = _pyarrow(piece.file).parquet.ParquetFile(piece.file.path), piece.file.size
        groups = table.num_row_groups
        before = (i for i in range(groups) if size * i // groups < piece.begin)
        return 1 + sum(table.metadata.row_group(i).num_rows for i in before)
    return 1
