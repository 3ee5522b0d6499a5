"""Reports the failure of a training process: a stack trace, or one line if the reason lies outside
the program.

What it is: when a process of a run ends, gloo, NCCL or the store raises an error in all others,
wherever they are. Their stack traces would hide the one line that matters: the process that ended
has printed the reason, or the launcher says which signal killed it. If no process has ended, the
network is the reason, and the line names the address and the place. A file that cannot be read or
written, such as prepared data that has vanished, also gives one line.
"""

from __future__ import annotations

import os
import re
import sys
import traceback

import torch.distributed as dist

from titanlite.runtime.errors import EXIT_LOST, printable

# Messages of gloo's transport, NCCL and the store about a lost rank (torch 2.13). Time-outs are not
# among them: the watchdog finds the rank that blocks the others.
GLOO = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
OTHERS = (
    "remote process exited",
    "Connection was likely closed",
    "Connection reset by peer",
    "Broken pipe",
)


def report_failure(error: Exception, train_file: str) -> int:
    """Prints an error that ends this process, and returns its exit code.

    `train_file`: the path of the program.
    """
    rank = os.environ.get("RANK", "0")
    lost = lost_connection(error, train_file)
    # Write each line in one piece: other ranks may write at the same time
    if lost:
        sys.stderr.write(f"error: rank {rank} {lost}\n")
        return EXIT_LOST
    if isinstance(error, OSError) and error.filename is not None:
        sys.stderr.write(
            f"error: rank {rank}: {printable(str(error.filename))}: {error.strerror}\n"
        )
    else:
        traceback.print_exception(error)
    return 1


def lost_connection(error: Exception, train_file: str) -> str:
    """Writes a message with the line of `train_file` that lost a rank's connection; else empty."""
    text = str(error)
    signs: tuple[str, ...] = ()
    if isinstance(error, dist.DistError):
        signs = OTHERS
    elif "gloo/transport" in text:
        signs = GLOO
    if not isinstance(error, RuntimeError) or not any(sign in text for sign in signs):
        return ""

    place = ""
    for frame in traceback.extract_tb(error.__traceback__):  # the innermost frame is the last
        if frame.filename == train_file:
            place = f" at line {frame.lineno} of train.py"
    # Remove gloo's source file
    reason = re.sub(r"^\[\S+\] ", "", text.splitlines()[0]).partition(". This is ")[0]
    return f"lost its connection to another rank{place}: {reason}"
