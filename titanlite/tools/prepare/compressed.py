"""Opens files, compressed or not, as streams of bytes.

What it is: gzip by the standard library, Zstandard by the package `zstandard` (extra `[zstd]`).
Data is decompressed as it is read, so that memory does not grow with it. Time does: 128 kB of
Zstandard can expand to 4 GB. So a file may expand to 200 times its size and 134 MB.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from pathlib import Path
from typing import IO, Any

from titanlite.runtime.errors import ConfigError

COMPRESSIONS = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
BUFFER = 1 << 20
CHUNK = 1 << 9  # compressed bytes that are decompressed at a time: at most 16 MB come out
WINDOW = 1 << 27  # bytes that a Zstandard stream may refer back to, and that are kept in memory
EXPANSION = 200  # bytes of text that each byte of a file may have
FREE = 1 << 27  # and bytes of text that any file may have besides
# Bytes that a row of Parquet counts as, besides its text: its time does not depend on its length
ROW = 256
# The same for a line of compressed JSON lines, which is stored with its own bytes and read faster
LINE = 32


class ExpandsTooFar(ValueError):
    """A file has more content than its size allows."""


class Allowance:
    """The bytes that a file, or a piece of one, may still expand to."""

    def __init__(self, size: int, row: str, advice: str) -> None:
        """Limits what a file of `size` bytes may expand to.

        `row`: what counts besides the text; `advice`: what to do if
        the file is meant to be so."""
        self.most = FREE + EXPANSION * size
        self.left = self.most
        self._row = row
        self._advice = advice

    def spend(self, count: int) -> None:
        """Counts what was read. Raises ExpandsTooFar."""
        self.left -= count
        if self.left < 0:
            raise ExpandsTooFar(
                f"expands to more than {self.most / 1e6:,.0f} MB, "
                f"{EXPANSION} times its size and {FREE / 1e6:,.0f} MB "
                f"({self._row} besides its text); if it is meant to, {self._advice}"
            )


def damaged() -> tuple[type[Exception], ...]:
    """Returns the exceptions that a damaged file raises, or one that expands too far."""
    try:
        from zstandard import ZstdError
    except ImportError:
        return (OSError, EOFError, zlib.error, ExpandsTooFar)
    return (OSError, EOFError, zlib.error, ExpandsTooFar, ZstdError)


def unreadable(path: str, compression: str, error: Exception, line: int = 0) -> ConfigError:
    """The error for a file that raised one of `damaged`; `line` from 1 on, if it is known."""
    place = f"{path}:{line}" if line else path
    if isinstance(error, ExpandsTooFar):
        return ConfigError(f"{place}: {error}")
    return ConfigError(f"{place}: damaged {compression} data: {error}")


def open_file(path: Path, compression: str) -> IO[bytes]:
    """The decompressed bytes of a file.

    Raises ConfigError if the package for it is not installed.
    """
    if not compression:
        return path.open("rb")
    return io.BufferedReader(Decompressed(path, compression), BUFFER)


class Decompressed(io.RawIOBase):
    """The decompressed bytes of a file, as far as its size allows."""

    def __init__(self, path: Path, compression: str) -> None:
        super().__init__()
        self._file = path.open("rb")
        try:
            self._content: io.BufferedIOBase | io.RawIOBase
            if compression == "gzip":
                self._content = gzip.GzipFile(fileobj=self._file)
            else:
                self._content = _Zstandard(self._file, _decompressor(path))
        except BaseException:
            self._file.close()
            raise
        self.allowance = Allowance(
            os.fstat(self._file.fileno()).st_size,
            f"each line of JSON lines counts {LINE} bytes",
            "unpack it",
        )

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer, as far as there are bytes. Raises ExpandsTooFar."""
        count: int = self._content.readinto(buffer) or 0
        self.allowance.spend(count)
        return count

    def close(self) -> None:
        self._content.close()
        self._file.close()
        super().close()


def allowance_of(stream: IO[bytes]) -> Allowance | None:
    """Returns the bytes to which a stream of `open_file` may still expand; None if its file is not
    compressed."""
    if isinstance(stream, io.BufferedReader) and isinstance(stream.raw, Decompressed):
        return stream.raw.allowance
    return None


def _decompressor(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"{path}: needs the package zstandard: pip install zstandard") from None
    return zstandard.ZstdDecompressor(max_window_size=WINDOW)


class _Zstandard(io.RawIOBase):
    """All frames of a file.

    The package's own stream ends without an error where a file is cut off.
    """

    def __init__(self, file: IO[bytes], decompressor: Any) -> None:
        super().__init__()
        self._file = file
        self._new_frame = decompressor.decompressobj
        self._frame: Any = None
        self._ready = memoryview(b"")  # decompressed, and not read yet
        self._unused = b""  # compressed bytes after the end of the last frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._unused or self._file.read(CHUNK)
            if not data:
                if self._frame is not None:
                    raise EOFError("Zstandard data ends within a frame")
                return 0
            self._frame = self._frame or self._new_frame()
            self._ready = memoryview(self._frame.decompress(data))
            self._unused = b""
            if self._frame.eof:
                self._unused = self._frame.unused_data
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
