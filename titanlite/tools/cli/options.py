"""What several commands share: a parser, options of a checkpoint, numbers with bounds, output."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file
from titanlite.tools.formats.selection import Selection

if TYPE_CHECKING:
    import torch  # slow to import: not for the options alone


def at_least(
    kind: Callable[[str], float], low: float, high: float = sys.float_info.max
) -> Callable[[str], float]:
    """An argparse type: a number with bounds."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number") from None
        if not low <= value <= high:
            bounds = f"at least {low}"
            if high < 1e300:
                bounds += f", at most {high}"
            raise argparse.ArgumentTypeError(f"{text}: expected {bounds}")
        return value

    return convert


def log(text: str) -> None:
    """Prints a message beside the command's result."""
    print(text, file=sys.stderr, flush=True)


def write_file(option: str, path: Path, text: str) -> None:
    """Writes a file. Raises ConfigError that names the option."""
    try:
        replace_file(path.absolute(), text.encode())
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: {error.strerror or error}; expected a file to write"
        ) from None


def require_writable(option: str, path: Path) -> None:
    """Raises ConfigError, before the work begins, if a file of results cannot be written."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: {error.strerror or error}; expected a file to write"
        ) from None


def add_selection_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select weights: the fields of a `Selection`."""
    parser.add_argument(
        "--step", type=at_least(int, 0), help="step of the checkpoint; default: the newest"
    )
    parser.add_argument(
        "--weights",
        default="model",
        help="of a run: model (default), or ema for the averaged weights (ema.decay)",
    )
    parser.add_argument(
        "--adapter",
        type=Path,
        help="adapters to add to the weights: a run with lora.rank > 0, or PEFT's folder",
    )
    parser.add_argument(
        "--model", default="", help="flavor or model.json, for files without the model's shape"
    )


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the commands that compute with a checkpoint's weights."""
    add_selection_options(parser)
    parser.add_argument(
        "--tokenizer", default="", help="a tokenizer's file or folder, for checkpoints without one"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="to compute on; default: %(default)s",
    )


def selection_of(options: argparse.Namespace) -> Selection:
    """Returns what the options of `add_selection_options` select."""
    return Selection(
        step=options.step, weights=options.weights, model=options.model, adapter=options.adapter
    )


def device_of(options: argparse.Namespace) -> torch.device:
    """Returns the device that `--device` names. Raises ConfigError."""
    import torch

    if options.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if options.device == "cuda":
        raise ConfigError("--device cuda: torch finds no CUDA device; allowed: auto, cpu")
    return torch.device("cpu")


class StrictParser(argparse.ArgumentParser):
    """A parser that raises ConfigError, and suggests the most similar word for an unknown option,
    action or choice. Options have no short forms.
    """

    words: Sequence[str] = ()  # those that are parsed

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        self.require_none(rest)
        return options

    def parse_beside_config(self, args: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Returns the options, and the other words: the arguments of a config.

        Raises ConfigError for an unknown option without a dot; keys of a config have one.
        """
        options, rest = self.parse_known_args(args)
        problems = [self._unknown(word) for word in rest if is_option(word)]
        if problems:
            raise ConfigError(problems)
        return options, rest

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.words = args
        return super().parse_known_args(args, namespace)

    def add_subparsers(self, **options: Any) -> Any:
        return super().add_subparsers(parser_class=Subcommand, **options)

    def require_none(self, rest: list[str]) -> None:
        """Raises ConfigError if words are left: unknown options, and arguments too many."""
        problems = []
        of_option = False  # whether the word is the value of an unknown option
        for word in rest:
            if word.startswith("-"):
                problems.append(self._unknown(word))
            elif not of_option:
                problems.append(f"unexpected argument {word!r}; see --help")
            of_option = word.startswith("-") and "=" not in word
        if problems:
            raise ConfigError(problems)

    def is_known(self, word: str) -> bool:
        """Whether a word names an option of this parser."""
        return word.partition("=")[0] in self._names()

    def error(self, message: str) -> NoReturn:
        problems = [message]
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice:
            problems = [message + suggestion(choice[1], re.findall(r"[\w.-]+", choice[2]))]
        elif "are required" in message:  # a misspelt option may be the reason
            unknown = [word for word in self.words if is_option(word) and not self.is_known(word)]
            problems += map(self._unknown, unknown)
        raise ConfigError(problems)

    def _names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def _unknown(self, word: str) -> str:
        given = word.partition("=")[0]
        longer = [name for name in self._names() if name.startswith(given)]
        hint = suggestion(given, longer, 0.0) or suggestion(given, self._names())
        return f"unknown option {word}{hint}; see --help"


class Subcommand(StrictParser):
    """The parser of a subcommand, which suggests its own options."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = super().parse_known_args(args, namespace)
        self.require_none(rest)
        return options, []


def is_option(word: str) -> bool:
    """Whether a word is an option of a command: keys of a config have a dot."""
    return word.startswith("--") and "." not in word.partition("=")[0]
