"""`titanlite tokenizer`: trains, describes and uses a byte-pair encoding.

Each action imports the readers of text and tokenizers that it needs, so `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.runtime.errors import ConfigError, printable
from titanlite.tools.cli.options import StrictParser, at_least

UNLIMITED = 1 << 40  # stands for no limit in a format that must have one


def run(argv: list[str]) -> int:
    """Runs the command; returns 0. Raises ConfigError."""
    options = _options(argv)
    commands = {"train": _train, "info": _info, "encode": _encode, "decode": _decode}
    return commands[options.command](options)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = StrictParser(prog="titanlite tokenizer", description="Byte-pair encodings.")
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
        "--json",
        type=Path,
        metavar="FOLDER",
        help="also write tokenizer.json and tokenizer_config.json into this new folder, for "
        "transformers",
    )
    train.add_argument(
        "--fast",
        action="store_true",
        help="on all cores, by the package tokenizers",
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
            help="a tiktoken rank file, a tokenizer.json, or a folder with one of them; "
            '"": the bundled one',
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
    if options.json and options.json.exists():
        raise ConfigError(f"--json {options.json}: exists already; name a new folder")
    for path in (options.output, options.json or options.output):
        if not path.parent.is_dir():
            raise ConfigError(f"{path.parent}: no such folder")

    from titanlite.runtime.files import replace_file
    from titanlite.tokenizer.bpe import train_bpe, train_bpe_fast, write_rank_file
    from titanlite.tokenizer.tokenizer import Tokenizer
    from titanlite.tools.formats.huggingface_tokenizer import to_files
    from titanlite.tools.prepare.plan_job import text_files
    from titanlite.tools.prepare.sources import Keys, Source, find
    from titanlite.tools.prepare.text_files import read_texts

    source = Source(
        options.data_path, options.data_pattern, keys=Keys("--data-path", "--data-pattern")
    )
    found = find(source)
    print(f"counting words in {len(found.files)} files of {found.root}", flush=True)
    texts = read_texts(text_files(source, found))
    if options.fast:
        tokens = train_bpe_fast(texts, options.num_tokens)
    else:
        tokens = train_bpe(texts, options.num_tokens)
    try:
        write_rank_file(tokens, options.output)
        if options.json:
            options.json.mkdir()
            for name, content in to_files(Tokenizer(options.output), UNLIMITED).items():
                replace_file(options.json / name, content)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or options.output}: {error.strerror or error}"
        ) from None
    fewer = ""
    if len(tokens) < options.num_tokens:
        fewer = f" ({options.num_tokens} requested, but the text has no more pairs)"
    advice = f"train with --data.tokenizer={options.output}"
    print(f"wrote {len(tokens)} tokens{fewer} to {options.output}; {advice}")
    return 0


def _info(options: argparse.Namespace) -> int:
    from titanlite.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer(options.tokenizer)
    names = {i: name for name, i in tokenizer.special.items()}
    special = [f"{names[i]} {i}" for i in sorted(names)[:8]]
    if len(names) > 8:
        special.append(f"and {len(names) - 8} more")
    notes = []
    if tokenizer.nfc:
        notes.append("text is normalised to NFC")
    if tokenizer.ids:
        notes.append("the ids are not in the order of the merges")
    if tokenizer.unmade:
        notes.append(f"{tokenizer.unmade} tokens that no merges make")
    form = "a tiktoken rank file" if len(tokenizer.files) == 1 else "a tokenizer.json"
    counts = f"{len(tokenizer.tokens):,} tokens of text, {len(names):,} special"
    longest = max(tokenizer.token_bytes)
    bos = f"{names[tokenizer.bos]} ({tokenizer.bos})"
    eos = f"{names[tokenizer.eos]} ({tokenizer.eos})"
    rows = {
        "file": f"{tokenizer.path} (SHA-256 {tokenizer.sha256[:16]})",
        "kind": f"byte-level BPE of {form}",
        "ids": f"{tokenizer.size:,}: {counts}; the longest has {longest} bytes",
        "documents": f"begin with {bos}, end with {eos}",
        "special": ", ".join(special),
        "pattern": tokenizer.pattern,
        "notes": "; ".join(notes),
    }
    if options.file:
        text = _read(options.file)
        size = len(text.encode())
        count = len(tokenizer.encode(text))
        ratio = f"{size / max(1, count):.3f} bytes per token"
        rows["text"] = f"{options.file}: {size:,} bytes, {count:,} tokens, {ratio}"
    for name, row in rows.items():
        if row:
            print(f"{name:<10} {printable(row)}")
    return 0


def _encode(options: argparse.Namespace) -> int:
    from titanlite.tokenizer.tokenizer import Tokenizer

    if options.text is not None and options.file:
        raise ConfigError(f"--file {options.file}: a text is given too; give one of them")
    tokenizer = Tokenizer(options.tokenizer)
    text = options.text
    if text is None:
        text = _read(options.file)
    print(*tokenizer.encode(text))
    return 0


def _decode(options: argparse.Namespace) -> int:
    from titanlite.tokenizer.tokenizer import Tokenizer
    from titanlite.tools.cli.text_stream import write_text

    tokenizer = Tokenizer(options.tokenizer)
    words = options.ids or _read(None).split()
    for word in words:
        is_number = word.isascii() and word.isdecimal() and len(word) < 20
        if not is_number or int(word) >= tokenizer.size:
            raise ConfigError(
                f"{word[:40]!r}: expected ids, integers from 0 to {tokenizer.size - 1}"
            )
    write_text(tokenizer.decode(map(int, words)))
    if sys.stdout.isatty():
        print()
    return 0


def _read(path: Path | None) -> str:
    """Reads a file, or standard input, and keeps its line ends.

    Raises ConfigError if it is not UTF-8.
    """
    try:
        content = path.read_bytes() if path else sys.stdin.buffer.read()
        return content.decode()
    except OSError as error:
        raise ConfigError(f"--file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path or 'standard input'}: not UTF-8 text ({error.reason})") from None
