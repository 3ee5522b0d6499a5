"""Keeps the names of the lessons that were passed, in a small file of the user.

What it is: `learn.json` in the cache folder, a list of names. It can be deleted at any time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from titanlite.runtime.documents import read_json
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file
from titanlite.tools.learn.lessons import LESSONS

MAX_BYTES = 1 << 16


def progress_file() -> Path:
    """The path of the file, in the folder of prepared data."""
    given = os.environ.get("TITANLITE_CACHE")
    folder = Path(given) if given else Path.home() / ".cache/titanlite"
    return folder / "learn.json"


def passed_lessons() -> list[str]:
    """The names, in the order of the lessons. Raises ConfigError for a damaged file."""
    path = progress_file()
    try:
        content = read_json(path, MAX_BYTES)
    except FileNotFoundError:
        return []
    except ValueError:
        content = None
    if not isinstance(content, list):
        raise ConfigError(f"{path}: expected a list of lessons that were passed; delete the file")
    return [lesson.name for lesson in LESSONS if lesson.name in content]


def note_passed(name: str) -> None:
    """Adds a lesson."""
    names = {*passed_lessons(), name}
    path = progress_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = [lesson.name for lesson in LESSONS if lesson.name in names]
    replace_file(path, (json.dumps(ordered) + "\n").encode())
