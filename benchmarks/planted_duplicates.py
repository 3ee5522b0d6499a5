"""A corpus with planted duplicates, made on the spot, to measure recall and precision on.

What it is: documents of about 2,000 bytes in four languages, a part of which gets one changed copy
each.
The code is the standard library's, the English its documentation: real text, which differs between
versions of Python. The Korean and Japanese are generated: words of random syllables or characters,
frequent ones more often (Zipf), with real particles and endings, in sentences and paragraphs. They
have the script, the lengths of words and the bytes of the languages, but no meaning; real text can
be given instead (`duplicates.py --text`).
"""

from __future__ import annotations

import ast
import itertools
import random
import re
import sysconfig
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

SIZE = 2000  # bytes of a document
NO_CODE = {
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
}


@dataclass(frozen=True)
class Document:
    text: str
    origin: int  # equal for a document and its planted copy
    kind: str  # of the copy; "" for an original


def code() -> list[str]:
    """The standard library without tests and without `encodings`, whose tables are near duplicates
    of each other.
    """
    return [piece for text in _modules() for piece in pieces(text)]


def english() -> list[str]:
    """The documentation in `pydoc_data`, and the long docstrings of the standard library."""
    found = [piece for text in topics.values() for piece in pieces(text)]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for text in _modules():
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
        found += [
            piece for node in nodes for piece in pieces(ast.get_docstring(node) or "", SIZE // 2)
        ]
    return found


def _modules() -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not NO_CODE & set(path.relative_to(root).parts)
    ]
    return [path.read_text("utf-8", "replace") for path in paths]


def korean(count: int = 2000) -> list[str]:
    rng = random.Random("korean")
    syllables = [chr(code) for code in rng.sample(range(0xAC00, 0xD7A4), 300)]
    stems = ["".join(rng.choices(syllables, k=rng.choice((1, 2, 2, 2, 3)))) for _ in range(8000)]
    particles = [
        "은",
        "는",
        "이",
        "가",
        "을",
        "를",
        "에",
        "에서",
        "으로",
        "의",
        "도",
        "와",
        "과",
        "만",
        "까지",
        "부터",
    ]
    endings = [
        "이다.",
        "한다.",
        "했다.",
        "하였다.",
        "있다.",
        "없다.",
        "된다.",
        "되었다.",
        "합니다.",
        "했습니다.",
    ]
    return _generate(rng, stems, particles, endings, " ", count)


def japanese(count: int = 2000) -> list[str]:
    rng = random.Random("japanese")
    kanji = [chr(code) for code in rng.sample(range(0x4E00, 0x9FA6), 600)]
    kana = [chr(code) for code in range(0x3042, 0x3094)] + [
        chr(code) for code in range(0x30A2, 0x30F4)
    ]
    stems = [
        "".join(rng.choices(rng.choice((kanji, kanji, kana)), k=rng.choice((1, 2, 2, 3))))
        for _ in range(8000)
    ]
    particles = ["は", "が", "を", "に", "で", "と", "の", "も", "へ", "から", "まで", "より"]
    endings = [
        "です。",
        "ます。",
        "ました。",
        "でした。",
        "である。",
        "ない。",
        "している。",
        "された。",
        "となる。",
    ]
    return _generate(rng, stems, particles, endings, "", count)


def _generate(
    rng: random.Random,
    stems: list[str],
    particles: list[str],
    endings: list[str],
    space: str,
    count: int,
) -> list[str]:
    weights = list(itertools.accumulate(1 / (rank + 3) for rank in range(len(stems))))

    def paragraph() -> str:
        sentences = []
        for _ in range(rng.randint(2, 5)):
            words = rng.choices(stems, cum_weights=weights, k=rng.randint(5, 14))
            words = [word + rng.choice(particles) for word in words[:-1]] + [
                words[-1] + rng.choice(endings)
            ]
            sentences.append(space.join(words))
        return space.join(sentences)

    documents = []
    for _ in range(count):
        paragraphs: list[str] = []
        while sum(len(part.encode()) for part in paragraphs) < SIZE:
            paragraphs.append(paragraph())
        documents.append("\n\n".join(paragraphs))
    return documents


def pieces(text: str, size: int = SIZE) -> list[str]:
    """The text cut at line ends into pieces of at least `size` bytes; what is left at the end is
    left out.
    """
    found, piece, length = [], [], 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        length += len(line.encode("utf-8", "surrogatepass"))
        if length >= size:
            found.append("".join(piece))
            piece, length = [], 0
    return found


def _copy(text: str, rng: random.Random) -> str:
    return text


def _respelled(text: str, rng: random.Random) -> str:
    """The same text for a reader: NFD, with the line ends of Windows."""
    return unicodedata.normalize("NFD", text).replace("\r\n", "\n").replace("\n", "\r\n")


def _edited(text: str, rng: random.Random, share: float = 0.05) -> str:
    """A share of the words is replaced by another word of the text, deleted, or doubled by another.

    The words are what is between spaces; in Japanese and Chinese, which have none, single
    characters.
    """
    spaced = sum("\u3040" <= letter <= "\u9fff" for letter in text) < len(text) / 3
    parts = re.split(r"(\s+)", text) if spaced else list(text)
    words = [part for part in parts if part and not part.isspace()]
    for i, part in enumerate(parts):
        if part and not part.isspace() and rng.random() < share:
            other = rng.choice(words)
            parts[i] = rng.choice((other, "", f"{part}{' ' if spaced else ''}{other}"))
    return "".join(parts)


def _scattered(text: str, rng: random.Random, share: float = 0.05) -> str:
    """A share of all characters, independently of each other, is replaced by another character of
    the text.
    """
    letters = [letter for letter in text if not letter.isspace()]
    return "".join(rng.choice(letters) if rng.random() < share else letter for letter in text)


def _reordered(text: str, rng: random.Random) -> str:
    """The paragraphs in another order; if the text has fewer than four, an eighth of its lines
    makes one.
    """
    paragraphs = re.split(r"\n\s*\n", text.strip())
    if len(paragraphs) < 4:
        lines = text.splitlines()
        step = max(1, -(-len(lines) // 8))
        paragraphs = ["\n".join(lines[i : i + step]) for i in range(0, len(lines), step)]
    rng.shuffle(paragraphs)
    return "\n\n".join(paragraphs)


LANGUAGES: dict[str, Callable[[], list[str]]] = {
    "code": code,
    "English": english,
    "Korean": korean,
    "Japanese": japanese,
}
# Changes a quarter of the words of code and English: not near duplicates any more
SCATTERED = "5 % of characters"
KINDS: dict[str, Callable[[str, random.Random], str]] = {
    "copy": _copy,
    "NFD, CRLF": _respelled,
    "reordered": _reordered,
    "5 % of words": _edited,
    SCATTERED: _scattered,
}


def planted(texts: list[str], per_kind: int, seed: int) -> list[Document]:
    """A corpus in random order: `per_kind` originals with a copy of each kind, and all others
    without.
    """
    rng = random.Random(seed)
    texts = list(dict.fromkeys(texts))
    rng.shuffle(texts)
    documents = [Document(text, origin, "") for origin, text in enumerate(texts)]
    originals = iter(list(documents))
    for kind, change in KINDS.items():
        for _ in range(per_kind):
            original = next(originals)
            documents.append(Document(change(original.text, rng), original.origin, kind))
    rng.shuffle(documents)
    return documents
