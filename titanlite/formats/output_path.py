"""The output of a conversion: written under a temporary name beside the target, synced, and renamed when complete.

What it is: which targets may be replaced, the temporary names, the rename. A killed conversion's leftovers are removed
by the next one to the same target; what `--force` replaces stays until the new output has its name.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from titanlite.config.files import sync_folder, write_synced
from titanlite.config.schema import ConfigError

REPLACEABLE = re.compile(  # names of files that a conversion, or a run's checkpoint, consists of
    r"(model|training)-?.*\.safetensors|model\.safetensors\.index\.json|.*\.distcp|\.metadata|consolidated\.\d+\.pth"
    r"|(manifest|config|generation_config|params|model|data|titanlite|tokenizer|tokenizer_config)\.json"
    r"|special_tokens_map\.json|config\.toml|tokenizer\.model"
)


def require_writable(source: Path, target: Path, force: bool) -> None:
    """Raises ConfigError unless the target is new, or may be replaced, and apart from the source."""
    here, there, where = (Path(os.path.realpath(path)) for path in (source, target, "."))
    if there == here or there in here.parents or here in there.parents:
        raise ConfigError(f"{target}: is, contains or lies in the source {source}; choose another path")
    if there == where or there in where.parents:
        raise ConfigError(f"{target}: is or contains the current folder; choose another path")
    if (target.exists() or target.is_symlink()) and not force:
        raise ConfigError(f"{target}: exists already; choose another name, or replace it with --force")
    if target.is_symlink() or (target.exists() and not target.is_file() and not target.is_dir()):
        raise ConfigError(f"{target}: is a link or a device; --force replaces files and folders only")
    content = sorted(target.iterdir()) if target.is_dir() else []
    if others := [path.name for path in content if path.is_dir() or not REPLACEABLE.fullmatch(path.name)]:
        raise ConfigError(
            f"{target}: holds {', '.join(others[:3])}; --force replaces only folders whose files convert could have "
            "written"
        )


def temporary_path(target: Path) -> Path:
    """A new name beside the target."""
    return target.with_name(f"{target.stem}.titanlite-tmp-{secrets.token_hex(4)}{target.suffix}")


def remove_leftovers(target: Path, source: Path) -> None:
    """Removes what killed conversions to this target have left; a scratch file has the mark in its name twice."""
    pattern = rf"{re.escape(target.stem)}(\.titanlite-tmp-[0-9a-f]{{8}})+{re.escape(target.suffix)}"
    for path in target.parent.iterdir():
        if re.fullmatch(pattern, path.name) and path != source:
            remove(path)


def write_small_files(folder: Path, files: dict[str, bytes]) -> None:
    """Writes and syncs files by name."""
    for name, content in files.items():
        write_synced(folder / name, content)


def publish(temporary: Path, target: Path) -> None:
    """Renames the output to its target; a folder that was there is first renamed, and removed afterwards."""
    if temporary.is_dir():
        sync_folder(temporary)
    if not (target.exists() or target.is_symlink()):
        temporary.rename(target)
    elif not target.is_dir():
        temporary.replace(target)
    else:
        old = target.with_name(f"{target.name}.titanlite-old-{secrets.token_hex(4)}")  # `remove_leftovers` keeps it
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
