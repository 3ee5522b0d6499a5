"""The prepared data of a run: its sources, and whether they fit the run's tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from titanlite.config.schema import DataConfig
from titanlite.data.shards import Tokens
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import ConfigError


def load_sources(
    section: DataConfig, folders: list[Path], tokenizer: Tokenizer
) -> list[PreparedData]:
    """The data of each source, with its name and weight, in these folders.

    Raises what `PreparedData` does.
    """
    pairs = zip(folders, section.all_sources(), strict=True)
    return [PreparedData(folder, tokenizer, source.name, source.weight) for folder, source in pairs]


class PreparedData:
    """A folder that `prepare` made: its manifest, the tokenizer it was made with, and the tokens of
    its splits.

    `prepare` has read the manifest and verified the files just before, in this process or in the
    launcher.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, name: str = "", weight: float = 1.0
    ) -> None:
        """`name`: "" is the manifest's.

        Raises ConfigError if the manifest names another tokenizer.
        """
        self.folder = folder
        self.tokenizer = tokenizer
        self.weight = weight
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
        found = self.manifest["tokenizer"]["sha256"]
        if found != tokenizer.sha256:
            raise ConfigError(
                f"{folder}: was prepared with a tokenizer of SHA-256 {found[:8]}, not with {tokenizer.path} "
                f"({tokenizer.sha256[:8]}); set data.tokenizer to the former, or prepare the data again"
            )
        self.name: str = name or self.manifest["name"]
        self.fingerprint: str = self.manifest["fingerprint"]

    def tokens(self, split: str) -> Tokens:
        """The tokens of `train` or `validation`."""
        return Tokens(self.folder, self.manifest, split)


def fingerprint_of(data: list[PreparedData]) -> str:
    """The fingerprint of all sources together; that of a single one is its own."""
    texts = [part.fingerprint for part in data]
    return texts[0] if len(texts) == 1 else hashlib.sha256(" ".join(texts).encode()).hexdigest()


def description(data: list[PreparedData]) -> bytes:
    """The file data.json of a checkpoint: a source's manifest; of several sources also their names
    and weights.
    """
    if len(data) == 1:
        return (data[0].folder / "manifest.json").read_bytes()
    entries = [
        {"name": part.name, "weight": part.weight, "manifest": part.manifest} for part in data
    ]
    return json.dumps({"sources": entries}).encode()
