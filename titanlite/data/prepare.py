"""Text files -> tokenised shards, once.

What it is: finds the text, holds some of it out for validation, tokenises it into the cache and writes a manifest.
Without `data.path` the text is the source of the running interpreter's own standard library: real Python and its
English documentation, on every machine, nothing downloaded.
Held out are whole files, those whose path hashes to 0 modulo 20; where that leaves nothing (a single file), the last
twentieth of each. The result is written beside its place and renamed, so it is complete or absent, and is found
again as long as the text files and the tokenizer are the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from titanlite.config.progress import progress_bar
from titanlite.config.schema import ConfigError, DataConfig
from titanlite.data.shards import ShardWriter, token_dtype
from titanlite.data.tokenizer import Tokenizer

FORMAT = 1
HOLDOUT = 20
BLOCK = 400_000  # bytes of text tokenised at a time
NO_CORPUS = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


def prepare(section: DataConfig, tokenizer: Tokenizer, say: Callable[[str], None] = print) -> Path:
    """The folder of prepared data for a config, made now if it is not there yet.

    Raises ConfigError for text that is missing, empty or not UTF-8, naming it.
    """
    name, root, files = find_text(section)
    given = section.cache or os.environ.get("TITANLITE_CACHE")
    cache = Path(given) if given else Path.home() / ".cache/titanlite"
    stats = [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    identity = json.dumps([FORMAT, str(root), tokenizer.sha256, stats])
    folder = cache / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if (folder / "manifest.json").exists():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one prepares, the others find it done
            if not (folder / "manifest.json").exists():
                _prepare(name, root, files, tokenizer, folder, say)
    except OSError as error:
        raise ConfigError(f"data.cache = {str(cache)!r}: {error}; expected a folder that can be written") from None
    return folder


def find_text(section: DataConfig) -> tuple[str, Path, list[Path]]:
    """(name of the set, its root, the files in a fixed order)."""
    if not section.path:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = []
        for where, folders, names in os.walk(root):
            folders[:] = [f for f in folders if f not in NO_CORPUS]
            files += [Path(where, n) for n in names if n.endswith(".py")]
        if sum(p.stat().st_size for p in files) < 1_000_000:
            raise ConfigError(
                f"the default corpus is the source of Python's standard library, but {root} holds only {len(files)} "
                ".py files (a stripped or frozen interpreter); name a text of your own with data.path"
            )
        return "stdlib", root, sorted(files)
    try:
        path = Path(section.path).resolve()
        if path.is_file():
            if not path.stat().st_size:
                raise ConfigError(f"data.path = {section.path!r}: the file is empty")
            return _set_name(path), path.parent, [path]
        if not path.is_dir():
            raise ConfigError(f"data.path = {section.path!r}: no such file or folder")
    except (OSError, RuntimeError) as error:  # a name too long, a link to itself
        raise ConfigError(f"data.path = {section.path!r}: {error}") from None
    try:
        files = [p for p in path.glob(section.pattern) if p.is_file()]
    except (ValueError, IndexError, NotImplementedError) as error:
        raise ConfigError(
            f"data.pattern = {section.pattern!r}: {error}; expected a glob pattern such as **/*.txt"
        ) from None
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if not files:
        raise ConfigError(f"data.path = {section.path!r}: no file in it matches data.pattern = {section.pattern!r}")
    if not any(p.stat().st_size for p in files):
        raise ConfigError(f"data.path = {section.path!r}: its {len(files)} files are empty")
    return _set_name(path), path, sorted(files)


def _set_name(path: Path) -> str:
    """What a set of text is called in metrics and in the cache."""
    return re.sub(r"[^\w.-]", "_", path.stem) or "text"


def _prepare(
    name: str, root: Path, files: list[Path], tokenizer: Tokenizer, folder: Path, say: Callable[[str], None]
) -> None:
    """Tokenises into a temporary folder and renames it."""
    started = time.monotonic()
    total = sum(path.stat().st_size for path in files)
    say(f"preparing {name}: {len(files)} files, {total / 1e6:.1f} MB of text from {root}")
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    dtype = token_dtype(tokenizer.size)
    writers = {split: ShardWriter(temporary, split, dtype) for split in ("train", "validation")}
    digest = hashlib.sha256(tokenizer.sha256.encode())
    with progress_bar(total, "tokenising") as bar:
        for path, split, begin, end in _parts(root, files):
            writer = writers[split]
            writer.write([tokenizer.bos])
            digest.update(f"{path.relative_to(root)} {split} {end - begin}\n".encode("utf-8", "surrogateescape"))
            for block in _read(path, begin, end):
                digest.update(block)
                writer.write(tokenizer.encode(_decode(block, path)))
                bar.update(len(block))
            writer.write([tokenizer.eos])
            writer.documents += 1
            writer.text_bytes += end - begin
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "root": str(root),
        "python": platform.python_version(),
        "files": len(files),
        "bytes": total,
        "fingerprint": digest.hexdigest(),
        "tokenizer": {"file": tokenizer.path.name, "sha256": tokenizer.sha256, "size": tokenizer.size},
        "dtype": dtype.str,
        "splits": {split: writer.finish() for split, writer in writers.items()},
    }
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
    temporary.rename(folder)
    tokens = {split: entry["tokens"] for split, entry in manifest["splits"].items()}
    say(
        f"prepared {tokens['train']:,} training and {tokens['validation']:,} validation tokens "
        f"in {time.monotonic() - started:.1f} s: {folder}"
    )


def read_texts(files: list[Path]) -> Iterator[str]:
    """The text of the files, in blocks. Raises ConfigError for a file that is not UTF-8."""
    for path in files:
        for block in _read(path, 0, path.stat().st_size):
            yield _decode(block, path)


def _parts(root: Path, files: list[Path]) -> Iterator[tuple[Path, str, int, int]]:
    """(file, split, first byte, end byte) of each document."""
    hashes = [
        hashlib.sha256(path.relative_to(root).as_posix().encode("utf-8", "surrogateescape")).digest() for path in files
    ]
    held_out = {path for path, h in zip(files, hashes, strict=True) if int.from_bytes(h, "big") % HOLDOUT == 0}
    whole_files = bool(held_out) and len(held_out) < len(files)
    for path in files:
        size = path.stat().st_size
        cut = _line_end(path, size - size // HOLDOUT)
        if whole_files:
            cut = 0 if path in held_out else size
        for split, begin, end in (("train", 0, cut), ("validation", cut, size)):
            if begin < end:
                yield path, split, begin, end


def _line_end(path: Path, offset: int) -> int:
    """The first end of a line from `offset` on, or the start of the next character where the line is very long."""
    with path.open("rb") as file:
        file.seek(offset)
        block = file.read(BLOCK)
    line = block.find(b"\n") + 1
    return offset + (line or _whole_characters(block, from_start=True))


def _read(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """The bytes of a part of a file, cut at line ends where there are any, else between characters."""
    with path.open("rb") as file:
        file.seek(begin)
        rest, left = b"", end - begin
        while left > 0:
            read = file.read(min(BLOCK, left))
            if not read:
                raise ConfigError(f"{path}: became shorter while it was read; start again")
            left -= len(read)
            block = rest + read
            cut = len(block) if left == 0 else (block.rfind(b"\n") + 1 or _whole_characters(block))
            rest = block[cut:]
            if cut:
                yield block[:cut]


def _whole_characters(block: bytes, from_start: bool = False) -> int:
    """Where the last UTF-8 character of a block begins (or the first, from the start)."""
    positions = range(min(4, len(block))) if from_start else range(len(block) - 1, max(0, len(block) - 5), -1)
    return next((i for i in positions if block[i] & 0xC0 != 0x80), len(block))


def _decode(block: bytes, path: Path) -> str:
    """Text of a block. Raises ConfigError for bytes that are no text."""
    try:
        text = block.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason}); choose the text files with data.pattern") from None
    if "\0" in text:
        raise ConfigError(f"{path}: holds a NUL byte, so it is no text; choose the text files with data.pattern")
    return text
