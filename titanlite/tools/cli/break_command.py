"""`titanlite break`: plants faults to predict and to understand."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from titanlite.tools.cli.options import StrictParser, log

EPILOG = """Each fault is a small patch of the running program, most of them shipped by other
trainers (docs/faults.md). The command shows the patch and the layout, asks which figure of
`titanlite verify` will be off first, runs the comparison with the fault and without, and explains.
Without a terminal, or with --show, it asks nothing. The files of the program stay as they are: the
patch exists in worker processes only."""


def run(argv: list[str]) -> int:
    """Runs the command. Returns 0, also if a prediction was wrong, or 1 if a run has failed.

    Raises ConfigError.
    """
    options = _options(argv)
    # Imports torch, like the parts that the faults patch
    from titanlite.tools.faults.catalogue import FAULTS, find_fault

    faults = [find_fault(name) for name in options.names] or list(FAULTS)
    if options.list:
        width = max(len(fault.name) for fault in faults)
        for fault in faults:
            print(f"{fault.name:{width}}  {fault.title}")
        return 0

    from titanlite.tools.faults.experiment import Experiments
    from titanlite.tools.faults.quiz import run_fault
    from titanlite.tools.verify.pool import Pool, WorkerError

    ask = None if options.show or not sys.stdin.isatty() else input
    pool = Pool(["titanlite.tools.faults.experiment"], quiet=True)
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        experiments = Experiments(pool, Path(folder))
        for i, fault in enumerate(faults):
            try:
                run_fault(fault, experiments, ask)
                if ask is not None and i < len(faults) - 1:
                    ask("\nEnter: the next fault; Ctrl-D: the end ")
            except WorkerError as error:
                log(f"{fault.name}: not compared, a process failed\n{error}")
                code = 1
            except EOFError:
                print()
                break
    return code


def _options(argv: list[str]) -> argparse.Namespace:
    parser = StrictParser(
        prog="titanlite break",
        usage="titanlite break [NAME ...] [--show] [--list]",
        description="Plant a fault, predict what it changes, and see it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all faults, in order")
    parser.add_argument("--show", action="store_true", help="ask nothing")
    parser.add_argument("--list", action="store_true", help="print names and titles")
    options: argparse.Namespace = parser.parse_args(argv)
    return options
