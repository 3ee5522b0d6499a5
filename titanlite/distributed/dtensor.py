"""The part of a tensor that this process holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Any) -> Tensor:
    """The local tensor of a DTensor, without a copy; another tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
