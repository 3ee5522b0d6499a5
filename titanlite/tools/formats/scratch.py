"""Makes a scratch file for writers that take whole tensors: those of torch.save and DCP.

What it is: the converted tensors are written block by block into a safetensors file beside the
output, and the writer gets them memory-mapped from there. Their pages belong to the page cache and
not to the process.
What it costs: a second write, and twice the disk space until the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from titanlite.tools.formats.export import Outgoing
from titanlite.tools.formats.output_path import temporary_path
from titanlite.tools.formats.safetensors_files import write_file


@contextlib.contextmanager
def mapped(path: Path, tensors: dict[str, Outgoing]) -> Iterator[dict[str, Tensor]]:
    """The converted tensors, memory-mapped from a file beside `path` that is deleted at the end.

    torch reports a failed write as "unexpected pos". The error or signal that caused it is raised
    in its place.
    """
    scratch = temporary_path(path)
    try:
        write_file(scratch, tensors, sync=False)
        with safe_open(scratch, framework="pt") as file:
            yield {name: file.get_tensor(name) for name in tensors}
    except (RuntimeError, CheckpointException) as error:  # the latter is a BaseException
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause, _ = next(iter(error.failures.values()))
        while not isinstance(cause, (OSError, SystemExit, KeyboardInterrupt)) and cause.__context__:
            cause = cause.__context__
        raise cause from None
    finally:
        scratch.unlink(missing_ok=True)
