"""Publishes the output of a conversion: gives it the target's name when all is written.

What it is: the checks of the target, the temporary names, the last step. Nothing is replaced: a
target that exists is refused, also one that appears while the output is written. A conversion holds
the lock of its target, so what lies beside it under a temporary name was left by killed conversions
and is removed. A kill at any moment leaves the whole output under the target's name, or nothing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import sync_folder, write_synced
from titanlite.runtime.lock_file import lock_file

logger = logging.getLogger("titanlite")
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # of file systems without hard links
TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # something is at the target


def require_apart(source: Path, target: Path) -> None:
    """Raises ConfigError if the target is, contains or lies in the source."""
    real_source = Path(os.path.realpath(source))
    real_target = Path(os.path.realpath(target))
    if real_source.is_relative_to(real_target) or real_target.is_relative_to(real_source):
        raise ConfigError(
            f"{target}: is, contains or lies in the source {source}; choose another path"
        )


def require_new(target: Path) -> None:
    """Raises ConfigError if something is at the target."""
    if not os.path.lexists(target):
        return
    kind = "file"
    if target.is_symlink():
        kind = "link"
    elif target.is_dir():
        kind = "folder"
    raise ConfigError(f"{target}: this {kind} exists already; remove it, or choose another name")


@contextlib.contextmanager
def lock_target(target: Path, source: Path) -> Iterator[None]:
    """Excludes other conversions to the target. Raises ConfigError if one is writing it.

    On entry it removes what killed conversions have left.
    """
    lock = target.with_name(f".{target.name}.titanlite-lock")
    busy = f"{target}: another conversion is writing it; wait for it, or choose another path"
    with lock_file(lock, busy):
        _remove_leftovers(target, source)
        yield


def temporary_path(target: Path) -> Path:
    """A new name beside the target."""
    return target.with_name(f"{target.stem}.titanlite-tmp-{secrets.token_hex(4)}{target.suffix}")


def _remove_leftovers(target: Path, source: Path) -> None:
    """Removes what killed conversions have left; the caller holds the target's lock."""
    pattern = rf"{re.escape(target.stem)}\.titanlite-tmp-[0-9a-f]{{8}}{re.escape(target.suffix)}"
    for path in sorted(target.parent.iterdir()):
        if re.fullmatch(pattern, path.name) and path != source:
            remove(path)


def write_small_files(folder: Path, files: dict[str, bytes]) -> None:
    """Writes and syncs files by name."""
    for name, content in files.items():
        write_synced(folder / name, content)


def publish(temporary: Path, target: Path) -> None:
    """Gives the output its target's name. Raises ConfigError if there is something by now."""
    try:
        if temporary.is_dir():
            sync_folder(temporary)
            _rename_to_new(temporary, target)
        else:
            _link(temporary, target)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        raise ConfigError(
            f"{target}: appeared while it was written, and was not replaced; choose another name"
        ) from None
    try:
        sync_folder(target.parent)
    except OSError as error:
        # The target is complete and under its name, so the conversion has not failed
        logger.warning(
            "%s: %s while syncing it; a power failure now could lose %s",
            target.parent,
            error,
            target.name,
        )


def _link(temporary: Path, target: Path) -> None:
    """Gives a file another name, which must be free: a rename would replace what is there."""
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        _rename_to_new(temporary, target)
    remove(temporary)


def _rename_to_new(temporary: Path, target: Path) -> None:
    """Renames. Raises OSError if there is something at the target."""
    if os.path.lexists(target):  # a rename would replace a folder without files
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(temporary, target)  # fails if a folder with files has appeared meanwhile


def remove(path: Path) -> None:
    """Removes what a conversion has written under a temporary name, if it is there.

    What cannot be removed stays, and the next conversion tries again.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: %s while removing it", path, error.strerror or error)
