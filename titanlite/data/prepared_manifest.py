"""The manifest of a prepared folder: reads it and checks every field.

What it is: `manifest.json` lists the shards of both splits with their sizes and hashes, the
tokenizer (its hash and size), the type of the ids, and the source. It is read here once per node,
before the files are verified.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.runtime.documents import read_json
from titanlite.runtime.errors import ConfigError, reason_of

FORMAT = 2  # the version of prepared folders
AGAIN = "delete the folder to prepare the data again"
MANIFEST_BYTES = 1 << 26  # a longer manifest is an error
SHA256 = re.compile("[0-9a-f]{64}")
FILE_NAME = re.compile(r"(train|validation)-\d{5,9}(\.starts|\.mask)?\.bin")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the smallest unsigned type that can store every id."""
    return np.dtype("<u2" if vocab_size <= 65_536 else "<u4")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads and checks the manifest of a prepared folder.

    Raises ConfigError if it cannot be read or a field is invalid.
    """
    path = folder / "manifest.json"
    try:
        manifest: dict[str, Any] = read_json(path, MANIFEST_BYTES)
        field = _invalid_field(manifest)
        if field:
            raise ConfigError(f"{path}: invalid {field}; {AGAIN}")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{folder}: not a prepared folder: it has no manifest.json") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; expected the manifest of a prepared folder"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path}: not a manifest of prepared data ({reason_of(error)}); {AGAIN}"
        ) from None
    return manifest


def _invalid_field(manifest: dict[str, Any]) -> str:
    """Names the first field that `prepare` cannot have written.

    Raises KeyError and the like if a field is absent.
    """
    if manifest["format"] != FORMAT:
        return f"format {manifest['format']!r}, expected {FORMAT}"
    splits = [manifest["splits"][name] for name in ("train", "validation")]
    shards = [shard for split in splits for shard in split["shards"]]
    files = list[dict[str, Any]]()
    for shard in shards:
        files += [entry for entry in (shard, shard["starts"], shard["mask"]) if entry is not None]
    size = manifest["tokenizer"]["size"]
    names = [entry["file"] for entry in files]
    rows = manifest["rows"]

    checks = {
        "name": isinstance(manifest["name"], str) and manifest["name"].isprintable(),
        "splits": set(manifest["splits"]) == {"train", "validation"},
        "starts": all(shard["starts"] is not None for shard in shards),
        "count": all(_is_count(count) for count in _counts(manifest, splits, shards)),
        "SHA-256": all(SHA256.fullmatch(digest) for digest in _hashes(manifest, files)),
        "file name": all(FILE_NAME.fullmatch(name) for name in names),
        "file name, twice": len(set(names)) == len(names),
        "dtype": manifest["dtype"] == token_dtype(size).str,
        "rows": (
            _is_count(rows["rows"]) and _is_count(rows["bad"]) and _are_texts(rows["examples"])
        ),
        "duplicates": _is_count(manifest["duplicates"]),
        "roots": _are_texts(manifest["roots"]),
        "tokenizer": isinstance(manifest["tokenizer"]["file"], str),
        "number of tokens": all(_has_total(split, "tokens") for split in splits),
        "number of documents": all(_has_total(split, "documents") for split in splits),
    }
    for name, valid in checks.items():
        if not valid:
            return name
    return ""


def _counts(
    manifest: dict[str, Any], splits: list[dict[str, Any]], shards: list[dict[str, Any]]
) -> list[object]:
    """Lists all fields that are counts."""
    counts = [manifest["bytes"], manifest["files"], manifest["tokenizer"]["size"]]
    for entry in (*splits, *shards):
        counts += [entry["tokens"], entry["documents"]]
    counts += [split["bytes"] for split in splits]
    return counts


def _hashes(manifest: dict[str, Any], files: list[dict[str, Any]]) -> list[str]:
    """Lists all fields that are a SHA-256."""
    hashes = [manifest["fingerprint"], manifest["tokenizer"]["sha256"]]
    return hashes + [entry["sha256"] for entry in files]


def _has_total(split: dict[str, Any], name: str) -> bool:
    """Whether a split's number of tokens or documents is the sum over its shards."""
    return bool(split[name] == sum(shard[name] for shard in split["shards"]))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
