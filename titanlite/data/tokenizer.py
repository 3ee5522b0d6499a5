"""Text <-> token ids.

What it is: tiktoken's byte-pair encoder with the tokens of a rank file, and Llama 3's special tokens after them: all
256 if the file has Llama 3's 128,000 ranks (then ids are equal to Meta's), otherwise the first 16. Text is never
encoded as a special token: `<|end_of_text|>` in a document is ordinary characters.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable
from pathlib import Path

import tiktoken

from titanlite.config.files import read_bounded
from titanlite.config.schema import ConfigError

BUNDLED = Path(__file__).with_name("tokenizer.model")  # 4,096 tokens, made by `titanlite tokenizer train`
LLAMA3_RANKS = 128_000
MAX_RANK_FILE, MAX_TOKEN = 1 << 23, 1024  # bytes; Llama 3's file has 2 MB, its longest token 128
# Llama 3's pre-tokenizer: contractions, words, up to three digits, punctuation, line ends, spaces.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tiktoken's matcher recurses: it fails on about a million characters, and on long runs of one kind of character.
MAX_PIECE, MAX_RUN = 400_000, 25_000


class Tokenizer:
    """`encode` and `decode`. `size`: the number of ids; `special`: name -> id; `bos` and `eos` enclose a document."""

    def __init__(self, path: str | Path = "", content: bytes | None = None) -> None:
        """Reads a rank file, or takes its `content`; "" is the bundled file. Raises ConfigError with the line."""
        self.path = Path(path or BUNDLED)
        try:
            content = read_bounded(self.path, MAX_RANK_FILE) if content is None else content
        except OSError as error:
            raise ConfigError(
                f"data.tokenizer = {str(path)!r}: {error.strerror or error}; expected a tiktoken rank file"
            ) from None
        ranks = _parse(self.path, content)
        self.sha256 = hashlib.sha256(content).hexdigest()
        names = _special_names(256 if len(ranks) == LLAMA3_RANKS else 16)
        self.special = special = {name: len(ranks) + i for i, name in enumerate(names)}
        self.bos, self.eos = special["<|begin_of_text|>"], special["<|end_of_text|>"]
        self.size = len(ranks) + len(special)
        self._encoding = tiktoken.Encoding("titanlite", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
        self.token_bytes = [0] * self.size  # bytes of text of each id; special tokens have none
        for token, rank in ranks.items():
            self.token_bytes[rank] = len(token)

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without bos and eos. Lone surrogates become U+FFFD."""
        return [i for piece in _pieces(text) for i in self._encoding.encode_ordinary(piece)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text. Bytes that are not UTF-8 become U+FFFD; ids of a padded vocabulary are dropped."""
        return self._encoding.decode([i for i in ids if i < self.size], errors="replace")


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
            decoded, expected = base64.b64decode(token, validate=True), len(ranks)
            if int(rank) != expected:
                raise ValueError(f"rank {int(rank)}, expected {expected}")
            if len(decoded) > MAX_TOKEN:  # finding merges takes time of its square
                raise ValueError(f"a token of {len(decoded)} bytes, expected at most {MAX_TOKEN}")
            if decoded in ranks:
                raise ValueError("a token that an earlier line has")
        except (ValueError, binascii.Error) as error:
            shown = line[:40].decode("utf-8", "replace")
            raise ConfigError(f"{path}:{number}: {shown!r}: expected `base64 rank`, ranks in order ({error})") from None
        ranks[decoded] = expected
    if missing := [i for i in range(256) if bytes([i]) not in ranks]:
        raise ConfigError(
            f"{path}: no token for {len(missing)} of the 256 bytes, the first 0x{missing[0]:02x}: not a rank file"
        )
    return ranks


def _pieces(text: str) -> Iterable[str]:
    """The text in pieces that tiktoken can encode."""
    for start in range(0, len(text), MAX_PIECE):
        piece = text[start : start + MAX_PIECE]
        begin = 0
        run = 1
        for i in range(1, len(piece)) if _has_long_run(piece) else ():
            run = run + 1 if piece[i].isspace() == piece[i - 1].isspace() else 1
            if run > MAX_RUN:
                yield piece[begin:i]
                begin, run = i, 1
        yield piece[begin:]


def _has_long_run(piece: str) -> bool:
    """A fast test: may there be more than MAX_RUN characters in a row all with, or all without, white space?"""
    words = piece.split()
    in_words = sum(map(len, words))
    return max(map(len, words), default=0) > MAX_RUN or len(piece) - in_words > MAX_RUN
