"""Encodes by Hugging Face's `tokenizers` package what tiktoken cannot express.

What it is: a tokenizer.json that `tokenizer_json.py` refuses: SentencePiece's (Llama 2, Mistral),
with several pre-tokenizers (DeepSeek), with normalizers other than NFC, or without tokens for some
bytes (SmolLM2). Special tokens are removed from the file before the package reads it, because it
would find their names in any text: here a name in a document is ordinary characters.
Why not for all tokenizers: tiktoken encodes text of any length in blocks, without another package.
What it costs: a document is encoded as a whole, and the package is an extra:
`pip install tokenizers`.
Reference: https://huggingface.co/docs/tokenizers
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.byte_level import BYTES
from titanlite.tokenizer.tokenizer_json import (
    MARK,
    MAX_ID,
    Encoding,
    Json,
    steps,
)
from titanlite.tokenizer.tokenizer_probe import problem_of

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark for a space


class PackageMissing(Exception):
    """The package `tokenizers` is not installed."""


class HuggingFaceCodec:
    """Encodes and decodes text without special tokens, and ids of both."""

    def __init__(self, path: Path, main: Json) -> None:
        """Raises ConfigError if the package cannot read the tokenizer; PackageMissing."""
        self.special: dict[str, int] = {}
        ordinary = []
        for entry in main["added_tokens"]:
            if entry["special"] or MARK.fullmatch(entry["content"]):
                self.special[entry["content"]] = entry["id"]
            else:
                ordinary.append(entry)
        of_text = {
            **main,
            "added_tokens": ordinary,
            "post_processor": None,
            "truncation": None,
            "padding": None,
        }
        if main["model"].get("dropout"):
            raise ConfigError(f"{path}: model.dropout makes ids random; allowed: null")
        try:
            import tokenizers
        except ImportError:
            raise PackageMissing from None
        texts = (json.dumps(main), json.dumps(of_text))
        problem = problem_of(texts)
        if problem:
            raise ConfigError(f"{path}: `tokenizers` cannot read it: {problem}")
        whole: Any = tokenizers.Tokenizer.from_str(texts[0])
        self._encoder: Any = tokenizers.Tokenizer.from_str(texts[1])
        # `tokenizers` assigns ids of added tokens anew when it reads a file: check them
        for encoder, entries in ((whole, main["added_tokens"]), (self._encoder, ordinary)):
            for entry in entries:
                found = encoder.token_to_id(entry["content"])
                if found != entry["id"]:
                    raise ConfigError(
                        f"{path}: added token {entry['content']!r} has id {entry['id']}; "
                        f"`tokenizers` gives it {found}"
                    )
        self._names = {i: name for name, i in self.special.items()}
        decoders = steps(main.get("decoder"), "decoders")
        self._byte_level = any(step["type"] == "ByteLevel" for step in decoders)

    def encode(self, text: str) -> list[int]:
        """Encodes a text; a name of a special token is ordinary text."""
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """Encodes a text; also returns the index of the character in which each token begins."""
        encoded = self._encoder.encode(text, add_special_tokens=False)
        return encoded.ids, [begin for begin, _ in encoded.offsets]

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids; special tokens become their names."""
        texts = []
        for is_special, run in itertools.groupby(ids, lambda i: i in self._names):
            if is_special:
                texts += [self._names[i] for i in run]
            else:
                texts.append(self._encoder.decode(list(run), skip_special_tokens=False))
        return "".join(texts)

    def token_bytes(self) -> dict[int, bytes]:
        """Maps each id to the bytes of text that it stands for; a special token has none."""
        vocabulary: dict[str, int] = self._encoder.get_vocab(with_added_tokens=True)
        return {
            i: bytes_of(token, self._byte_level)
            for token, i in vocabulary.items()
            if i not in self._names
        }


def encoding_by_package(path: Path, main: Json) -> tuple[Encoding, HuggingFaceCodec]:
    """Reads the encoding of a tokenizer that needs the package. Raises ConfigError if the package
    cannot read it; PackageMissing.
    """
    codec = HuggingFaceCodec(path, main)
    contents = codec.token_bytes()
    largest = max([*contents, *codec.special.values()])
    if largest >= MAX_ID:
        raise ConfigError(f"{path}: its largest id is {largest}; allowed: at most {MAX_ID - 1}")
    encoding = Encoding(
        tokens={content: i for i, content in contents.items()},
        ranks={},
        ids=[],
        special=codec.special,
        pattern="",
        nfc=False,
        unmade=0,
    )
    return encoding, codec


def bytes_of(token: str, byte_level: bool) -> bytes:
    """Converts a token to its bytes, in a byte-level encoding or in SentencePiece's."""
    if byte_level:
        return token.translate(BYTES).encode("latin-1", "replace")
    byte = BYTE.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE, " ").encode()
