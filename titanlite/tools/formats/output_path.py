"""Publishes the output of a conversion: renames it to the target when all is written.

What it is: which targets may be replaced, the temporary names, the rename. A conversion holds the
lock of its target, so what lies beside it under a temporary name was left by killed conversions and
is removed. Without `--force` nothing is replaced, also not what appears while the output is
written. With `--force` the old and the new one are exchanged in one operation, and the old one is
checked again and removed, so a kill at any moment leaves one of them under the target's name. Files
are removed one by one, by the names that were checked: what another program has added meanwhile is
kept, and its place is logged.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import sync_folder, write_synced
from titanlite.runtime.lock_file import lock_file
from titanlite.tools.formats.model_card import CARD, is_card

logger = logging.getLogger("titanlite")
# Constants of linux/fcntl.h and linux/fs.h
AT_FDCWD = -100
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
REPLACEABLE = re.compile(  # names of files that a conversion, or a run's checkpoint, consists of
    r"(model|training)-?.*\.safetensors|model\.safetensors\.index\.json|.*\.distcp|\.metadata"
    r"|(manifest|config|generation_config|huggingface|model|data|excluded|titanlite|tokenizer|tokenizer_config)\.json"
    r"|special_tokens_map\.json|config\.toml|tokenizer\.model|chat_template\.jinja"
    r"|adapter_model\.safetensors|adapter_config\.json"
)
# Names of files that it removes itself before it ends
PARTIAL = re.compile(r"scratch\.titanlite-tmp-[0-9a-f]{8}|\.metadata\.tmp")


def require_writable(source: Path, target: Path, force: bool) -> None:
    """Raises ConfigError unless the target is new or may be replaced, and is not the source."""
    real_source = Path(os.path.realpath(source))
    real_target = Path(os.path.realpath(target))
    current = Path(os.path.realpath("."))
    if real_source.is_relative_to(real_target) or real_target.is_relative_to(real_source):
        raise ConfigError(
            f"{target}: is, contains or lies in the source {source}; choose another path"
        )
    if current.is_relative_to(real_target):
        raise ConfigError(f"{target}: is or contains the current folder; choose another path")
    if (target.exists() or target.is_symlink()) and not force:
        raise ConfigError(
            f"{target}: exists already; choose another name, or replace it with --force"
        )
    require_replaceable(target, target)


def require_replaceable(path: Path, target: Path) -> list[str]:
    """Returns the names of the files in `path`, which is or was at the target.

    Raises ConfigError if it may not be deleted.
    """
    if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
        raise ConfigError(
            f"{target}: is a link or a device; --force replaces files and folders only"
        )
    content = sorted(path.iterdir()) if path.is_dir() else []
    others = [inner.name for inner in content if not _is_replaceable(inner)]
    if others:
        raise ConfigError(
            f"{target}: holds {', '.join(others[:3])}; --force replaces only folders whose files "
            "convert could have "
            "written"
        )
    return [inner.name for inner in content]


def _is_replaceable(path: Path) -> bool:
    """Whether a conversion could have written this file of a folder."""
    if path.is_dir():
        return False
    return bool(REPLACEABLE.fullmatch(path.name)) or (path.name == CARD and is_card(path))


@contextlib.contextmanager
def lock_target(target: Path, source: Path) -> Iterator[None]:
    """Excludes other conversions to the target. Raises ConfigError if one is writing it.

    On entry it removes what killed conversions have left, and gives back the target's name to what
    one has replaced.
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
    """Removes what killed conversions have left; the caller holds the target's lock.

    A scratch file has the mark in its name twice.
    """
    pattern = rf"{re.escape(target.stem)}(\.titanlite-tmp-[0-9a-f]{{8}})+{re.escape(target.suffix)}"
    replaced = re.compile(rf"{re.escape(target.name)}\.titanlite-old-[0-9a-f]{{8}}")
    for path in sorted(target.parent.iterdir()):
        if re.fullmatch(pattern, path.name) and path != source:
            remove(path)
        elif replaced.fullmatch(path.name) and not os.path.lexists(target):
            path.rename(target)
            logger.warning(
                "%s: a conversion was killed while it replaced this; its name is restored", target
            )
        elif replaced.fullmatch(path.name):
            logger.warning(
                "%s: what a killed conversion has replaced; delete it if you do not need it", path
            )


