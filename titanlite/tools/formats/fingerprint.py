"""Computes a fingerprint of a model's weights, to see whether two files hold the same model.

What it is: a hash of names, shapes, and the first and last row of each tensor in fp32, so that it
is the same in every format that keeps the numbers. Training changes rows that are used.
What it costs: two rows of each tensor are read.
"""

from __future__ import annotations

import hashlib

from titanlite.tools.formats.full_state import FullState


def fingerprint(full: FullState) -> str:
    """Computes the SHA-256, in hexadecimal. Raises CorruptCheckpoint."""
    digest = hashlib.sha256()
    for name in sorted(full.tensors):
        tensor = full.tensors[name]
        digest.update(f"{name} {list(tensor.shape)}".encode())
        for row in (0, tensor.shape[0] - 1) if tensor.shape else ():
            digest.update(tensor.read(row, row + 1).float().numpy().tobytes())
    return digest.hexdigest()
