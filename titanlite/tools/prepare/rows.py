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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import ConfigError
from titanlite.tools.chat.conversation import ChatEncoder, messages_of
from titanlite.tools.chat.conversation import Piece as ChatPiece
from titanlite.tools.chat.template import ChatTemplate, Message
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
from titanlite.tools.prepare.job import REJECTED, ChatConfig, File, Job, Piece
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
LISTS = ("list<", "large_list<")  # how the type of a column of lists begins, in Parquet


def row_documents(job: Job, piece: Piece) -> Iterator[Document | BadRow | Skipped]:
    """The rows that begin in a piece.

    Raises ConfigError for a file that is damaged as a whole, or expands too far.
    """
    read: dict[str, Callable[[Job, Piece], Iterator[Document | BadRow | Skipped]]]
    read = {"jsonl": _json_lines, "parquet": _parquet, "hf": _hub}
    return read[piece.file.kind](job, piece)


@functools.lru_cache(1)
def _encoder(chat: ChatConfig) -> ChatEncoder:
    template = ChatTemplate(chat.template, chat.bos, chat.eos)
    return ChatEncoder(template, chat.special, chat.control)


def _conversation(row: int, values: Any, job: Job, split: str) -> Document | BadRow | None:
    """The document of a row with messages, or with a prompt and its answer; or with a pair of
    these.
    """
    try:
        pieces = _pieces(values, job.field, job)
        rejected: tuple[ChatPiece, ...] = ()
        if job.chat.pairs:
            rejected = _pieces(values, REJECTED, job)
            _require_pair(pieces, rejected)
    except ValueError as error:
        return BadRow(row, str(error))
    text = "".join(piece.text for piece in (*pieces, *rejected))
    return Document(row, split, (text,), pieces=pieces, rejected=rejected, length=len(text))


def _pieces(values: dict[str, Any], field: str, job: Job) -> tuple[ChatPiece, ...]:
    """The parts of the conversation in a row's field. Raises ValueError with the reason."""
    try:
        messages = _messages(values, field, job.prompt_field)
        pieces = _encoder(job.chat).pieces(messages, last_only=job.chat.last_only)
        size = sum(len(piece.text.encode("utf-8")) for piece in pieces)
    except (ValueError, RecursionError) as error:
        prompt = f" with {job.prompt_field!r}" if job.prompt_field else ""
        raise ValueError(f"field {field!r}{prompt}: {error}") from None
    if size > MAX_DOCUMENT:
        raise ValueError(f"a conversation of {size} bytes, more than {MAX_DOCUMENT}")
    if not any(piece.target for piece in pieces):
        raise ValueError(f"field {field!r}: no message is the assistant's")
    return tuple(pieces)


def _require_pair(chosen: Sequence[ChatPiece], rejected: Sequence[ChatPiece]) -> None:
    """Raises ValueError unless these are two answers to one prompt."""
    if chosen == rejected:
        raise ValueError("both answers are the same")
    prompts = []
    for pieces in (chosen, rejected):
        before = itertools.takewhile(lambda piece: not piece.target, pieces)
        prompts.append("".join(piece.text for piece in before))
    if prompts[0] != prompts[1]:
        raise ValueError(f"{REJECTED!r} answers another prompt than the chosen answer")


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
        return json.loads(text)
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
                item: Document | BadRow | Skipped | None = None
                too_long = len(line) > MAX_DOCUMENT and not line.endswith(b"\n")
                if row == 0 and piece.begin == 0:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                if too_long:
                    offset += _skip_line(stream)
                    item = BadRow(row, f"a line of more than {MAX_DOCUMENT} bytes")
                elif line.strip():
                    item = _line(row, line, job, file.split)
                if compressed:
                    compressed.allowance.spend(LINE)
                if item is None and offset - offset_reported >= COUNTED:
                    item = Skipped()
                if item is not None:
                    place = compressed.position if compressed else offset
                    yield item._replace(progress=place - place_reported)
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
    skipped = 0  # bytes that counted since something was yielded
    reported = bounds[groups[0]]  # a place in the file
    starts = itertools.accumulate((table.rows[group] for group in groups), initial=0)
    first_row = dict(zip(groups, starts, strict=False))  # the last start is the number of rows
    try:
        is_chat = bool(job.chat.template)
        for group, values in read_rows(file.path, columns, groups, MAX_DOCUMENT, is_chat):
            size = ROW + sum(_length(value) for value in values)
            allowance.spend(size)
            skipped += size
            item: Document | BadRow | Skipped | None
            item = _parquet_document(row, table.types, values, job, file.split)
            row += 1
            if item is None and skipped >= COUNTED:
                item = Skipped()
            if item is not None:
                share = min(1.0, (row - first_row[group]) / table.rows[group])
                place = bounds[group] + int(share * (bounds[group + 1] - bounds[group]))
                yield item._replace(progress=place - reported)
                reported = place
                skipped = 0
    except (UnreadableParquet, ExpandsTooFar) as error:
        problem = "" if isinstance(error, ExpandsTooFar) else "damaged Parquet data: "
        number = first_row_number(job, piece) + row
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
            found[name] = json.loads(found[name])
    return _document(row, found, job, split)


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


def _check_columns(file: File, columns: list[str], table: Table, nested: bool) -> None:
    """Raises ConfigError if a column is absent or has no text; `nested`: nor messages."""
    for name in columns:
        if name not in table.types:
            hint = suggestion(name, table.names) or f"; it has {', '.join(table.names[:20])}"
            raise ConfigError(f"{file.path}: has no column {name!r}{hint}")
        if nested and table.types[name].startswith(LISTS):
            continue
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
            if isinstance(item, Document):
                size = sum(len(text.encode()) for text in (item.prompt, *item.blocks))
                item = item._replace(progress=size)
            if item is not None:
                yield item
    except Exception as error:  # datasets raises whatever its readers raise
        raise _hub_problem(spec, error) from None


def _hub_problem(spec: str, error: Exception) -> ConfigError:
    """What `datasets` raised, as a message of one line."""
    first_line = (str(error) or "?").splitlines()[0]
    return ConfigError(f"{spec}: {type(error).__name__}: {first_line}")


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
            if isinstance(data, dict):
                data = data[split or "train"]
            return data.to_iterable_dataset(num_shards=max(1, len(data.cache_files)))
        return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:  # not found, no network, a wrong config or split, a damaged file
        raise _hub_problem(spec, error) from None


def numbered(job: Job, examples: list[Example]) -> list[Example]:
    """Examples with the row's number in its file in place of that in the piece from `begin` on.

    Only for those that are shown, after all parts: the lines before a piece have to be read and
    counted.
    """
    files = {file.path: file for file in job.files}
    with_numbers: list[Example] = []
    for example in examples:
        file = files[example["file"]]
        begin = example["begin"]
        row = first_row_number(job, Piece(file, begin, file.size)) + example["row"]
        with_numbers.append({"file": file.path, "row": row, "text": example["text"]})
    return with_numbers


def hub_columns(spec: str) -> list[str]:
    """The columns of a data set. If it does not list them, its first row is read."""
    data = open_hub(spec)
    try:
        return list(data.column_names or next(iter(data), {}))
    except Exception as error:  # datasets raises whatever its readers raise
        raise _hub_problem(spec, error) from None


def first_row_number(job: Job, piece: Piece) -> int:
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
                block = stream.read(min(COUNTED, remaining))
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
