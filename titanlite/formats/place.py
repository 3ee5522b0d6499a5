"""Where the result of a conversion lies until it is whole, and how it gets its place.

What it is: it is written beside its target under a name of its own, synced and renamed. What a conversion leaves that
was killed is removed by the next one to the same target; what `--force` replaces stays until the new one has its place.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from titanlite.checkpoint.storage import sync_folder
from titanlite.config.schema import ConfigError

OURS = re.compile(  # names of what a conversion, or a run's checkpoint, consists of
    r"(model|training)-?.*\.safetensors|model\.safetensors\.index\.json|.*\.distcp|\.metadata|consolidated\.\d+\.pth"
    r"|(manifest|config|generation_config|params|model|data|titanlite|tokenizer|tokenizer_config)\.json"
    r"|special_tokens_map\.json|config\.toml|tokenizer\.model"
)


def require_free(source: Path, target: Path, force: bool) -> None:
    """The target is not there, or may be replaced, and is neither the source nor around it or in it."""
    here, there, where = (Path(os.path.realpath(path)) for path in (source, target, "."))
    if there == here or there in here.parents or here in there.parents:
        raise ConfigError(f"{target}: is, holds or lies in the source {source}; choose another place")
    if there == where or there in where.parents:
        raise ConfigError(f"{target}: is or holds the folder one is in; choose another place")
    if (target.exists() or target.is_symlink()) and not force:
        raise ConfigError(f"{target}: exists already; choose another name, or replace it with --force")
    if target.is_symlink() or (target.exists() and not target.is_file() and not target.is_dir()):
        raise ConfigError(f"{target}: --force replaces files and folders, and this is a link or a device")
    content = sorted(target.iterdir()) if target.is_dir() else []
    if others := [path.name for path in content if path.is_dir() or not OURS.fullmatch(path.name)]:
        raise ConfigError(
            f"{target}: --force replaces a folder of what convert writes, and this one has {', '.join(others[:3])}"
        )


def publish(temporary: Path, target: Path) -> None:
    """Renames the result, out of the way of what was there."""
    if temporary.is_dir():
        sync_folder(temporary)
    if not (target.exists() or target.is_symlink()):
        temporary.rename(target)
    elif not target.is_dir():
        temporary.replace(target)
    else:
        old = target.with_name(f"{target.name}.titanlite-old-{secrets.token_hex(4)}")  # which no sweep removes
        target.rename(old)
        try:
            temporary.rename(target)
        except BaseException:  # also a signal
            if not target.exists():
                old.rename(target)
            raise
        remove(old)
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def temporary(target: Path) -> Path:
    """A name beside the target that no conversion had before."""
    return target.with_name(f"{target.stem}.titanlite-tmp-{secrets.token_hex(4)}{target.suffix}")


def sweep(target: Path, source: Path) -> None:
    """Removes what a conversion to this target that was killed has left."""
    pattern = rf"{re.escape(target.stem)}\.titanlite-tmp-[0-9a-f]{{8}}{re.escape(target.suffix)}"
    for path in target.parent.iterdir():
        if re.fullmatch(pattern, path.name) and path != source:
            remove(path)
