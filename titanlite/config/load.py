"""Defaults < base files < TOML file < command line -> one frozen `Config`.

What it is: the strict reader of configuration. Unknown keys, wrong types and values out of bounds are collected and
reported together, each with file and line, the value, the allowed values and the nearest match. Nothing is ignored.
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

from titanlite.config.files import read_bounded
from titanlite.config.schema import Config, ConfigError, sections, suggestion

_hints = functools.cache(get_type_hints)
REMOVED = {"checkpoint.trust_pickle": "pickles are read without being run"}
FILE_KEYS = ("data.path", "data.tokenizer", "data.cache", "checkpoint.initial_load")
# Settings that a checkpoint and the resumed run must share, unless `checkpoint.accept` names them
ACCEPTABLE = (
    "run.seed",
    "data",
    "training.seq_len",
    "optimizer.lr",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.decayed",
)
TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple: "a list of two numbers",
}


def program_folder() -> Path:
    """The folder of train.py and train_configs/: inside the package in a wheel (see setup.py), beside it in a clone."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "program"
    return inside if inside.is_dir() else package.parent


CONFIGS = program_folder() / "train_configs"


def load_config(argv: list[str], configs: Path = CONFIGS) -> Config:
    """The configuration that `[CONFIG] [--section.key=value ...]` describes.

    Raises ConfigError with every problem in the file, its bases and the command line at once.
    """
    problems: list[str] = []
    positional, overrides = _split(argv)
    if len(positional) > 1:
        problems.append(f"expected one config, found {len(positional)}: {', '.join(positional)}")
    path = _find(positional[0] if positional else "debug", configs, problems)
    values: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    if path is not None:
        _read(path, values, problems, [])
        values["run"].setdefault("name", path.stem)
    for name, text, origin in overrides:
        _set_from_text(name, text, origin, values, problems)
    if problems:
        raise ConfigError(problems)
    config = Config(**{name: cls(**values[name]) for name, cls in sections().items()})
    if problems := contradictions(config):
        raise ConfigError(problems)
    # Absolute paths, so that the resolved config can be used from any folder.
    for name in FILE_KEYS:
        section, _, entry = name.partition(".")
        if given := values[section].get(entry):
            values[section][entry] = str(Path(given).absolute())
    return Config(**{name: cls(**values[name]) for name, cls in sections().items()})


