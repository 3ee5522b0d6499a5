"""The command `titanlite`.

What it is: one function per subcommand. torch is imported only by those that compute, so the others answer at once.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from titanlite.config import EXIT_CONFIG, ConfigError, Data

USAGE = """usage: titanlite COMMAND ...

  train [CONFIG] [--section.key=value ...]       train (what ./run_train.sh calls); --help lists every key
  config [CONFIG] [--section.key=value ...]      check a configuration and print it in full, as TOML
  prepare [CONFIG] [--section.key=value ...]     tokenise the text of a configuration into the cache
  verify [CONFIG] [--quick] [--processes N]      show that every parallel layout computes what one process computes
  generate CHECKPOINT [--prompt TEXT]            sample text from a checkpoint of any format
  convert SOURCE TARGET [--to FORMAT]            write a checkpoint in another format, and check it
  checkpoint list|verify|show|diff|prune ...     what lies in a run's folder, and whether it is whole
  tokenizer train OUTPUT [--data-path PATH]      train a byte-pair encoding

`titanlite COMMAND --help` tells more."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code: 0, or 2 for wrong input."""
    arguments = sys.argv[1:] if argv is None else argv
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 still shows the text
    commands: dict[str, Callable[[list[str]], int]]
    commands = {"train": train, "config": config, "prepare": prepare, "verify": verify, "generate": generate}
    commands |= {"checkpoint": checkpoint, "convert": convert, "tokenizer": tokenizer}
    try:
        if name not in commands:
            from titanlite.spelling import suggestion

            raise ConfigError(f"unknown command {name!r}{suggestion(name, list(commands))}\n{USAGE}")
        return commands[name](rest)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _wants_help(argv: list[str]) -> bool:
    from titanlite.config_text import help_text

    if wanted := bool({"-h", "--help"} & set(argv)):
        print(help_text())
    return wanted


def train(argv: list[str]) -> int:
    if _wants_help(argv):
        return 0
    from titanlite.launch import launch

    return launch(argv)


def config(argv: list[str]) -> int:
    if _wants_help(argv):
        return 0
    from titanlite.config_text import to_toml
    from titanlite.configure import load_config

    print(to_toml(load_config(argv)), end="")
    return 0


def prepare(argv: list[str]) -> int:
    if _wants_help(argv):
        return 0
    from titanlite.configure import load_config
    from titanlite.data import prepare as data
    from titanlite.data.tokenizer import Tokenizer

    section = load_config(argv).data
    print(data.prepare(section, Tokenizer(section.tokenizer)))
    return 0


def verify(argv: list[str]) -> int:
    from titanlite.verify.command import verify as run

    return run(argv)


def _generate_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="titanlite generate",
        description="Sample text from a checkpoint.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("path", type=Path, help="a run's folder (its newest checkpoint), or whatever `convert` reads")
    parser.add_argument("--step", type=_at_least(int, 0), help="which checkpoint of a run; if not given, the newest")
    parser.add_argument("--model", default="", help="flavor or model.json, for files that do not tell the shape")
    parser.add_argument("--tokenizer", default="", help="rank file, for files that hold no tokenizer")
    parser.add_argument("--prompt", default="def", help="text to continue")
    parser.add_argument(
        "--max-new-tokens",
        type=_at_least(int, 0, 10**6),
        default=0,
        help="stop after so many; 0: at the trained length",
    )
    parser.add_argument("--temperature", type=_at_least(float, 0), default=0.7, help="0: always the likeliest token")
    parser.add_argument(
        "--top-k", type=_at_least(int, 0), default=50, help="choose among the k likeliest; 0: among all"
    )
    parser.add_argument(
        "--seed", type=_at_least(int, 0, 2**63 - 1), default=0, help="the same seed gives the same text"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    return parser.parse_args(argv)


def generate(argv: list[str]) -> int:
    options = _generate_options(argv)
    import torch

    from titanlite.checkpoint.load import load_model, open_verified, tokenizer_of
    from titanlite.model.generate import generate as sample

    full = open_verified(options.path, options.step, options.model)
    cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device; allowed: auto, cpu")
    encoder = tokenizer_of(full, options.tokenizer)
    prompt = [encoder.bos, *encoder.encode(options.prompt)]
    trained = full.about.seq_len
    if not trained and not options.max_new_tokens:
        raise ConfigError(f"{full.path}: does not tell the length it was trained on; give --max-new-tokens")
    room = options.max_new_tokens or max(1, trained - len(prompt))
    model = load_model(full, torch.device("cuda" if cuda else "cpu"), len(prompt) + room)
    note = (
        f"; beyond {trained} tokens the text is longer than what it was trained on"
        if len(prompt) + room > trained > 0
        else ""
    )
    print(f"{full.path}: {model.config.num_parameters:,} parameters{note}", file=sys.stderr)
    new = sample(
        model,
        prompt,
        room,
        stop=encoder.eos,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    print(options.prompt, end="", flush=True)
    ids, shown = [], ""
    for token in new:
        ids.append(token)
        text = encoder.decode(ids)
        if not text.endswith("\ufffd"):  # a character may be several tokens: wait for the rest
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(encoder.decode(ids)[len(shown) :])
    return 0


def convert(argv: list[str]) -> int:
    from titanlite.checkpoint.convert_command import run

    return run(argv)


def checkpoint(argv: list[str]) -> int:
    from titanlite.checkpoint.command import run

    return run(argv)


def tokenizer(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="titanlite tokenizer", description="Byte-pair encodings.")
    commands = parser.add_subparsers(dest="command", required=True)
    trainer = commands.add_parser("train", help="train one and write it as a tiktoken rank file")
    trainer.add_argument("output", type=Path, help="the file to write")
    trainer.add_argument(
        "--num-tokens", type=_at_least(int, 256), default=4096, help="tokens in the file (default 4096)"
    )
    trainer.add_argument(
        "--data-path", default="", help="a text file or folder; default: the standard library's source"
    )
    trainer.add_argument("--data-pattern", default="**/*", help="which files of the folder (default **/*)")
    options = parser.parse_args(argv)
    if options.output.exists():
        raise ConfigError(f"{options.output} exists already; delete it first or name another file")
    if not options.output.parent.is_dir():
        raise ConfigError(f"{options.output.parent}: no such folder")

    from titanlite.data.bpe import train_bpe, write_rank_file
    from titanlite.data.prepare import find_text, read_texts

    _, root, files = find_text(Data(path=options.data_path, pattern=options.data_pattern))
    print(f"counting words in {len(files)} files of {root}", flush=True)
    tokens = train_bpe(read_texts(files), options.num_tokens)
    try:
        write_rank_file(tokens, options.output)
    except OSError as error:
        raise ConfigError(f"{options.output}: {error.strerror or error}") from None
    fewer = (
        f" (asked for {options.num_tokens}, but the text has no more pairs)" if len(tokens) < options.num_tokens else ""
    )
    print(f"wrote {len(tokens)} tokens{fewer} to {options.output}; train with --data.tokenizer={options.output}")
    return 0


def _at_least(kind: Callable[[str], float], low: float, high: float = sys.float_info.max) -> Callable[[str], float]:
    """An argparse type: a number with bounds."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{text}: expected at least {low}" + (f", at most {high}" if high < 1e300 else "")
            )
        return value

    return convert
