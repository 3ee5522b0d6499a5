"""Reads the rows of a Parquet file in a process with limits.

What it is: pyarrow reads the file in a child process, which writes the bytes of each row to a pipe.
Its memory and CPU time have limits that grow with the size of what is read, and a row longer than a
document may be is not sent. The child (`runtime/limited_child.py`) is used for the next file.
Why it is here: a page of a few bytes can stand for gigabytes, and what the file says of its own
sizes need not be true. Within a process, pyarrow has no limit of memory, and an allocation that
fails is not always an error but sometimes the end of the process.
What it costs: 0.15 s for the process. 200 MB of rows take 1.5 CPU seconds, in place of 0.8 without
the process; tokenising them takes 28.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from titanlite.runtime import limited_child

# Bytes: of any file, and for each byte of the columns that are read
MEMORY = 1 << 30
MEMORY_PER_BYTE = 8
# CPU time: for any file, and for the bytes of the columns
SECONDS = 10
BYTES_PER_SECOND = 1 << 22
BATCH = 256  # rows that are read at a time; one, where so many do not fit into memory
BUFFER = 1 << 20  # bytes of the file that are read at a time
TOO_LARGE = "reading it takes more memory than its size allows (1 GB and 8 times its columns)"
ENDED = "the process that read it ended; its size allows that process 1 GB and 8 times its columns"
# Names of columns are cut for messages
MOST_NAMES = 1000
LONGEST_NAME = 200
PACKAGES = ("pyarrow", "numpy")


class UnreadableParquet(ValueError):
    """The file is damaged, or exceeds a limit."""


class OutOfMemory(UnreadableParquet):
    """The process that read it has no memory left, or ended; a failed allocation can be either."""


class Table(NamedTuple):
    """What a file says of itself."""

    names: list[str]  # all columns
    types: dict[str, str]  # the types of the columns that were asked for
    rows: list[int]  # the number in each row group
    sizes: list[int]  # per row group: the compressed bytes of the columns that were asked for


def installed() -> bool:
    """Whether the package pyarrow can be used."""
    return importlib.util.find_spec("pyarrow") is not None


def describe(path: str, columns: list[str]) -> Table:
    """Raises UnreadableParquet."""
    (answer,) = (answer for answer, _ in _ask({"path": path, "columns": columns}))
    return Table(**answer)


def read_rows(
    path: str, columns: list[str], groups: list[int], longest: int, lists: bool = False
) -> Iterator[list[bytes | int | str | None]]:
    """The rows of row groups, one at a time.

    A row has for each column its text, the length of a text of more than `longest` bytes, or the
    name of another type. `lists`: a list is a text too, in JSON.

    Raises UnreadableParquet.
    """
    request = {"path": path, "columns": columns, "groups": groups, "longest": longest}
    request["lists"] = lists
    done = 0
    for batch in (BATCH, 1):
        try:
            for answer, content in _ask({**request, "batch": batch, "skip": done}):
                for lengths in zip(*answer["columns"], strict=True):
                    values: list[bytes | int | str | None] = []
                    for length in lengths:
                        sent = isinstance(length, int) and length <= longest
                        values.append(_read(content, length) if sent else length)
                    done += 1
                    yield values
            return
        except OutOfMemory:
            if batch == 1:
                raise


idle_children: list[subprocess.Popen[bytes]] = []  # children that wait for a file


def _ask(request: dict[str, Any]) -> Iterator[tuple[dict[str, Any], IO[bytes]]]:
    """The answers of a child, each with the stream from which the bytes that it announces are to be
    read.

    Raises UnreadableParquet if the child says so or ends.
    """
    child = idle_children.pop() if idle_children else limited_child.start(main, PACKAGES)
    assert child.stdout is not None
    complete = False
    try:
        limits = {"memory": MEMORY, "seconds": SECONDS}
        limited_child.request(child, limits | request)
        while not complete:
            line = child.stdout.readline()
            if not line:
                raise _ended(child.wait())
            answer = json.loads(line)
            if "memory" in answer:
                raise OutOfMemory(TOO_LARGE)
            if "error" in answer:
                raise UnreadableParquet(answer["error"])
            complete = "end" in answer
            if not complete:
                yield answer, child.stdout
    finally:
        if complete:
            idle_children.append(child)
        else:  # what it has written so far has no reader
            limited_child.stop(child)


def _read(content: IO[bytes], count: int) -> bytes:
    data = content.read(count)
    if len(data) < count:
        raise OutOfMemory(ENDED)
    return data


def _ended(code: int) -> UnreadableParquet:
    if code == -signal.SIGXCPU:
        limit = f"{SECONDS} s and 1 s for each {BYTES_PER_SECOND / 1e6:.0f} MB"
        return UnreadableParquet(f"reading it takes more CPU time than its size allows ({limit})")
    return OutOfMemory(ENDED)


@atexit.register
def stop_idle() -> None:
    """Ends the processes that wait for a file."""
    while idle_children:
        limited_child.stop(idle_children.pop())


# From here on: the child


def main() -> None:
    """Answers requests."""
    limited_child.forbid(resource.RLIMIT_FSIZE)
    # pyarrow's other memory pools reserve many addresses, and these are limited
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    # The time of this import is the child's
    import pyarrow.parquet

    base = limited_child.address_space()
    for request in limited_child.requests():
        try:
            _limit(request, base, 0)
            with pyarrow.parquet.ParquetFile(
                request["path"], pre_buffer=False, buffer_size=BUFFER
            ) as table:
                _answer(request, table, base)
            limited_child.send({"end": True})
        except MemoryError:
            limited_child.send({"memory": True})
        except Exception as error:  # whatever it is, the file is the cause
            text = str(error).strip() or type(error).__name__
            limited_child.send({"error": text.splitlines()[0][:400]})
        sys.stdout.flush()


def _limit(request: dict[str, Any], base: int, size: int) -> None:
    """Sets the limits of memory and CPU time for columns of so many bytes."""
    memory = base + request["memory"] + MEMORY_PER_BYTE * size
    seconds = int(time.process_time()) + 1 + request["seconds"] + size // BYTES_PER_SECOND
    limited_child.limit({resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: seconds}, for_good=False)


def _answer(request: dict[str, Any], table: Any, base: int) -> None:
    schema = table.schema_arrow
    metadata = table.metadata
    columns = request["columns"]
    if "groups" not in request:
        names = [name[:LONGEST_NAME] for name in schema.names[:MOST_NAMES]]
        known = [name for name in columns if name in schema.names]
        types = {name: str(schema.field(name).type)[:LONGEST_NAME] for name in known}
        groups = range(metadata.num_row_groups)
        rows = [metadata.row_group(group).num_rows for group in groups]
        sizes = [_compressed_size(metadata, group, columns) for group in groups]
        limited_child.send({"names": names, "types": types, "rows": rows, "sizes": sizes})
        return
    total = sum(_compressed_size(metadata, group, columns) for group in request["groups"])
    _limit(request, base, min(total, os.path.getsize(request["path"])))
    done = 0
    for group in request["groups"]:
        for batch in table.iter_batches(request["batch"], [group], columns, use_threads=False):
            if done >= request["skip"]:
                _send_batch(request, [batch.column(name) for name in columns])
            done += len(batch)


def _compressed_size(metadata: Any, group: int, columns: list[str]) -> int:
    """The bytes of these columns in a row group, as the file states them."""
    part = metadata.row_group(group)
    size = 0
    for leaf in range(metadata.num_columns):
        path = metadata.schema.column(leaf).path
        # The name of a column can contain a dot
        if path in columns or path.split(".")[0] in columns:
            size += max(0, part.column(leaf).total_compressed_size)
    return size


def _send_batch(request: dict[str, Any], columns: list[Any]) -> None:
    """The lengths of all values, column by column, and then the bytes of those that are not too
    long, row by row.
    """
    lists = request["lists"]
    values = [[_value(scalar, lists) for scalar in column] for column in columns]
    lengths = [[_length(value) for value in column] for column in values]
    limited_child.send({"columns": lengths})
    for row in zip(*values, strict=True):
        for value in row:
            if isinstance(value, memoryview) and len(value) <= request["longest"]:
                sys.stdout.buffer.write(value)


def _length(value: memoryview | str | None) -> int | str | None:
    """The number of bytes of a text; other values themselves."""
    if isinstance(value, memoryview):
        return len(value)
    return value


def _value(scalar: Any, lists: bool) -> memoryview | str | None:
    """The bytes of a text, None for null, or the name of another type.

    `lists`: the bytes of a list too, as JSON.
    """
    if not scalar.is_valid:
        return None
    if hasattr(scalar, "dictionary"):
        scalar = scalar.value
    if lists and str(scalar.type).startswith(("list<", "large_list<")):
        return memoryview(json.dumps(scalar.as_py(), default=str).encode())
    if not hasattr(scalar, "as_buffer"):
        return str(scalar.type)[:LONGEST_NAME]
    buffer = scalar.as_buffer()
    return None if buffer is None else memoryview(buffer)
