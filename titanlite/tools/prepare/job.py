"""A job of preparation: its files and settings, and how it is cut into parts.

What it is: the files of a job are concatenated in order into one sequence of bytes and divided into
n equal ranges; part i is the i-th range. A large text or JSONL file is cut where the sequence is
cut: rows and lines belong to the part in which they begin. So a part is a function of the job, i
and n alone: parts can be made in any order, on any number of cores or machines, and again after an
interruption, and give the same bytes. The number of parts follows from the input's size or `--part
I/N`.
"""

from __future__ import annotations

import bisect
import dataclasses
import errno
import functools
import itertools
import json
import os
import re
import secrets
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple, TypeAlias

from titanlite.data.prepared_manifest import FORMAT
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded, replace_file, sync_folder, write_synced
from titanlite.runtime.typed_json import Count, typed
from titanlite.tools.prepare.duplicates import DuplicateConfig
from titanlite.tools.prepare.filters import FilterConfig

HOLDOUT = 20  # one document of so many is for validation
PART = 1 << 26  # bytes of input of a part, or more of a large input
# Parts of any input, unless a number is asked for: each has files of its own, which training maps
MOST_PARTS = 256
MOST_ASKED = 99_999  # parts that may be asked for
CUT = 1 << 23  # bytes; smaller files are not cut
REJECTED = "rejected"  # the field of a pair's other answer
NO_FILTERS = FilterConfig()
ALL_DOCUMENTS = DuplicateConfig()
REMOVED = ("none", "exact", "near")
# Settings whose option has another name
OPTIONS = {
    "remove": "--drop-duplicates",
    "threshold": "--near-threshold",
    "tokenizer_sha256": "--tokenizer, SHA-256",
    "parts": "number of parts",
}
# Settings without an option
NAMES = ("name", "roots", "format", "cut")
SHOWN = 200  # characters of a value in a message
# What link fails with where a file system has no hard links: FAT, and some over a network
NO_LINKS = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)
NAME = "job.json"  # the file of a job
LARGEST = 1 << 30  # bytes of a file of the working folder

# A path that the system can have: no NUL, and no half of a surrogate pair except those that stand
# for bytes that are not UTF-8
Name: TypeAlias = Annotated[str, re.compile("[^\0\ud800-\udc7f\udd00-\udfff]*")]


class File(NamedTuple):
    """An input file.

    `split`: train, validation, hash (of each document), or tail (its last twentieth is held out).
    """

    path: Name
    relative: Name
    size: Count
    mtime_ns: int
    kind: Annotated[str, re.compile("text|jsonl|parquet|hf|tokens|megatron")]
    compression: Annotated[str, re.compile("|gzip|zstd")]
    split: Annotated[str, re.compile("train|validation|hash|tail")]
    companions: str = ""  # the version of other files that are read with it (`inputs.py`)

    def changed(self, now: File) -> str:
        """The name of what has changed, "" if nothing has."""
        if self == now:
            return ""
        if self.kind == "hf":
            return self.path.rpartition("#")[0]
        if self.kind == "megatron" and self == now._replace(companions=self.companions):
            return str(Path(self.path).with_suffix(".idx"))
        return self.path

    @property
    def has_known_size(self) -> bool:
        return self.kind != "hf" or bool(self.companions)


class Piece(NamedTuple):
    """A byte range of a file: the rows, lines or documents that begin in it."""

    file: File
    begin: int
    end: int

    @property
    def whole(self) -> bool:
        return self.begin == 0 and self.end >= self.file.size


@dataclass(frozen=True)
class ChatConfig:
    """How rows that are conversations become text; no template: they are text themselves."""

    template: str = ""
    bos: str = ""  # names of special tokens
    eos: str = ""
    special: tuple[str, ...] = ()
    control: tuple[str, ...] = ()  # those that a message cannot have
    last_only: bool = False  # only the last answer of a conversation is trained
    pairs: bool = False  # a row has two conversations, of which one is preferred


NO_CHAT = ChatConfig()