def contradictions(config: Config) -> list[str]:
    """Problems of several keys together, or of a value beyond its declaration."""
    problems = []
    if config.training.global_batch_size % config.training.local_batch_size:
        whole, local = config.training.global_batch_size, config.training.local_batch_size
        nearest = " or ".join(str(n) for n in (whole // local * local, (whole // local + 1) * local) if n)
        problems.append(
            f"training.global_batch_size = {whole} is not a multiple of training.local_batch_size = {local}; "
            f"nearest: {nearest}"
        )
    profiling = config.profiling
    if profiling.warmup_steps + profiling.active_steps > profiling.freq:
        problems.append(
            f"profiling.warmup_steps + profiling.active_steps = {profiling.warmup_steps + profiling.active_steps} "
            f"is more than profiling.freq = {profiling.freq}"
        )
    for accepted in config.checkpoint.accepted:
        if accepted not in ACCEPTABLE:
            near = suggestion(accepted, list(ACCEPTABLE))
            problems.append(f"checkpoint.accept: {accepted}: expected some of {', '.join(ACCEPTABLE)}{near}")
    name = config.run.name
    if not name or Path(name).name != name or name.startswith(".") or not name.isprintable():
        problems.append(f"run.name = {name!r}: expected a plain folder name")
    return problems


def _split(argv: list[str]) -> tuple[list[str], list[tuple[str, str | None, str]]]:
    """Positional arguments, and (key, text or None, origin) for each option."""
    positional: list[str] = []
    overrides: list[tuple[str, str | None, str]] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            positional.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        words = _switch_words(name)
        if equals:
            overrides.append((name, text, f"--{name}"))
        elif rest and not rest[0].startswith("--") and (not words or rest[0].lower() in words):
            overrides.append((name, rest.pop(0), f"--{name}"))
        elif words:
            overrides.append((name, "true", f"--{name}"))
        else:
            overrides.append((name, None, f"--{name}"))
    return positional, overrides


def _find(name: str, configs: Path, problems: list[str]) -> Path | None:
    """The file of a CONFIG argument: a path, or a flavor in train_configs/."""
    path = Path(name)
    for candidate in (path, configs / f"{name}.toml"):
        with contextlib.suppress(OSError):  # for example, a name too long for the file system
            if candidate.is_file():
                return candidate
    problems.append(
        f"config {name!r}: no such file, and no such flavor in train_configs/{suggestion(name, flavors(configs))}; "
        f"allowed: a path or one of {', '.join(flavors(configs))}"
    )
    return None


def flavors(configs: Path = CONFIGS) -> list[str]:
    return sorted(path.stem for path in configs.glob("*.toml"))


def _read(path: Path, values: dict[str, dict[str, Any]], problems: list[str], chain: list[Path]) -> None:
    """Adds the keys of a TOML file to `values`, those of its base files first."""
    path = path.resolve()
    if path in chain:
        problems.append(f"{path}: `base` leads back to the file itself: {' -> '.join(p.name for p in [*chain, path])}")
        return
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        text = read_bounded(path).decode("utf-8-sig")
        table = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # not TOML, or not UTF-8, or numbers and nesting without end
        problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
        return
    base = table.pop("base", None)
    if isinstance(base, str) and len(base) < 200 and (path.parent / base).is_file():
        _read(path.parent / base, values, problems, [*chain, path])
    elif base is not None:
        near = suggestion(str(base), [p.name for p in path.parent.glob("*.toml")])
        problems.append(f"{_where(path, text, '', 'base')}: base = {base!r}: expected the path of a TOML file{near}")
    for section, entries in table.items():
        if section not in values:
            near = suggestion(section, list(values))
            problems.append(f"{_where(path, text, section, '')}: unknown section [{section}]{near}")
        elif not isinstance(entries, dict):
            problems.append(f"{_where(path, text, '', section)}: {section} is a section: write [{section}]")
        else:
            for name, value in entries.items():
                _set(f"{section}.{name}", value, _where(path, text, section, name), values, problems)


def _where(path: Path, text: str, section: str, name: str) -> str:
    """`file:line` of a key, or of a section's header when `name` is empty."""
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w-]+)\s*\]", line):
            current = header[1]
            if current == section and not name:
                return f"{path}:{number}"
        elif current == section and name and re.match(rf"""\s*["']?{re.escape(name)}["']?\s*=""", line):
            return f"{path}:{number}"
    return str(path)


def type_of(name: str) -> type | None:
    """The declared type of `section.key`, None if there is no such key. tuple[...] counts as tuple."""
    section, _, entry = name.partition(".")
    cls = sections().get(section)
    declared = _hints(cls).get(entry) if cls else None
    return getattr(declared, "__origin__", declared)


def _meta(name: str) -> Any:
    """The help, bounds and choices of a key."""
    section, _, entry = name.partition(".")
    return next(f.metadata for f in dataclasses.fields(sections()[section]) if f.name == entry)


def _switch_words(name: str) -> tuple[str, ...]:
    """The values of a key that can be given without a value, as `--compile.loss`; () for other keys."""
    declared = type_of(name)
    choices = _meta(name)["choices"] if declared else ()
    return choices if "true" in choices else ("true", "false") if declared is bool else ()


