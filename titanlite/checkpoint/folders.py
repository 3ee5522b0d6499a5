"""Checkpoint folders on disk, and the protocol by which each is either complete or absent.

What it is: `checkpoints/step-N/` contains safetensors files, small files that make the folder
self-contained (resolved config, model shape, tokenizer, data manifest) and `manifest.json`. A save
(`storage.py`)

    1. creates `step-N.tmp-<id>`, with a random id;
    2. lets each process write its files there and sync them to the disk;
    3. writes the small files and the manifest, with the size and SHA-256 of all files;
       and syncs them and the folder;
    4. renames the folder to `step-N`, and syncs the parent folder.

So a folder named `step-N` is complete, whenever a process died, and nothing is written into it
later.
A deletion renames the folder first and then removes the files. A damaged checkpoint is renamed,
never deleted.
What it costs: two syncs of folders for a save.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import shutil
from pathlib import Path

from titanlite.checkpoint.manifest import NAME
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import make_folder, sync_folder

logger = logging.getLogger("titanlite")
RECORD = "stability.json"  # in the run's folder: rollbacks (divergence.py)


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def list_steps(folder: Path) -> list[int]:
    """Lists the steps of the committed checkpoints in a `checkpoints` folder, ascending."""
    steps = []
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d{1,18})", path.name)
        if match and path.is_dir():
            steps.append(int(match[1]))
    return sorted(steps)


def find_step_folder(path: Path) -> Path:
    """Finds the checkpoint at a user's path: a step folder, or the newest step of a run.

    Raises ConfigError if there is none.
    """
    with contextlib.suppress(OSError):  # for example, the name is too long
        if (path / NAME).is_file():
            return path
        for folder in (path / "checkpoints", path):
            steps = list_steps(folder)
            if steps:
                return step_folder(folder, steps[-1])
    raise ConfigError(
        f"{path}: no checkpoint; expected a run's folder (outputs/<run>) or a step's "
        "(checkpoints/step-N)"
    )


def begin(final: Path) -> Path:
    """Creates the folder in which a step is written."""
    temporary = final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")
    make_folder(temporary)
    return temporary


def publish(temporary: Path, final: Path) -> None:
    """Commits a complete folder: renames it to its final name."""
    sync_folder(temporary)
    temporary.rename(final)
    try:
        sync_folder(final.parent)  # makes the rename durable
    except OSError as error:  # the checkpoint is committed and readable, so the save has not failed
        logger.warning(
            "%s: %s while syncing it; a power failure now could lose %s",
            final.parent,
            error,
            final.name,
        )


def discard(final: Path) -> None:
    """Removes what failed saves of a step have left, which frees space if the disk is full."""
    with contextlib.suppress(OSError):
        for unfinished in final.parent.glob(f"{final.name}.tmp-*"):
            shutil.rmtree(unfinished, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Removes the folders of interrupted saves and deletions.

    One process calls it, while no process writes.
    """
    for path in (*folder.glob("step-*.tmp-*"), *folder.glob("step-*.deleted")):
        remove_folder(path)


def remove_folder(path: Path) -> None:
    """Removes a folder with its content, or a link to one."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
