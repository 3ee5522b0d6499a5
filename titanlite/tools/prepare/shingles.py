"""Overlapping pieces (shingles) of a text, as 64-bit hashes.

What it is: the text in UTF-8 after NFC, case folding, and replacing each run of white space by one
space; then a hash of each window of 8, 16 or 32 bytes, one window per byte. Windows of bytes, not
of words, because Japanese, Chinese and Thai have no spaces, and not of characters, because a Korean
or Chinese character carries as much as two or three Latin letters and has about as many bytes.
Why it is here: near duplicates (`signatures.py`) and repetition (`filters.py`) compare such
windows. The hash has no seed and does not depend on the process, the machine or the version of
Python, unlike `hash()`.
What it costs: 8 bytes of memory per byte of text, for a block of a million characters at a time.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 20  # characters; windows across two blocks are left out


def mix_hashes(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's last step: a bijection of 64-bit integers whose results look random."""
    hashes = hashes ^ (hashes >> np.uint64(30))
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(27)
    hashes *= np.uint64(0x94D049BB133111EB)
    hashes ^= hashes >> np.uint64(31)
    return hashes


def simplify(text: str) -> str:
    """NFC, without case, each run of white space one space."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def window_hashes(text: str, size: int) -> Iterator[NDArray[np.uint64]]:
    """The hash of each window of `size` bytes (8, 16 or 32), in order, in arrays of one block each.

    A block shorter than one window has none.
    """
    for start in range(0, len(text), BLOCK):
        data = simplify(text[start : start + BLOCK]).encode("utf-8", "surrogatepass")
        windows = max(0, len(data) - 7)
        # Eight bytes are one integer, so that numpy reads the windows where they are: at every
        # byte, strides of one.
        hashes = mix_hashes(np.ndarray((windows,), "<u8", data, strides=(1,)).astype(np.uint64))
        width = 8
        # The hashes of two neighbouring windows make that of the window of both
        while width < size:
            hashes = mix_hashes(hashes[:-width] * np.uint64(3) ^ hashes[width:])
            width *= 2
        yield hashes
