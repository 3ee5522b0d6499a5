"""Merges defaults < base files < TOML file < command line into one frozen `Config`.

What it is: the strict reader of configuration. Each file and the command line is read into a layer;
the layers are merged into one value for each key, and the values become a `Config`. Unknown keys,
wrong types and values out of bounds are collected and reported together, each with file and line,
the value, the allowed values and the nearest match. Nothing is ignored.
Why it is here: a mistyped key that silently keeps its default costs a training run.
What it costs: nothing; no torch is imported, so a mistake is reported in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlite.config.batch_sizes import size_problems
from titanlite.config.budget import epoch_problems, in_steps
from titanlite.config.keys import accept_problems, all_keys, schema_keys
from titanlite.config.lists import data_problems, read_list, resolve_sources
from titanlite.config.mistakes import (
    suggestion,
    unknown_config,
    unknown_key,
    unknown_section,
    where,
    without_dashes,
    wrong_value,
)
from titanlite.config.schema import Config, sections
from titanlite.config.values import Mistake, convert, expected_type, parse
from titanlite.runtime.documents import MOST_TOML, parse_toml
from titanlite.runtime.errors import ConfigError, shortened
from titanlite.runtime.files import read_bounded

RUN_CONFIG = "config.toml"  # in a run's folder
FILE_KEYS = ("data.path", "data.tokenizer", "data.cache", "checkpoint.initial_load")
# Keys that exclude each other. The value of a base file is dropped if a later file or the command
# line sets another key of the group
ALTERNATIVES = (
    ("training.steps", "training.tokens", "training.epochs"),
    ("schedule.warmup_steps", "schedule.warmup_tokens", "schedule.warmup_ratio"),
    ("schedule.decay_fraction", "schedule.decay_steps", "schedule.decay_tokens"),
    ("data.path", "data.sources"),
    ("data.path", "data.phases"),
    ("checkpoint.freq", "checkpoint.freq_epochs"),
    ("validation.freq", "validation.freq_epochs"),
)
# Alternatives that count as set even with 0 or an empty value: in every layer, or only on the
# command line (a run's config.toml has them beside the alternative that counts)
CHOSEN_BY_ZERO = ("schedule.warmup_steps",)
CHOSEN_BY_ZERO_IN_COMMAND = ("schedule.decay_fraction", "checkpoint.freq", "validation.freq")
MOST_PROBLEMS = 5000  # reported problems of a command line


def program_folder() -> Path:
    """Returns the folder of train.py and train_configs/: beside the package; in a wheel, in it."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "program"
    return inside if inside.is_dir() else package.parent


CONFIGS = program_folder() / "train_configs"


def flavors(configs: Path = CONFIGS) -> list[str]:
    """Lists the names of the configs in train_configs/."""
    return sorted(path.stem for path in configs.glob("*.toml"))


@dataclass(frozen=True)
class Option:
    """`--name=text` on the command line."""

    name: str
    text: str | None  # None: the value is missing


@dataclass
class Layer:
    """The values that one file, or the command line, sets."""

    origin: str  # the path of the file; empty for the command line
    values: dict[str, object] = field(default_factory=dict)

    def chooses(self, name: str) -> bool:
        """Whether the layer chooses this key among its `ALTERNATIVES`."""
        if name not in self.values:
            return False
        if name in CHOSEN_BY_ZERO or (not self.origin and name in CHOSEN_BY_ZERO_IN_COMMAND):
            return True
        return bool(self.values[name])


