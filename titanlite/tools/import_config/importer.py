"""Detects the trainer that a config belongs to, and translates it."""

from __future__ import annotations

from pathlib import Path

from titanlite.config.keys import all_keys
from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import ConfigError
from titanlite.tools.import_config.deepspeed import DEEPSPEED
from titanlite.tools.import_config.draft import Draft
from titanlite.tools.import_config.megatron import MEGATRON
from titanlite.tools.import_config.read_config import flatten, read_table
from titanlite.tools.import_config.table import Format
from titanlite.tools.import_config.torchtitan import TORCHTITAN
from titanlite.tools.import_config.torchtitan_json import TORCHTITAN_JSON
from titanlite.tools.import_config.trainer import TRAINER
from titanlite.tools.import_config.translate import translate

FORMATS = (TORCHTITAN, TORCHTITAN_JSON, MEGATRON, DEEPSPEED, TRAINER)
NAMES = [form.name for form in FORMATS]


def detect(table: dict[str, object]) -> Format:
    """The format that knows most fields of a config. Raises ConfigError if it is like none."""
    if set(flatten(table)) - {"base"} <= set(all_keys()):
        raise ConfigError(
            "this is a config of titanlite; `titanlite train FILE --print-config` checks it"
        )
    known = {form.name: _known(form, table) for form in FORMATS}
    best = max(FORMATS, key=lambda form: known[form.name])
    names = set(flatten(table, best.whole))
    if 2 * known[best.name] < len(names) or known[best.name] < min(2, len(names)):
        raise ConfigError(
            f"its {len(names)} keys are those of no trainer that is known; expected a config of "
            f"{', '.join(f'{form.title} {form.version}' for form in FORMATS)}, or --format with "
            f"one of {', '.join(NAMES)}"
        )
    return best


def _known(form: Format, table: dict[str, object]) -> int:
    fields = {row.theirs for row in form.rows}
    return len(fields & set(flatten(table, form.whole)))


def by_name(name: str) -> Format:
    """The format of the option --format. Raises ConfigError."""
    for form in FORMATS:
        if form.name == name:
            return form
    hint = suggestion(name, NAMES)
    raise ConfigError(f"--format {name}: expected one of {', '.join(NAMES)}{hint}")


def import_config(path: Path, name: str = "", processes: int = 0) -> tuple[Format, Draft]:
    """The format of a file, and what it is here. Raises ConfigError with all that makes no file."""
    form = by_name(name) if name else None
    table = read_table(path)
    try:
        form = form or detect(table)
        return form, translate(flatten(table, form.whole), form, processes)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from None
