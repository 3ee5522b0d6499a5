"""Detects what a file contains, text, rows or token ids, and whether it is compressed.

What it is: detection by the first bytes, and by the name (.bin, .npy, .idx, .ds, .jsonl, .csv) only
where they are ambiguous. JSON lines, tables and binary files are never read as text; the error for
a known but unsupported format names it and the command that converts it. A .bin, or a .npy without
NumPy's header, may begin with any two ids, so that only marks of at least four bytes count there.
What it costs: 4 KB of each file are read, once per preparation; of a long first line of JSON up to
1 MB.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError
from titanlite.tools.prepare.compressed import COMPRESSIONS, damaged, open_file, unreadable
from titanlite.tools.prepare.documents import BYTE_ORDER_MARK
from titanlite.tools.prepare.fields import CONVERSATIONS, IN_JSON, other_fields, with_chat
from titanlite.tools.prepare.sources import DATATROVE_COMPANIONS, RAW_NAMES, Source

SAMPLE = 4096  # bytes that are read
LONG_LINE = 1 << 20  # and bytes of a first line of JSON that is longer
ROW_NAMES = (".jsonl", ".ndjson")
TABLES = {".csv": "", ".tsv": ", delimiter='\\t'"}  # suffix -> the option of Python's csv reader
FOREIGN = {  # magic bytes -> (what it is, what to do)
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"\xfd7zXZ": ("an xz file", "unpack it, or pack it with gzip or zstd"),
    b"BZh": ("a bzip2 file", "unpack it, or pack it with gzip or zstd"),
    b"ARROW1": ("an Arrow file", "give the data set's folder as hf:FOLDER"),
    b"%PDF": ("a PDF", "extract its text"),
    b"\xff\xfe": ("UTF-16 text", "convert it to UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "convert it to UTF-8"),
    b"\x80\x02": ("a pickle", "pickles are not read: they can run code"),
    b"\x80\x04": ("a pickle", "pickles are not read: they can run code"),
    b"LITPKDS": (
        "a chunk of lit-gpt's PackedDataset",
        "remove its header of 24 bytes: tail -c +25 FILE > ids.bin",
    ),
    b"GGUF": ("a GGUF model", "expected text, rows or token ids"),
    b"\x89HDF\r\n": ("an HDF5 file", "write its ids with numpy.save"),
}
WEAK = 4  # bytes; shorter magic bytes may be the first ids of a .bin
# The mark of a message, its length, and where its table begins; ids of -1 begin as the mark does
ARROW_STREAM = re.compile(rb"\xff{4}..\0\0\x10\0\0\0", re.DOTALL)
# Magic bytes, method, flags, time, level: RFC 1952
GZIP = re.compile(rb"\x1f\x8b\x08[\x00-\x1f].{4}[\x00\x02\x04]", re.DOTALL)
DATATROVE_FILES = tuple(f".ds{suffix}" for suffix in DATATROVE_COMPANIONS)
MEGATRON = b"MMIDIDX\x00\x00"
# How Megatron's preprocess_data, and Pythia's shards of its files, end
MEGATRON_NAME = re.compile(r"(^|_)(document|sentence)(-\d+-of-\d+)?\.bin")
LITDATA_NAME = re.compile(r"chunk-\d+-\d+(\.\w+)?\.bin")
NUMPY = b"\x93NUMPY"
# A zip archive's first file in a file of torch.save
TORCH = re.compile(rb"PK\x03\x04.{26}[^/]{1,80}/(data\.pkl|\.format_version|\.data)", re.DOTALL)
# An array of objects: Markdown and TOML can begin with [, too
ARRAY = re.compile(rb'(\xef\xbb\xbf)?\s*\[\s*\{\s*"')
# The magic number in the header of llm.c's token files -> its version, and the type of its ids
LLMC = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
LLMC_HEADER = 1024  # bytes
# and in the headers of its other files
LLMC_OTHERS = {
    20240326: "weights of llm.c",
    20240327: "a debug state of llm.c",
    20240328: "a tokenizer of llm.c",
    20240522: "an evaluation of llm.c",
}


def detect(path: Path, source: Source) -> tuple[str, str]:
    """Detects (kind, compression) of a file.

    The kind is "" for a file that is read with another one: an index of Megatron or datatrove.
    Raises ConfigError for a file that is none of these, naming what it is if that is known.
    """
    if path.suffix == ".ds":
        return "datatrove", ""
    if path.name.endswith(DATATROVE_FILES) or _describes_others(path):
        return "", ""
    compression = ""
    try:
        with path.open("rb") as file:
            start = file.read(16)
        for name, magic in COMPRESSIONS.items():
            if start.startswith(magic):
                compression = name
        if compression == "gzip" and path.suffix in RAW_NAMES and not GZIP.match(start):
            compression = ""  # the two bytes are its first id
        with open_file(path, compression) as file:
            sample = file.read(SAMPLE)
            if sample.startswith(BYTE_ORDER_MARK):
                sample = sample.removeprefix(BYTE_ORDER_MARK) + file.read(len(BYTE_ORDER_MARK))
            if sample.lstrip()[:1] in (b"{", b"[") and b"\n" not in sample:
                sample += file.read(LONG_LINE)
    except damaged() as error:
        if compression:
            raise unreadable(str(path), compression, error) from None
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if sample.startswith(b"PAR1"):
        if compression:
            raise ConfigError(f"{path}: a Parquet file within {compression}; unpack it")
        return "parquet", ""
    if sample.startswith(MEGATRON):
        return "", ""
    if path.with_suffix(".idx").is_file() and path.suffix == ".bin":
        return "megatron", compression
    magic_number = int.from_bytes(sample[:4], "little")
    if magic_number in LLMC and len(sample) >= LLMC_HEADER:
        return "tokens", compression
    if magic_number in LLMC_OTHERS and len(sample) >= LLMC_HEADER:
        raise ConfigError(f"{path}: is {LLMC_OTHERS[magic_number]}, not text, rows or token ids")
    if ARROW_STREAM.match(sample):
        raise ConfigError(f"{path}: is an Arrow stream; give the data set's folder as hf:FOLDER")
    if sample.startswith(NUMPY):
        return "tokens", compression
    if TORCH.match(sample):
        raise ConfigError(
            f"{path}: is a file of torch.save; write its ids with numpy.save(FILE, ids.numpy())"
        )
    for magic, (content, remedy) in FOREIGN.items():
        if sample.startswith(magic) and (len(magic) >= WEAK or path.suffix not in RAW_NAMES):
            raise ConfigError(f"{path}: is {content}; {remedy}")
    named = path.name.removesuffix(".gz").removesuffix(".zst").endswith(ROW_NAMES)
    if not _is_text(sample) and not named:  # among rows, some may be text
        if path.suffix in RAW_NAMES:
            if LITDATA_NAME.fullmatch(path.name) and source.ids == "auto":
                raise ConfigError(
                    f"{path}: is named as a chunk of litdata, which has a header; save the ids "
                    f"with numpy.save, or name their type by {source.keys.ids} if it has none"
                )
            if MEGATRON_NAME.search(path.name) and source.ids == "auto":
                raise ConfigError(
                    f"{path}: is named as Megatron's, whose documents are in "
                    f"{path.with_suffix('.idx').name}, which is not beside it: put it there, or "
                    f"name the type of its ids by {source.keys.ids} to read them as one sequence"
                )
            return "tokens", compression
        problem = "contains a NUL byte, so it is not text" if b"\0" in sample else "not UTF-8 text"
        raise ConfigError(
            f"{path}: {problem}; select the text files with {source.keys.pattern} (token ids are "
            "read from .bin and .npy)"
        )
    if _is_rows(path, sample, source, named):
        return "jsonl", compression
    _require_prose(path, sample, source)
    return "text", compression


def _describes_others(path: Path) -> bool:
    """Whether a file only describes token ids beside it, by dolma."""
    name = path.name.removesuffix(".csv.gz")
    return name != path.name and path.with_name(name + ".npy").is_file()


def _require_prose(path: Path, sample: bytes, source: Source) -> None:
    """Raises ConfigError for a table, or for JSON that is a conversation or a list of rows."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    suffix = Path(name).suffix.lower()
    if suffix in TABLES:
        target = shlex.quote(Path(name).stem + ".jsonl")
        unpack = "" if name == path.name else "unpack it, then "
        raise ConfigError(
            f"{path}: is a table ({suffix}), not prose; {unpack}write its rows as JSON lines: "
            'python -c "import csv, json, sys; csv.field_size_limit(2**30); [print(json.dumps(row))'
            " for row in csv.DictReader(open(sys.argv[1], newline='', encoding='utf-8-sig')"
            f'{TABLES[suffix]})]" {shlex.quote(str(path.with_name(name)))} > {target}'
        )
    if suffix == ".json" and (ARRAY.match(sample) or IN_JSON.search(sample)):
        parts = ".[]" if ARRAY.match(sample) else "."
        rows = Path(name).stem + ".jsonl"
        conversation = IN_JSON.search(sample)
        then = ""
        if conversation:
            then = f", then {with_chat(rows, conversation[1].decode())}"
        raise ConfigError(
            f"{path}: is rows in JSON, not prose; write one object per line: "
            f"jq -c '{parts}' {shlex.quote(str(path))} > {shlex.quote(rows)}{then}"
        )