def _set_from_text(
    name: str, text: str | None, origin: str, values: dict[str, dict[str, Any]], problems: list[str]
) -> None:
    """Sets a key from the command line's text, read as the declared type."""
    declared = type_of(name)
    value: Any = text
    if declared is not None and text is None:
        problems.append(f"{origin}: a value is missing; expected {TYPE_NAMES[declared]}")
        return
    if declared is str and text is not None and text.lower() in _switch_words(name):
        value = text.lower()
    elif declared is not None and declared is not str and text is not None:
        with contextlib.suppress(ValueError, RecursionError):  # otherwise it stays a string, which `_set` refuses
            value = _number(text) if declared in (int, float) else json.loads(text.lower())
    _set(name, value, origin, values, problems)


def _number(text: str) -> int | float | str:
    """A number in Python's notation. Raises ValueError for other text."""
    return int(text) if re.fullmatch(r"\s*[+-]?[\d_]+\s*", text) else float(text)


def _set(name: str, value: Any, origin: str, values: dict[str, dict[str, Any]], problems: list[str]) -> None:
    """Checks one value against its declaration, and stores it or adds a problem."""
    declared = type_of(name)
    section, _, entry = name.partition(".")
    if name in REMOVED and value in (False, "false"):  # in the config.toml of an older run
        return
    if declared is None:
        elsewhere = [k for k in all_keys() if k.partition(".")[2] == (entry or section)]
        mistyped_section = entry and section not in sections()
        near = suggestion(name, elsewhere) if mistyped_section else ""
        if elsewhere and not near:
            near = f"; did you mean {' or '.join(elsewhere)}?"
        elif not elsewhere:
            near = suggestion(name, all_keys(), 0.8)  # more than usual: keys of one section have its name in common
        if name in sections():
            near = f"; that is a section: set one of its keys, {', '.join(k for k in all_keys() if k.startswith(name))}"
        near = f"; removed: {REMOVED[name]}" if name in REMOVED else near
        problems.append(f"{origin}: unknown key {name}{near}")
        return
    meta = _meta(name)
    if isinstance(value, bool) and "true" in meta["choices"]:
        value = str(value).lower()  # TOML's true and false, of a key that also allows auto
    value, expected = _convert(value, declared, meta)
    if expected:
        near = suggestion(value, list(meta["choices"])) if isinstance(value, str) and meta["choices"] else ""
        where = "" if origin == f"--{name}" else f"{origin}: "
        problems.append(f"{where}{name} = {json.dumps(value, default=str)[:200]}: expected {expected}{near}")
    else:
        values[section][entry] = value


def _convert(value: Any, declared: type, meta: Any) -> tuple[Any, str]:
    """The value in its declared type and "", or the unchanged value and what was expected."""
    expected = "one of " + ", ".join(map(str, meta["choices"])) if meta["choices"] else TYPE_NAMES[declared]
    parts = value if declared is tuple and isinstance(value, list) and len(value) == 2 else [value]
    number = declared in (float, tuple)
    good = [
        isinstance(p, (int, float) if number else declared) and (declared is bool or not isinstance(p, bool))
        for p in parts
    ]
    if not all(good) or (declared is tuple and parts is not value):
        return value, expected
    if declared is str and any("\ud800" <= letter <= "\udfff" or letter == "\0" for letter in value):
        return value, "text in UTF-8, without NUL"
    if meta["choices"] and value not in meta["choices"]:
        return value, expected
    low, high = meta["min"], meta["max"]
    for part in parts:
        if (low is not None and not part >= low) or (high is not None and not part <= high):
            bounds = [f"at least {low}" if low is not None else "", f"at most {high}" if high is not None else ""]
            return value, f"{expected}, " + " and ".join(b for b in bounds if b)
    if any(isinstance(part, int) and abs(part) >= 1 << 63 for part in parts):
        return value, f"{expected} below 2**63"
    if number and not all(abs(p) < float("inf") for p in parts):
        return value, "a finite number"
    return (tuple(float(p) for p in parts) if declared is tuple else float(value) if declared is float else value), ""


def all_keys() -> list[str]:
    return [f"{section}.{f.name}" for section, cls in sections().items() for f in dataclasses.fields(cls)]