def load_config(argv: list[str], configs: Path = CONFIGS) -> Config:
    """Loads the configuration that `[CONFIG] [--section.key=value ...]` describes.

    A run's folder stands for its config.toml.

    Raises ConfigError with every problem in the file, its bases and the command line at once.
    """
    names, options = split_command_line(argv)
    problems: list[str] = []
    dashless = [name for name in names if "=" in name and not os.path.exists(name)]
    problems += [without_dashes(word, all_keys()) for word in dashless]
    names = [name for name in names if name not in dashless]
    if len(names) > 1:
        shown = shortened(", ".join(names))
        problems.append(f"expected one config, found {len(names)}: {shown}")

    layers: list[Layer] = []
    name = names[0] if names else "debug"
    path = find_config(name, configs, problems)
    if path:
        layers += read_files(path, problems)
        if path == Path(name, RUN_CONFIG):
            layers.append(read_place(path.parent))
    layers.append(read_options(options, problems))

    values = merge(layers, problems)
    if path:
        values.setdefault("run.name", path.stem)
    if problems:
        raise ConfigError(problems)

    config = build(values)
    # Values that fit alone may not fit together
    problems = contradictions(config)
    if problems:
        raise ConfigError(problems)
    return in_steps(config)


def split_command_line(argv: list[str]) -> tuple[list[str], list[Option]]:
    """Splits a command line into positional arguments and options."""
    names: list[str] = []
    options: list[Option] = []
    remaining = list(reversed(argv))
    while remaining:
        word = remaining.pop()
        if not word.startswith("--"):
            names.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        if equals:
            options.append(Option(name, text))
            continue
        key = schema_keys().get(name)
        words = key.words if key else ()
        following = remaining[-1] if remaining else "--"
        # A switch takes the next word only if it is one of its values: it may be the config instead
        if not following.startswith("--") and (not words or following.lower() in words):
            options.append(Option(name, remaining.pop()))
        else:
            options.append(Option(name, "true" if words else None))
    return names, options


def find_config(name: str, configs: Path, problems: list[str]) -> Path | None:
    """Finds the file of CONFIG: a path, the name of a flavor, or a run's folder."""
    with contextlib.suppress(OSError):  # for example, a name too long for the file system
        for candidate in (Path(name), configs / f"{name}.toml"):
            if candidate.is_file():
                return candidate
        # A step's folder has a config.toml too, and no log: a run must not write there
        if Path(name, "log.txt").is_file() and Path(name, RUN_CONFIG).is_file():
            return Path(name, RUN_CONFIG)
    problems.append(unknown_config(name, flavors(configs)))
    return None


def read_files(path: Path, problems: list[str], derived: tuple[Path, ...] = ()) -> list[Layer]:
    """Reads the layers of a TOML file's bases and its own, in this order.

    `derived`: the files that have this one as a base.
    """
    path = path.resolve()
    if path in derived:
        chain = " -> ".join(file.name for file in (*derived, path))
        problems.append(f"{path}: `base` leads back to the file itself: {chain}")
        return []
    try:
        text = read_bounded(path, MOST_TOML).decode("utf-8-sig")
        table = parse_toml(text)
    except (OSError, ValueError) as error:
        # Not readable, not UTF-8, not TOML, or too long numbers or too deep nesting
        problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
        return []

    layers: list[Layer] = []
    layer = Layer(str(path))
    mistakes: list[Mistake] = []
    base = table.pop("base", None)
    if isinstance(base, str) and len(base) < 200 and (path.parent / base).is_file():
        layers = read_files(path.parent / base, problems, (*derived, path))
    elif base is not None:
        hint = suggestion(str(base), [file.name for file in path.parent.glob("*.toml")])
        message = f"base = {base!r}: expected the path of a TOML file{hint}"
        mistakes.append(Mistake("", "base", message))
    for section, entries in table.items():
        known = section in sections()
        if not known and isinstance(entries, dict):
            mistakes.append(Mistake(section, "", unknown_section(section)))
        elif not known:
            message = unknown_key(section, all_keys())
            mistakes.append(Mistake("", section, message))
        elif not isinstance(entries, dict):
            message = f"{section} is a section: write [{section}]"
            mistakes.append(Mistake("", section, message))
        else:
            for name, value in entries.items():
                mistakes += set_value(f"{section}.{name}", value, layer)
    for mistake in mistakes:
        line = where(path, text, mistake.section, mistake.key)
        problems.append(f"{line}: {mistake.message}")
    return [*layers, layer]


