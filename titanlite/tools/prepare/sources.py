"""Finds the files of a source of data, and lists them in a fixed order.

What it is: a path as it stands in a config or on the command line -> a name, a root and a list of
files with sizes and times of modification. Hidden files and folders are left out, and `**` does not
follow links to folders. A folder that cannot be listed is an error, and so are prepared data below
a source, whose files would be read as ids and text once more. Nothing is opened here, so that a
start of training that finds its data prepared costs one `stat` per file. `python-stdlib` is the
source of the running interpreter's standard library: Python code with English documentation, which
every machine has. `hf:NAME` is a data set that the package `datasets` reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from titanlite.config.mistakes import hub_name
from titanlite.data.prepared import is_prepared
from titanlite.runtime.errors import ConfigError

STDLIB = "python-stdlib"
HUB = "hf:"
RAW_NAMES = (".bin", ".npy")  # of files of token ids, with or without a header
DATATROVE_COMPANIONS = (".index", ".metadata", ".loss")
NO_CORPUS = {
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}


class Keys(NamedTuple):
    """How messages name the settings of a source: keys of a config, or options of a command."""

    path: str = "data.path"
    pattern: str = "data.pattern"
    field: str = "data.field"
    validation: str = "validation"
    ids: str = "data.ids"


CONFIG_KEYS = Keys()


@dataclass(frozen=True)
class Source:
    """Where documents come from."""

    path: str = STDLIB
    pattern: str = "**/*"
    field: str = "text"  # the field of a row with its text
    prompt_field: str = ""  # the field with text before it, which is not trained on
    validation: str = ""  # another source, of validation documents; empty: a part of this one
    keys: Keys = CONFIG_KEYS
    ids: str = "auto"  # the type of the ids in files that do not state it; auto: by the data
    split: str = ""  # the split of all its documents; empty: a part is held out
    # Texts are between bos and eos; otherwise after what the tokenizer's files put before a prompt
    enclosed: bool = True

    def held_out(self) -> Source:
        """The source of the validation documents, if they are not a part of this one."""
        keys = self.keys._replace(path=self.keys.validation)
        return Source(self.validation, "**/*", self.field, self.prompt_field, "", keys, self.ids)


class FoundFile(NamedTuple):
    """A file of a source, not opened yet."""

    path: str
    relative: str  # to the root; it decides whether a text file is held out
    size: int
    mtime_ns: int


class Found(NamedTuple):
    """The files of a source."""

    name: str  # in metrics, and of the prepared folder
    root: str
    files: list[FoundFile]


def find(source: Source) -> Found:
    """The files of a source in a fixed order.

    Raises ConfigError if there are none, or all are empty.
    """
    path = source.path
    keys = source.keys
    if path in ("", STDLIB):
        return _standard_library(keys)
    if path.startswith(HUB):
        return _hub(path, keys)
    try:
        root = Path(path).resolve()
        if root.is_file():
            name = root.stem
            if root.suffix in (".gz", ".zst"):
                name = Path(name).stem
            if not root.stat().st_size:
                raise ConfigError(f"{keys.path} = {path!r}: the file is empty")
            if root.suffix == ".bin" and is_prepared(root.parent):
                raise ConfigError(
                    f"{root.parent}: is a folder of prepared data; train on all of it with "
                    f"--data.path={shlex.quote(str(root.parent))}"
                )
            return _found(name, root.parent, [root])
        if not root.is_dir():
            hint = ""
            name = hub_name(path)
            if name:
                hint = f"; for a data set on huggingface.co write {HUB}{name}"
            raise ConfigError(f"{keys.path} = {path!r}: no such file or folder{hint}")
    except (OSError, RuntimeError) as error:  # the name is too long, or a link points to itself
        raise ConfigError(f"{keys.path} = {path!r}: {error}") from None
    try:
        if "**" in source.pattern:
            _require_readable(root)
        matches = [p for p in root.glob(source.pattern) if p.is_file()]
    except OSError as error:
        raise ConfigError(f"{keys.path} = {path!r}: {error.filename}: {error.strerror}") from None
    except (ValueError, IndexError, NotImplementedError) as error:
        raise ConfigError(
            f"{keys.pattern} = {source.pattern!r}: {error}; "
            "expected a glob pattern such as **/*.txt"
        ) from None
    files = [p for p in matches if not _is_hidden(p.relative_to(root))]
    if not files:
        raise ConfigError(
            f"{keys.path} = {path!r}: no file matches {keys.pattern} = {source.pattern!r}"
        )
    for folder in sorted({p.parent for p in files if p.suffix in (".bin", ".json")}):
        if is_prepared(folder):
            raise ConfigError(
                f"{keys.path} = {path!r}: {folder} is a folder of prepared data; "
                f"move it elsewhere, or select the files to prepare with {keys.pattern}"
            )
    found = _found(root.name, root, sorted(files))
    if not any(file.size for file in found.files):
        raise ConfigError(f"{keys.path} = {path!r}: its {len(files)} files are empty")
    return found


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def require_apart(source: Source, found: Found, target: Path) -> None:
    """Raises ConfigError if one of the prepared folder and the source is within the other."""
    root = Path(found.root.removeprefix(HUB).split(":")[0]).resolve()
    target = target.resolve()
    if source.path in ("", STDLIB) or not root.is_dir():
        return
    setting = f"{source.keys.path} = {source.path!r}"
    if target.is_relative_to(root) and not Path(source.path).is_file():
        raise ConfigError(f"--out {target}: is within {setting}; expected a folder elsewhere")
    if root.is_relative_to(target):
        raise ConfigError(f"{setting}: is within --out {target}; expected a folder elsewhere")


def _require_readable(root: Path) -> None:
    """Raises OSError for a folder that cannot be listed, which `glob` passes over."""

    def stop(error: OSError) -> None:
        raise error

    for _, folders, _ in os.walk(root, onerror=stop):
        folders[:] = [folder for folder in folders if not folder.startswith(".")]


def _found(name: str, root: Path, paths: list[Path]) -> Found:
    """These files with their sizes."""
    try:
        files = [_with_size(path, path.relative_to(root).as_posix()) for path in paths]
    except OSError as error:  # it has vanished since
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    return Found(_plain(name), str(root), files)


def _plain(name: str) -> str:
    """A name that can be that of a file."""
    return re.sub(r"[^\w.-]", "_", name) or "text"


def _with_size(path: Path, relative: str) -> FoundFile:
    status = path.stat()
    return FoundFile(str(path), relative, status.st_size, status.st_mtime_ns)


def with_companions(file: FoundFile) -> list[FoundFile]:
    """A file and those that are read with it.

    They are Megatron's index of a .bin, and datatrove's index and description of a .ds.
    """
    path = Path(file.path)
    names = []
    if path.suffix == ".bin":
        names = [path.with_suffix(".idx").name]
    elif path.suffix == ".ds":
        names = [path.name + suffix for suffix in DATATROVE_COMPANIONS]
    relative = PurePosixPath(file.relative)
    files = [file]
    for name in names:
        if path.with_name(name).is_file():
            files.append(_with_size(path.with_name(name), str(relative.with_name(name))))
    return files


def versions(files: Iterable[FoundFile]) -> list[tuple[str, int, int]]:
    """Lists (relative path, size, time) of all files that are read: these, and their companions."""
    listed = {file.path: file for file in files}
    for file in list(listed.values()):
        for companion in with_companions(file):
            listed.setdefault(companion.path, companion)
    return [(file.relative, file.size, file.mtime_ns) for file in listed.values()]


def version_of(files: Iterable[FoundFile]) -> str:
    """A hash that changes when one of these files does."""
    identity = json.dumps([file[1:] for file in files])  # without the absolute path
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _standard_library(keys: Keys) -> Found:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NO_CORPUS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    found = _found("stdlib", root, sorted(files))
    if sum(file.size for file in found.files) < 1_000_000:
        raise ConfigError(
            f"the default corpus is the source of Python's standard library, but {root} has only "
            f"{len(files)} .py files (a stripped or frozen interpreter); "
            f"set {keys.path} to a text file or folder"
        )
    return found


def _hub(path: str, keys: Keys) -> Found:
    """A data set of the package `datasets`.

    A local folder is identified by its files, any other by its name.
    """
    name = path.removeprefix(HUB).split(":")[0]
    if not name:
        raise ConfigError(
            f"{keys.path} = {path!r}: has no name; expected {HUB}NAME[:CONFIG[:SPLIT]]"
        )
    if name.startswith((".", "/")) and not Path(name).is_dir():
        raise ConfigError(f"{keys.path} = {path!r}: no such folder")
    files = hub_files(path) or [FoundFile(path, path, 1, 0)]
    return Found(_plain(Path(name).name), path, files)


def hub_files(path: str) -> list[FoundFile]:
    """The files of a data set in a local folder; none of one on the Hub."""
    folder = Path(path.removeprefix(HUB).split(":")[0])
    if not folder.is_dir():
        return []
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return _found(folder.name, folder, files).files
