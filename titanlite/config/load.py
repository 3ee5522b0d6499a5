"""Defaults < base files < TOML file < command line -> one frozen `Config`.

What it is: the strict reader of configuration. Unknown keys, wrong types and values out of bounds
are collected and reported together, each with file and line, the value, the allowed values and the
nearest match. Nothing is ignored.
Why it is here: a mistyped key that silently keeps its default costs a training run.
What it costs: nothing; no torch is imported, so a mistake is reported in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import sys
from pathlib import Path
from typing import Any, get_type_hints

from titanlite.config.schema import Config, sections
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded

_hints = functools.cache(get_type_hints)
REMOVED = {"checkpoint.trust_pickle": "pickles are read without being run"}
FILE_KEYS = ("data.path", "data.tokenizer", "data.cache", "checkpoint.initial_load")
TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
TYPE_NAMES |= {
    tuple: "a list of two numbers",
    list: "a list of tables, which only a TOML file can contain",
}
# Keys that exclude each other. The value of a base file is dropped if a later file or the command
# line sets another one
ALTERNATIVES = (
    ("training.steps", "training.tokens", "training.epochs"),
    ("schedule.warmup_steps", "schedule.warmup_tokens"),
    ("schedule.decay_fraction", "schedule.decay_steps", "schedule.decay_tokens"),
    ("data.path", "data.sources"),
    ("data.path", "data.phases"),
)


def program_folder() -> Path:
    """The folder of train.py and train_configs/: inside the package in a wheel (see setup.py),
    beside it in a clone.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "program"
    return inside if inside.is_dir() else package.parent


CONFIGS = program_folder() / "train_configs"
MOST_PROBLEMS = 5000  # of a command line, that are reported


def load_config(argv: list[str], configs: Path = CONFIGS) -> Config:
    """The configuration that `[CONFIG] [--section.key=value ...]` describes.

    Raises ConfigError with every problem in the file, its bases and the command line at once.
    """
    positional, overrides = _split(argv)
    problems = [f"expected one config, found {len(positional)}: {', '.join(positional)}"] * (
        len(positional) > 1
    )
    path = _find(positional[0] if positional else "debug", configs, problems)
    values = dict[str, Any]()
    layer = dict[str, Any]()
    if path is not None:
        _read(path, values, problems, [])
        values.setdefault("run.name", path.stem)
    for name, text in overrides:
        problems += _set_from_text(name, text, layer)
        # Nobody reads more, and a command line may have a million
        if len(problems) > MOST_PROBLEMS:
            raise ConfigError(
                [*problems[:MOST_PROBLEMS], "and perhaps more: the rest was not read"]
            )
    _merge(layer, "", values, problems)
    if problems:
        raise ConfigError(problems)
    for name in FILE_KEYS:
        values[name] = absolute(values.get(name, ""))
    if "data.sources" in values:
        from titanlite.config.lists import resolve_sources

        values["data.sources"] = resolve_sources(values["data.sources"], absolute)
    config = _build(values)
    problems = contradictions(config)
    if problems:
        raise ConfigError(problems)
    part = config.schedule
    if any(
        (
            config.training.tokens,
            part.warmup_tokens,
            part.decay_steps,
            part.decay_tokens,
            part.name == "step",
        )
    ):
        from titanlite.config.budget import in_steps

        config = in_steps(config)
    return config


def _build(values: dict[str, Any]) -> Config:
    def entries(section: str) -> dict[str, Any]:
        return {
            name.removeprefix(section): value
            for name, value in values.items()
            if name.startswith(section)
        }

    return Config(**{name: cls(**entries(f"{name}.")) for name, cls in sections().items()})


def absolute(path: str) -> str:
    """The absolute path, so that the resolved config can be used from any folder."""
    return (
        str(Path(path).absolute())
        if path not in ("", "python-stdlib") and not path.startswith("hf:")
        else path
    )


def _merge(layer: dict[str, Any], origin: str, values: dict[str, Any], problems: list[str]) -> None:
    """Adds the values of a file, or of the command line, to those of the files before it."""
    for group in ALTERNATIVES:
        # 0 steps of warmup are a choice; so is a fraction of 0, but config.toml has it beside the
        # number of steps.
        zero = ("schedule.warmup_steps", *(() if origin else ("schedule.decay_fraction",)))
        chosen = [name for name in group if layer.get(name) or (name in layer and name in zero)]
        problems += [f"{origin}{' and '.join(chosen)}: expected only one of them"] * (
            len(chosen) > 1
        )
        for name in group if chosen else ():
            values.pop(name, None)
    values |= layer


