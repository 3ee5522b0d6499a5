"""Converts text to token ids and back.

What it is: tiktoken's byte-pair encoder with the tokens of a rank file, and Llama 3's special
tokens after them: all 256 if the file has Llama 3's 128,000 ranks (then ids are equal to Meta's),
otherwise the first 16. It also reads a Hugging Face tokenizer.json: tiktoken encodes if it computes
the same ids, else the package `tokenizers`. Text is never encoded as a special token:
`<|end_of_text|>` in a document is ordinary characters.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable
from pathlib import Path

import tiktoken

from titanlite.config.mistakes import hub_advice
from titanlite.runtime.errors import ConfigError, printable
from titanlite.runtime.files import read_bounded
from titanlite.tokenizer.nfc import nfc
from titanlite.tokenizer.tiktoken_pieces import pieces
from titanlite.tokenizer.tokenizer_hf import HuggingFaceCodec, PackageMissing, encoding_by_package
from titanlite.tokenizer.tokenizer_json import (
    Encoding,
    Frame,
    Json,
    convert,
    find,
    frame_of,
    parse,
    reading,
)

BUNDLED = Path(__file__).with_name("tokenizer.model")  # 4,096 tokens of `titanlite tokenizer train`
LLAMA3_RANKS = 128_000
MAX_RANK_FILE = 1 << 23  # bytes; Llama 3's file has 2 MB, its longest token 128
MAX_TOKEN = 1024
# Llama 3's pre-tokenizer: contractions, words, up to three digits, punctuation, line ends, spaces.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """Encodes and decodes text.

    `size`: the number of ids; `special`: name -> id; `bos` and `eos` enclose a document of
    training; `before`: the ids that the tokenizer's files put before a text, which are none in many
    tokenizer.json.
    """

    def __init__(self, path: str | Path = "", content: bytes | None = None) -> None:
        """Reads a file or folder, or takes a file's `content`; "" is the bundled file.

        Raises ConfigError.
        """
        self.path = Path(path or BUNDLED)
        if content is None:
            self.path, content = _read(self.path)
        codec: HuggingFaceCodec | None = None
        if content.lstrip()[:1] == b"{":
            main, config = parse(self.path, content)
            encoding, codec = _of_json(self.path, main)
            with reading(self.path):
                frame = frame_of(main, config, encoding.special)
        else:
            encoding, frame = _of_rank_file(self.path, content)
        self.bos = frame.bos
        self.eos = frame.eos
        self.before = frame.before
        self.files = frame.files
        self.tokens = encoding.tokens
        self.ranks = encoding.ranks
        self.ids = encoding.ids
        self.special = encoding.special
        self.pattern = encoding.pattern
        self.nfc = encoding.nfc
        self.unmade = encoding.unmade
        self.content = b"\0".join(self.files.values())
        self.sha256 = hashlib.sha256(self.content).hexdigest()

        self._codec = codec
        if codec is None:
            # tiktoken drops text that nothing matches, so the pattern also matches everything else
            with_rest = rf"{self.pattern}|(?:(?!{self.pattern})[\s\S])+"
            self._encoding = tiktoken.Encoding(
                "", pat_str=with_rest, mergeable_ranks=self.ranks, special_tokens={}
            )
            self._bytes = {i: token for token, i in self.tokens.items()}
        else:
            self._bytes = codec.token_bytes()
        self.size = 1 + max(*self._bytes, *self.special.values())
        # Bytes of text per id; special tokens have none
        self.token_bytes = [len(self._bytes.get(i, b"")) for i in range(self.size)]
        self._bytes |= {i: name.encode() for name, i in self.special.items()}

    @property
    def whole_documents(self) -> bool:
        """Whether a document must be encoded as a whole, because its parts would have other ids."""
        return self._codec is not None

    def encode(self, text: str) -> list[int]:
        """Encodes a text, without bos and eos. Lone surrogates become U+FFFD."""
        if self._codec is not None:
            return self._codec.encode(without_surrogates(text))
        ranks: list[int] = []
        for piece in pieces(text, self.nfc):
            ranks += self._encoding.encode_ordinary(piece)
        if not self.ids:
            return ranks
        return [self.ids[rank] for rank in ranks]

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """Encodes a text; also returns the index of the character in which each token begins."""
        text = without_surrogates(text)
        if self._codec is not None:
            return self._codec.encode_with_starts(text)
        if self.nfc:
            text = nfc(text)
        ids = self.encode(text)
        characters = []  # for each byte, the index of its character
        for place, character in enumerate(text):
            characters += [place] * len(character.encode())
        starts = []
        position = 0
        for i in ids:
            starts.append(characters[position])
            position += self.token_bytes[i]
        return ids, starts

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes a text to be continued, after `before`; bos alone if there is nothing in it."""
        return [*self.before, *self.encode(text)] or [self.bos]

    def prompt_rule(self, texts: str = "prompts") -> str:
        """Says which tokens `encode_prompt` puts before a text."""
        names = printable(self.decode(self.before)) or "no special token"
        return f"{texts} begin with {names}, as the tokenizer's files say"

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids.

        Bytes that are not UTF-8 become U+FFFD; ids of a padded vocabulary are dropped.
        """
        if self._codec is not None:
            return self._codec.decode(i for i in ids if i in self._bytes)
        return b"".join(self._bytes.get(i, b"") for i in ids).decode("utf-8", "replace")


def named_tokenizer(path: str, setting: str = "data.tokenizer") -> Tokenizer:
    """Reads the tokenizer at the path that a setting has.

    Raises ConfigError, which names the setting.
    """
    try:
        return Tokenizer(path)
    except ConfigError as error:
        problems = [text.removeprefix(f"{path}: ") for text in error.problems]
        raise ConfigError([f"{setting} = {path!r}: {text}" for text in problems]) from None


def without_surrogates(text: str) -> str:
    """Replaces each lone surrogate by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read(path: Path) -> tuple[Path, bytes]:
    """Finds and reads the tokenizer's file from its path or its folder's. Raises ConfigError."""
    try:
        if path.is_dir() or path.suffix == ".json":
            return find(path)
        return path, read_bounded(path, MAX_RANK_FILE)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}{hub_advice(str(path))}; "
            "expected a tiktoken rank file, a tokenizer.json, or a folder with one of them"
        ) from None


