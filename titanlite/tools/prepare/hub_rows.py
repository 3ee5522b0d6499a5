"""Opens data sets of the package `datasets`: `hf:NAME[:CONFIG[:SPLIT]]`, a folder or on the Hub.

What it is: a data set is streamed in the pieces that the package offers, its shards. A local one
has the size and the version of its files; one on the Hub has neither.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from titanlite.runtime.errors import ConfigError
from titanlite.tools.prepare.fields import other_fields
from titanlite.tools.prepare.sources import HUB, Source


@functools.lru_cache(4)
def open_hub(spec: str) -> Any:
    """A streamed data set. Raises ConfigError if there is none."""
    name, config, split = (*spec.removeprefix(HUB).split(":"), "", "")[:3]
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{spec}: needs the package datasets: pip install datasets") from None
    try:
        # From save_to_disk
        if Path(name, "state.json").is_file() or Path(name, "dataset_dict.json").is_file():
            data = datasets.load_from_disk(name)
            if isinstance(data, dict):
                data = data[split or "train"]
            return data.to_iterable_dataset(num_shards=max(1, len(data.cache_files)))
        return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:  # not found, no network, a wrong config or split, a damaged file
        raise hub_problem(spec, error) from None


def hub_problem(spec: str, error: Exception) -> ConfigError:
    """Shortens an error of `datasets` to one line."""
    first_line = (str(error) or "?").splitlines()[0]
    return ConfigError(f"{spec}: {type(error).__name__}: {first_line}")


def num_shards(source: Source) -> int:
    """The number of pieces in which a data set can be read.

    Raises ConfigError if it does not have the column of the text.
    """
    data = open_hub(source.path)
    names = _columns(source.path)
    if names and source.field not in names:
        hint = other_fields(source.path, source.field, names)
        raise ConfigError(
            f"{source.path}: has no column {source.keys.field} = {source.field!r}{hint}"
        )
    return max(1, data.num_shards)


def _columns(spec: str) -> list[str]:
    """The columns of a data set. If it does not list them, its first row is read."""
    data = open_hub(spec)
    try:
        return list(data.column_names or next(iter(data), {}))
    except Exception as error:  # datasets raises whatever its readers raise
        raise hub_problem(spec, error) from None
