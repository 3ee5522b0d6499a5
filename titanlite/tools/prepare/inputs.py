"""Detects that input files have changed since a job began.

What it is: a file's version is its size and its time of modification. Some files are read together
with others, whose version is a part of theirs: the ids of Megatron with their index, and each shard
of a local data set of the package `datasets` with all its files. A data set on the Hub has no
version here.
Why it is here: the parts of a job fit together only if all of them read the same versions.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from titanlite.runtime.errors import ConfigError
from titanlite.tools.prepare.job import File, afresh
from titanlite.tools.prepare.sources import hub_files, index_of, version_of


def companions_of(path: str, relative: str, kind: str) -> str:
    """The version of the files that are read with one of this kind; "" if there are none."""
    if kind == "hf":
        files = hub_files(path.rpartition("#")[0])
    else:
        index = index_of(path, relative) if kind == "megatron" else None
        files = [index] if index else []
    return version_of(files) if files else ""


def check_inputs(files: Iterable[File], work: Path) -> None:
    """Raises ConfigError for a file that is gone, or has another version than when the job in
    `work` began.
    """
    hub: dict[str, str] = {}  # data set -> version, which its shards share
    for file in files:
        now = file
        try:
            if file.kind == "hf":
                name = file.path.rpartition("#")[0]
                hub[name] = hub.get(name) or companions_of(file.path, file.relative, file.kind)
                now = file._replace(companions=hub[name])
            else:
                status = Path(file.path).stat()
                companions = companions_of(file.path, file.relative, file.kind)
                now = file._replace(
                    size=status.st_size, mtime_ns=status.st_mtime_ns, companions=companions
                )
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: {error.strerror}, since the preparation began"
            ) from None
        changed = file.changed(now)
        if changed:
            again = f"repeat the command; with --part and --merge, {afresh(work)}"
            raise ConfigError(f"{changed}: has changed since the preparation began; {again}")
