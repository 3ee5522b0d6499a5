"""The file of another trainer as flat keys: JSON, TOML, YAML, or arguments in a script or a line.

What it is: `read_entries` gives `{"optimizer.params.lr": 3e-4, ...}`. Nothing is run: of a script,
the `--name value` pairs are read, with variables that the script sets to plain words.
What it costs: YAML needs the package PyYAML, an extra of titanlite; the others need nothing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST = 1 << 16  # bytes of a file: PyYAML's time grows with the square of a line's length
MOST = 5000  # keys
DEEPEST = 12
OPTION = re.compile(r"(?:^|(?<=[\s\"'(=]))--[A-Za-z][\w.-]*")
VARIABLE = re.compile(
    r"^\s*(?:export\s+)?([A-Za-z_]\w*)=[\"']?([^\s\"'()$`]{1,200})[\"']?\s*$", re.MULTILINE
)
USE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")
NUMBER = re.compile(r"-?[\d.][\d._]*(?:e[+-]?\d+)?", re.IGNORECASE)


def read_entries(path: Path) -> dict[str, object]:
    """The keys and values of a file. Raises ConfigError if it is none of the kinds."""
    try:
        text = read_bounded(path, LARGEST).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8; expected JSON, TOML, YAML or arguments") from None
    kind = kind_of(path, text)
    entries: dict[str, object] = {}
    try:
        for name, entry in flatten(PARSERS[kind](text), "", 0):
            entries[name] = entry
            if len(entries) > MOST or not is_small(entry):
                raise ConfigError(
                    f"{path}: more than {MOST} keys or elements; expected the config of a trainer"
                )
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: not {kind}: {reason}") from None
    if not entries:
        raise ConfigError(f"{path}: no keys; expected JSON, TOML, YAML or arguments")
    return entries


def kind_of(path: Path, text: str) -> str:
    """JSON, TOML, YAML or arguments: by the name's ending, or else by the content."""
    by_ending = {".json": "JSON", ".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}
    kind = by_ending.get(path.suffix.lower())
    if kind is not None:
        return kind
    if OPTION.search(text):
        return "arguments"
    if text.lstrip().startswith("{"):
        return "JSON" if _is_json(text) else "YAML"  # GPT-NeoX's YAML looks like JSON
    if re.search(r"^\s*\[[\w.]+\]\s*$", text, re.MULTILINE):
        return "TOML"
    return "YAML"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def read_yaml(text: str) -> Any:
    """A YAML document, without tags that make objects."""
    if find_spec("yaml") is None:
        raise ConfigError("YAML needs the package PyYAML: pip install 'titanlite[yaml]'")
    import yaml  # an extra

    try:
        # libyaml's, where PyYAML was built with it, is ten times as fast
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    # A scalar that is not what its tag says is an error of whatever function reads it
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


def read_arguments(text: str) -> dict[str, object]:
    """The `--name value` pairs of a script, a file or a line.

    A name without a value is a switch, which is on; several values are one text with spaces.
    """
    text = re.sub(r"(?:^|(?<=\s))#.*", "", text)
    text = re.sub(r"\\\r?\n", " ", text)
    variables = dict(VARIABLE.findall(text))

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
        entries[name] = " ".join(words) if words else True
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


def flatten(value: object, prefix: str, depth: int) -> Iterator[tuple[str, object]]:
    """Dotted names and values of nested tables; lists and empty tables are values.

    Hyphens in names become underscores: Megatron-LM and older GPT-NeoX write them.
    """
    if depth > DEEPEST:
        raise ValueError(f"{prefix}: more than {DEEPEST} tables within each other")
    if not isinstance(value, dict):
        if prefix:
            yield prefix, value
        return
    for name, entry in value.items():
        full = f"{prefix}.{name}" if prefix else str(name)
        full = full.replace("-", "_")[:200]
        if isinstance(entry, dict) and entry:
            yield from flatten(entry, full, depth + 1)
        else:
            yield full, entry
