"""Tables from the keys of a foreign config to ours, and the draft of a config that they fill.

What it is: a `Row` says which of our keys a foreign key becomes. Most rows copy a value; the others
name a function, which reads the foreign values from the `Draft` and sets ours. What has no equal is
noted with the reason, and so is what the user must decide. docs/coming_from.md is made
from the same rows.
Why it is here: a file of each format is then its table, and what is particular to it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from titanlite.config.foreign import foreign_value
from titanlite.config.keys import Key, schema_keys
from titanlite.config.lists import read_list
from titanlite.config.load import ALTERNATIVES, build, contradictions
from titanlite.config.schema import FROM_CHECKPOINT
from titanlite.config.to_toml import toml_value
from titanlite.config.values import convert, parse

UNRESOLVED = re.compile(r"\$\{|\$\w")  # a variable of a script, or an interpolation of OmegaConf
MISSING = (None, "", "null", "None")
OFF: tuple[object, ...] = (*MISSING, False, 0, "no", "NO", "none", "off", "false", "False", [], {})


@dataclass(frozen=True)
class Row:
    """A line of a table: foreign keys, and what they become."""

    theirs: str  # dotted names with spaces between them; a `*` at the end stands for any ending
    ours: str  # our keys, with spaces between them; empty: there is none
    note: str = ""  # how it is converted, or why there is none
    apply: Callable[[Draft], None] | None = None  # None: the value is copied


@dataclass(frozen=True)
class Format:
    """A trainer whose configs can be imported."""

    name: str  # of the option --format
    title: str
    rows: tuple[Row, ...]
    # What the trainer does where the config is silent, and titanlite would do something else
    defaults: Callable[[Mapping[str, object]], dict[str, object]]

    def knows(self, entries: Mapping[str, object]) -> set[str]:
        """Which of these keys have a row."""
        return {name for row in self.rows for name in names_of(row, entries)}

    def names(self, entries: Mapping[str, object]) -> set[str]:
        """Which of these keys a row names in full, without a `*`."""
        return {name for row in self.rows for name in row.theirs.split() if name in entries}


@dataclass(frozen=True)
class Setting:
    """A key of ours with its value, and where that comes from."""

    key: str
    value: object
    origin: str


@dataclass
class Draft:
    """The foreign values of a config, by dotted name, and what has become of them."""

    entries: dict[str, object]
    processes: int = 0  # of the foreign run; 0: not known
    defaults: dict[str, object] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)
    lacks: list[str] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Whether the config, or the trainer's default, gives the key a value."""
        return self.value(name) not in MISSING

    def value(self, name: str, default: object = None) -> Any:
        """The foreign value; text that is a number as a number."""
        value = self.entries.get(name)
        if value in MISSING:
            value = self.defaults.get(name, default)
        return as_number(value)

    def number(self, name: str) -> float:
        """The value as a number; 0 if it has none."""
        value = self.value(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
        return 0

    def on(self, name: str) -> bool:
        """Whether the value switches something on."""
        return self.value(name) not in OFF

    def origin(self, names: str) -> str:
        """The names that have values, for a comment; how, if it is by default."""
        given = [name for name in names.split() if self.entries.get(name) not in MISSING]
        if given:
            return ", ".join(given)
        silent = [name for name in names.split() if name in self.defaults]
        return f"default of {', '.join(silent)}" if silent else "not said there"

    def set(self, key: str, value: object, names: str) -> None:
        """Gives our key a value that comes from these foreign keys; a wrong one is noted."""
        if isinstance(value, str) and UNRESOLVED.search(value):
            self.decide(f"{key}: {self.origin(names)} = {value[:80]} there, which is not resolved")
            return
        declared = schema_keys()[key]
        fitted = fit(value, declared)
        converted, expected = convert(fitted, declared)
        if declared.is_list_of_strings:
            converted, mistakes = read_list(value, declared)
            expected = "; ".join(mistake.message for mistake in mistakes)
        origin = self.origin(names)
        if expected:
            self.lack(origin, value, f"{key} = {fitted!r}: expected {expected}")
        else:
            self.settings[key] = Setting(key, converted, origin)

    def copy(self, name: str, key: str) -> None:
        """Gives our key the value of a foreign one; text that is a number stays text in text."""
        value = self.value(name)
        if schema_keys()[key].kind is str and isinstance(self.entries.get(name), str):
            value = self.entries[name]
        self.set(key, value, name)

    def get(self, key: str) -> Any:
        """The value of our key so far."""
        if key in self.settings:
            return self.settings[key].value
        return schema_keys()[key].default

    def lack(self, origin: str, value: object, reason: str) -> None:
        """Notes a foreign value that has no equal."""
        shown = f"{origin} = {str(value)[:80]}"
        self.lacks.append(f"{shown}: {reason}" if reason else shown)

    def decide(self, text: str) -> None:
        """Notes what the user has to decide."""
        if text not in self.decisions:
            self.decisions.append(text)

    def changed(self) -> list[Setting]:
        """The settings that differ from our defaults, in the order of the schema."""
        defaults = {name: key.default for name, key in schema_keys().items()}
        chosen = [self.settings[name] for name in defaults if name in self.settings]
        return [setting for setting in chosen if setting.value != defaults[setting.key]]


def as_number(value: object) -> object:
    """Text that is a number as the number: YAML 1.1 reads 1e-5 as text."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            return value
    return value


def fit(value: object, key: Key) -> object:
    """The foreign value in the form of our key, where that is clear."""
    ours = foreign_value(key.name, value)
    if ours:
        return ours
    if isinstance(value, str):
        by_case = {str(choice).lower(): choice for choice in key.choices}
        return by_case.get(value.lower(), parse(value, key))
    if key.kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if key.kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if key.kind is tuple and isinstance(value, (list, tuple)):
        return [as_number(entry) for entry in value]
    return value


def names_of(row: Row, entries: Mapping[str, object]) -> list[str]:
    """The keys of a config that a row is about."""
    found = []
    for name in row.theirs.split():
        if name.endswith("*"):
            found += fnmatch.filter(entries, name)
        elif name in entries:
            found.append(name)
    return found


def nothing(draft: Draft) -> None:
    """Of a row whose keys need no equal: what they ask for is always so here."""


def translate(entries: Mapping[str, object], form: Format, processes: int = 0) -> Draft:
    """What a config of this format is here."""
    automatic = [name for name, value in entries.items() if value == "auto"]
    draft = Draft({n: v for n, v in entries.items() if v != "auto"}, processes)
    if automatic:
        draft.decide(f"{', '.join(automatic)}: auto there, so another file has the values")
    draft.defaults = form.defaults(draft.entries)
    known = {**draft.defaults, **draft.entries}
    read: set[str] = set()
    for row in form.rows:
        names = [name for name in names_of(row, known) if name not in read]
        read.update(names)
        given = [name for name in names if draft.has(name)]
        if not given:
            continue
        if row.apply is not None:
            row.apply(draft)
        elif row.ours:
            draft.copy(given[0], row.ours)
        else:
            for name in given:
                if draft.on(name):
                    draft.lack(name, draft.value(name), row.note)
    for name, value in draft.entries.items():
        if name not in read and value not in OFF:
            draft.lack(name, value, "not known to the importer")
    _decide_the_rest(draft)
    _leave_out_contradictions(draft)
    return draft


def _decide_the_rest(draft: Draft) -> None:
    """What every run needs, and the config has not said."""
    decided = " ".join(draft.decisions)
    if not any(name.startswith("model.") for name in draft.settings) and "model:" not in decided:
        draft.decide("model.flavor: the config does not say which model; the default is debug")
    if "training.seq_len" not in draft.settings and "training.seq_len:" not in decided:
        silent = schema_keys()["training.seq_len"].default
        draft.decide(f"training.seq_len: the config does not say it; the default is {silent}")
    needed = ["data.path", "data.tokenizer"]
    if draft.get("model.flavor") == FROM_CHECKPOINT:  # with its tokenizer
        needed.remove("data.tokenizer")
    for key in needed:
        if f"{key}:" not in decided:
            draft.decide(f"{key}: the config does not say it")


def _leave_out_contradictions(draft: Draft) -> None:
    """Leaves out settings that exclude each other, or do not fit together, and notes them."""
    for group in ALTERNATIVES:
        chosen = [name for name in group if name in draft.settings and draft.get(name)]
        for name in chosen[:-1]:
            _leave_out(draft, name, f"{chosen[-1]} is set")
    while True:
        problems = contradictions(build({name: s.value for name, s in draft.settings.items()}))
        wrong = [name for name in draft.settings for text in problems if name in text]
        if not wrong:
            return
        _leave_out(draft, wrong[0], next(text for text in problems if wrong[0] in text))


def _leave_out(draft: Draft, name: str, reason: str) -> None:
    setting = draft.settings.pop(name)
    draft.lack(setting.origin, setting.value, reason)


def to_toml(draft: Draft, source: str, form: Format) -> str:
    """The draft as a TOML file: keys that differ from our defaults, each with its origin."""
    lines = [f"# From {comment(source)} ({form.title}), by titanlite import-config."]
    section = ""
    for setting in draft.changed():
        name, _, entry = setting.key.partition(".")
        if name != section:
            section = name
            lines += ["", f"[{section}]"]
        lines.append(f"{entry} = {toml_value(setting.value)}  # {comment(setting.origin)}")
    for title, texts in (("To decide:", draft.decisions), ("Without an equal:", draft.lacks)):
        if texts:
            lines += ["", f"# {title}", *(f"#   {comment(text)}" for text in texts)]
    return "\n".join(lines) + "\n"


def comment(text: str) -> str:
    """The text in one line that TOML allows in a comment."""
    return "".join(c if c.isprintable() else "?" for c in text)[:400]


def markdown(form: Format) -> str:
    """The table of a format in docs/coming_from.md."""
    lines = [f"| {form.title} | titanlite | |", "|---|---|---|"]
    for row in form.rows:
        theirs = ", ".join(f"`{name}`" for name in row.theirs.split())
        ours = ", ".join(f"`{name}`" for name in row.ours.split()) or "-"
        lines.append(f"| {theirs} | {ours} | {row.note} |")
    return "\n".join(lines) + "\n"