@dataclass(frozen=True)
class Job:
    """Everything that decides the bytes of a prepared folder."""

    name: str
    roots: tuple[str, ...]
    files: tuple[File, ...]
    field: str
    prompt_field: str
    # Absolute path, "" for the bundled one; its hash is compared
    tokenizer: Name = dataclasses.field(compare=False)
    tokenizer_sha256: str
    parts: Annotated[int, range(1, MOST_ASKED + 1)]
    filters: FilterConfig = NO_FILTERS
    duplicates: DuplicateConfig = ALL_DOCUMENTS
    chat: ChatConfig = NO_CHAT
    uncut: bool = False  # the tokenizer encodes documents as a whole
    separate_validation: bool = False  # the files of split `validation` are of another source
    format: int = FORMAT
    cut: Count = dataclasses.field(default_factory=lambda: CUT)  # bytes; smaller files are not cut

    @property
    def columns(self) -> list[str]:
        """The fields or columns of a row that are read."""
        names = [self.field, self.prompt_field]
        if self.chat.pairs:
            names.append(REJECTED)
        return [name for name in names if name]

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return self._ends[-1] if self._ends else 0

    @functools.cached_property
    def has_known_size(self) -> bool:
        """Whether `bytes` is the input's size; a shard of a data set on the Hub counts as PART."""
        return all(file.has_known_size for file in self.files)

    @functools.cached_property
    def _ends(self) -> list[int]:
        """The end of each file in the sequence of all bytes."""
        return list(itertools.accumulate(file.size for file in self.files))

    @property
    def whole_documents(self) -> bool:
        """Whether each document must be in memory at once: to be examined, or by the tokenizer."""
        return self.examines or self.uncut

    @property
    def examines(self) -> bool:
        """Whether documents are filtered or compared."""
        return self.filters != NO_FILTERS or self.duplicates != ALL_DOCUMENTS

    def pieces(self, part: int) -> Iterator[Piece]:
        """What part number `part`, from 0 on, reads."""
        # All of these are places in the sequence of the bytes of all files
        low = self.bytes * part // self.parts
        high = self.bytes * (part + 1) // self.parts
        for number in range(bisect.bisect_left(self._ends, low), len(self.files)):
            file = self.files[number]
            file_end = self._ends[number]
            file_begin = file_end - file.size
            if file_begin >= high:
                break
            if self._can_be_cut(file):
                begin = max(low, file_begin)
                end = min(high, file_end)
                if begin < end:
                    yield Piece(file, begin - file_begin, end - file_begin)
            elif low <= file_begin:
                yield Piece(file, 0, file.size)

    def size(self, parts: Iterable[int]) -> int | None:
        """The bytes that these parts read; None if that is not known."""
        total = sum(piece.end - piece.begin for part in parts for piece in self.pieces(part))
        return total if self.has_known_size else None

    def _can_be_cut(self, file: File) -> bool:
        if file.compression or file.kind == "hf":
            return False
        if file.kind == "text" and self.whole_documents:
            return False  # the file is one document
        return file.size >= self.cut


