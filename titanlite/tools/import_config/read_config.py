"""Reads the tables of a config: JSON, TOML, YAML, or arguments in a script or a line.

What it is: `read_table` reads a file, and `flatten` gives `{"optimizer.params.lr": 3e-4, ...}`.
Nothing is run: of a script, the `--name value` pairs are read, with variables that the script sets
to plain words, each once. What only a shell knows is an error: an option under `if`, or arguments
in a variable that the file does not set.
What it costs: YAML needs the package PyYAML, an extra of titanlite; the others need nothing.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titanlite.runtime.documents import (
    DEEP,
    INTEGER,
    MOST_TOML,
    parse_json,
    parse_toml,
    require_bounded,
)
from titanlite.runtime.errors import ConfigError, shortened
from titanlite.runtime.files import read_bounded

LARGEST = 1 << 22  # bytes of a file: torchtitan's JSON has every layer of the model
# PyYAML's time grows with the square of a line's length, that of arguments with the square of a
# variable's default
MOST_LETTERS = {"YAML": 1 << 16, "TOML": MOST_TOML, "arguments": 1 << 18}
MOST = 50_000  # keys and elements
DEEPEST = 12
OPTION = re.compile(r"(?:^|(?<=[\s\"'(=]))--[A-Za-z][\w.-]*")
VARIABLE = re.compile(
    r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=[\"']?([^\s\"'()$`]{1,200})[\"']?[ \t\r]*$",
    re.MULTILINE,
)
# Every way in which a script gives a name a value; only `VARIABLE` is one that is read
ASSIGNED = re.compile(r"(?<![\w$-])([A-Za-z_]\w*)\+?=|\b(?:for|read)\s+([A-Za-z_]\w*)")
BRANCH = re.compile(
    r"(?:^|;)[ \t]*(if|case|fi|esac)\b|^[ \t]*((?:\[|test\s).*(?:&&|\|\|).*)$", re.MULTILINE
)
USE = re.compile(r"\$\{(\w+)(?::-([^}\n]{0,200}))?\}|\$(\w+)")
TABLE = re.compile(r"^[ \t]*\[[\w.]+\][ \t\r]*$", re.MULTILINE)
PROGRAM = re.compile(r"(?<!\S)\S+\.py[\"']?(?=\s|$)")
NUMBER = re.compile(r"-?[\d.][\d._]*(?:e[+-]?\d+)?", re.IGNORECASE)


def read_table(path: Path) -> dict[str, object]:
    """The tables of a file. Raises ConfigError if it is none of the kinds."""
    try:
        text = read_bounded(path, LARGEST).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8; expected JSON, TOML, YAML or arguments") from None
    kind = kind_of(path, text)
    most = MOST_LETTERS.get(kind, LARGEST)
    if len(text) > most:
        raise ConfigError(f"{path}: {len(text)} letters of {kind}; expected at most {most}")
    try:
        table = PARSERS[kind](text)
        if not is_small(table):
            raise ConfigError(
                f"{path}: more than {MOST} keys or elements; expected the config of a trainer"
            )
        if not isinstance(table, dict) or not flatten(table):
            raise ConfigError(f"{path}: no keys; expected JSON, TOML, YAML or arguments")
    except ConfigError:
        raise
    except ValueError as error:
        reason = shortened(" ".join(str(error).split()), 1000)
        raise ConfigError(f"{path}: not {kind}: {reason}") from None
    return table


def kind_of(path: Path, text: str) -> str:
    """JSON, TOML, YAML or arguments: by the name's ending, or else by the content."""
    by_ending = {".json": "JSON", ".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}
    kind = by_ending.get(path.suffix.lower())
    if kind is not None:
        return kind
    if OPTION.search(text):
        return "arguments"
    if text.lstrip().startswith("{"):
        return "JSON"
    if TABLE.search(text):
        return "TOML"
    return "YAML"


def read_yaml(text: str) -> Any:
    """Reads safe YAML: no tag makes an object."""
    if find_spec("yaml") is None:
        raise ConfigError("YAML needs the package PyYAML: pip install pyyaml")
    import yaml  # an extra

    # libyaml's, where PyYAML was built with it, is ten times as fast
    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            """Merges `<<`; before PyYAML 6.0.3 the keys of merged merges multiply."""
            super().flatten_mapping(node)
            if len(node.value) > MOST:
                raise ValueError(f"a table of more than {MOST} keys")

    try:
        value = yaml.load(text, Loader)
    except RecursionError:
        raise ValueError(DEEP) from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    # A scalar that is not what its tag says is an error of whatever function reads it
    except (AttributeError, LookupError, TypeError, OverflowError):
        raise ValueError("a value that is not what its tag says") from None
    except ValueError as error:  # Python's limit of an integer's digits, or an impossible date
        raise ValueError(INTEGER if "digits" in str(error) else str(error)) from None
    if is_small(value):  # `read_table` refuses others
        require_bounded(value)
    return value


def read_arguments(text: str) -> dict[str, object]:
    """The `--name value` pairs of a script, a file or a line.

    A name without a value is a switch, which is on; several values are one text with spaces. Raises
    ValueError for what only a shell knows: a name with two different values, or under `if`, and
    arguments in a variable that the file does not set.
    """
    text = re.sub(r"(?:^|(?<=\s))#.*", "", text)
    text = re.sub(r"\\\r?\n", " ", text)
    assigned = set(assigned_names(text))
    variables = plain_variables(text)

    def replaced(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in assigned and name not in variables:
            return match[0]
        return str(variables.get(name, match[2] or match[0]))

    text = USE.sub(replaced, text)
    text = "\n".join(without_bundles(line, assigned) for line in text.split("\n"))
    branches = under_condition(text)
    places = [*OPTION.finditer(text)]
    ends = [place.start() for place in places[1:]] + [len(text)]
    entries: dict[str, object] = {}
    for place, end in zip(places, ends, strict=True):
        if is_within(place.start(), branches):
            raise ValueError(f"{place[0]} stands under a condition: write out the arguments used")
        name = place[0][2:].replace("-", "_")
        rest = text[place.end() : end].partition("\n")[0]
        rest = re.split(r"[\"')][\s)]|[\"')]$|\s\d?[<>]|[;&|<>]", rest.lstrip("= "))[0]
        words = [word.strip("\"'") for word in rest.split()]
        if any(word.endswith(".py") for word in words):  # the program that torchrun starts
            words = words[: [word.endswith(".py") for word in words].index(True)]
        value = " ".join(words) if words else True
        if entries.get(name, value) != value:
            raise ValueError(f"--{name} has two values, {entries[name]} and {value}")
        entries[name] = value
    return entries


def plain_variables(text: str) -> dict[str, str]:
    """The variables that a script sets to plain words, once and under no condition."""
    branches = under_condition(text)
    times = Counter(assigned_names(text))
    return {
        match[1]: match[2]
        for match in VARIABLE.finditer(text)
        if times[match[1]] == 1 and not is_within(match.start(1), branches)
    }


def assigned_names(text: str) -> list[str]:
    """The name of each assignment and loop of a script."""
    return [match[1] or match[2] for match in ASSIGNED.finditer(text)]


def under_condition(text: str) -> list[range]:
    """The parts of a script that it runs under a condition."""
    ranges = []
    open_at = []
    for match in BRANCH.finditer(text):
        if match[2]:
            ranges.append(range(match.start(), match.end()))
        elif match[1] in ("if", "case"):
            open_at.append(match.start())
        elif open_at:
            ranges.append(range(open_at.pop(), match.end()))
    outer: list[range] = []  # without those within another one
    for part in sorted(ranges, key=lambda part: part.start):
        if not outer or part.stop > outer[-1].stop:
            outer.append(part)
    return outer


def is_within(place: int, ranges: list[range]) -> bool:
    """Whether a place is in one of the parts of a text."""
    before = bisect.bisect_right(ranges, place, key=lambda part: part.start)
    return before > 0 and place in ranges[before - 1]


def without_bundles(line: str, assigned: set[str]) -> str:
    """A command without the words that stand for arguments, as `${MODEL_ARGS[@]}`.

    The arguments are read where the file sets the variable. Raises ValueError if it does not.
    """
    program = PROGRAM.search(line)
    if program is None:
        return line
    kept: list[str] = []
    for word in line[program.end() :].split():
        is_value = bool(kept) and kept[-1].startswith("--") and "=" not in kept[-1]
        use = re.match(r"[\"']?[$`]\{?(\w*)", word)
        if use is None or is_value:
            kept.append(word)
        elif use[1] not in assigned:
            raise ValueError(
                f"{word}: arguments that the file does not have; write them out, or remove it"
            )
    return " ".join([line[: program.end()], *kept])


def without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object. Raises ValueError for a name that it has twice, as DeepSpeed does."""
    table = dict(pairs)
    if len(table) < len(pairs):
        ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{repeated} stands twice in one object")
    return table


def read_json(text: str) -> Any:
    """A JSON document in which no object has a name twice."""
    return parse_json(text, without_repeats)


PARSERS: dict[str, Callable[[str], Any]] = {
    "JSON": read_json,
    "TOML": parse_toml,
    "YAML": read_yaml,
    "arguments": read_arguments,
}


def is_small(value: object) -> bool:
    """Whether a value has at most `MOST` elements: YAML's aliases can repeat a list without end."""
    remaining = [value]
    count = 0
    while remaining:
        entry = remaining.pop()
        count += 1
        if count > MOST:
            return False
        if isinstance(entry, dict):
            remaining += entry.values()
        elif isinstance(entry, (list, set, tuple)):
            remaining += entry
    return True


def flatten(table: dict[str, object], whole: tuple[str, ...] = ()) -> dict[str, object]:
    """Dotted names and values of nested tables; lists, empty and `whole` tables are values."""
    entries: dict[str, object] = {}
    waiting = [(str(name), value, 0) for name, value in table.items()]
    while waiting:
        name, value, depth = waiting.pop()
        name = name[:200]
        if depth > DEEPEST:
            raise ValueError(f"{name}: more than {DEEPEST} tables within each other")
        if isinstance(value, dict) and value and name not in whole:
            waiting += [(f"{name}.{key}", inner, depth + 1) for key, inner in value.items()]
        elif name in entries:
            raise ValueError(f"{name} stands twice: as a name with dots, and in a table")
        else:
            entries[name] = value
    return entries
