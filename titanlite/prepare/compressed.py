"""Files, compressed or not, as streams of bytes.

What it is: gzip by the standard library, Zstandard by the package `zstandard` (extra `[zstd]`). Data is decompressed as
it is read, so a small file that expands to a huge one needs time and no memory.
"""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import IO, Any

from titanlite.config.schema import ConfigError

COMPRESSIONS = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
BUFFER = 1 << 20
FED = 1 << 9  # compressed bytes that are decompressed at a time: at most 16 MB come out
WINDOW = 1 << 27  # bytes that a Zstandard stream may refer back to, and that are kept in memory


def damaged() -> tuple[type[Exception], ...]:
    """What a damaged file raises."""
    try:
        from zstandard import ZstdError
    except ImportError:
        return (OSError, EOFError, zlib.error)
    return (OSError, EOFError, zlib.error, ZstdError)


def open_file(path: Path, compression: str) -> IO[bytes]:
    """The decompressed bytes of a file. Raises ConfigError if the package for it is not installed."""
    if compression == "gzip":
        return io.BufferedReader(gzip.open(path), BUFFER)
    if compression == "zstd":
        try:
            import zstandard
        except ImportError:
            raise ConfigError(f"{path}: needs the package zstandard: pip install 'titanlite[zstd]'") from None
        return io.BufferedReader(_Zstandard(path, zstandard.ZstdDecompressor(max_window_size=WINDOW)), BUFFER)
    return path.open("rb")


class _Zstandard(io.RawIOBase):
    """All frames of a file. The package's own stream ends without an error where a file is cut off."""

    def __init__(self, path: Path, decompressor: Any) -> None:
        self._file, self._new_frame = path.open("rb"), decompressor.decompressobj
        self._frame: Any = None
        self._ready, self._rest = memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._rest or self._file.read(FED)
            if not data:
                if self._frame is not None:
                    raise EOFError("Zstandard data ends within a frame")
                return 0
            self._frame = self._frame or self._new_frame()
            self._ready, self._rest = memoryview(self._frame.decompress(data)), b""
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
