"""Text files -> tokenised shards.

What it is: selects a part of the text for validation, tokenises all of it and writes shards and a manifest. The
validation split is every file whose path hashes to 0 modulo 20, or the last twentieth of each file if no file or all
files do (as with a single file). The result is written to a temporary folder that is then renamed, so it is complete or
absent.
What it costs: one pass over the text, a few MB per second on one core; blocks of 400 kB are in memory at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.files import make_folder, sync_folder, write_synced
from titanlite.config.progress import progress_bar
from titanlite.config.schema import ConfigError
from titanlite.data.shards import FORMAT, token_dtype
from titanlite.data.tokenizer import Tokenizer

HOLDOUT = 20
SHARD_TOKENS = 100_000_000
BLOCK = 400_000  # bytes of text that are tokenised at a time


class ShardWriter:
    """Appends token ids to `folder/<split>-00000.bin`, -00001, ..., each of at most `shard_tokens`."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.shards: list[dict[str, Any]] = []
        self.documents = self.text_bytes = 0
        self._open()

    def _open(self) -> None:
        path = self.folder / f"{self.split}-{len(self.shards):05d}.bin"
        self._file, self._hash, self._tokens = path.open("wb"), hashlib.sha256(), 0

    def _close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        name = Path(self._file.name).name
        self.shards.append({"file": name, "tokens": self._tokens, "sha256": self._hash.hexdigest()})

    def write(self, ids: list[int]) -> None:
        while ids:
            part, ids = ids[: self.shard_tokens - self._tokens], ids[self.shard_tokens - self._tokens :]
            content = np.asarray(part, dtype=self.dtype).tobytes()
            self._file.write(content)
            self._hash.update(content)
            self._tokens += len(part)
            if self._tokens == self.shard_tokens:
                self._close()
                self._open()

    def finish(self) -> dict[str, Any]:
        """Closes the files and returns the split's entry of the manifest."""
        self._close()
        tokens = sum(shard["tokens"] for shard in self.shards)
        return {"tokens": tokens, "documents": self.documents, "bytes": self.text_bytes, "shards": self.shards}


def tokenise(
    name: str, root: Path, files: list[Path], tokenizer: Tokenizer, folder: Path, log: Callable[[str], None]
) -> None:
    """Tokenises these files into `folder`, by way of a temporary folder that is renamed.

    Raises ConfigError for a file that is not UTF-8 text, OSError for one that has vanished or cannot be read.
    """
    started = time.monotonic()
    total = sum(path.stat().st_size for path in files)
    log(f"preparing {name}: {len(files)} files, {total / 1e6:.1f} MB of text from {root}")
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(temporary)
    try:
        manifest = _write(name, root, files, tokenizer, temporary)
        write_synced(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
        sync_folder(temporary)
        temporary.rename(folder)
    except BaseException:  # also Ctrl-C
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(folder.parent)
    tokens = {split: entry["tokens"] for split, entry in manifest["splits"].items()}
    log(
        f"prepared {tokens['train']:,} training and {tokens['validation']:,} validation tokens "
        f"in {time.monotonic() - started:.1f} s: {folder}"
    )


def _write(name: str, root: Path, files: list[Path], tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Writes the shards and returns the manifest."""
    total = sum(path.stat().st_size for path in files)
    dtype = token_dtype(tokenizer.size)
    writers = {split: ShardWriter(folder, split, dtype) for split in ("train", "validation")}
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
    return {
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
