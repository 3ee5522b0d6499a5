"""`titanlite convert SOURCE TARGET`: the command line of `tools/formats/convert.py`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.options import StrictParser, add_selection_options, log
from titanlite.tools.cli.stops import stoppable
from titanlite.tools.formats.convert import Mismatch, convert
from titanlite.tools.formats.detect_format import READABLE
from titanlite.tools.formats.export import DTYPES, Options
from titanlite.tools.formats.targets import TARGETS
from titanlite.tools.formats.torchtitan_names import GENERATIONS

EXIT_MISMATCH = 1
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def run(argv: list[str]) -> int:
    """The command; returns its exit code: 0, or 1 if the output differs from the source."""
    parser = StrictParser(
        prog="titanlite convert",
        description="Write a checkpoint in another format, tensor by tensor, and compare the two.",
        epilog=f"SOURCE is detected: {READABLE}. No process group and no GPU are needed.",
    )
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="what to convert; a run means its newest step"
    )
    parser.add_argument("target", type=Path, metavar="TARGET", help="the file or folder to write")
    parser.add_argument(
        "--to",
        default="",
        metavar="FORMAT",
        help=f"{', '.join(TARGETS)}; default: by TARGET's suffix",
    )
    parser.add_argument(
        "--dtype",
        default="",
        help=f"of the weights: {', '.join(DTYPES)}; default: the source's",
    )
    parser.add_argument(
        "--names",
        default="",
        help=f"of the parameters in dcp: {', '.join(GENERATIONS)}; default: the first",
    )
    add_selection_options(parser)
    parser.add_argument(
        "--shard-size", type=file_size, default=0, help="largest file of a sharded format (5GB)"
    )
    parser.add_argument(
        "--full", action="store_true", help="also write optimizer and training state"
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read the output again and compare it with the source (default)",
    )
    parser.add_argument(
        "--allow-nonfinite", action="store_true", help="convert NaN and infinity too"
    )
    arguments = vars(parser.parse_args(argv))
    source = arguments.pop("source")
    target = arguments.pop("target")
    try:
        with stoppable():  # removes partial output
            convert(source, target, Options(**arguments), log)
    except Mismatch as error:
        for problem in error.problems:
            log(f"error: {problem}")
        return EXIT_MISMATCH
    except OSError as error:
        raise ConfigError(f"{error.filename or target}: {error.strerror or error}") from None
    return 0


def file_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|TB|)", text.upper())
    if not match or not 1 <= float(match[1]) * UNITS[match[2]] < 1 << 62:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a size as 5GB, 500MB or a number of bytes"
        )
    return int(float(match[1]) * UNITS[match[2]])
