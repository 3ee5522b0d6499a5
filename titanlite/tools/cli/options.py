"""Options of several commands: `--help` of those with a config, and numbers with bounds for
argparse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from titanlite.config.help import help_text
from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import ConfigError


def wants_help(argv: list[str]) -> bool:
    """Prints the help of all config keys if `argv` asks for it; whether it did."""
    wanted = bool({"-h", "--help"} & set(argv))
    if wanted:
        print(help_text())
    return wanted


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
            raise argparse.ArgumentTypeError(
                f"{text}: expected at least {low}" + (f", at most {high}" if high < 1e300 else "")
            )
        return value

    return convert


class StrictParser(argparse.ArgumentParser):
    """A parser whose errors are ConfigErrors, with the most similar option for one that does not
    exist.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            names = [name for action in self._actions for name in action.option_strings]
            raise ConfigError(
                [
                    f"unknown option {word}{suggestion(word.partition('=')[0], names)}"
                    for word in unknown
                ]
            )
        return options

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
