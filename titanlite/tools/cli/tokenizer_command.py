"""`titanlite tokenizer`: trains a byte-pair encoding, describes one, and encodes and decodes with
one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.runtime.errors import ConfigError, printable
from titanlite.tools.cli.options import at_least


def run(argv: list[str]) -> int:
    options = _options(argv)
    return {"train": _train, "info": _info, "encode": _encode, "decode": _decode}[options.command](
        options
    )


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="titanlite tokenizer", description="Byte-pair encodings.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train one and write it as a tiktoken rank file")
    train.add_argument("output", type=Path, help="the file to write")
    train.add_argument(
        "--num-tokens",
        type=at_least(int, 256),
        default=4096,
        help="tokens in the file (default 4096)",
    )
    train.add_argument(
        "--data-path",
        default="",
        help="a text file or folder; default: the standard library's source",
    )
    train.add_argument(
        "--data-pattern",
        default="**/*",
        help="glob pattern of the files in the folder (default **/*)",
    )
    train.add_argument(
        "--fast",
        action="store_true",
        help="on all cores, by the tokenizers package: titanlite[fast]",
    )
    for name, text in (
        ("info", "print what it is, and how many bytes of a text a token has"),
        ("encode", "print the ids of a text, without those that enclose a document"),
        ("decode", "print the text of ids"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "tokenizer",
            nargs="?" if name == "info" else None,
            default="",
            help='a tiktoken rank file, a tokenizer.json, or a folder with one of them; "": the bundled one',
        )
        if name != "decode":
            command.add_argument("--file", type=Path, help="a file with the text")
    commands.choices["encode"].add_argument(
        "text", nargs="?", help="the text; without it and --file: standard input"
    )
    commands.choices["decode"].add_argument(
        "ids", nargs="*", help="the ids; without any: standard input"
    )
    return parser.parse_args(argv)


def _train(options: argparse.Namespace) -> int:
    if options.output.exists():
        raise ConfigError(f"{options.output} exists already; delete it or choose another file")
    if not options.output.parent.is_dir():
        raise ConfigError(f"{options.output.parent}: no such folder")

    from titanlite.data.bpe import train_bpe, write_rank_file
    from titanlite.data.bpe_fast import train_bpe_fast
    from titanlite.tools.prepare.plan_job import text_files
    from titanlite.tools.prepare.sources import Keys, Source, find
    from titanlite.tools.prepare.text_files import read_texts

    source = Source(
        options.data_path, options.data_pattern, keys=Keys("--data-path", "--data-pattern")
    )
    found = find(source)
    print(f"counting words in {len(found.files)} files of {found.root}", flush=True)
    tokens = (train_bpe_fast if options.fast else train_bpe)(
        read_texts(text_files(source, found)), options.num_tokens
    )
    try:
        write_rank_file(tokens, options.output)
    except OSError as error:
        raise ConfigError(f"{options.output}: {error.strerror or error}") from None
    fewer = (
        f" ({options.num_tokens} requested, but the text has no more pairs)"
        if len(tokens) < options.num_tokens
        else ""
    )
    print(
        f"wrote {len(tokens)} tokens{fewer} to {options.output}; train with --data.tokenizer={options.output}"
    )
    return 0


def _info(options: argparse.Namespace) -> int:
    from titanlite.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(options.tokenizer)
    names = {i: name for name, i in tokenizer.special.items()}
    shown = [f"{names[i]} {i}" for i in sorted(names)[:8]] + (
        [f"and {len(names) - 8} more"] if len(names) > 8 else []
    )
    notes = [
        *(["text is normalised to NFC"] if tokenizer.nfc else []),
        *(["the ids are not in the order of the merges"] if tokenizer.ids else []),
        *([f"{tokenizer.unmade} tokens that no merges make"] if tokenizer.unmade else []),
    ]
    rows = {
        "file": f"{tokenizer.path} (SHA-256 {tokenizer.sha256[:16]})",
        "kind": "byte-level BPE of "
        + ("a tiktoken rank file" if len(tokenizer.files) == 1 else "a tokenizer.json"),
        "ids": f"{tokenizer.size:,}: {len(tokenizer.tokens):,} tokens of text, {len(names):,} special; "
        f"the longest has {max(tokenizer.token_bytes)} bytes",
        "documents": f"begin with {names[tokenizer.bos]} ({tokenizer.bos}), end with {names[tokenizer.eos]} "
        f"({tokenizer.eos})",
        "special": ", ".join(shown),
        "pattern": tokenizer.pattern,
        "notes": "; ".join(notes),
    }
    if options.file:
        text = _read(options.file)
        size = len(text.encode())
        count = len(tokenizer.encode(text))
        rows["text"] = (
            f"{options.file}: {size:,} bytes, {count:,} tokens, {size / max(1, count):.3f} bytes per token"
        )
    print("\n".join(f"{name:<10} {printable(row)}" for name, row in rows.items() if row))
    return 0


def _encode(options: argparse.Namespace) -> int:
    from titanlite.data.tokenizer import Tokenizer

    if options.text is not None and options.file:
        raise ConfigError(f"--file {options.file}: a text is given too; give one of them")
    tokenizer = Tokenizer(options.tokenizer)
    text = options.text if options.text is not None else _read(options.file)
    print(*tokenizer.encode(text))
    return 0


def _decode(options: argparse.Namespace) -> int:
    from titanlite.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(options.tokenizer)
    words = options.ids or _read(None).split()
    for word in words:
        if not (
            word.isascii() and word.isdecimal() and len(word) < 20 and int(word) < tokenizer.size
        ):
            raise ConfigError(
                f"{word[:40]!r}: expected ids, integers from 0 to {tokenizer.size - 1}"
            )
    print(tokenizer.decode(map(int, words)), end="\n" if sys.stdout.isatty() else "")
    return 0


def _read(path: Path | None) -> str:
    """The text of a file, or of standard input, with its line ends.

    Raises ConfigError if it is not UTF-8.
    """
    try:
        return (path.read_bytes() if path else sys.stdin.buffer.read()).decode()
    except OSError as error:
        raise ConfigError(f"--file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path or 'standard input'}: not UTF-8 text ({error.reason})") from None
