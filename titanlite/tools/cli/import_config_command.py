"""`titanlite import-config`: the config of another trainer as one of ours."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.runtime.errors import ConfigError, printable
from titanlite.runtime.files import write_new_files
from titanlite.tools.cli.options import StrictParser, at_least
from titanlite.tools.import_config.draft import Draft
from titanlite.tools.import_config.importer import NAMES, import_config
from titanlite.tools.import_config.translate import to_toml

EPILOG = """\
Writes the keys that differ from titanlite's defaults, each with the foreign field that it comes
from. What is to be decided, and what is not taken over, stands at the end of the file and on
standard error. A model or a layout that cannot be expressed makes no file (exit code 2)."""


def run(argv: list[str]) -> int:
    """Prints the TOML, or writes it to a file. Raises ConfigError."""
    parser = StrictParser(
        prog="titanlite import-config",
        description="Make a config of titanlite from that of another trainer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="JSON, TOML, YAML, or a script with arguments")
    parser.add_argument("--out", type=Path, metavar="FILE.toml", help="write to this new file")
    parser.add_argument(
        "--format", default="", metavar="NAME", help=f"one of {', '.join(NAMES)}; default: detect"
    )
    parser.add_argument(
        "--processes",
        type=at_least(int, 1, 1 << 24),
        default=0,
        help="number of processes (GPUs) of that run, where its batch depends on it",
    )
    options = parser.parse_args(argv)
    form, draft = import_config(options.file, options.format, int(options.processes))
    text = to_toml(draft, options.file.name, form)
    if options.out is None:
        print(text, end="")
    else:
        _write(options.out, text)
    _explain(draft)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        write_new_files(path.absolute().parent, {path.name: text.encode()})
    except OSError as error:
        raise ConfigError(
            f"--out {path}: {error.strerror or error}; expected a new file to write"
        ) from None


def _explain(draft: Draft) -> None:
    """Prints on standard error what the user has to know."""
    parts = (("to decide", draft.decisions), ("not taken over", draft.left))
    for title, texts in parts:
        for text in texts:
            print(f"{title}: {printable(text)}", file=sys.stderr)