def read_place(run_folder: Path) -> Layer:
    """Reads where a run is: its folder may have been moved or copied since it began."""
    folder = run_folder
    if not folder.name.strip("."):  # as in `.`
        folder = Path(os.path.abspath(folder))
    return Layer(str(run_folder), {"run.folder": str(folder.parent), "run.name": folder.name})


def read_options(options: list[Option], problems: list[str]) -> Layer:
    """Reads the layer of the command line."""
    layer = Layer("")
    for option in options:
        key = schema_keys().get(option.name)
        shown = f"--{shortened(option.name)}"
        if key and option.text is None:
            problems.append(f"{shown}: a value is missing; expected {expected_type(key)}")
        else:
            text = option.text
            value = parse(text, key) if key and text is not None else text
            for mistake in set_value(option.name, value, layer):
                prefix = "" if key else f"{shown}: "
                problems.append(prefix + mistake.message)
        # Stop here: nobody reads more, and a command line may have a million
        if len(problems) > MOST_PROBLEMS:
            unread = "and perhaps more: the rest was not read"
            raise ConfigError([*problems[:MOST_PROBLEMS], unread])
    return layer


def set_value(name: str, value: object, layer: Layer) -> list[Mistake]:
    """Stores a value in a layer, in the type of its key. Returns what is wrong with it."""
    section, _, entry = name.partition(".")
    key = schema_keys().get(name)
    if key is None:
        return [Mistake(section, entry, unknown_key(name, all_keys()))]
    if key.is_list_of_strings or (key.kind is list and isinstance(value, list)):
        layer.values[name], mistakes = read_list(value, key)
        return mistakes
    if isinstance(value, bool) and "true" in key.choices:
        value = str(value).lower()  # TOML's true and false, for a key that also allows auto
    layer.values[name], expected = convert(value, key)
    if not expected:
        return []
    return [Mistake(section, entry, wrong_value(name, value, expected, key.choices))]


def merge(layers: list[Layer], problems: list[str]) -> dict[str, Any]:
    """Merges layers: each key gets the value of the last layer that sets it."""
    values: dict[str, Any] = {}
    for layer in layers:
        prefix = f"{layer.origin}: " if layer.origin else ""
        for group in ALTERNATIVES:
            chosen = [name for name in group if layer.chooses(name)]
            if len(chosen) > 1:
                problems.append(f"{prefix}{' and '.join(chosen)}: expected only one of them")
            if chosen:
                for name in group:
                    values.pop(name, None)
        values |= layer.values
    return values


def build(values: dict[str, Any]) -> Config:
    """Builds the config from these values and the defaults; paths become absolute."""
    for name in FILE_KEYS:
        values[name] = absolute(values.get(name, ""))
    if "data.sources" in values:
        values["data.sources"] = resolve_sources(values["data.sources"], absolute)
    by_section: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for name, value in values.items():
        section, _, entry = name.partition(".")
        by_section[section][entry] = value
    return Config(**{name: cls(**by_section[name]) for name, cls in sections().items()})


def absolute(path: str) -> str:
    """Makes a path absolute, so that the resolved config can be used from any folder."""
    if path in ("", "python-stdlib") or path.startswith("hf:"):
        return path
    return str(Path(path).absolute())


def contradictions(config: Config) -> list[str]:
    """Lists the problems of keys together, and of values that a declaration cannot express."""
    problems = list(size_problems(config.training))
    freq = config.profiling.freq
    traced = config.profiling.warmup_steps + config.profiling.active_steps
    if traced > freq:
        problems.append(
            f"profiling.warmup_steps + profiling.active_steps = {traced} exceeds "
            f"profiling.freq = {freq}"
        )
    problems += data_problems(config.data, config.training)
    problems += epoch_problems(config)
    problems += accept_problems(config.checkpoint)
    name = config.run.name
    if not name or Path(name).name != name or name.startswith(".") or not name.isprintable():
        problems.append(f"run.name = {name!r}: expected a plain folder name")
    return problems
