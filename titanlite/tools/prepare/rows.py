"""Reads rows, each a document: JSON lines, Parquet, and data sets of the package `datasets`.

What it is: for each row its text, and the prompt before it if there is a prompt field. A row that
cannot be used (broken JSON, not UTF-8, no such field, another type) becomes a `BadRow`; an empty
text is passed over, as an empty file is.
What it costs: a row must fit into memory; a longer line than 64 MB, or a longer text with its
prompt, is a bad row.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError
from titanlite.tools.chat.conversation import ChatEncoder, messages_of
from titanlite.tools.chat.template import ChatTemplate, Message
from titanlite.tools.prepare.compressed import (
    LINE,
    ROW,
    Allowance,
    ExpandsTooFar,
    allowance_of,
    damaged,
    open_file,
    unreadable,
)
from titanlite.tools.prepare.documents import BYTE_ORDER_MARK, MAX_DOCUMENT, BadRow, Document
from titanlite.tools.prepare.fields import CONVERSATIONS, MESSAGE, NEEDS_CHAT, other_fields
from titanlite.tools.prepare.hub_rows import hub_problem, open_hub
from titanlite.tools.prepare.job import ChatConfig, File, Job, Piece
from titanlite.tools.prepare.parquet_reader import (
    Table,
    UnreadableParquet,
    describe,
    installed,
    read_rows,
)

BLOCK = 1 << 22  # bytes that are read at a time where lines are only counted
LISTS = ("list<", "large_list<")  # how the type of a column of lists begins, in Parquet


def row_documents(job: Job, piece: Piece) -> Iterator[Document | BadRow]:
    """The rows that begin in a piece.

    Raises ConfigError for a file that is damaged as a whole, or expands too far.
    """
    read: dict[str, Callable[[Job, Piece], Iterator[Document | BadRow]]]
    read = {"jsonl": _json_lines, "parquet": _parquet, "hf": _hub}
    return read[piece.file.kind](job, piece)


@functools.lru_cache(1)
def _encoder(chat: ChatConfig) -> ChatEncoder:
    template = ChatTemplate(chat.template, chat.bos, chat.eos)
    return ChatEncoder(template, chat.special, chat.control, chat.marker)


def _conversation(row: int, values: Any, job: Job, split: str) -> Document | BadRow:
    """The document of a row with messages, or with a prompt and its answer."""
    try:
        messages = _messages(values, job.field, job.prompt_field)
        pieces = _encoder(job.chat).pieces(messages, last_only=job.chat.last_only)
        text = "".join(piece.text for piece in pieces)
        size = len(text.encode("utf-8"))
    except ValueError as error:
        prompt = f" with {job.prompt_field!r}" if job.prompt_field else ""
        return BadRow(row, f"field {job.field!r}{prompt}: {error}")
    if size > MAX_DOCUMENT:
        return BadRow(row, f"a conversation of {size} bytes, more than {MAX_DOCUMENT}")
    if not any(piece.target for piece in pieces):
        return BadRow(row, f"field {job.field!r}: no message is the assistant's")
    return Document(row, split, (text,), pieces=tuple(pieces), length=len(text))


def _messages(values: dict[str, Any], field: str, prompt_field: str) -> list[Message]:
    """The messages of a row's field, after those of a prompt field if there is one.

    A prompt and an answer can be messages or text; an answer that begins with its prompt is a whole
    conversation. Raises ValueError with the reason.
    """
    for name in (prompt_field, field):
        if name and name not in values:
            raise ValueError(f"no field {name!r}")
    value = values[field]
    if not prompt_field:
        if isinstance(value, str):  # a column of Parquet, or text in JSON
            value = _from_json(value)
        return messages_of(value)
    prompt = _as_messages(values[prompt_field], "user")
    answer = _as_messages(value, "assistant")
    begins = [(message["role"], message["content"]) for message in answer[: len(prompt)]]
    if begins == [(message["role"], message["content"]) for message in prompt]:
        return answer
    return [*prompt, *answer]


def _from_json(text: str) -> Any:
    """Messages that a text is in JSON. Raises ValueError."""
    try:
        return parse_json(text)
    except ValueError:
        raise ValueError(
            "expected messages, found a text; an answer that is a text needs --prompt-field"
        ) from None


def _as_messages(value: Any, role: str) -> list[Message]:
    """Messages, or a text as one message of this role. Raises ValueError."""
    if isinstance(value, list):
        return messages_of(value)
    return messages_of([{"role": role, "content": value}])


def _document(row: int, values: Any, job: Job, split: str) -> Document | BadRow | None:
    """The document of a row, which should be a dict; None for an empty text."""
    if not isinstance(values, dict):
        return BadRow(
            row, f"expected an object with a field {job.field!r}, found {type(values).__name__}"
        )
    if job.chat.template:
        return _conversation(row, values, job, split)
    texts = []
    size = 0
    for name in (job.field, job.prompt_field):
        if name and name not in values:
            return BadRow(row, f"no field {name!r}")
        value = values[name] if name else ""  # there may be no prompt field
        if value is None and name == job.prompt_field:
            value = ""
        if name in CONVERSATIONS and (not isinstance(value, str) or MESSAGE.match(value)):
            return BadRow(row, f"field {name!r} is a conversation; {NEEDS_CHAT}")
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


def _json_lines(job: Job, piece: Piece) -> Iterator[Document | BadRow]:
    """The lines that begin in the piece.

    Blank lines are passed over, and counted for line numbers.
    """
    file = piece.file
    row = 0
    try:
        with open_file(Path(file.path), file.compression) as stream:
            allowance = allowance_of(stream)
            offset = 0  # in the text
            if piece.begin:  # the line that begins before the piece belongs to the one before
                stream.seek(piece.begin - 1)
                _skip_line(stream)
                offset = stream.tell()
            while allowance or offset < piece.end:
                line = stream.readline(MAX_DOCUMENT + 1)
                if not line:
                    break
                offset += len(line)
                too_long = len(line) > MAX_DOCUMENT and not line.endswith(b"\n")
                if row == 0 and piece.begin == 0:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                item: Document | BadRow | None = None
                if too_long:
                    offset += _skip_line(stream)
                    item = BadRow(row, f"a line of more than {MAX_DOCUMENT} bytes")
                elif line.strip():
                    item = _line(row, line, job, file.split)
                if allowance:
                    allowance.spend(LINE)
                if item is not None:
                    yield item
                row += 1
    except damaged() as error:
        if not file.compression:
            raise
        raise unreadable(file.path, file.compression, error, row + 1) from None


def _line(row: int, line: bytes, job: Job, split: str) -> Document | BadRow | None:
    try:
        values = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(row, f"not UTF-8 ({error.reason})")
    except json.JSONDecodeError as error:
        return BadRow(row, f"not JSON: {error.msg} (column {error.colno})")
    except ValueError as error:  # a number or a nesting without end
        return BadRow(row, f"not JSON: {error}")
    return _document(row, values, job, split)


def _skip_line(stream: IO[bytes]) -> int:
    """Reads to the end of the line; returns its bytes."""
    size = 0
    while block := stream.readline(BLOCK):
        size += len(block)
        if block.endswith(b"\n"):
            break
    return size


def _parquet(job: Job, piece: Piece) -> Iterator[Document | BadRow]:
    """The rows of the row groups that begin in the piece: `_group_bounds`."""
    file = piece.file
    columns = job.columns
    table = _table(file, columns)
    _check_columns(file, columns, table, nested=bool(job.chat.template))
    bounds = _group_bounds(file, table)
    groups = [
        i for i, rows in enumerate(table.rows) if rows > 0 and piece.begin <= bounds[i] < piece.end
    ]
    if not groups:
        return
    # The sizes that a file states can be untrue
    size_of_groups = min(file.size, sum(table.sizes[group] for group in groups))
    allowance = Allowance(
        size_of_groups, f"each row counts {ROW} bytes", "write Parquet as JSON lines"
    )
    row = 0
    try:
        is_chat = bool(job.chat.template)
        for values in read_rows(file.path, columns, groups, MAX_DOCUMENT, is_chat):
            allowance.spend(ROW + sum(_length(value) for value in values))
            item = _parquet_document(row, table.types, values, job, file.split)
            row += 1
            if item is not None:
                yield item
    except (UnreadableParquet, ExpandsTooFar) as error:
        problem = "" if isinstance(error, ExpandsTooFar) else "damaged Parquet data: "
        number = first_row_number(piece) + row
        raise ConfigError(f"{file.path}: row {number}: {problem}{error}") from None


def _length(value: bytes | int | str | None) -> int:
    """The bytes of a text; of one that is too long, an int, only they are known."""
    if isinstance(value, int):
        return value
    if isinstance(value, bytes):
        return len(value)
    return 0


def _parquet_document(
    row: int,
    types: dict[str, str],
    values: list[bytes | int | str | None],
    job: Job,
    split: str,
) -> Document | BadRow | None:
    """`types`: of the columns that were read, in the order of the values."""
    found: dict[str, Any] = {}
    for (name, kind), value in zip(types.items(), values, strict=True):
        if isinstance(value, int):
            return BadRow(row, f"a text of {value} bytes, more than {MAX_DOCUMENT}")
        if isinstance(value, str):
            return BadRow(row, f"field {name!r} is of type {value}, expected text")
        try:
            found[name] = None if value is None else value.decode("utf-8")
        except UnicodeDecodeError as error:
            return BadRow(row, f"not UTF-8 ({error.reason})")
        if found[name] is not None and kind.startswith(LISTS):
            found[name] = json.loads(found[name])  # by our own process
    return _document(row, found, job, split)


def _table(file: File, columns: list[str]) -> Table:
    """What a Parquet file says of itself. Raises ConfigError if it cannot be read."""
    if not installed():
        raise ConfigError(f"{file.path}: Parquet needs pyarrow: pip install pyarrow")
    try:
        return describe(file.path, columns)
    except UnreadableParquet as error:
        raise ConfigError(f"{file.path}: damaged Parquet data: {error}") from None


def _group_bounds(file: File, table: Table) -> list[int]:
    """Estimates where row groups begin, as if all had equal sizes; the last entry is the end."""
    groups = len(table.rows)
    return [file.size * group // groups for group in range(groups)] + [file.size]


def _check_columns(file: File, columns: list[str], table: Table, nested: bool) -> None:
    """Raises ConfigError if a column is absent or has no text; `nested`: nor messages."""
    for name in columns:
        if name not in table.types:
            hint = other_fields(file.path, name, table.names)
            raise ConfigError(f"{file.path}: has no column {name!r}{hint}")
        if nested and table.types[name].startswith(LISTS):
            continue
        if name in CONVERSATIONS and table.types[name].startswith(LISTS):
            raise ConfigError(f"{file.path}: column {name!r} has conversations; {NEEDS_CHAT}")
        if "string" not in table.types[name]:
            raise ConfigError(
                f"{file.path}: column {name!r} is of type {table.types[name]}, expected string"
            )


def _hub(job: Job, piece: Piece) -> Iterator[Document | BadRow]:
    """The rows of one shard of a data set, which is `hf:NAME:CONFIG:SPLIT#SHARD`."""
    spec, _, index = piece.file.path.rpartition("#")
    data = open_hub(spec)
    try:
        if data.num_shards > 1:
            data = data.shard(num_shards=data.num_shards, index=int(index))
        for row, values in enumerate(data):
            item = _document(row, values, job, piece.file.split)
            if item is not None:
                yield item
    except Exception as error:  # datasets raises whatever its readers raise
        raise hub_problem(spec, error) from None


def first_row_number(piece: Piece) -> int:
    """The number of a piece's first row in its file, from 1 on.

    A piece within a JSONL file has to count lines.
    """
    if piece.begin and piece.file.kind == "jsonl":
        with open(piece.file.path, "rb") as stream:
            stream.seek(piece.begin - 1)
            remaining = piece.begin - 1 + _skip_line(stream)  # bytes before the first row
            stream.seek(0)
            number = 1
            while remaining > 0:
                block = stream.read(min(BLOCK, remaining))
                if not block:  # the file has become shorter
                    break
                number += block.count(b"\n")
                remaining -= len(block)
        return number
    if piece.begin and piece.file.kind == "parquet":
        table = _table(piece.file, [])
        bounds = _group_bounds(piece.file, table)
        number = 1
        for rows, begin in zip(table.rows, bounds, strict=False):  # the last bound is the end
            if begin < piece.begin:
                number += rows
        return number
    return 1
