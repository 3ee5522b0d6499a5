"""Sources -> a job: what each file contains, which documents are held out, and the number of parts.

What it is: the decisions that precede any work. One document of twenty is for validation, chosen by
a hash: of its text for rows, of its relative path for a text file. If that leaves all text files or
none for validation (as with a single file), it is the last twentieth of each. Or validation
documents come from a separate source.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import BUNDLED, Tokenizer
from titanlite.tools.prepare.detect_content import detect
from titanlite.tools.prepare.duplicates import DuplicateConfig
from titanlite.tools.prepare.filters import FilterConfig
from titanlite.tools.prepare.inputs import companions_of
from titanlite.tools.prepare.job import (
    ALL_DOCUMENTS,
    HOLDOUT,
    NO_CHAT,
    NO_FILTERS,
    PART,
    ChatConfig,
    File,
    Job,
    number_of_parts,
)
from titanlite.tools.prepare.rows import hub_columns, open_hub
from titanlite.tools.prepare.sources import (
    HUB,
    STDLIB,
    Found,
    Source,
    find,
    hub_files,
    index_of,
    version_of,
)
from titanlite.tools.prepare.token_files import has_documents

# (path, size, time) of a file -> (kind, compression)
Known = dict[tuple[str, int, int], tuple[str, str]]
ROWS = ("jsonl", "parquet", "hf")  # kinds of files with fields
IDS = ("tokens", "megatron")  # kinds of files of token ids
MOST_PROBLEMS = 10  # shown in a message


@dataclass(frozen=True)
class Settings:
    """What decides the bytes of the result besides the sources.

    `parts`: 0 for a number by the size of the input.
    """

    parts: int = 0
    filters: FilterConfig = NO_FILTERS
    duplicates: DuplicateConfig = ALL_DOCUMENTS
    chat: ChatConfig = NO_CHAT


def plan_job(
    sources: list[tuple[Source, Found]],
    tokenizer: Tokenizer,
    settings: Settings,
    begun: Job | None = None,
) -> Job:
    """The job of preparing these sources, with the same settings for all rows, as one set of data.

    `begun`: an earlier job; its files need not be looked into again if they have not changed.
    Raises ConfigError for each file that cannot be read, or that lacks what is asked for: text to
    filter, a prompt.
    """
    first = sources[0][0]
    name = sources[0][1].name
    known: Known = {}
    if begun is not None:
        for file in begun.files:
            known[file.path, file.size, file.mtime_ns] = (file.kind, file.compression)
    files = []
    roots = []
    for source, source_files in sources:
        files += _files(source, source_files, "", tokenizer, known)
        roots.append(source_files.root)
    if first.validation:
        files = [file._replace(split="train") for file in files]
        validation = first.held_out()
        validation_files = find(validation)
        files += _files(validation, validation_files, "validation", tokenizer, known)
        roots.append(validation_files.root)
    _require_distinct(files, first)
    job = Job(
        name=name,
        roots=tuple(roots),
        files=tuple(files),
        field=first.field,
        prompt_field=first.prompt_field,
        tokenizer="" if tokenizer.path == BUNDLED else str(tokenizer.path.absolute()),
        tokenizer_sha256=tokenizer.sha256,
        parts=settings.parts or number_of_parts(sum(file.size for file in files)),
        filters=settings.filters,
        duplicates=settings.duplicates,
        chat=settings.chat,
        uncut=tokenizer.whole_documents,
        separate_validation=bool(first.validation),
    )
    if job.chat.template and not all(file.kind in ROWS for file in files):
        kinds = sorted({file.kind for file in files} - set(ROWS))
        raise ConfigError(f"--chat: conversations are rows, and {kinds[0]} has none")
    if job.prompt_field and not any(file.kind in ROWS for file in files):
        raise ConfigError(
            f"{files[0].path}: contains {files[0].kind}, which has no field {job.prompt_field!r}"
        )
    if job.examines:
        for file in files:
            if file.kind in IDS:
                raise ConfigError(
                    f"{file.path}: consists of token ids, "
                    "which cannot be filtered or compared as text"
                )
    return job


def _files(
    source: Source, found: Found, split: str, tokenizer: Tokenizer, known: Known
) -> list[File]:
    """The files of a source, each with what it contains and which split its documents are for."""
    if source.path.startswith(HUB):
        return _hub_shards(source, split or "hash")
    files: list[File] = []
    problems: list[str] = []
    for file in found.files:
        kind, compression = known.get((file.path, file.size, file.mtime_ns), ("", ""))
        indexed = index_of(file.path, file.relative) is not None
        try:
            if not file.size or source.path in ("", STDLIB):
                kind = "text"
                compression = ""
            elif not kind or (kind == "megatron") != indexed:  # an index has come or gone
                kind, compression = detect(Path(file.path), source)
            if compression and kind in IDS:
                raise ConfigError(
                    f"{file.path}: token ids in {compression}, which cannot be mapped; unpack it"
                )
        except ConfigError as error:
            problems += error.problems
        if kind:  # else an index, which belongs to the .bin file beside it
            companions = companions_of(file.path, file.relative, kind)
            files.append(File(*file, kind, compression, split or "hash", companions))
    if not files and not problems:
        index = Path(found.files[0].path)
        ids = index.with_suffix(".bin")
        reason = f"give {ids}" if ids.is_file() else "without its .bin file"
        problems = [f"{index}: an index of token ids, {reason}"]
    if len(problems) > MOST_PROBLEMS:
        omitted = len(problems) - MOST_PROBLEMS
        problems = [*problems[:MOST_PROBLEMS], f"and {omitted} more"]
    if problems:
        raise ConfigError(problems)
    if split:
        return files
    return _with_splits(files, tokenizer)


def _with_splits(files: list[File], tokenizer: Tokenizer) -> list[File]:
    """The files, each with the split of its documents, where validation has no separate source."""
    texts = [file for file in files if file.kind == "text"]
    held_out = {file.path for file in texts if is_held_out(file.relative)}
    # Whether both splits have a file of text; an empty one does not count
    holds_out_files = len({file.path in held_out for file in texts if file.size}) == 2

    def split_of(file: File) -> str:
        if file.kind == "text":
            if not holds_out_files:
                return "tail"
            return "validation" if file.path in held_out else "train"
        if file.kind == "tokens" and not has_documents(file, tokenizer):
            return "tail"
        return "hash"

    return [file._replace(split=split_of(file)) for file in files]


def _require_distinct(files: list[File], source: Source) -> None:
    """Raises ConfigError for a file that is given twice.

    In both splits, validation would measure what was trained.
    """
    seen: set[str] = set()
    for file in files:
        if file.path in seen and source.validation and file.split == "validation":
            given = f"{source.keys.validation} = {source.validation!r}"
            raise ConfigError(
                f"{given}: {file.path} is also a file of {source.keys.path}; expected other files"
            )
        if file.path in seen:
            raise ConfigError(f"{source.keys.path}: {file.path} is given twice")
        seen.add(file.path)


def is_held_out(relative: str) -> bool:
    digest = hashlib.sha256(relative.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest, "big") % HOLDOUT == 0


def _hub_shards(source: Source, split: str) -> list[File]:
    """The shards of a data set of the package `datasets`, each as a file.

    Of a local data set, all shards together have the size of its files. The size of one on the Hub
    is not known. Raises ConfigError if the data set lacks the column of the text.
    """
    count = _shards(source)
    local_files = hub_files(source.path)
    total = sum(file.size for file in local_files)
    spec = source.path
    version = ""
    if local_files:
        # By an absolute path, as other files
        name = spec.removeprefix(HUB).split(":")[0]
        spec = HUB + str(Path(name).absolute()) + spec.removeprefix(HUB + name)
        version = version_of(local_files)
    shards = []
    for i in range(count):
        size = PART
        if local_files:
            size = total * (i + 1) // count - total * i // count
        name = f"{spec}#{i}"
        shards.append(File(name, name, max(1, size), 0, "hf", "", split, version))
    return shards


def _shards(source: Source) -> int:
    """The number of pieces in which a data set of the package `datasets` can be read.

    Raises ConfigError if it does not have the column of the text.
    """
    data = open_hub(source.path)
    names = hub_columns(source.path)
    if names and source.field not in names:
        hint = suggestion(source.field, names) or f"; it has {', '.join(names[:20])}"
        raise ConfigError(
            f"{source.path}: has no column {source.keys.field} = {source.field!r}{hint}"
        )
    return max(1, data.num_shards)


def text_files(source: Source, found: Found) -> list[File]:
    """The text files of a source. Raises ConfigError if it has files of another kind."""
    files = []
    for file in found.files:
        kind = "text"
        compression = ""
        if file.size and source.path not in ("", STDLIB):
            kind, compression = detect(Path(file.path), source)
        if kind != "text":
            raise ConfigError(
                f"{file.path}: contains {kind}, expected text; "
                f"select files with {source.keys.pattern}"
            )
        files.append(File(*file, kind, compression, "train"))
    return files
