"""Reads files within limits, and writes files so that they survive a power failure."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

# Errors of flock on file systems without locks: Lustre without its option flock, NFS without its
# lock daemon
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def read_bounded(path: Path, most: int = 1 << 24) -> bytes:
    """Reads a regular file.

    Raises OSError, also for pipes, devices and files of more than `most` bytes.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        size = os.fstat(file.fileno()).st_size
        if not os.path.isfile(file.fileno()) or size > most:
            raise OSError(
                errno.EINVAL, f"expected a regular file of at most {most} bytes", str(path)
            )
        os.set_blocking(file.fileno(), True)
        return file.read(size)


def write_synced(path: Path, content: bytes) -> None:
    """Writes a new file and syncs its content. Raises FileExistsError if it is there already."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes, shared: bool = False) -> None:
    """Writes a file under a temporary name, syncs and renames it, unless it has this content.

    Errors name the path. `shared`: other processes may write the file too, so each uses its own
    temporary file, which a killed process leaves behind.
    """
    try:
        if path.is_file() and path.read_bytes() == content:
            return
        name = f".{path.name}.tmp"
        if shared:
            name += f"-{secrets.token_hex(4)}"
        temporary = path.with_name(name)
        temporary.unlink(missing_ok=True)
        try:
            write_synced(temporary, content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        error.filename = str(path)
        raise


def write_new_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes new files under a folder, which need not exist: all of them or none.

    Raises OSError, which names the file that exists or could not be written.
    """
    paths = [folder / name for name in contents]
    parents = dict.fromkeys(parent for path in paths for parent in path.parents)
    absent = [parent for parent in parents if not parent.exists()]
    written: list[Path] = []
    try:
        for path, content in zip(paths, contents.values(), strict=True):
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            make_folder(path.parent)
            replace_file(path, content)
            written.append(path)
    except OSError:
        for path in written:
            path.unlink(missing_ok=True)
        for parent in sorted(absent, reverse=True):  # the inner ones first
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder to the disk, if the file system supports that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        error.filename = str(folder)
        # The file system does not sync folders, or this folder only permits creating files.
        if error.errno not in (errno.EINVAL, errno.EACCES):
            raise


def make_folder(folder: Path) -> None:
    """Creates a folder and its missing parents, and syncs each new folder's parent.

    The folder may exist already.
    """
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(absent):
        sync_folder(path.parent)
