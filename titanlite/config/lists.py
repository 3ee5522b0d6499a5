"""Lists: arrays of tables, as `[[data.sources]]`, and lists of strings, as `validation.prompts`.

What it is: the reader of a key whose value is a list, of tables that are dataclasses or of strings,
and the checks of the sources and phases together. Imported only if such a key is set.
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
from typing import Any, TypeAlias, get_type_hints

from titanlite.config.batch_sizes import first_sample
from titanlite.config.mistakes import suggestion
from titanlite.config.schema import DataConfig, PhaseConfig, SourceConfig, TrainingConfig
from titanlite.runtime.errors import ConfigError

NAME = re.compile(r"[\w.-]+")


# a value, its declared type, bounds and choices ->
Convert: TypeAlias = Callable[[Any, type, Any], tuple[Any, str]]
# the value in that type, and what was expected if it is not of that type
Problems: TypeAlias = list[tuple[str, str, str]]  # section or table, key in it, message


def read_list(
    key: str, value: Any, meta: Any, convert: Convert
) -> tuple[tuple[Any, ...], Problems]:
    """The items of a list, of the type `meta["items"]`, and the problems."""
    if meta["items"] is str:
        return _read_texts(key, value, meta, convert)
    return _read_tables(key, value, meta["items"], convert)


def _read_texts(
    key: str, value: Any, meta: Any, convert: Convert
) -> tuple[tuple[str, ...], Problems]:
    """A list of strings, each once if they are names to choose from.

    On the command line it is a JSON array, or text without brackets and quotes: one string, or
    names with commas.
    """
    (section, _, name), choices = key.partition("."), meta["choices"]
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):  # otherwise it stays a string
            value = json.loads(value)
    elif isinstance(value, str):
        value = (
            [word.strip() for word in value.split(",") if word.strip()]
            if choices
            else [value] * bool(value)
        )
    example = f"some of {', '.join(choices)}" if choices else 'as in ["one", "two"]'
    if not isinstance(value, list):
        return (), [
            (section, name, f"{key} = {_shown(value)}: expected a list of strings, {example}")
        ]
    problems: Problems = []
    for number, text in enumerate(value, 1):
        expected = convert(text, str, meta)[1]
        if expected:
            near = suggestion(text, list(choices)) if isinstance(text, str) and choices else ""
            problems.append(
                (section, name, f"{key}[{number}] = {_shown(text)}: expected {expected}{near}")
            )
    return tuple(dict.fromkeys(value) if choices and not problems else value), problems


def _read_tables(
    key: str, value: list[Any], cls: type, convert: Convert
) -> tuple[tuple[Any, ...], Problems]:
    """The tables as objects of `cls`, and the problems."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = get_type_hints(cls)
    problems: Problems = []
    objects = []
    for number, table in enumerate(value, 1):
        header = f"{key}[{number}]"
        values = {}
        if not isinstance(table, dict):
            problems.append(
                (header, "", f"{header} = {_shown(table)}: expected a table, as in [[{key}]]")
            )
            continue
        for name, entry in table.items():
            if name not in fields:
                near = suggestion(name, list(fields)) or f"; expected some of {', '.join(fields)}"
                problems.append((header, name, f"unknown key {name} in [[{key}]]{near}"))
            elif name == "weights":
                values[name], found = _read_weights(header, entry)
                problems += [(header, name, message) for message in found]
            else:
                values[name], expected = convert(entry, hints[name], fields[name].metadata)
                if expected:
                    problems.append(
                        (header, name, f"{header}.{name} = {_shown(entry)}: expected {expected}")
                    )
        objects.append(cls(**values))
    return tuple(objects), problems


def _read_weights(header: str, table: Any) -> tuple[tuple[tuple[str, float], ...], list[str]]:
    """{ name = weight, ... } as pairs, and the problems."""
    if isinstance(table, dict):
        wrong = {name: weight for name, weight in table.items() if not _is_weight(weight)}
        found = [
            f"{header}.weights.{n} = {_shown(w)}: expected a number, at least 0"
            for n, w in wrong.items()
        ]
        return tuple((name, float(w)) for name, w in table.items() if name not in wrong), found
    return (), [
        f"{header}.weights = {_shown(table)}: expected a table, as in {{ code = 0.2, web = 0.8 }}"
    ]


def _is_weight(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:200]


def resolve_sources(
    sources: tuple[SourceConfig, ...], absolute: Callable[[str], str]
) -> tuple[SourceConfig, ...]:
    """The sources with absolute paths and names; the default name is the last part of the path
    without its endings.
    """
    return tuple(
        dataclasses.replace(
            source,
            path=absolute(source.path),
            validation=absolute(source.validation),
            name=source.name
            or re.sub(r"[^\w.-]", "_", Path(re.sub(r"\.(gz|zst)$", "", source.path)).stem),
        )
        for source in sources
    )


def data_problems(data: DataConfig, training: TrainingConfig) -> Iterator[str]:
    """What is wrong with the sources and phases of a config, whose sources are resolved."""
    names = [source.name for source in data.sources]
    weights = dict.fromkeys(names, 0.0)
    for phase in data.phases:
        weights |= {name: max(weight, weights.get(name, 0.0)) for name, weight in phase.weights}
    for number, source in enumerate(data.sources, 1):
        key = f"data.sources[{number}]"
        if not source.path:
            yield f"{key}.path is missing: expected what data.path may be, or python-stdlib"
        elif not NAME.fullmatch(source.name):
            yield f"{key}.name = {_shown(source.name)}: expected letters, digits, '_', '-' and '.'"
        elif source.name in names[: number - 1]:
            first = names.index(source.name) + 1
            yield f"{key}.name = {_shown(source.name)} is also that of data.sources[{first}]; set other names"
        if not source.weight and not weights[source.name]:
            yield f"{key}.weight = 0: expected more than 0, or a weight for {source.name} in a phase of data.phases"
    if training.epochs and len(names) > 1:
        problem = f"training.epochs = {training.epochs}, with {len(names)} data.sources that have different epochs"
        yield f"{problem}; expected training.tokens or training.steps"
    if data.sources and not any(source.weight for source in data.sources):
        yield "data.sources: all weights are 0; expected one that is more"
    if data.phases and len(names) < 2:
        yield "data.phases: expected at least two [[data.sources]], whose weights they change"
        return
    starts: list[int] = []
    with contextlib.suppress(ConfigError):  # of a wrong batch_ramp, which `size_problems` reports
        starts = [first_sample(phase, training) for phase in data.phases]
    for number, (start, following) in enumerate(itertools.pairwise(starts), 1):
        if following <= start:
            both = f"sample {start}, which is not before that of data.phases[{number + 1}], {following}"
            yield f"data.phases[{number}] begins with {both}; expected phases in order"
    for number, phase in enumerate(data.phases, 1):
        yield from _phase_problems(f"data.phases[{number}]", phase, names)


def _phase_problems(key: str, phase: PhaseConfig, names: list[str]) -> Iterator[str]:
    given = [name for name, _ in phase.weights]
    if bool(phase.from_step) == bool(phase.from_tokens):
        yield f"{key}: expected from_step or from_tokens, one of them more than 0"
    for name in given:
        if name not in names:
            near = suggestion(name, names) or f"; expected {', '.join(names)}"
            yield f"{key}.weights: no source has the name {name}{near}"
    missing = [name for name in names if name not in given]
    if missing:
        yield f"{key}.weights: no weight for {', '.join(missing)}; 0 leaves a source out"
    elif not any(weight for _, weight in phase.weights):
        yield f"{key}.weights: all are 0; expected one that is more"
