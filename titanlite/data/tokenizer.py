"""Text <-> token ids.

What it is: tiktoken's byte-pair encoder with the tokens of a rank file, and Llama 3's special
tokens after them: all 256 if the file has Llama 3's 128,000 ranks (then ids are equal to Meta's),
otherwise the first 16. Or with the tokens of a Hugging Face tokenizer.json. Text is never encoded
as a special token: `<|end_of_text|>` in a document is ordinary characters.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable
from pathlib import Path

import tiktoken

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded

# 4,096 tokens, made by `titanlite tokenizer train`
BUNDLED = Path(__file__).with_name("tokenizer.model")
LLAMA3_RANKS = 128_000
# Bytes; Llama 3's file has 2 MB, its longest token 128
MAX_RANK_FILE = 1 << 23
MAX_TOKEN = 1024
# Llama 3's pre-tokenizer: contractions, words, up to three digits, punctuation, line ends, spaces.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """`encode` and `decode`.

    `size`: the number of ids; `special`: name -> id; `bos` and `eos` enclose a document.
    """

    def __init__(self, path: str | Path = "", content: bytes | None = None) -> None:
        """Reads a file or folder, or takes a file's `content`; "" is the bundled file.

        Raises ConfigError.
        """
        self.path = Path(path or BUNDLED)
        content = self._read() if content is None else content
        self.pattern = PATTERN
        self.nfc = False
        self.ids = list[int]()
        self.unmade = 0
        if content.lstrip()[:1] == b"{":
            from titanlite.data.tokenizer_json import convert  # imported only if used

            found = convert(self.path, content, MAX_TOKEN)
            self.tokens = found.tokens
            self.special = found.special
            self.bos = found.bos
            self.eos = found.eos
            self.pattern = found.pattern
            self.nfc = found.nfc
            self.ids = found.ids
            self.unmade = found.unmade
            self.ranks = found.ranks
            self.files = found.files
        else:
            self.tokens = self.ranks = _parse(self.path, content)
            names = _special_names(256 if len(self.ranks) == LLAMA3_RANKS else 16)
            self.special = {name: len(self.ranks) + i for i, name in enumerate(names)}
            self.bos = self.special["<|begin_of_text|>"]
            self.eos = self.special["<|end_of_text|>"]
            self.files = {BUNDLED.name: content}  # with which a folder has this tokenizer
        self.content = b"\0".join(self.files.values())
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        # Tiktoken drops what nothing matches
        pieces = rf"{self.pattern}|(?:(?!{self.pattern})[\s\S])+"
        self._encoding = tiktoken.Encoding(
            "", pat_str=pieces, mergeable_ranks=self.ranks, special_tokens={}
        )
        self._bytes = {i: token for token, i in self.tokens.items()}
        self.size = 1 + max(*self._bytes, *self.special.values())
        # Of text; special tokens have none
        self.token_bytes = [len(self._bytes.get(i, b"")) for i in range(self.size)]
        self._bytes |= {i: name.encode() for name, i in self.special.items()}

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without bos and eos. Lone surrogates become U+FFFD."""
        from titanlite.data.pieces import pieces  # a run on prepared data encodes no text

        ranks: list[int] = []
        for piece in pieces(text, self.nfc):
            ranks += self._encoding.encode_ordinary(piece)
        return [self.ids[rank] for rank in ranks] if self.ids else ranks

    def decode(self, ids: Iterable[int]) -> str:
        """The text.

        Bytes that are not UTF-8 become U+FFFD; ids of a padded vocabulary are dropped.
        """
        return b"".join(self._bytes.get(i, b"") for i in ids).decode("utf-8", "replace")

    def _read(self) -> bytes:
        try:
            if self.path.is_dir() or self.path.suffix == ".json":
                from titanlite.data.tokenizer_json import find

                self.path, content = find(self.path)
                return content
            return read_bounded(self.path, MAX_RANK_FILE)
        except OSError as error:
            raise ConfigError(
                f"data.tokenizer = {str(self.path)!r}: {error.strerror or error}; expected a tiktoken rank file, "
                "a tokenizer.json or a folder with one of them"
            ) from None


def _special_names(count: int) -> list[str]:
    """Llama 3's special tokens in the order of their ids."""
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        9: "<|eot_id|>",
    }
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(count))
    return [named[i] if i in named else next(reserved) for i in range(count)]


def _parse(path: Path, content: bytes) -> dict[bytes, int]:
    """token -> rank of a rank file: every byte is a token, and ranks are 0, 1, 2, ... in order."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            decoded = base64.b64decode(token, validate=True)
            expected = len(ranks)
            if int(rank) != expected:
                raise ValueError(f"rank {int(rank)}, expected {expected}")
            if len(decoded) > MAX_TOKEN:  # finding merges takes time of its square
                raise ValueError(f"a token of {len(decoded)} bytes, expected at most {MAX_TOKEN}")
            if decoded in ranks:
                raise ValueError("a token that an earlier line has")
        except (ValueError, binascii.Error) as error:
            shown = line[:40].decode("utf-8", "replace")
            raise ConfigError(
                f"{path}:{number}: {shown!r}: expected `base64 rank`, ranks in order ({error})"
            ) from None
        ranks[decoded] = expected
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise ConfigError(
            f"{path}: no token for {len(missing)} of the 256 bytes, the first 0x{missing[0]:02x}: not a rank file"
        )
    return ranks
