"""Finds a chat template in a file of its own or in tokenizer_config.json."""

from __future__ import annotations

from pathlib import Path

from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError, reason_of
from titanlite.runtime.files import read_bounded
from titanlite.tokenizer.tokenizer_json import JSON_FILES, TEMPLATE_FILE

MAX_TEMPLATE = 1 << 22  # bytes of its file


def read_template(path: Path) -> str:
    """Reads a template from a file. Raises ConfigError, also for an empty file."""
    template = _read(path)
    if not template.strip():
        raise ConfigError(f"{path}: the file is empty; expected a chat template")
    return template


def _read(path: Path) -> str:
    try:
        return read_bounded(path, MAX_TEMPLATE).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {reason}; expected a chat template") from None


def find_template(tokenizer: Path) -> str:
    """The template beside a tokenizer's file, or in its folder; "" if there is none.

    Raises ConfigError.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    if (folder / TEMPLATE_FILE).is_file():
        return read_template(folder / TEMPLATE_FILE)
    path = folder / JSON_FILES[1]
    if not path.is_file():
        return ""
    try:
        template = parse_json(_read(path)).get("chat_template") or ""
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}["default"]
        if not isinstance(template, str):
            raise ValueError(f"expected text, found {type(template).__name__}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: chat_template: {reason_of(error)}") from None
    return template
