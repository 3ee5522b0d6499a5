"""Prepares text once, and reuses the result in later runs.

What it is: a source -> a folder of shards. For `[data]` the folder is in the cache, and its name
contains a hash of the names, sizes and times of the files and of the tokenizer; `titanlite prepare
--out` names it. A preparation that was interrupted goes on with the parts that are missing
(`build.py`). Before data is used it is verified (`data/verification.py`), once for each version of
its files.
What it costs: the launcher of each node reads the size and the time of modification of each file at
every start.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from titanlite.config.schema import DataConfig
from titanlite.data.prepared import is_prepared, open_prepared, refuse_text_settings
from titanlite.data.prepared_manifest import FORMAT
from titanlite.data.verification import verify_changed
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.sources import (
    CONFIG_KEYS,
    STDLIB,
    Found,
    Keys,
    Source,
    find,
    versions,
)

Log = Callable[[str], None]


def find_text(section: DataConfig) -> Found:
    """The files that a config names. Raises ConfigError if there are none."""
    source = source_of(section)
    if not is_prepared(Path(source.path)):
        return find(source)
    refuse_text_settings(section)
    return Found("", source.path, [])


def source_of(section: DataConfig) -> Source:
    """The single source that a section names (`DataConfig.parts`)."""
    (source,) = section.all_sources()
    keys = CONFIG_KEYS
    if source.name:  # a table of `[[data.sources]]`
        keys = Keys(*(f"data.sources: {source.name}: {key}" for key in Keys._fields))
    return Source(
        source.path or STDLIB,
        source.pattern,
        source.field,
        "",
        source.validation,
        keys,
        source.ids,
    )


def prepare(
    section: DataConfig,
    tokenizer: Tokenizer,
    log: Log = print,
    found: Found | None = None,
) -> Path:
    """The folder of prepared data for a config, which is made if it does not exist.

    Files that have changed since they were verified are verified.
    `found`: the result of `find_text`, if that has been called.
    Raises ConfigError with the path of text that is missing, empty or not UTF-8, or of damaged
    data.
    """
    prepared = open_prepared(section)
    if prepared is not None:
        return prepared
    return prepare_text(source_of(section), tokenizer, log, section.cache, found)


def prepare_text(
    source: Source,
    tokenizer: Tokenizer,
    log: Log,
    cache_path: str = "",
    found: Found | None = None,
) -> Path:
    """The folder in the cache with the prepared text of a source, as `prepare` returns it."""
    found = found or find(source)
    setting = "data.cache"
    given = cache_path
    if not given:
        setting = "TITANLITE_CACHE"
        given = os.environ.get("TITANLITE_CACHE") or str(Path.home() / ".cache/titanlite")
    cache = Path(given)
    held_out = find(source.held_out()).files if source.validation else []
    identity: list[object] = [
        FORMAT,
        found.root,
        tokenizer.sha256,
        source.field,
        source.prompt_field,
        source.split,
        source.enclosed,
        source.ids,
        [versions(found.files), versions(held_out)],
    ]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    folder = cache / f"{found.name}-{digest}"
    if not (folder / "manifest.json").exists():
        # Once per text: other runs do without it
        from titanlite.tools.prepare.build import Options, build, hold

        try:
            with hold(folder, wait=True):
                # Another process may have made it meanwhile
                if not (folder / "manifest.json").exists():
                    build([(source, found)], tokenizer, folder, Options(), log)
        except OSError as error:  # the lock cannot be made: another user may own the cache
            raise ConfigError(
                f"{setting} = {str(cache)!r}: {error}; expected a writable folder"
            ) from None
    verify_changed(folder)
    return folder