def write_small_files(folder: Path, files: dict[str, bytes]) -> None:
    """Writes and syncs files by name; each gets its name when it is complete.

    A part of a README.md would not be known as one that a conversion has written.
    """
    for name, content in files.items():
        scratch = folder / f"scratch.titanlite-tmp-{secrets.token_hex(4)}"
        write_synced(scratch, content)
        scratch.rename(folder / name)


def publish(temporary: Path, target: Path, force: bool) -> None:
    """Renames the output to its target.

    Raises ConfigError if there is something that may not be replaced.
    """
    if temporary.is_dir():
        sync_folder(temporary)
    try:
        _rename_to_new(temporary, target)
    except FileExistsError:
        if not force:
            raise ConfigError(
                f"{target}: appeared while it was written, and was not replaced; choose another "
                "name"
            ) from None
        require_replaceable(target, target)
        _replace(temporary, target)
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


def _rename_to_new(path: Path, target: Path) -> None:
    """Renames; raises FileExistsError if there is something at the target."""
    if _renameat2(path, target, RENAME_NOREPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(target)
    if path.is_dir() and not path.is_symlink():
        path.rename(target)  # fails if a file, a link or a folder with files has appeared meanwhile
        return
    try:
        # a rename would replace a file that has appeared meanwhile
        os.link(path, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        path.rename(target)  # the file system has no links
    else:
        path.unlink()


def _replace(temporary: Path, target: Path) -> None:
    """Exchanges the two, and removes what was at the target; if it may not be removed, exchanges
    them again.
    """
    old = target.with_name(f"{target.name}.titanlite-old-{secrets.token_hex(4)}")
    exchanged = _renameat2(temporary, target, RENAME_EXCHANGE)
    if exchanged:
        old = temporary
    else:
        # In two steps: a kill between them leaves the old copy under the other name, which the next
        # one gives back
        target.rename(old)
        try:
            _rename_to_new(temporary, target)
        except BaseException:  # also a signal
            if os.path.lexists(temporary):
                _put_back(old, target)
            raise
    try:
        names = require_replaceable(old, target)  # files may have been added since the first check
        # Otherwise a power failure could undo the exchange, but not the removal of files
        sync_folder(target.parent)
    except (ConfigError, OSError):
        if exchanged:
            _renameat2(temporary, target, RENAME_EXCHANGE)
        else:
            target.rename(temporary)
            _put_back(old, target)
        raise
    remove(old, names)


def _put_back(old: Path, target: Path) -> None:
    """Gives what was at the target its name again.

    Raises ConfigError with its new place if the name is taken.
    """
    try:
        _rename_to_new(old, target)
    except OSError:
        if not os.path.lexists(target):
            raise
        raise ConfigError(
            f"{target}: appeared while it was replaced, and stays; what was there before is {old}"
        ) from None


def _renameat2(path: Path, target: Path, flag: int) -> bool:
    """Calls Linux's renameat2, which Python does not offer.

    Returns False where the system or the file system lacks it.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(AT_FDCWD, os.fsencode(path), AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(target))


def remove(path: Path, names: list[str] | None = None) -> None:
    """Removes what a conversion has written or replaced, if it is there: a file, or `names` in a
    folder and the folder.

    `names`: those that were checked; None: all that a conversion could have written. Whatever else
    is there, because another program has added it, is kept, and its place is logged. What cannot be
    removed stays, and the next conversion tries again.
    """
    try:
        if path.is_file() and not path.is_symlink():
            path.unlink()
            return
        if path.is_dir() and not path.is_symlink():
            checked = os.listdir(path) if names is None else names
            removable = [
                name for name in checked if _is_replaceable(path / name) or PARTIAL.fullmatch(name)
            ]
            for name in removable:
                with contextlib.suppress(OSError):
                    (path / name).unlink()
            with contextlib.suppress(OSError):
                path.rmdir()
                return
            if not set(os.listdir(path)) - set(removable):
                return
        elif not os.path.lexists(path):
            return
        saved = path.with_name(re.sub(r"\.titanlite-(tmp|old)-", ".titanlite-kept-", path.name))
        path.rename(saved)  # a name that no later conversion removes
    except OSError as error:
        if os.path.lexists(path):
            logger.warning("%s: %s while removing it", path, error.strerror or error)
        return
    place = str(saved)
    if saved.is_dir():
        place = f"{', '.join(sorted(os.listdir(saved))[:3])} in {saved}"
    logger.warning(
        "%s: added while it was replaced, and kept; delete it if you do not need it", place
    )