def number_of_parts(total: int) -> int:
    """The number of parts of an input of so many bytes."""
    size = max(PART, -(-total // MOST_PARTS))
    return max(1, -(-total // size))


def begin_job(job: Job, work: Path) -> None:
    """Writes the job into its working folder, or checks that the folder has the same job.

    Of several processes that begin at the same time, one writes its job, and the others compare
    theirs with it.
    """
    path = work / NAME
    if not path.exists() and _create(path, _content(job)):
        return
    changed = differences(read_job(work), job)
    if changed:
        raise ConfigError(
            f"{work}: was begun differently ({changed}); "
            f"repeat the former command, or {afresh(work)}"
        )
    write_job(job, work)  # what is not compared may differ


def write_job(job: Job, work: Path) -> None:
    """Writes the job into its working folder, also in place of another one."""
    replace_file(work / NAME, _content(job), shared=True)


def _create(path: Path, content: bytes) -> bool:
    """Makes a file that is complete from the moment at which it is there.

    False: it was there, and stays as it is.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        write_synced(temporary, content)
        try:
            os.link(temporary, path)  # does not replace a file, as a renaming would
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # Not complete at once: a process that reads it too early fails, and can be repeated
            write_synced(path, content)
    except FileExistsError:
        return False
    except OSError as error:
        error.filename = str(path)
        error.filename2 = None
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def _content(job: Job) -> bytes:
    return json.dumps(dataclasses.asdict(job)).encode()


def afresh(work: Path) -> str:
    """How to start without the parts that are in a working folder."""
    return f"start afresh after: rm -r {shlex.quote(str(work))}"


def differences(was: Job, now: Job) -> str:
    """The options and files in which two jobs differ, as on the command line; "" if equal."""
    changes = []
    for setting in dataclasses.fields(Job):
        before = getattr(was, setting.name)
        after = getattr(now, setting.name)
        if not setting.compare or before == after:
            continue
        if setting.name == "files":
            changes.append(_changed_files(before, after))
        elif isinstance(before, FilterConfig | DuplicateConfig):
            for field in dataclasses.fields(before):
                value_before = getattr(before, field.name)
                value_after = getattr(after, field.name)
                if value_before != value_after:
                    changes.append(_difference(field.name, value_before, value_after))
        else:
            changes.append(_difference(setting.name, before, after))
    return "; ".join(changes)


def _difference(name: str, before: object, after: object) -> str:
    option = OPTIONS.get(name, f"--{name.replace('_', '-')}")
    if name in NAMES:
        option = name
    return f"{option}: {_shown(before)}, now {_shown(after)}"


def _shown(value: object) -> str:
    """A value as a message shows it."""
    if isinstance(value, tuple):
        text = ", ".join(value)
    elif isinstance(value, float):
        text = f"{value:g}"
    elif value is None:
        text = ""
    else:
        text = str(value)
    return text[:SHOWN] or "unset"


def _changed_files(was: tuple[File, ...], now: tuple[File, ...]) -> str:
    before = {file.path: file for file in was}
    after = {file.path: file for file in now}
    changes = [f"{path} is gone" for path in before if path not in after]
    changes += [f"{path} is new" for path in after if path not in before]
    names: dict[
        str, None
    ] = {}  # as an ordered set: all shards of a data set on the Hub have one name
    for path, file in after.items():
        if path in before:
            names[before[path].changed(file)] = None
    changes += [f"{name} has changed" for name in names if name]
    if not changes:
        return "files: in another order"
    rest = ""
    if len(changes) > 3:
        rest = f" and {len(changes) - 3} more"
    return f"files: {', '.join(changes[:3])}{rest}"


def read_job(work: Path) -> Job:
    """The job of a working folder. Raises ConfigError if it is absent or damaged."""
    try:
        job = typed(Job, read_json(work / NAME))
        _require_consistent(job)
    except ConfigError:  # a ValueError too, and complete
        raise
    except ValueError as error:
        raise ConfigError(
            f"{work / NAME}: damaged ({error}); delete {work} and start again"
        ) from None
    return job


def _require_consistent(job: Job) -> None:
    """Raises ValueError for values that no job has."""
    if not job.name.isprintable() or job.duplicates.remove not in REMOVED:
        raise ValueError("name, duplicates.remove")
    for file in job.files:
        if file.kind == "hf":
            valid = re.fullmatch(r"(?s)hf:.+#\d{1,9}", file.path) is not None
        else:
            path = PurePath(file.path)
            relative = PurePath(file.relative)
            valid = path.is_absolute() and path.name != "" and relative.name != ""
        if not valid:
            raise ValueError(f"files: {file.path!r:.200} is not a path of {file.kind}")


def read_json(path: Path) -> dict[str, Any]:
    """A file of the working folder. Raises ConfigError if it cannot be read."""
    try:
        content: dict[str, Any] = json.loads(read_bounded(path, LARGEST))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; expected a file that the preparation wrote"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: damaged ({type(error).__name__}); delete {path.parent} and start again"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: damaged (not an object); delete {path.parent} and start again")
    return content
