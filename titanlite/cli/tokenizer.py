"""`titanlite tokenizer train`: trains a byte-pair encoding."""

from __future__ import annotations

import argparse
from pathlib import Path

from titanlite.cli.options import at_least
from titanlite.config.schema import ConfigError, DataConfig


def run(argv: list[str]) -> int:
    """Trains an encoding on text files and writes a rank file."""
    parser = argparse.ArgumentParser(prog="titanlite tokenizer", description="Byte-pair encodings.")
    commands = parser.add_subparsers(dest="command", required=True)
    trainer = commands.add_parser("train", help="train one and write it as a tiktoken rank file")
    trainer.add_argument("output", type=Path, help="the file to write")
    trainer.add_argument(
        "--num-tokens", type=at_least(int, 256), default=4096, help="tokens in the file (default 4096)"
    )
    trainer.add_argument(
        "--data-path", default="", help="a text file or folder; default: the standard library's source"
    )
    trainer.add_argument(
        "--data-pattern", default="**/*", help="glob pattern of the files to use from the folder (default **/*)"
    )
    options = parser.parse_args(argv)
    if options.output.exists():
        raise ConfigError(f"{options.output} exists already; delete it or choose another file")
    if not options.output.parent.is_dir():
        raise ConfigError(f"{options.output.parent}: no such folder")

    from titanlite.data.bpe import train_bpe, write_rank_file
    from titanlite.data.prepare import find_text
    from titanlite.data.tokenise import read_texts

    _, root, files = find_text(DataConfig(path=options.data_path, pattern=options.data_pattern))
    print(f"counting words in {len(files)} files of {root}", flush=True)
    tokens = train_bpe(read_texts(files), options.num_tokens)
    try:
        write_rank_file(tokens, options.output)
    except OSError as error:
        raise ConfigError(f"{options.output}: {error.strerror or error}") from None
    fewer = (
        f" ({options.num_tokens} requested, but the text has no more pairs)" if len(tokens) < options.num_tokens else ""
    )
    print(f"wrote {len(tokens)} tokens{fewer} to {options.output}; train with --data.tokenizer={options.output}")
    return 0
