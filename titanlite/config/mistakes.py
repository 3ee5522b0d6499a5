"""Messages about mistakes: which word was probably meant, and the line of a key in a config file.

Imported only when there is something to report.
"""

from __future__ import annotations

import json
import re
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path

from titanlite.config.schema import sections


def suggestion(word: str, allowed: list[str], cutoff: float = 0.65) -> str:
    """`; did you mean X?` for the most similar allowed word, "" if none is similar. Equally similar
    ones are all named.

    `cutoff`: the similarity required, from 0 to 1 for the same word.
    """
    word = word[:199]  # SequenceMatcher treats longer ones differently
    near = {
        other: SequenceMatcher(None, other, word).ratio()
        for other in get_close_matches(word, allowed, 9, cutoff)
    }
    best = [other for other in allowed if other in near and near[other] == max(near.values())]
    return f"; did you mean {' or '.join(best)}?" if best else ""


def where(path: Path, text: str, section: str, name: str) -> str:
    """`file:line` of a key, or of the header of its section when `name` is empty or not found in
    it.

    The second table of an array is the section `data.sources[2]`.
    """
    current = ""
    header_line = 0
    tables: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[(\[?)\s*([\w.-]+)\s*\]", line)
        if header:
            current = header[2]
            if header[1]:
                tables[current] = tables.get(current, 0) + 1
                current += f"[{tables[current]}]"
            if current == section:
                header_line = number
                if not name:
                    break
        elif (
            current == section
            and name
            and re.match(rf"""\s*["']?{re.escape(name)}["']?\s*=""", line)
        ):
            return f"{path}:{number}"
    return f"{path}:{header_line}" if header_line else str(path)


def unknown_config(name: str, flavors: list[str]) -> str:
    """The message for a CONFIG argument that is neither a file nor one of the flavors."""
    problem = f"config {name!r}: no such file, and no such flavor in train_configs/{suggestion(name, flavors)}"
    return f"{problem}; allowed: a path or one of {', '.join(flavors)}"


def wrong_value(name: str, value: object, expected: str, choices: tuple[object, ...]) -> str:
    """The message for the value of a key, which should be as `expected`, for example one of the
    choices.
    """
    near = (
        suggestion(value, [str(choice) for choice in choices])
        if isinstance(value, str) and choices
        else ""
    )
    return f"{name} = {json.dumps(value, default=str)[:200]}: expected {expected}{near}"


def unknown_key(name: str, keys: list[str], removed: dict[str, str]) -> str:
    """The message for a key that is not one of `keys`, with the one that was probably meant."""
    section, _, entry = name.partition(".")
    elsewhere = [key for key in keys if key.partition(".")[2] == (entry or section)]
    mistyped_section = entry and section not in sections()
    near = suggestion(name, elsewhere) if mistyped_section else ""
    if elsewhere and not near:
        near = f"; did you mean {' or '.join(elsewhere)}?"
    elif not elsewhere:
        # More than usual: keys of one section have its name in common
        near = suggestion(name, keys, 0.8)
    if name == "help":
        near = "; titanlite train --help, or ./run_train.sh --help, lists all keys"
    if name in sections():
        near = f"; that is a section: set one of its keys, {', '.join(key for key in keys if key.startswith(name))}"
    return f"unknown key {name}" + (f"; removed: {removed[name]}" if name in removed else near)
