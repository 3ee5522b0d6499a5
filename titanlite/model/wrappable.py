"""Where `parallel/` wraps what a module computes: recomputation, torch.compile, dropout's keys.

Why it is here: a wrapper module would change the names of parameters, and a hook cannot call the
computation again. So a module whose computation may be wrapped says so.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Wrappable(nn.Module):
    """A module that computes what its method `compute` does, or a wrapper of it.

    Hooks of the module, also those of FSDP and tensor parallel, stay outside of the wrappers.
    """

    compute: Callable[..., Tensor]
    _wrapped: Callable[..., Tensor] | None = None

    def forward(self, *inputs: object, **options: object) -> Tensor:
        computation = self._wrapped or self.compute
        return computation(*inputs, **options)

    def wrap(self, wrapper: Callable[..., Callable[..., Tensor]], **options: object) -> None:
        """Replaces the computation by `wrapper(computation, **options)`.

        The last wrapper is the outermost.
        """
        self._wrapped = wrapper(self._wrapped or self.compute, **options)
