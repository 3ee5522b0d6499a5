"""The error of a rank whose connection to another one broke, in one line.

What it is: when a process of a run ends, gloo, NCCL or the store raise an error in all others, wherever they are. The
reason is not in their stack traces: the process that ended has printed it, or the launcher says which signal killed it.
Where no process has ended, the network is the reason, and the line names the address and the place.
"""

from __future__ import annotations

import re
import traceback

import torch.distributed as dist

# What gloo's transport, NCCL and the store say of it (torch 2.13). Time-outs are not among them: the watchdog finds out
# which rank blocks the others.
GLOO = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
OTHERS = ("remote process exited", "Connection was likely closed", "Connection reset by peer", "Broken pipe")


def lost_connection(error: Exception, rank: str, train_file: str = "") -> str:
    """The line; empty for other errors. It names the line of `train_file` that was executed."""
    text = str(error)
    signs = OTHERS if isinstance(error, dist.DistError) else GLOO if "gloo/transport" in text else ()
    if not isinstance(error, RuntimeError) or not any(sign in text for sign in signs):
        return ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == train_file]
    place = f" at line {lines[-1]} of train.py" if lines else ""
    reason = re.sub(r"^\[\S+\] ", "", text.splitlines()[0]).partition(". This is ")[0]  # without gloo's source file
    return f"rank {rank} lost its connection to another rank{place}: {reason}"
