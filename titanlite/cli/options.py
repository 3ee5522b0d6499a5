"""Options of several commands: `--help` of those with a config, and numbers with bounds for argparse."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from titanlite.config.text import help_text


def wants_help(argv: list[str]) -> bool:
    """Prints the help of all config keys if `argv` asks for it; whether it did."""
    if wanted := bool({"-h", "--help"} & set(argv)):
        print(help_text())
    return wanted


def at_least(kind: Callable[[str], float], low: float, high: float = sys.float_info.max) -> Callable[[str], float]:
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
