"""Plans a job: what each file of its sources contains, and which documents are held out.

What it is: the decisions that precede any work. One document of twenty is for validation, chosen by
a hash: of its text for rows, of its relative path for a text file. If that leaves all text files or
none for validation (as with a single file), it is the last twentieth of each. Or validation
documents come from a separate source.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import BUNDLED, Tokenizer
from titanlite.tools.prepare.detect_content import detect
from titanlite.tools.prepare.hub_rows import num_shards
from titanlite.tools.prepare.job import (
    HOLDOUT,
    IDS,
    NO_CHAT,
    PART,
    ChatConfig,
    File,
    Job,
    number_of_parts,
)
from titanlite.tools.prepare.sources import (
    HUB,
    STDLIB,
    Found,
    FoundFile,
    Source,
    find,
    hub_files,
    version_of,
    with_companions,
)
from titanlite.tools.prepare.token_files import has_documents
from titanlite.tools.prepare.token_layout import Layout, token_layout

ROWS = ("jsonl", "parquet", "hf")  # kinds of files with fields
MOST_PROBLEMS = 10  # shown in a message


def plan_job(
    sources: list[tuple[Source, Found]],
    tokenizer: Tokenizer,
    drop_duplicates: bool = False,
    chat: ChatConfig = NO_CHAT,
) -> Job:
    """The job of preparing these sources, with the same settings for all rows, as one set of data.

    Raises ConfigError for each file that cannot be read, or that lacks what is asked for: text to
    compare, a prompt.
    """
    first = sources[0][0]
    files: list[File] = []
    roots = []
    for source, found in sources:
        files += _files(source, found, source.split, tokenizer)
        roots.append(found.root)
    if first.validation:
        files = [file._replace(split="train") for file in files]
        validation = first.held_out()
        found = find(validation)
        files += _files(validation, found, "validation", tokenizer)
        roots.append(found.root)
    _require_distinct(files, first)
    job = Job(
        name=sources[0][1].name,
        roots=tuple(roots),
        files=tuple(files),
        field=first.field,
        prompt_field=first.prompt_field,
        tokenizer="" if tokenizer.path == BUNDLED else str(tokenizer.path.absolute()),
        tokenizer_sha256=tokenizer.sha256,
        parts=number_of_parts(sum(file.size for file in files)),
        drop_duplicates=drop_duplicates,
        chat=chat,
        uncut=tokenizer.whole_documents,
        separate_validation=bool(first.validation),
        ids=first.ids,
        enclosed=first.enclosed,
    )
    for file in files:
        if chat.template and file.kind not in ROWS:
            raise ConfigError(
                f"{file.path}: --chat: conversations are rows, and {file.kind} has none"
            )
        if drop_duplicates and file.kind in IDS:
            raise ConfigError(
                f"{file.path}: consists of token ids, which --drop-duplicates cannot compare"
            )
    if job.prompt_field and not any(file.kind in ROWS for file in files):
        raise ConfigError(
            f"{files[0].path}: contains {files[0].kind}, which has no field {job.prompt_field!r}"
        )
    if job.ids != "auto" and not any(file.kind == "tokens" for file in files):
        raise ConfigError(
            f"{first.keys.ids} = {job.ids!r}: has no effect: {files[0].path} contains "
            f"{files[0].kind}, expected token ids in .bin or .npy; remove it"
        )
    return job


def _files(source: Source, found: Found, split: str, tokenizer: Tokenizer) -> list[File]:
    """The files of a source, each with what it contains and which split its documents are for."""
    if source.path.startswith(HUB):
        return _hub_shards(source, split or "hash")
    files: list[File] = []
    layouts: dict[str, Layout] = {}
    problems: list[str] = []
    for file in found.files:
        try:
            kind, compression = _detect(file, source)
            if kind == "tokens":
                layouts[file.path] = token_layout(
                    file.path, file.size, tokenizer, source.ids, source.keys.ids
                )
        except ConfigError as error:
            problems += error.problems
            continue
        if kind:
            version = version_of(with_companions(file))
            files.append(
                File(
                    file.path, file.relative, file.size, version, kind, compression, split or "hash"
                )
            )
    if not files and not problems:
        path = found.files[0].path
        problems = [f"{path}: is read with the token ids that it describes; give their file"]
    if len(problems) > MOST_PROBLEMS:
        omitted = len(problems) - MOST_PROBLEMS
        problems = [*problems[:MOST_PROBLEMS], f"and {omitted} more"]
    if problems:
        raise ConfigError(problems)
    if split:
        return files
    return _with_splits(files, layouts, tokenizer)


def _detect(file: FoundFile, source: Source) -> tuple[str, str]:
    """Detects (kind, compression) of a file; no kind if it belongs to another one.

    Raises ConfigError.
    """
    if not file.size or source.path in ("", STDLIB):
        return "text", ""
    kind, compression = detect(Path(file.path), source)
    if compression and kind in IDS:
        raise ConfigError(
            f"{file.path}: token ids in {compression}, which cannot be mapped; unpack it"
        )
    return kind, compression


def _with_splits(files: list[File], layouts: dict[str, Layout], tokenizer: Tokenizer) -> list[File]:
    """The files, each with the split of its documents, where validation has no separate source.

    `layouts`: of the files of token ids, by their paths.
    """
    texts = [file for file in files if file.kind == "text"]
    held_out = {file.path for file in texts if is_held_out(file.relative)}
    # Whether both splits have a file of text; an empty one does not count
    holds_out_files = len({file.path in held_out for file in texts if file.size}) == 2

    def split_of(file: File) -> str:
        if file.kind == "text":
            if not holds_out_files:
                return "tail"
            return "validation" if file.path in held_out else "train"
        if file.kind == "tokens" and not has_documents(file, layouts[file.path], tokenizer):
            return "tail"
        return "hash"

    return [file._replace(split=split_of(file)) for file in files]


def is_held_out(relative: str) -> bool:
    digest = hashlib.sha256(relative.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest, "big") % HOLDOUT == 0


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


def _hub_shards(source: Source, split: str) -> list[File]:
    """The shards of a data set of the package `datasets`, each as a file.

    All shards of a local data set together have the size of its files. The size of one on the Hub
    is not known. Raises ConfigError if the data set lacks the column of the text.
    """
    count = num_shards(source)
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
        shards.append(File(name, name, max(1, size), version, "hf", "", split))
    return shards


def text_files(source: Source, found: Found) -> list[File]:
    """The text files of a source. Raises ConfigError if it has files of another kind."""
    files = []
    for file in found.files:
        kind, compression = _detect(file, source)
        if kind != "text":
            raise ConfigError(
                f"{file.path}: contains {kind or 'an index'}, expected text; "
                f"select files with {source.keys.pattern}"
            )
        files.append(File(file.path, file.relative, file.size, "", kind, compression, "train"))
    return files


def check_unchanged(files: tuple[File, ...]) -> None:
    """Raises ConfigError for a file that has changed since the job was planned, OSError for one
    that is gone.
    """
    hub: dict[str, str] = {}  # data set -> version, which its shards share
    for file in files:
        if file.kind == "hf":
            if file.name not in hub:
                local_files = hub_files(file.name)
                hub[file.name] = version_of(local_files) if local_files else ""
            version = hub[file.name]
        else:
            status = Path(file.path).stat()
            now = FoundFile(file.path, file.relative, status.st_size, status.st_mtime_ns)
            version = version_of(with_companions(now))
        if version != file.version:
            raise ConfigError(
                f"{file.name}: has changed since the preparation began; repeat the command"
            )
