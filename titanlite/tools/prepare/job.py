"""Describes a job of preparation, its files and settings, and cuts it into parts.

What it is: the files of a job are concatenated in order into one sequence of bytes and divided into
n equal ranges; part i is the i-th range. A large text or JSONL file is cut where the sequence is
cut: rows and lines belong to the part in which they begin. So a part is a function of the job and
its number alone: any process can make it, also again after an interruption, and it gives the same
bytes.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

from titanlite.data.prepared_manifest import AGAIN, FORMAT
from titanlite.runtime.documents import read_json
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file
from titanlite.runtime.typed_json import Count, typed

T = TypeVar("T")
HOLDOUT = 20  # one document of so many is for validation
PART = 1 << 26  # bytes of input of a part, or more of a large input
MOST_PARTS = 256  # each has files of its own, which training maps
CUT = 1 << 23  # bytes; smaller files are not cut
IDS = ("tokens", "megatron", "datatrove")  # kinds of files of token ids
NAME = "job.json"  # the file of a job
HASH = 16  # characters of the hash of a job
LARGEST = 1 << 30  # bytes of a file of the working folder


class File(NamedTuple):
    """An input file.

    `split`: train, validation, hash (of each document), or tail (its last twentieth is held out).
    `version` changes when the file does, or one that is read with it; "" if that is not known.
    """

    path: str
    relative: str
    size: Count
    version: str
    kind: str
    compression: str
    split: str

    @property
    def name(self) -> str:
        """What a message calls it: its path, or the data set of a shard."""
        if self.kind == "hf":
            return self.path.rpartition("#")[0]
        return self.path


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
    # What ends the last answer, where the template ends answers by the next turn's beginning only
    marker: str = ""


NO_CHAT = ChatConfig()


@dataclass(frozen=True)
class Job:
    """Everything that decides the bytes of a prepared folder."""

    name: str
    roots: tuple[str, ...]
    files: tuple[File, ...]
    field: str
    prompt_field: str
    tokenizer: str  # absolute path, "" for the bundled one
    tokenizer_sha256: str
    parts: Annotated[int, range(1, MOST_PARTS + 1)]
    drop_duplicates: bool = False
    chat: ChatConfig = NO_CHAT
    uncut: bool = False  # the tokenizer encodes documents as a whole
    separate_validation: bool = False  # the files of split `validation` are of another source
    ids: str = "auto"  # the type of the ids in files that do not state it; auto: by the data
    enclosed: bool = True  # texts are between bos and eos; otherwise they begin as prompts do
    format: int = FORMAT
    cut: Count = dataclasses.field(default_factory=lambda: CUT)  # bytes; smaller files are not cut

    @property
    def columns(self) -> list[str]:
        """The fields or columns of a row that are read."""
        return [name for name in (self.field, self.prompt_field) if name]

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return self._ends[-1] if self._ends else 0

    @functools.cached_property
    def has_known_size(self) -> bool:
        """Whether `bytes` is the input's size; a shard of a data set on the Hub counts as PART."""
        return all(file.version for file in self.files)

    @functools.cached_property
    def _ends(self) -> list[int]:
        """The end of each file in the sequence of all bytes."""
        return list(itertools.accumulate(file.size for file in self.files))

    @property
    def whole_documents(self) -> bool:
        """Whether each document must be in memory at once: to be compared, or by the tokenizer."""
        return self.drop_duplicates or self.uncut

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

    def size(self, part: int) -> int:
        """The bytes that a part reads."""
        return sum(piece.end - piece.begin for piece in self.pieces(part))

    def _can_be_cut(self, file: File) -> bool:
        if file.compression or file.kind == "hf" or file.kind in IDS:
            return False
        if file.kind == "text" and self.whole_documents:
            return False  # the file is one document
        return file.size >= self.cut


def number_of_parts(total: int) -> int:
    """The number of parts of an input of so many bytes."""
    size = max(PART, -(-total // MOST_PARTS))
    return max(1, -(-total // size))


def job_hash(job: Job) -> str:
    """Identifies a job by all that decides the bytes of its parts."""
    fields = dataclasses.asdict(job)
    del fields["tokenizer"]  # its place; its hash stays
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:HASH]


def write_job(job: Job, work: Path) -> None:
    """Writes the job into its working folder."""
    replace_file(work / NAME, json.dumps(dataclasses.asdict(job)).encode())


def read_job(work: Path) -> Job:
    """The job of a working or prepared folder. Raises ConfigError if it is damaged."""
    return read_typed(Job, work / NAME)


def read_typed(kind: type[T], path: Path) -> T:
    """A file of the working folder. Raises ConfigError if it is damaged."""
    try:
        return typed(kind, read_json(path, LARGEST))
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}); {AGAIN}") from None
