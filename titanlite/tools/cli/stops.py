"""Lets signals end a command in order: close files, remove partial output, print advice."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

STOPS = (signal.SIGTERM, signal.SIGHUP)  # SIGINT raises KeyboardInterrupt


class Stopped(SystemExit):
    """Raised by a signal; the exit code is 128 + its number."""


@contextlib.contextmanager
def stoppable(advice: str = "") -> Iterator[None]:
    """Context manager in which SIGTERM and SIGHUP raise `Stopped`.

    After these and Ctrl-C it prints the advice. A signal that is ignored stays ignored.
    """

    def stop(number: int, frame: object) -> None:
        raise Stopped(128 + number)

    # nohup starts a command with SIGHUP ignored
    handled = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]
    before = [signal.signal(number, stop) for number in handled]
    try:
        yield
    except (Stopped, KeyboardInterrupt):
        if advice:
            print(advice, file=sys.stderr, flush=True)
        raise
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)
