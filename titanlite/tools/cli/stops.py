"""Signals that end a command: close files, remove partial output, print how to continue."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

STOPS = (signal.SIGTERM, signal.SIGHUP)  # SIGINT raises KeyboardInterrupt


class Stopped(SystemExit):
    """A signal has come. The exit code is 128 + its number."""


@contextlib.contextmanager
def stoppable(advice: str = "") -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP raise `Stopped`, as Ctrl-C raises KeyboardInterrupt; then
    prints the advice.

    A signal that is ignored stays ignored.
    """

    def stop(number: int, frame: object) -> None:
        raise Stopped(128 + number)

    # Nohup ignores SIGHUP
    heard = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]
    before = [signal.signal(number, stop) for number in heard]
    try:
        yield
    except (Stopped, KeyboardInterrupt):
        if advice:
            print(advice, file=sys.stderr, flush=True)
        raise
    finally:
        for number, handler in zip(heard, before, strict=True):
            signal.signal(number, handler)
