"""The prepared data of a run: where it is, and whether it fits the run's tokenizer.

What it is: the launcher finds or makes the folder, once for all processes of a node, and passes its path to them. So
the text itself, which may be a hundred thousand files, is looked for once per node.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from titanlite.config.schema import LAUNCHED, ConfigError, DataConfig
from titanlite.data.shards import AGAIN, Tokens, read_manifest
from titanlite.data.tokenizer import Tokenizer


def prepared_folder(section: DataConfig, tokenizer: Tokenizer, log: Callable[[str], None]) -> Path:
    """The folder of prepared data for a config: from the launcher, or found or made by this process.

    Raises ConfigError as `prepare` does.
    """
    if LAUNCHED in os.environ:
        return Path(os.environ[LAUNCHED])
    from titanlite.data.prepare import prepare  # without the launcher

    return prepare(section, tokenizer, log)


class PreparedData:
    """A folder that `prepare` made: its manifest, the tokenizer it was made with, and the tokens of its splits."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Raises ConfigError if the manifest cannot be read, or names another tokenizer."""
        self.folder, self.tokenizer, self.manifest = folder, tokenizer, read_manifest(folder)
        if (found := self.manifest["tokenizer"]["sha256"]) != tokenizer.sha256:
            raise ConfigError(
                f"{folder}: was prepared with a tokenizer of SHA-256 {found[:8]}, not {tokenizer.path}; {AGAIN}"
            )
        self.name: str = self.manifest["name"]
        self.fingerprint: str = self.manifest["fingerprint"]

    def tokens(self, split: str) -> Tokens:
        """The tokens of `train` or `validation`."""
        return Tokens(self.folder, self.manifest, split)