def _is_text(sample: bytes) -> bool:
    """UTF-8 without NUL; the last character may be cut."""
    try:
        return "\0" not in sample.decode("utf-8")
    except UnicodeDecodeError as error:
        return (
            error.start >= len(sample) - 3
            and b"\0" not in sample
            and "unexpected end" in error.reason
        )


def _is_rows(path: Path, sample: bytes, source: Source, named: bool) -> bool:
    """Whether the lines are JSON objects. Raises ConfigError if they lack the field of the text.

    `named`: the name says so.
    """
    *complete, last = sample.split(b"\n")
    lines = [line for line in complete if line.strip()][:20]
    if not lines and len(sample) < SAMPLE and last.strip():  # a single line without a line end
        lines.append(last)
    if not lines and sample.lstrip().startswith((b'{"', b"{ ")):
        return True  # the first line is longer than the sample
    objects: list[dict[str, object]] = []
    for line in lines:
        value = _parse(line)
        if isinstance(value, dict):
            objects.append(value)
    if named and lines and not objects:
        raise ConfigError(
            f"{path}: is named as JSON lines, "
            f"but none of its first {len(lines)} lines is a JSON object"
        )
    if not named and ARRAY.match(sample) and f'"{source.field}"'.encode() in sample:
        raise ConfigError(
            f"{path}: is one JSON array; write one object per line (jq -c '.[]' FILE > FILE.jsonl)"
        )
    with_field = sum(source.field in value for value in objects)
    conversations = sum(
        any(isinstance(value.get(name), list) for name in CONVERSATIONS) for value in objects
    )
    all_objects = len(lines) > 1 and len(objects) == len(lines)
    # Some may be broken
    most_have_field = len(lines) > 0 and 2 * max(with_field, conversations) >= len(lines)
    is_rows = named or all_objects or most_have_field
    if is_rows and objects and not with_field:
        names = list(objects[0])
        hint = other_fields(str(path), source.field, names)
        raise ConfigError(
            f"{path}: its rows have no field {source.keys.field} = {source.field!r}{hint}"
        )
    return is_rows


def _parse(line: bytes) -> object:
    """The JSON value of a line; None if it has none."""
    try:
        value: object = parse_json(line)
    except ValueError:
        return None
    return value