def contradictions(config: Config) -> list[str]:
    """Problems of several keys together, or of a value beyond its declaration."""
    problems: list[str] = []
    if (
        config.training.batch_ramp
        or config.training.global_batch_size % config.training.local_batch_size
    ):
        from titanlite.config.batch_sizes import size_problems

        problems += size_problems(config.training)
    freq = config.profiling.freq
    traced = config.profiling.warmup_steps + config.profiling.active_steps
    if traced > freq:
        problems.append(
            f"profiling.warmup_steps + profiling.active_steps = {traced} exceeds profiling.freq = {freq}"
        )
    if config.data.sources or config.data.phases:
        from titanlite.config.lists import data_problems

        problems += data_problems(config.data, config.training)
    if config.checkpoint.accept:
        from titanlite.config.acceptable import accept_problems

        problems += accept_problems(config.checkpoint)
    name = config.run.name
    if not name or Path(name).name != name or name.startswith(".") or not name.isprintable():
        problems.append(f"run.name = {name!r}: expected a plain folder name")
    return problems


def _split(argv: list[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Positional arguments, and (key, text or None) for each option."""
    positional: list[str] = []
    overrides: list[tuple[str, str | None]] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            positional.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        words = _switch_words(name)
        given = (
            bool(rest) and not rest[0].startswith("--") and (not words or rest[0].lower() in words)
        )
        overrides.append(
            (name, text if equals else rest.pop(0) if given else "true" if words else None)
        )
    return positional, overrides


def _find(name: str, configs: Path, problems: list[str]) -> Path | None:
    """The file of a CONFIG argument: a path, or a flavor in train_configs/."""
    for candidate in (Path(name), configs / f"{name}.toml"):
        with contextlib.suppress(OSError):  # for example, a name too long for the file system
            if candidate.is_file():
                return candidate
    from titanlite.config.mistakes import unknown_config

    problems.append(unknown_config(name, flavors(configs)))
    return None


def flavors(configs: Path = CONFIGS) -> list[str]:
    return sorted(path.stem for path in configs.glob("*.toml"))


def _read(path: Path, values: dict[str, Any], problems: list[str], chain: list[Path]) -> None:
    """Adds the keys of a TOML file to `values`, those of its base files first."""
    path = path.resolve()
    if path in chain:
        problems.append(
            f"{path}: `base` leads back to the file itself: {' -> '.join(p.name for p in [*chain, path])}"
        )
        return
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        text = read_bounded(path).decode("utf-8-sig")
        table = tomllib.loads(text)
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as error:  # not TOML, or not UTF-8, or numbers and nesting without end
        problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
        return

    def report(section: str, name: str, problem: str, word: str = "", allowed: Any = ()) -> None:
        from titanlite.config.mistakes import suggestion, where

        problems.append(
            f"{where(path, text, section, name)}: {problem}{suggestion(word, list(allowed))}"
        )

    base = table.pop("base", None)
    if isinstance(base, str) and len(base) < 200 and (path.parent / base).is_file():
        _read(path.parent / base, values, problems, [*chain, path])
    elif base is not None:
        allowed = (file.name for file in path.parent.glob("*.toml"))
        report("", "base", f"base = {base!r}: expected the path of a TOML file", str(base), allowed)
    layer: dict[str, Any] = {}
    for section, entries in table.items():
        if section not in sections():
            report(section, "", f"unknown section [{section}]", section, sections())
        elif not isinstance(entries, dict):
            report("", section, f"{section} is a section: write [{section}]")
        else:
            for name, value in entries.items():
                for problem in _set(f"{section}.{name}", value, layer):
                    report(*problem)
    _merge(layer, f"{path}: ", values, problems)


def type_of(name: str) -> type | None:
    """The declared type of `section.key`, None if there is no such key.

    Pairs are tuple, longer ones list.
    """
    section, _, entry = name.partition(".")
    cls = sections().get(section)
    declared = _hints(cls).get(entry) if cls else None
    return list if declared and _meta(name)["items"] else getattr(declared, "__origin__", declared)


@functools.cache
def _meta(name: str) -> Any:
    """The help, bounds and choices of a key."""
    section, _, entry = name.partition(".")
    return next(f.metadata for f in dataclasses.fields(sections()[section]) if f.name == entry)


def _switch_words(name: str) -> tuple[str, ...]:
    """The values of a key that can be given without a value, as `--compile.loss`; () for other
    keys.
    """
    declared = type_of(name)
    choices = _meta(name)["choices"] if declared else ()
    return choices if "true" in choices else ("true", "false") if declared is bool else ()


def _set_from_text(name: str, text: str | None, layer: dict[str, Any]) -> list[str]:
    """Sets a key from the command line's text, read as the declared type. Returns problems."""
    declared = type_of(name)
    value: Any = text
    if declared and text is None:
        strings = declared is list and _meta(name)["items"] is str
        expected = "a list of strings" if strings else _convert(None, declared, _meta(name))[1]
        return [f"--{name}: a value is missing; expected {expected}"]
    if declared is str and text is not None and text.lower() in _switch_words(name):
        value = text.lower()
    elif declared not in (None, str, list) and text is not None:
        # Otherwise it stays a string, which `_set` refuses
        with contextlib.suppress(ValueError, RecursionError):
            value = _number(text) if declared in (int, float) else json.loads(text.lower())
    return [
        problem if declared else f"--{name}: {problem}"
        for _, _, problem in _set(name, value, layer)
    ]


def _number(text: str) -> int | float | str:
    """A number in Python's notation. Raises ValueError for other text."""
    return int(text) if re.fullmatch(r"\s*[+-]?[\d_]+\s*", text) else float(text)


def _set(name: str, value: Any, layer: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Checks one value against its declaration, and stores it.

    Returns problems: section, key in it, message.
    """
    declared, (section, _, entry) = type_of(name), name.partition(".")
    if name in REMOVED and value in (False, "false"):  # in the config.toml of an older run
        return []
    if declared is None:
        from titanlite.config.mistakes import unknown_key

        return [(section, entry, unknown_key(name, all_keys(), REMOVED))]
    meta = _meta(name)
    if declared is list and (isinstance(value, list) or meta["items"] is str):
        from titanlite.config.lists import read_list

        layer[name], problems = read_list(name, value, meta, _convert)
        return problems
    if isinstance(value, bool) and "true" in meta["choices"]:
        value = str(value).lower()  # TOML's true and false, of a key that also allows auto
    layer[name], expected = _convert(value, declared, meta)
    if not expected:
        return []
    from titanlite.config.mistakes import wrong_value

    return [(section, entry, wrong_value(name, value, expected, meta["choices"]))]


def _convert(value: Any, declared: type, meta: Any) -> tuple[Any, str]:
    """The value in its declared type and "", or the unchanged value and what was expected."""
    expected = (
        "one of " + ", ".join(map(str, meta["choices"]))
        if meta["choices"]
        else TYPE_NAMES[declared]
    )
    parts = value if declared is tuple and isinstance(value, list) and len(value) == 2 else [value]
    number = declared in (float, tuple)
    kind = (int, float) if number else declared
    good = all(
        isinstance(part, kind) and (declared is bool or not isinstance(part, bool))
        for part in parts
    )
    if not good or (declared is tuple and parts is not value):
        return value, expected
    if declared is str and any(
        "\ud800" <= letter <= "\udfff" or letter == "\0" for letter in value
    ):
        return value, "text in UTF-8, without NUL"
    if meta["choices"] and value not in meta["choices"]:
        return value, expected
    low = meta["min"]
    high = meta["max"]
    for part in parts:
        if (low is not None and not part >= low) or (high is not None and not part <= high):
            bounds = [
                f"at least {low}" if low is not None else "",
                f"at most {high}" if high is not None else "",
            ]
            return value, f"{expected}, " + " and ".join(b for b in bounds if b)
    if any(isinstance(part, int) and abs(part) >= 1 << 63 for part in parts):
        return value, f"{expected} below 2**63"
    if number and not all(abs(p) < float("inf") for p in parts):
        return value, "a finite number"
    return (
        tuple(float(p) for p in parts)
        if declared is tuple
        else float(value)
        if declared is float
        else value
    ), ""


def all_keys() -> list[str]:
    return [
        f"{section}.{f.name}"
        for section, cls in sections().items()
        for f in dataclasses.fields(cls)
    ]
