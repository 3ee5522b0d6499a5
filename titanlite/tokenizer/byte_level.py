"""Byte-level tokens as text: how `tokenizers` and llama.cpp write bytes.

What it is: GPT-2's map of the 256 bytes to printable characters, and the list of merges in which
these formats keep an encoding that tiktoken stores as the ranks of its tokens.
Reference: github.com/openai/gpt-2, src/encoder.py
"""

from __future__ import annotations


def _byte_characters() -> dict[int, str]:
    """A printable character for each byte: itself where it is one, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    for i, byte in enumerate(others):
        characters[byte] = chr(256 + i)
    return characters


CHARACTERS = _byte_characters()
# Character -> byte, for str.translate; U+FFFF cannot be encoded as Latin-1
BYTES = dict.fromkeys(range(256), "\uffff")
BYTES |= {ord(character): chr(byte) for byte, character in CHARACTERS.items()}


def to_text(token: bytes) -> str:
    """A token as `tokenizers` and llama.cpp write it: a printable character for each byte."""
    return "".join(CHARACTERS[byte] for byte in token)


def to_bytes(text: str) -> bytes:
    """The inverse. Raises UnicodeEncodeError if a character stands for no byte."""
    return text.translate(BYTES).encode("latin-1")


def merges_of(tokens: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that makes a token, which tiktoken would merge.

    They are in the order of `tokens`, which is that of ranks.
    """
    merges = []
    for token in tokens:
        pairs = []
        for i in range(1, len(token)):
            first = token[:i]
            second = token[i:]
            if first in tokens and second in tokens:
                pairs.append((first, second))
        merges += sorted(pairs, key=lambda pair: (tokens[pair[0]], tokens[pair[1]]))
    return merges
