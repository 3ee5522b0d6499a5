"""Quality filters: simple measures of a document, and limits beyond which it is dropped.

What it is: measures of the kind that MassiveText filters web text by (Gopher, arXiv 2112.11446,
appendix A.1): length, mean length of words, share of symbols, share of letters, repetition. No
limit is set unless asked for, because none fits every corpus: limits for English prose drop most
source code (docs/prepare.md has values for each kind of text). What is measured is the text of a
row without its prompt.
Letters are those of every script, and words are measured only in scripts that separate them by
spaces.
What it costs: nothing for a measure without a limit; with all of them 9 to 18 MB of text per second
on one core.
"""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite.tools.prepare.shingles import BLOCK, window_hashes

REPEAT = 32  # bytes of text that occur again: about five English words
SPACE, LETTER, UNSPACED, DIGIT, SYMBOL = range(5)  # the kinds of characters
# Scripts whose words are not separated by spaces: Thai and Lao, Tibetan, Burmese, Khmer, kana,
# Chinese characters.
UNSPACED_SCRIPTS = [
    (0x0E00, 0x0FFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3005, 0x30FF),
    (0x31F0, 0x31FF),
    (0x3400, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),
    (0x20000, 0x3FFFF),
]


def _limit(text: str) -> Any:
    return field(default=None, metadata={"help": text})


@dataclass(frozen=True)
class FilterConfig:
    """The limits, cheapest first; a document is dropped by the first that it breaks.

    None: no limit.
    """

    min_chars: float | None = _limit("smallest number of characters of a document")
    max_chars: float | None = _limit("largest number of characters of a document")
    min_mean_word_length: float | None = _limit("smallest mean number of characters per word")
    max_mean_word_length: float | None = _limit("largest mean number of characters per word")
    max_symbol_ratio: float | None = _limit(
        "largest share of symbols and punctuation in all but white space"
    )
    min_alphabetic_ratio: float | None = _limit(
        "smallest share of letters of any script in all but white space"
    )
    max_repeated_lines: float | None = _limit(
        "largest share of text in lines that have occurred before"
    )
    max_repeated_text: float | None = _limit(
        f"largest share of {REPEAT}-byte pieces that have occurred before"
    )


RULES = tuple(rule.name for rule in fields(FilterConfig))


def rejection(text: str, config: FilterConfig) -> str:
    """The first rule that drops a document, such as "min_chars"; "" if none does."""
    measures = Measures(text)
    for rule in RULES:
        limit = getattr(config, rule)
        if limit is None:
            continue
        bound, _, measure = rule.partition("_")
        value = getattr(measures, measure)
        if value is None:
            continue
        breaks = value < limit if bound == "min" else value > limit
        if breaks:
            return rule
    return ""


class Measures:
    """The measures of a document, computed when first asked for; None where one does not apply."""

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def chars(self) -> int:
        return len(self.text)

    @functools.cached_property
    def _counts(self) -> tuple[NDArray[np.int64], int]:
        """The number of characters of each kind, and of words.

        Words are between spaces or unspaced letters.
        """
        counts = np.zeros(5, np.int64)
        words = 0
        for start in range(0, len(self.text), BLOCK):
            block = self.text[start : start + BLOCK].encode("utf-32-le", "surrogatepass")
            kinds = _kinds()[np.frombuffer(block, "<u4")]  # (characters,)
            counts += np.bincount(kinds, minlength=5)
            in_word = (kinds != SPACE) & (kinds != UNSPACED)
            words += int(in_word[0]) + int(np.count_nonzero(in_word[1:] & ~in_word[:-1]))
        return counts, words

    def _share(self, *kinds: int) -> float | None:
        """The share of some kinds of characters in all but white space; None without any."""
        counts, _ = self._counts
        total = counts.sum() - counts[SPACE]
        if not total:
            return None
        return float(counts[list(kinds)].sum() / total)

    @property
    def mean_word_length(self) -> float | None:
        """None without words, or if most letters belong to scripts without spaces."""
        counts, words = self._counts
        if not words or counts[UNSPACED] > counts[LETTER]:
            return None
        return float((counts.sum() - counts[SPACE] - counts[UNSPACED]) / words)

    @property
    def symbol_ratio(self) -> float | None:
        return self._share(SYMBOL)

    @property
    def alphabetic_ratio(self) -> float | None:
        return self._share(LETTER, UNSPACED)

    @functools.cached_property
    def repeated_lines(self) -> float | None:
        """The share of the text in lines that occurred before, without white space around them."""
        lines = [line.strip() for line in self.text.splitlines()]
        total = sum(len(line) for line in lines)
        if not total:
            return None
        distinct = sum(len(line) for line in set(lines))
        return 1 - distinct / total

    @functools.cached_property
    def repeated_text(self) -> float | None:
        """The share of windows of 32 bytes that occurred before in the same million characters."""
        total = 0
        distinct = 0
        for hashes in window_hashes(self.text, REPEAT):
            hashes.sort()
            total += len(hashes)
            distinct += min(1, len(hashes)) + int(np.count_nonzero(hashes[1:] != hashes[:-1]))
        if not total:
            return None
        return 1 - distinct / total


@functools.cache
def _kinds() -> NDArray[np.uint8]:
    """The kind of each Unicode character. Combining marks count as letters."""
    kinds = np.full(0x110000, SYMBOL, np.uint8)
    for code in range(0x110000):
        character = chr(code)
        category = unicodedata.category(character)[0]
        if character.isspace():
            kinds[code] = SPACE
        elif category in "LM":
            kinds[code] = LETTER
        elif category == "N":
            kinds[code] = DIGIT
    for first, last in UNSPACED_SCRIPTS:
        part = kinds[first : last + 1]
        part[part == LETTER] = UNSPACED
    return kinds
