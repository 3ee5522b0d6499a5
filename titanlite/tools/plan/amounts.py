"""Reads amounts as people write them (`2T` tokens, `5.76e23` FLOPs, `30d`) and formats them.

What it is: `amount` and `seconds` read text, the other functions write it. Imports no torch.
"""

from __future__ import annotations

import math
import re

from titanlite.runtime.errors import ConfigError

THOUSANDS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
UNITS = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
NUMBER = r"((?:\d[\d_,]*)?\.?\d+(?:[eE][+-]?\d{1,3})?|\d[\d_,]*\.)"
AMOUNT = re.compile(rf"\s*{NUMBER}\s*([a-zA-Z]*)\s*")
LONGEST = 60  # characters: the pattern is slow on a long row of digits
LARGEST = 1e40  # more FLOPs than any run has


def amount(name: str, text: str) -> float:
    """The positive number that the text stands for: 2T, 300B, 1.4e12, 1_000_000.

    `name` is the option that it is given for. Raises ConfigError.
    """
    match = AMOUNT.fullmatch(text[:LONGEST])
    letter = match[2].upper() if match else ""
    if match is None or letter not in THOUSANDS or len(text) > LONGEST:
        raise _wrong(name, text, "a number above 0, as in 1.4e12, 300B or 2T (K, M, B, T)")
    return _bounded(name, text, _number(match[1]) * THOUSANDS[letter])


def seconds(name: str, text: str) -> float:
    """The time that the text stands for, in seconds: 30 and 30d are days, 12h hours, 2w weeks.

    Raises ConfigError.
    """
    match = AMOUNT.fullmatch(text[:LONGEST])
    unit = match[2].lower() or "d" if match else ""
    if match is None or unit not in UNITS or len(text) > LONGEST:
        raise _wrong(name, text, "a time above 0, as in 30 or 30d (days), 12h or 2w")
    return _bounded(name, text, _number(match[1]) * UNITS[unit])


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def _bounded(name: str, text: str, value: float) -> float:
    if not 0 < value < LARGEST:
        raise _wrong(name, text, f"a number above 0 and below {LARGEST:g}")
    return value


def _wrong(name: str, text: str, expected: str) -> ConfigError:
    return ConfigError(f"{name} = {text[:LONGEST]!r}: expected {expected}")


def short(value: float) -> str:
    """Three digits and a letter, 69.3B; beyond 1,000 T and below 1, with an exponent."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    for letter, factor in reversed(THOUSANDS.items()):
        if factor <= rounded < 1e3 * factor:
            digits = 2 - math.floor(math.log10(rounded / factor) + 1e-9)
            return f"{rounded / factor:.{digits}f}{letter}"
    return exponent(value)


def exponent(value: float) -> str:
    """Three digits and an exponent, as FLOPs are written: 5.76e23."""
    return f"{value:.2e}".replace("e+", "e")


def bytes_text(number: float) -> str:
    """4096 -> 4.096 kB: units of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.4g} {unit}"
        number /= 1000
    return f"{number:.4g} TB"


def duration(value: float) -> str:
    """Seconds in the unit that suits them: 45 s, 12.5 min, 3.2 h, 27.0 days."""
    if value < 100:
        return f"{value:.3g} s"
    if value < 100 * 60:
        return f"{value / 60:.1f} min"
    if value < 48 * 3600:
        return f"{value / 3600:.1f} h"
    return f"{value / 86400:,.1f} days"
