"""The file of another trainer as tables: JSON, TOML, YAML, or arguments in a script or a line.

What it is: `read_table` reads a file, and `flatten` gives `{"optimizer.params.lr": 3e-4, ...}`.
Nothing is run: of a script, the `--name value` pairs are read, with variables that the script sets
to plain words, each once.
What it costs: YAML needs the package PyYAML, an extra of titanlite; the others need nothing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST = 1 << 22  # bytes of a file: torchtitan's JSON has every layer of the model
LARGEST_YAML = 1 << 16  # letters: PyYAML's time grows with the square of a line's length
MOST = 50_000  # keys and elements
DEEPEST = 12
OPTION = re.compile(r"(?:^|(?<=[\s\"'(=]))--[A-Za-z][\w.-]*")
VARIABLE = re.compile(
    r"^\s*(?:export\s+)?([A-Za-z_]\w*)=[\"']?([^\s\"'()$`]{1,200})[\"']?\s*$", re.MULTILINE
)
USE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")
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
    if kind == "YAML" and len(text) > LARGEST_YAML:
        raise ConfigError(f"{path}: {len(text)} letters of YAML; expected at most {LARGEST_YAML}")
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
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
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
    if re.search(r"^\s*\[[\w.]+\]\s*$", text, re.MULTILINE):
        return "TOML"
    return "YAML"


def read_yaml(text: str) -> Any:
    """Reads safe YAML: no tag makes an object."""
    if find_spec("yaml") is None:
        raise ConfigError("YAML needs the package PyYAML: pip install pyyaml")
    import yaml  # an extra

    try:
        # libyaml's, where PyYAML was built with it, is ten times as fast
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    # A scalar that is not what its tag says is an error of whatever function reads it
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


def read_arguments(text: str) -> dict[str, object]:
    """The `--name value` pairs of a script, a file or a line.

    A name without a value is a switch, which is on; several values are one text with spaces. Raises
    ValueError for a name with two different values, of which the shell would choose one.
    """
    text = re.sub(r"(?:^|(?<=\s))#.*", "", text)
    text = re.sub(r"\\\r?\n", " ", text)
    assigned = VARIABLE.findall(text)
    variables = dict(assigned)
    for name, value in assigned:
        if variables.get(name) != value:  # set twice: which one counts is not known
            variables.pop(name, None)

    def replaced(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return str(variables.get(name, match[2] or match[0]))

    text = USE.sub(replaced, text)
    places = [*OPTION.finditer(text)]
    ends = [place.start() for place in places[1:]] + [len(text)]
    entries: dict[str, object] = {}
    for place, end in zip(places, ends, strict=True):
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


PARSERS: dict[str, Callable[[str], Any]] = {
    "JSON": json.loads,
    "TOML": tomllib.loads,
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
        else:
            entries[name] = value
    return entries
