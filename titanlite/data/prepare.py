"""Finds the text of a run, and its tokenised form in the cache.

What it is: the text files that `[data]` names, and the cache folder that belongs to these files and this tokenizer.
Text is tokenised once (`tokenise.py`) and not in every run. Without `data.path` the text is the source of the running
interpreter's standard library: Python code with English documentation, which every machine has.
Before it is used it is verified (`verify.py`), once for each version of its files.
What it costs: the launcher of each node reads the size and the time of modification of each file at every start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from titanlite.config.files import NO_LOCKS, make_folder
from titanlite.config.schema import ConfigError, DataConfig
from titanlite.data.shards import AGAIN, FORMAT, read_manifest, unverified
from titanlite.data.tokenizer import Tokenizer

Text = tuple[str, Path, list[Path]]  # the name of a set of text, its root, and its files in a fixed order
NO_CORPUS = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


def prepare(
    section: DataConfig, tokenizer: Tokenizer, log: Callable[[str], None] = print, found: Text | None = None
) -> Path:
    """The folder of prepared data for a config; prepares it if it does not exist, and verifies what has changed.

    `found`: the result of `find_text`, if that has been called.
    Raises ConfigError with the path of text that is missing, empty or not UTF-8, or of damaged data.
    """
    name, root, files = found or find_text(section)
    given = section.cache or os.environ.get("TITANLITE_CACHE")
    cache = Path(given) if given else Path.home() / ".cache/titanlite"
    try:
        stats = [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    except OSError as error:  # it has vanished since
        raise ConfigError(f"data.path: {error.filename}: {error.strerror}") from None
    identity = json.dumps([FORMAT, str(root), tokenizer.sha256, stats])
    folder = cache / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not (folder / "manifest.json").exists():
        with _lock(cache, folder.name):
            if not (folder / "manifest.json").exists():
                if folder.exists():
                    raise ConfigError(f"{folder}: has no manifest.json; {AGAIN}")
                from titanlite.data.tokenise import tokenise  # once per text: other runs do without it

                try:
                    tokenise(name, root, files, tokenizer, folder, log)
                except OSError as error:
                    where = "" if error.filename is None else f"{error.filename}: "
                    raise ConfigError(f"{where}{error.strerror or error}, while the data was prepared") from None
    manifest = read_manifest(folder)
    if unverified(folder, manifest):
        from titanlite.data.verify import verify  # once per version of the files

        with _lock(cache, folder.name, required=False):
            if names := unverified(folder, manifest):
                verify(folder, manifest, names)
    return folder


@contextlib.contextmanager
def _lock(cache: Path, name: str, required: bool = True) -> Iterator[None]:
    """One of several processes prepares or verifies a folder, the others wait for it.

    Raises ConfigError if the lock is `required` and the cache cannot be written; another user may own it.
    """
    with contextlib.ExitStack() as stack:
        try:
            make_folder(cache)
            lock = stack.enter_context((cache / f".{name}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if required and error.errno not in NO_LOCKS:
                raise ConfigError(f"data.cache = {str(cache)!r}: {error}; expected a writable folder") from None
        yield


def find_text(section: DataConfig) -> Text:
    """The text that a config names."""
    if not section.path:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = []
        for where, folders, names in os.walk(root):
            folders[:] = [f for f in folders if f not in NO_CORPUS]
            files += [Path(where, n) for n in names if n.endswith(".py")]
        if sum(p.stat().st_size for p in files) < 1_000_000:
            raise ConfigError(
                f"the default corpus is the source of Python's standard library, but {root} has only {len(files)} "
                ".py files (a stripped or frozen interpreter); set data.path to a text file or folder"
            )
        return "stdlib", root, sorted(files)
    try:
        path = Path(section.path).resolve()
        if path.is_file():
            if not path.stat().st_size:
                raise ConfigError(f"data.path = {section.path!r}: the file is empty")
            return _set_name(path), path.parent, [path]
        if not path.is_dir():
            raise ConfigError(f"data.path = {section.path!r}: no such file or folder")
    except (OSError, RuntimeError) as error:  # the name is too long, or a link points to itself
        raise ConfigError(f"data.path = {section.path!r}: {error}") from None
    try:
        files = [p for p in path.glob(section.pattern) if p.is_file()]
    except (ValueError, IndexError, NotImplementedError) as error:
        raise ConfigError(
            f"data.pattern = {section.pattern!r}: {error}; expected a glob pattern such as **/*.txt"
        ) from None
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if not files:
        raise ConfigError(f"data.path = {section.path!r}: no file matches data.pattern = {section.pattern!r}")
    if not any(p.stat().st_size for p in files):
        raise ConfigError(f"data.path = {section.path!r}: its {len(files)} files are empty")
    return _set_name(path), path, sorted(files)


def _set_name(path: Path) -> str:
    """The name of a set of text in metrics and in the cache."""
    return re.sub(r"[^\w.-]", "_", path.stem) or "text"
