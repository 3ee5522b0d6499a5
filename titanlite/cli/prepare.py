"""`titanlite prepare`: tokenises the text of a configuration into the cache."""

from __future__ import annotations

from titanlite.cli.options import wants_help
from titanlite.config.load import load_config
from titanlite.data.prepare import prepare
from titanlite.data.tokenizer import Tokenizer


def run(argv: list[str]) -> int:
    """Prints the path of the prepared data."""
    if not wants_help(argv):
        section = load_config(argv).data
        print(prepare(section, Tokenizer(section.tokenizer)))
    return 0
