"""Translates the fields of a config to a TOML of ours, by the table of its format."""

from __future__ import annotations

from collections.abc import Mapping

from titanlite.config.keys import schema_keys
from titanlite.config.load import ALTERNATIVES, build, contradictions
from titanlite.config.mistakes import suggestion
from titanlite.config.schema import FROM_CHECKPOINT
from titanlite.config.to_toml import toml_value
from titanlite.runtime.errors import ConfigError
from titanlite.tools.import_config.draft import AUTO, REQUIRED, Draft, as_number, is_unresolved
from titanlite.tools.import_config.table import ANY, Format, Row


def translate(entries: Mapping[str, object], form: Format, processes: int = 0) -> Draft:
    """What a config of this format is here. Raises ConfigError if no file can be written."""
    draft = Draft(entries, {row.theirs: row.default for row in form.rows}, processes)
    for name in sorted(set(entries) - set(draft.defaults)):
        if entries[name] == {}:  # a table without fields
            continue
        hint = suggestion(name, list(draft.defaults))
        reason = f"not known here as a field of {form.title} {form.version}{hint}"
        draft.refuse(name, entries[name], reason)
    readable = {row.theirs for row in form.rows if _is_readable(row, draft)}
    if draft.refusals:
        raise ConfigError(draft.refusals)
    applied = []
    for row in form.rows:
        if row.apply is None and row.theirs in readable:
            _apply(row, draft)
        elif row.apply is not None and row.apply not in applied:
            applied.append(row.apply)
            row.apply(draft)
    _decide_the_rest(draft)
    draft.left += form.remarks
    if not draft.refusals:
        draft.refusals += _contradictions(draft)
    if draft.refusals:
        raise ConfigError(list(dict.fromkeys(draft.refusals)))  # each once
    return draft


def _is_readable(row: Row, draft: Draft) -> bool:
    """Notes a field that is missing, or whose value is not in the file."""
    value = draft.entries.get(row.theirs, row.default)
    is_layout = any(key.startswith(("parallel.", "model.")) for key in row.ours.split())
    if value == REQUIRED:
        draft.refusals.append(f"{row.theirs}: missing; the program needs it too")
    elif value == AUTO and AUTO not in row.same and row.ours and not is_layout:
        draft.decide(f"{', '.join(row.ours.split())}: {row.theirs} = auto, so another file has it")
    elif value == AUTO and AUTO not in row.same and is_layout:
        draft.refuse(row.theirs, value, "another file has the value: write it here")
    elif is_unresolved(value) and row.ours and not _is_text(row.ours):
        draft.refuse(
            row.theirs,
            value,
            "a variable that the file does not set once, to a plain word: write its value",
        )
    else:
        return True
    return False


def _is_text(keys: str) -> bool:
    """Whether our keys are paths and names, which the user may fill in later."""
    declared = [schema_keys()[key] for key in keys.split()]
    return all(key.kind is str and not key.choices for key in declared)


def _apply(row: Row, draft: Draft) -> None:
    """What becomes of one field that no function reads."""
    raw = draft.entries.get(row.theirs, row.default)
    value = as_number(raw)
    if ANY in row.same or any(value == same for same in row.same):
        return
    if row.values is not None:
        allowed = [theirs for theirs in row.values if theirs == value]
        if allowed:
            draft.set(row.ours, row.values[allowed[0]], row.theirs)
        else:
            expected = ", ".join(str(theirs) for theirs in row.values)
            draft.refuse(row.theirs, value, f"{row.ours}: expected one of {expected}")
    elif row.ours:
        if raw is not None or row.default is not None:
            text = isinstance(raw, str) and schema_keys()[row.ours].kind is str
            draft.set(row.ours, raw if text else value, row.theirs)
    elif row.refuse:
        expected = " or ".join(str(same) for same in row.same)
        draft.refuse(row.theirs, value, f"{row.note}; expected {expected}")
    else:
        draft.leave(row.theirs, value, row.note)


def _decide_the_rest(draft: Draft) -> None:
    """Notes what every run needs, and the config has not said."""
    decided = " ".join(draft.decisions)
    if not any(name.startswith("model.") for name in draft.settings):
        draft.decide("model.flavor: the config does not say which model; the default is debug")
    if "training.seq_len" not in draft.settings:
        silent = schema_keys()["training.seq_len"].default
        draft.decide(f"training.seq_len: the config does not say it; the default is {silent}")
    if "data.path:" not in decided:
        draft.decide("data.path: the config does not say it")
    if "data.tokenizer:" not in decided and draft.get("model.flavor") != FROM_CHECKPOINT:
        draft.decide("data.tokenizer: the config does not say it")


def _contradictions(draft: Draft) -> list[str]:
    """What is wrong with several settings together."""
    problems = []
    for group in ALTERNATIVES:
        chosen = [name for name in group if name in draft.settings and draft.get(name)]
        if len(chosen) > 1:
            problems.append(f"{' and '.join(chosen)}: expected only one of them")
    config = build({name: setting.value for name, setting in draft.settings.items()})
    problems += [
        text for text in contradictions(config) if any(name in text for name in draft.settings)
    ]
    return problems


def to_toml(draft: Draft, source: str, form: Format) -> str:
    """The draft as a TOML file: keys that differ from our defaults, each with its origin."""
    lines = [f"# From {comment(source)} ({form.title} {form.version}), by titanlite import-config."]
    section = ""
    for setting in draft.changed():
        name, _, entry = setting.key.partition(".")
        if name != section:
            section = name
            lines += ["", f"[{section}]"]
        lines.append(f"{entry} = {_written(setting.written)}  # {comment(setting.origin)}")
    for title, texts in (("To decide:", draft.decisions), ("Not taken over:", draft.left)):
        if texts:
            lines += ["", f"# {title}", *(f"#   {comment(text)}" for text in texts)]
    return "\n".join(lines) + "\n"


def _written(value: object) -> str:
    """A value in TOML; tables within a list are written in its line."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        tables = [", ".join(f"{k} = {toml_value(v)}" for k, v in table.items()) for table in value]
        return "[" + ", ".join(f"{{ {table} }}" for table in tables) + "]"
    return toml_value(value)


def comment(text: str) -> str:
    """The text in one line that TOML allows in a comment."""
    return "".join(c if c.isprintable() else "?" for c in text)[:400]
