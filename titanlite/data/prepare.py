"""Text files -> tokenised shards in the cache.

What it is: finds the text files, selects a part of them for validation, tokenises them into the cache and writes a
manifest. Without `data.path` the text is the source of the running interpreter's standard library: Python code with
English documentation, which every machine has.
Why it is here: text is tokenised once and not in every run. The result is found again as long as the text files and the
tokenizer are the same. It is written to a temporary folder that is then renamed, so it is complete or absent. The
validation split is every file whose path hashes to 0 modulo 20, or the last twentieth of each file if no file or all
files do (as with a single file).
What it costs: one pass over the text, a few MB per second on one core; blocks of 400 kB are in memory at a time.
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
BLOCK = 400_000  # bytes of text that are tokenised at a time
NO_CORPUS = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


def prepare(section: DataConfig, tokenizer: Tokenizer, log: Callable[[str], None] = print) -> Path:
    """The folder of prepared data for a config; prepares it if it does not exist.

    Raises ConfigError with the path of text that is missing, empty or not UTF-8.
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
            fcntl.flock(lock, fcntl.LOCK_EX)  # one of several processes prepares, the others wait for it
            if not (folder / "manifest.json").exists():
                _prepare(name, root, files, tokenizer, folder, log)
    except OSError as error:
        raise ConfigError(f"data.cache = {str(cache)!r}: {error}; expected a writable folder") from None
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
                f"the default corpus is the source of Python's standard library, but {root} has only {len(files)} "
                ".py files (a stripped or frozen interpreter); set data.path to a text file or folder"
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
    except (OSError, RuntimeError) as error:  # the name is too long, or a link points to itself
        raise ConfigError(f"data.path = {section.path!r}: {error}") from None
    try:
        files = [p for p in path.glob(section.pattern) if p.is_file()]
    except (ValueError, IndexError, NotImplementedError) as error:
        raise ConfigError(
            f"data.pattern = {section.pattern!r}: {error}; expected a glob pattern such as **/*.txt"
        ) from None
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if not files:
        raise ConfigError(f"data.path = {section.path!r}: no file matches data.pattern = {section.pattern!r}")
    if not any(p.stat().st_size for p in files):
        raise ConfigError(f"data.path = {section.path!r}: its {len(files)} files are empty")
    return _set_name(path), path, sorted(files)


def _set_name(path: Path) -> str:
    """The name of a set of text in metrics and in the cache."""
    return re.sub(r"[^\w.-]", "_", path.stem) or "text"


def _prepare(
    name: str, root: Path, files: list[Path], tokenizer: Tokenizer, folder: Path, log: Callable[[str], None]
) -> None:
    """Tokenises into a temporary folder and renames it."""
    started = time.monotonic()
    total = sum(path.stat().st_size for path in files)
    log(f"preparing {name}: {len(files)} files, {total / 1e6:.1f} MB of text from {root}")
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
    log(
        f"prepared {tokens['train']:,} training and {tokens['validation']:,} validation tokens "
        f"in {time.monotonic() - started:.1f} s: {folder}"
    )


def read_texts(files: list[Path]) -> Iterator[str]:
    """The text of the files, in blocks. Raises ConfigError for a file that is not UTF-8."""
    for path in files:
        for block in _read(path, 0, path.stat().st_size):
            yield _decode(block, path)


def _parts(root: Path, files: list[Path]) -> Iterator[tuple[Path, str, int, int]]:
    """(file, split, first byte, end byte) of each document; a file may be two."""
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
    """The first line end from `offset` on; in a very long line, the start of the next character."""
    with path.open("rb") as file:
        file.seek(offset)
        block = file.read(BLOCK)
    line = block.find(b"\n") + 1
    return offset + (line or _whole_characters(block, from_start=True))


def _read(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """The bytes of a part of a file in blocks that end at line ends, or between characters in a very long line."""
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
    """The offset of the last UTF-8 character of a block; with `from_start` of the first."""
    positions = range(min(4, len(block))) if from_start else range(len(block) - 1, max(0, len(block) - 5), -1)
    return next((i for i in positions if block[i] & 0xC0 != 0x80), len(block))


def _decode(block: bytes, path: Path) -> str:
    """The text of a block. Raises ConfigError for bytes that are not UTF-8, or contain NUL."""
    try:
        text = block.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason}); select the text files with data.pattern") from None
    if "\0" in text:
        raise ConfigError(f"{path}: contains a NUL byte, so it is not text; select the text files with data.pattern")
    return text
