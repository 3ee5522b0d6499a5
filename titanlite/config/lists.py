"""Reads lists: arrays of tables (`[[data.sources]]`) and of strings (`validation.prompts`).

What it is: the reader of a key whose value is a list of strings, or of tables that become
dataclasses; and the checks of sources and phases together. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from titanlite.config.batch_sizes import first_sample
from titanlite.config.keys import Key, keys_of
from titanlite.config.mistakes import suggestion
from titanlite.config.schema import DataConfig, PhaseConfig, SourceConfig, TrainingConfig
from titanlite.config.values import Mistake, convert
from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError, shortened

NAME = re.compile(r"[\w.-]+")


def read_list(value: Any, key: Key) -> tuple[tuple[object, ...], list[Mistake]]:
    """Reads the items of a list, as strings or objects of `key.items`; also returns mistakes."""
    if key.is_list_of_strings:
        return _read_strings(value, key)
    return _read_tables(value, key)


def _read_strings(value: object, key: Key) -> tuple[tuple[object, ...], list[Mistake]]:
    """Reads a list of strings; removes repetitions if they are names to choose from."""
    section, _, entry = key.name.partition(".")
    if isinstance(value, str):
        value = _parse_strings(value, key)
    if not isinstance(value, list):
        example = 'as in ["one", "two"]'
        if key.choices:
            example = f"some of {', '.join(str(choice) for choice in key.choices)}"
        message = f"{key.name} = {_shown(value)}: expected a list of strings, {example}"
        return (), [Mistake(section, entry, message)]
    item = dataclasses.replace(key, kind=str, items=None)
    mistakes = []
    for number, text in enumerate(value, 1):
        expected = convert(text, item).expected
        if expected:
            hint = ""
            if isinstance(text, str):
                hint = suggestion(text, [str(choice) for choice in key.choices])
            message = f"{key.name}[{number}] = {_shown(text)}: expected {expected}{hint}"
            mistakes.append(Mistake(section, entry, message))
    if key.choices and not mistakes:
        value = list(dict.fromkeys(value))  # without repetitions
    return tuple(value), mistakes


def _parse_strings(text: str, key: Key) -> object:
    """Parses a list on the command line: a JSON array, or text without brackets and quotes.

    Such a text is one string, or names with commas if the key has choices.
    """
    if text.lstrip().startswith("["):
        with contextlib.suppress(ValueError):  # otherwise it stays a string
            value: object = parse_json(text)
            return value
        return text
    if key.choices:
        names = [word.strip() for word in text.split(",")]
        return [name for name in names if name]
    return [text] if text else []


def _read_tables(tables: list[object], key: Key) -> tuple[tuple[object, ...], list[Mistake]]:
    """Builds an object of the dataclass `key.items` for each table."""
    assert key.items is not None
    objects = []
    mistakes: list[Mistake] = []
    for number, table in enumerate(tables, 1):
        header = f"{key.name}[{number}]"
        if not isinstance(table, dict):
            message = f"{header} = {_shown(table)}: expected a table, as in [[{key.name}]]"
            mistakes.append(Mistake(header, "", message))
            continue
        values, wrong = _read_table(table, header, key)
        objects.append(key.items(**values))
        mistakes += wrong
    return tuple(objects), mistakes


def _read_table(
    table: dict[str, object], header: str, key: Key
) -> tuple[dict[str, object], list[Mistake]]:
    """Reads the values of one table; `header`: its name in messages."""
    assert key.items is not None
    keys = keys_of(key.items)
    values: dict[str, object] = {}
    mistakes = []
    for name, entry in table.items():
        if name not in keys:
            hint = suggestion(name, list(keys)) or f"; expected some of {', '.join(keys)}"
            message = f"unknown key {shortened(name)} in [[{key.name}]]{hint}"
            mistakes.append(Mistake(header, name, message))
        elif name == "weights":
            values[name], messages = _read_weights(header, entry)
            mistakes += [Mistake(header, name, message) for message in messages]
        else:
            values[name], expected = convert(entry, keys[name])
            if expected:
                message = f"{header}.{name} = {_shown(entry)}: expected {expected}"
                mistakes.append(Mistake(header, name, message))
    return values, mistakes


def _read_weights(header: str, table: object) -> tuple[tuple[tuple[str, float], ...], list[str]]:
    """Reads { name = weight, ... } as pairs, and lists the problems."""
    if not isinstance(table, dict):
        example = "expected a table, as in { code = 0.2, web = 0.8 }"
        return (), [f"{header}.weights = {_shown(table)}: {example}"]
    pairs = []
    problems = []
    for name, weight in table.items():
        if _is_weight(weight):
            pairs.append((name, float(weight)))
        else:
            shown = f"{header}.weights.{name} = {_shown(weight)}"
            problems.append(f"{shown}: expected a number, at least 0")
    return tuple(pairs), problems


def _is_weight(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value < math.inf


def _shown(value: object) -> str:
    return shortened(json.dumps(value, default=str))


def resolve_sources(
    sources: tuple[SourceConfig, ...], absolute: Callable[[str], str]
) -> tuple[SourceConfig, ...]:
    """Gives each source an absolute path and a name.

    The default name is the last part of the path without its endings.
    """
    resolved = []
    for source in sources:
        stem = Path(re.sub(r"\.(gz|zst)$", "", source.path)).stem
        name = source.name or re.sub(r"[^\w.-]", "_", stem)
        path = absolute(source.path)
        validation = absolute(source.validation)
        resolved.append(dataclasses.replace(source, path=path, validation=validation, name=name))
    return tuple(resolved)


def data_problems(data: DataConfig, training: TrainingConfig) -> Iterator[str]:
    """Yields what is wrong with the sources and phases of a config; its sources are resolved."""
    names = [source.name for source in data.sources]
    yield from _source_problems(data)
    if data.sources and not any(source.weight for source in data.sources):
        yield "data.sources: all weights are 0; expected one that is more"
    if data.phases and len(names) < 2:
        yield "data.phases: expected at least two [[data.sources]], whose weights they change"
        return
    starts: list[int] = []
    with contextlib.suppress(ConfigError):  # `size_problems` reports a wrong batch_ramp
        starts = [first_sample(phase, training) for phase in data.phases]
    for number, (start, following) in enumerate(itertools.pairwise(starts), 1):
        if following <= start:
            yield (
                f"data.phases[{number}] begins with sample {start}, which is not before that of "
                f"data.phases[{number + 1}], {following}; expected phases in order"
            )
    for number, phase in enumerate(data.phases, 1):
        yield from _phase_problems(f"data.phases[{number}]", phase, names)


def _source_problems(data: DataConfig) -> Iterator[str]:
    names = [source.name for source in data.sources]
    in_phases = {name for phase in data.phases for name, weight in phase.weights if weight}
    for number, source in enumerate(data.sources, 1):
        key = f"data.sources[{number}]"
        shown = f"{key}.name = {_shown(source.name)}"
        if not source.path:
            yield f"{key}.path is missing: expected what data.path may be, or python-stdlib"
        elif not NAME.fullmatch(source.name):
            yield f"{shown}: expected letters, digits, '_', '-' and '.'"
        elif source.name in names[: number - 1]:
            first = names.index(source.name) + 1
            yield f"{shown} is also that of data.sources[{first}]; set other names"
        if not source.weight and source.name not in in_phases:
            yield (
                f"{key}.weight = 0: expected more than 0, or a weight for {source.name} in a "
                "phase of data.phases"
            )


def _phase_problems(key: str, phase: PhaseConfig, names: list[str]) -> Iterator[str]:
    in_phase = [name for name, _ in phase.weights]
    if bool(phase.from_step) == bool(phase.from_tokens):
        yield f"{key}: expected from_step or from_tokens, one of them more than 0"
    for name in in_phase:
        if name not in names:
            hint = suggestion(name, names) or f"; expected {', '.join(names)}"
            yield f"{key}.weights: no source has the name {name}{hint}"
    missing = [name for name in names if name not in in_phase]
    if missing:
        yield f"{key}.weights: no weight for {', '.join(missing)}; 0 leaves a source out"
    elif not any(weight for _, weight in phase.weights):
        yield f"{key}.weights: all are 0; expected one that is more"
