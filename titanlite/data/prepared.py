"""The prepared data of a run: its folders, and whether they fit the run's tokenizer.

What it is: a source whose path is a prepared folder is opened here, after its files have been
verified (`verification.py`), so training on prepared data needs nothing of `tools/`. Text is
prepared by `tools/prepare`, into such a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from titanlite.config.schema import DataConfig
from titanlite.data.shards import Tokens
from titanlite.data.verification import verify_changed
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer

# Settings of a source of text
TEXT_DEFAULTS = {"pattern": "**/*", "field": "text", "ids": "auto", "validation": ""}


def is_prepared(folder: Path) -> bool:
    """Whether a path is a prepared folder, perhaps a damaged one.

    A prepared folder has a manifest and at least one shard.
    """
    with contextlib.suppress(OSError):
        shards = (*folder.glob("train-*.bin"), *folder.glob("validation-*.bin"))
        return (folder / "manifest.json").is_file() and bool(shards)
    return False


def open_prepared(section: DataConfig) -> Path | None:
    """Returns a single source's folder if it is prepared (see `DataConfig.parts`); None for text.

    Verifies the files that have changed. Raises ConfigError for damaged files, and for settings of
    text, which would have no effect.
    """
    (source,) = section.all_sources()
    if not source.path or not is_prepared(Path(source.path)):
        return None
    refuse_text_settings(section)
    folder = Path(source.path).absolute()
    verify_changed(folder)
    return folder


def refuse_text_settings(section: DataConfig) -> None:
    """Raises ConfigError for settings of text if the source is a prepared folder."""
    (source,) = section.all_sources()
    prefix = f"data.sources: {source.name}: " if source.name else "data."
    for name, default in TEXT_DEFAULTS.items():
        value = getattr(source, name)
        if value != default:
            raise ConfigError(
                f"{prefix}{name} = {value!r}: has no effect on {source.path}, which is prepared "
                "already; remove it, or set it for other sources alone"
            )


def load_sources(
    section: DataConfig, folders: list[Path], tokenizer: Tokenizer
) -> list[PreparedData]:
    """Opens the data of each source, with its name and weight, in these folders.

    Raises ConfigError, as `PreparedData` does.
    """
    return [
        PreparedData(folder, tokenizer, source.name, source.weight)
        for folder, source in zip(folders, section.all_sources(), strict=True)
    ]


class PreparedData:
    """A prepared folder: its manifest, the tokenizer it was made with, and its splits' tokens.

    The manifest has been checked and the files verified just before (`verify_changed`), in this
    process or in the launcher.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, name: str = "", weight: float = 1.0
    ) -> None:
        """`name`: "" stands for the manifest's name. Raises ConfigError if the folder was prepared
        with another tokenizer.
        """
        self.folder = folder
        self.tokenizer = tokenizer
        self.weight = weight
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
        used = self.manifest["tokenizer"]["sha256"]
        if used != tokenizer.sha256:
            raise ConfigError(
                f"{folder}: was prepared with a tokenizer of SHA-256 {used[:8]}, not with "
                f"{tokenizer.path} ({tokenizer.sha256[:8]}); set data.tokenizer to the former, or "
                "prepare the data again"
            )
        self.name: str = name or self.manifest["name"]
        self.fingerprint: str = self.manifest["fingerprint"]

    def tokens(self, split: str) -> Tokens:
        """Opens the tokens of `train` or `validation`."""
        return Tokens(self.folder, self.manifest, split)


def fingerprint_of(data: list[PreparedData]) -> str:
    """Combines the fingerprints of all sources; a single source keeps its own."""
    fingerprints = [part.fingerprint for part in data]
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()


def description(data: list[PreparedData]) -> bytes:
    """Builds data.json of a checkpoint.

    It has the manifest of the source; for several sources, also their names and weights.
    """
    if len(data) == 1:
        return (data[0].folder / "manifest.json").read_bytes()
    entries = [
        {"name": part.name, "weight": part.weight, "manifest": part.manifest} for part in data
    ]
    return json.dumps({"sources": entries}).encode()
