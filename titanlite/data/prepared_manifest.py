"""The manifest of a prepared folder: read and checked, field by field.

What it is: `manifest.json` lists the shards of both splits with their sizes and hashes, the
tokenizer (its hash and size), the type of the ids, and the source. It is read here once per node,
before the files are verified.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded

FORMAT = 2  # of a prepared folder
AGAIN = "delete the folder to prepare the data again"
MANIFEST_BYTES = 1 << 26


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that can store every id."""
    return np.dtype("<u2" if vocab_size <= 65_536 else "<u4")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder.

    Raises ConfigError if it cannot be read or a field is not what it must be.
    """
    path = folder / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(read_bounded(path, MANIFEST_BYTES))
        field = _invalid_field(manifest)
        if field:
            raise ConfigError(f"{path}: invalid {field}; {AGAIN}")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{folder}: not a prepared folder: it has no manifest.json") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; expected the manifest of a prepared folder"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path}: not a manifest of prepared data ({type(error).__name__}); {AGAIN}"
        ) from None
    return manifest


def _invalid_field(manifest: dict[str, Any]) -> str:
    """The first field that is not what `prepare` writes.

    Raises KeyError and the like if one is absent.
    """
    if manifest["format"] != FORMAT:
        return f"format {manifest['format']!r}, expected {FORMAT}"
    splits = [manifest["splits"][name] for name in ("train", "validation")]
    shards = [shard for split in splits for shard in split["shards"]]
    files = [
        entry
        for shard in shards
        for entry in (shard, shard["starts"], shard["mask"])
        if entry is not None
    ]
    size = manifest["tokenizer"]["size"]
    counts = [manifest["bytes"], manifest["files"], size]
    counts += [entry[name] for entry in (*splits, *shards) for name in ("tokens", "documents")]
    counts += [split["bytes"] for split in splits]
    hashes = [
        manifest["fingerprint"],
        manifest["tokenizer"]["sha256"],
        *(entry["sha256"] for entry in files),
    ]
    pattern = r"(train|validation)-\d{5,9}(\.starts|\.mask)?\.bin"
    checks = {
        "name": isinstance(manifest["name"], str) and manifest["name"].isprintable(),
        "splits": set(manifest["splits"]) == {"train", "validation"},
        "starts": all(shard["starts"] is not None for shard in shards),
        "count": all(map(_is_count, counts)),
        "SHA-256": all(re.fullmatch("[0-9a-f]{64}", digest) for digest in hashes),
        "file name": all(re.fullmatch(pattern, entry["file"]) for entry in files),
        "file name, twice": len({entry["file"] for entry in files}) == len(files),
        "dtype": manifest["dtype"] == token_dtype(size).str,
    }
    rows = manifest["rows"]
    filters = manifest["filters"]
    checks["rows"] = (
        _is_count(rows["rows"]) and _is_count(rows["bad"]) and _are_texts(rows["examples"])
    )
    checks["filters"] = _is_report(filters) and all(
        _is_report(rule, of_rule=True) for rule in filters["rules"].values()
    )
    checks["roots"] = _are_texts(manifest["roots"])
    checks["tokenizer"] = isinstance(manifest["tokenizer"]["file"], str)
    for name in ("tokens", "documents"):
        checks[f"number of {name}"] = all(
            split[name] == sum(s[name] for s in split["shards"]) for split in splits
        )
    return next((name for name, valid in checks.items() if not valid), "")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _is_report(report: Any, of_rule: bool = False) -> bool:
    """Whether this is what was dropped (`tools/prepare/filter_report.py`): by all rules, or by one."""
    names = {"documents", "bytes", "examples" if of_rule else "rules"}
    if set(report) != names or not (_is_count(report["documents"]) and _is_count(report["bytes"])):
        return False
    examples = report["examples"] if of_rule else []
    return isinstance(examples, list) and all(
        set(e) == {"file", "row", "text"}
        and _are_texts([e["file"], e["text"]])
        and _is_count(e["row"])
        for e in examples
    )
