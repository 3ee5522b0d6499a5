"""Prepares text once, and reuses the result in later runs.

What it is: a source -> a folder of shards. For `[data]` the folder is in the cache, and its name
contains a hash of the names, sizes and times of the files and of the tokenizer; `titanlite prepare
--out` names it. The parts of the work (`job.py`) are made in a hidden working folder beside it,
which is renamed at the end (`merge.py`); a preparation that was interrupted goes on with the parts
that are missing. Before data is used it is verified (`verify.py`), once for each version of its
files.
What it costs: the launcher of each node reads the size and the time of modification of each file at
every start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from titanlite.config.schema import DataConfig
from titanlite.data.prepared_manifest import FORMAT, read_manifest
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.verification import unverified, verify
from titanlite.runtime.errors import ConfigError
from titanlite.tools.prepare.locks import hold
from titanlite.tools.prepare.sources import (
    CONFIG_KEYS,
    STDLIB,
    Found,
    Keys,
    Source,
    find,
    is_prepared,
    versions,
)

Log = Callable[[str], None]


def find_text(section: DataConfig) -> Found:
    """The files that a config names. Raises ConfigError if there are none."""
    source = source_of(section)
    if not is_prepared(Path(source.path)):
        return find(source)
    _refuse_what_has_no_effect(source)
    return Found("", source.path, [])


def _refuse_what_has_no_effect(source: Source) -> None:
    """Raises ConfigError for settings of text, where the path is that of a prepared folder."""
    validation_key = source.keys.path.removesuffix("path") + "validation"
    settings = {
        source.keys.pattern: "pattern",
        source.keys.field: "field",
        validation_key: "validation",
    }
    for key, name in settings.items():
        value = getattr(source, name)
        if value != getattr(Source, name):
            raise ConfigError(
                f"{key} = {value!r}: has no effect on {source.path}, which is prepared already; "
                "remove it, or set it for other sources alone"
            )


def source_of(section: DataConfig) -> Source:
    """The single source that a section names (`DataConfig.parts`)."""
    (source,) = section.all_sources()
    keys = CONFIG_KEYS
    if source.name:  # a table of `[[data.sources]]`
        keys = Keys(*(f"data.sources: {source.name}: {key}" for key in Keys._fields))
    return Source(source.path or STDLIB, source.pattern, source.field, "", source.validation, keys)


def prepare(
    section: DataConfig, tokenizer: Tokenizer, log: Log = print, found: Found | None = None
) -> Path:
    """The folder of prepared data for a config, which is made if it does not exist.

    Files that have changed since they were verified are verified.
    `found`: the result of `find_text`, if that has been called.
    Raises ConfigError with the path of text that is missing, empty or not UTF-8, or of damaged
    data.
    """
    source = source_of(section)
    if is_prepared(Path(source.path)):
        _refuse_what_has_no_effect(source)
        folder = Path(source.path).absolute()
    else:
        found = found or find(source)
        given = section.cache or os.environ.get("TITANLITE_CACHE")
        cache = Path(given) if given else Path.home() / ".cache/titanlite"
        held_out = find(source.held_out()).files if source.validation else []
        identity = json.dumps(
            [
                FORMAT,
                found.root,
                tokenizer.sha256,
                source.field,
                source.prompt_field,
                [versions(found.files), versions(held_out)],
            ]
        )
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        folder = cache / f"{found.name}-{digest}"
        if not (folder / "manifest.json").exists():
            with _hold(folder, log):
                if not (folder / "manifest.json").exists():
                    # Once per text: other runs do without it
                    from titanlite.tools.prepare.build import Options, build

                    build([(source, found)], tokenizer, folder, Options(), log)
    check(folder)
    return folder


def check(folder: Path) -> None:
    """Verifies what has changed in a prepared folder since it was verified.

    Raises ConfigError with what is damaged.
    """
    manifest = read_manifest(folder)
    if unverified(folder, manifest):
        with (folder / "manifest.json").open() as lock:
            with contextlib.suppress(OSError):  # without locks, several processes verify it
                fcntl.flock(lock, fcntl.LOCK_EX)
            names = unverified(folder, manifest)
            if names:
                verify(folder, manifest, names)


@contextlib.contextmanager
def _hold(folder: Path, log: Log) -> Iterator[None]:
    """One of several processes prepares a folder, the others wait for it.

    Raises ConfigError if the cache cannot be written; another user may own it.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold(folder, wait=log))
        except OSError as error:
            cache = str(folder.parent)
            raise ConfigError(
                f"data.cache = {cache!r}: {error}; expected a writable folder"
            ) from None
        yield
