"""Measures memory by counting the tensors that are alive."""

from __future__ import annotations

import weakref

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """The largest number of bytes alive at once, in tensors that this process made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back with the local tensors
        result = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if (
                type(tensor) is torch.Tensor
                and (key := tensor.untyped_storage().data_ptr()) not in self.alive
            ):
                self.alive[key] = size = tensor.untyped_storage().nbytes()
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(tensor.untyped_storage(), self.free, key)
        return result

    def free(self, key: int) -> None:
        self.now -= self.alive.pop(key)
