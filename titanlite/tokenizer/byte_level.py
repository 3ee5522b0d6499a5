"""Converts byte-level tokens to text and back, as `tokenizers` writes bytes.

What it is: GPT-2's map of the 256 bytes to printable characters.
Reference: github.com/openai/gpt-2, src/encoder.py
"""

from __future__ import annotations


def _byte_characters() -> dict[int, str]:
    """Maps each byte to a printable character: itself if it is one, else one from U+0100 on."""
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
    """Writes a token as `tokenizers` does: a printable character for each byte."""
    return "".join(CHARACTERS[byte] for byte in token)


def to_bytes(text: str) -> bytes:
    """Inverts `to_text`. Raises UnicodeEncodeError if a character stands for no byte."""
    return text.translate(BYTES).encode("latin-1")
