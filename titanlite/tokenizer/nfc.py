"""Normalises text to Unicode's form C (NFC), as the `tokenizers` library does.

What it is: canonical composition ("e" and a combining acute become one character), by the tables of
Unicode 9.
Why it is here: Python's tables grow with its version, but the ids of a text must stay the same. So
newer characters that take part in a composition, or combine with a character before them, are left
unchanged.
What it costs: a scan of the text; more only where it is not normalised yet.
Reference: Unicode Standard Annex 15; the crate unicode-normalization-alignments of `tokenizers`
"""

from __future__ import annotations

import re
import unicodedata

# Code points newer than Unicode 9 that have a combining class, or are the first part of a
# composition: ranges in hexadecimal
LATER = """
5c8-5c9 7fd 897-89f 8ca-8d3 9fe c3c d3b-d3c eba 1715 1abf-1af0 1df6-1dfa a82c 105d2 105da
10d24-10d27 10d69-10d6d 10eab-10eac 10ecb-10ecf 10ef0-10efb 10efd-10eff 10f46-10f50 10f82-10f85
11070 1133b 11382 11384 1138b 11390 113c2 113ce-113d0 1145e 11839-1183a 11935 1193d-1193e 11943
119e0 11a34 11a47 11a99 11d42 11d44-11d45 11d97 11f41-11f42 1611e 16121-16122 1612f 16d63 16d67
16d69 16ff0-16ff1 1d127-1d128 1d250-1d252 1d25b-1d25c 1d25f 1d280-1d281 1e08f 1e130-1e136 1e2ae
1e2ec-1e2ef 1e4ec-1e4ef 1e5ee-1e5ef 1e6e3 1e6e6 1e6ee-1e6ef 1e6f5
"""


def _later_characters() -> re.Pattern[str]:
    """Compiles a pattern for a newer character, as a group, so that `split` keeps it."""
    ranges = []
    for part in LATER.split():
        ends = [f"\\U{int(end, 16):08x}" for end in part.split("-")]
        ranges.append("-".join(ends))
    return re.compile(f"([{''.join(ranges)}])")


_LATER = _later_characters()


def nfc(text: str) -> str:
    """Normalises a text."""
    if unicodedata.is_normalized("NFC", text):
        return text
    parts = _LATER.split(text)  # every second part is a newer character
    parts[::2] = [unicodedata.normalize("NFC", part) for part in parts[::2]]
    return "".join(parts)
