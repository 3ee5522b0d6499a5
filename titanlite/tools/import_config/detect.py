"""Which trainer a config is of: the one whose table knows most of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from titanlite.config.keys import all_keys
from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import ConfigError
from titanlite.tools.import_config.accelerate import ACCELERATE
from titanlite.tools.import_config.deepspeed import DEEPSPEED
from titanlite.tools.import_config.mapping import OFF, Draft, Format, translate
from titanlite.tools.import_config.megatron import MEGATRON
from titanlite.tools.import_config.nanotron import NANOTRON
from titanlite.tools.import_config.neox import NEOX
from titanlite.tools.import_config.olmo import OLMO
from titanlite.tools.import_config.read_config import read_entries
from titanlite.tools.import_config.torchtitan import TORCHTITAN
from titanlite.tools.import_config.trainer import TRAINER

# Of formats that know the same number of keys, the first is taken: GPT-NeoX knows DeepSpeed's
FORMATS = (DEEPSPEED, MEGATRON, TORCHTITAN, OLMO, NEOX, NANOTRON, TRAINER, ACCELERATE)
NAMES = [form.name for form in FORMATS]


def detect(path: Path, entries: Mapping[str, object]) -> Format:
    """The format of a config. Raises ConfigError if it is like none of them."""
    if set(entries) - {"base"} <= set(all_keys()):
        raise ConfigError(f"{path}: a config of titanlite already; give it to titanlite train")
    best = max(FORMATS, key=lambda form: (len(form.names(entries)), len(form.knows(entries))))
    named = best.names(entries)
    known = best.knows(entries)
    # A dump of all arguments has many keys that are off, of which nothing would be said
    given = [name for name, value in entries.items() if value not in OFF]
    unknown = [name for name in given if name not in known]
    few = len(named) < min(2, len(entries))
    if few or 2 * len(unknown) > len(given):
        missing = f" ({best.title} does not have {', '.join(unknown[:3])})" if unknown else ""
        raise ConfigError(
            f"{path}: its {len(entries)} keys are those of no trainer that is known{missing}; "
            "expected a config of "
            f"{', '.join(form.title for form in FORMATS)}, or --format with one of "
            f"{', '.join(NAMES)}"
        )
    return best


def by_name(name: str) -> Format:
    """The format of the option --format. Raises ConfigError."""
    for form in FORMATS:
        if form.name == name:
            return form
    hint = suggestion(name, NAMES)
    raise ConfigError(f"--format {name}: expected one of {', '.join(NAMES)}{hint}")


def import_config(path: Path, name: str = "", processes: int = 0) -> tuple[Format, Draft]:
    """The format of a file, and what it is here. Raises ConfigError."""
    entries = read_entries(path)
    form = by_name(name) if name else detect(path, entries)
    return form, translate(entries, form, processes)
