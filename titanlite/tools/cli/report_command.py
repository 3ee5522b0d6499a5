"""`titanlite report`: shows one run, or compares several, as a page or as text.

Modules that import numpy are imported when they are needed, so that `--help` and wrong options are
answered at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.options import StrictParser, write_file

EPILOG = """Without options, writes report.html into the first run's folder: one file that needs no
network. Every run writes its own when it ends. docs/report.md says how to read it."""
EXPECTED = "expected a run's folder, as outputs/debug"


def run(argv: list[str]) -> int:
    """Writes or prints the report. Raises ConfigError."""
    options = _parser().parse_args(argv)
    folders = _run_folders(options.runs)
    if options.text:
        _print_text(folders)
    else:
        _write_page(folders, options.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(
        prog="titanlite report",
        usage="titanlite report RUN... [--out FILE | --text]",
        description="Show what a run has done, or compare several runs.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, as outputs/debug"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--out", type=Path, metavar="FILE", help="where to write the page")
    form.add_argument("--text", action="store_true", help="print the report, in at most 80 columns")
    return parser


def _run_folders(paths: list[Path]) -> list[Path]:
    """The folders without repetitions. Raises ConfigError for one that holds no run."""
    from titanlite.tools.report.page import MOST_RUNS

    problems = []
    for path in paths:
        if not path.is_dir():
            problems.append(_missing(path))
        elif not any((path / name).exists() for name in ("metrics.jsonl", "config.toml")):
            problems.append(f"{path}: has no metrics.jsonl; {EXPECTED}")
    if len(paths) > MOST_RUNS:
        problems.append(f"{len(paths)} runs: expected at most {MOST_RUNS} in one report")
    if problems:
        raise ConfigError(problems)
    unique = {path.resolve(): path for path in paths}
    return list(unique.values())


def _missing(path: Path) -> str:
    """The message for a path that is not a folder, with the most similar name beside it."""
    problem = "not a folder" if path.exists() else "no such folder"
    siblings: list[str] = []
    if path.parent.is_dir():
        siblings = [entry.name for entry in path.parent.iterdir()]
    hint = suggestion(path.name, siblings) or f"; {EXPECTED}"
    return f"{path}: {problem}{hint}"


def _print_text(folders: list[Path]) -> None:
    from titanlite.tools.report.run_data import read_runs
    from titanlite.tools.report.text_report import text_report

    runs = read_runs(folders)
    has_blocks = "utf" in (sys.stdout.encoding or "").lower()
    print(text_report(runs, blocks=has_blocks))


def _write_page(folders: list[Path], out: Path | None) -> None:
    """Writes the page and prints where. Raises ConfigError if it cannot be written."""
    from titanlite.tools.report.page import NAME, contents, page
    from titanlite.tools.report.run_data import read_runs

    path = out or folders[0] / NAME
    document = page(contents(read_runs(folders)))
    write_file("--out" if out else "without --out,", path, document)
    print(path)