def _of_json(path: Path, main: Json) -> tuple[Encoding, HuggingFaceCodec | None]:
    """Reads the encoding of a tokenizer.json, for tiktoken if that computes the same ids.

    Otherwise it is for `tokenizers`. Raises ConfigError.
    """
    try:
        with reading(path):
            return convert(main, MAX_TOKEN), None
    except ConfigError as reason:
        try:
            return encoding_by_package(path, main)
        except ConfigError as error:
            texts = [text.removeprefix(f"{path}: ") for text in reason.problems + error.problems]
            raise ConfigError([f"{path}: {text}" for text in dict.fromkeys(texts)]) from None
        except PackageMissing:
            reasons = "; ".join(text.removeprefix(f"{path}: ") for text in reason.problems)
            raise ConfigError(
                f"{path}: is for the package `tokenizers`, which is not installed: pip install "
                f"tokenizers (tiktoken cannot encode as it says: {reasons})"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise reason from None  # it is not a tokenizer.json


def _of_rank_file(path: Path, content: bytes) -> tuple[Encoding, Frame]:
    """Reads a rank file, whose ranks are the ids. Raises ConfigError."""
    ranks = _parse(path, content)
    names = _special_names(256 if len(ranks) == LLAMA3_RANKS else 16)
    special = {name: len(ranks) + i for i, name in enumerate(names)}
    encoding = Encoding(
        tokens=ranks,
        ranks=ranks,
        ids=[],
        special=special,
        pattern=PATTERN,
        nfc=False,
        unmade=0,
    )
    bos = special["<|begin_of_text|>"]
    eos = special["<|end_of_text|>"]
    return encoding, Frame(bos, eos, [bos], {BUNDLED.name: content})


def _special_names(count: int) -> list[str]:
    """Lists Llama 3's special tokens in the order of their ids."""
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
    """Parses a rank file to token -> rank; requires all bytes, and ranks 0, 1, 2, ... in order."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            decoded = base64.b64decode(token, validate=True)
            expected = len(ranks)
            if int(rank) != expected:
                raise ValueError(f"rank {int(rank)}, expected {expected}")
            if len(decoded) > MAX_TOKEN:  # time to find merges is quadratic
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
            f"{path}: no token for {len(missing)} of the 256 bytes, the first 0x{missing[0]:02x}: "
            "not a rank file"
        )
    return ranks
