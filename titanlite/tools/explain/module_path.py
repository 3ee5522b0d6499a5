"""Follows which module computes, in forward, backward and recomputation.

What it is: hooks on every module of a model, before its other hooks and after them. Tensor
parallelism communicates in such hooks: those before the module's forward see its input, those after
it see its output. The backward passes the same places in reverse, when the gradients of these
tensors exist.
Why it is here: an operator knows its tensors, but not the module that it is a part of.
What it costs: four hooks per module, and a hook on the gradients of its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from titanlite.runtime.phases import Phase

INPUT = "input"
INSIDE = "inside"
OUTPUT = "output"


class ModulePath:
    """Follows the modules of a model's parts. Make it after all other hooks."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.in_backward = False
        # Modules that compute, innermost last: name -> which part of it
        self.forward: dict[str, str] = {}
        self.backward: dict[str, str] = {}
        for part in parts:
            for name, module in part.named_modules():
                if name and not isinstance(module, nn.Identity):  # its output is its input
                    self._follow(name, module)

    def mark(self, phase: Phase) -> None:
        """Listens to phases."""
        if phase in (Phase.FORWARD_BACKWARD, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE):
            self.reset()
            self.in_backward = phase == Phase.BACKWARD

    def reset(self) -> None:
        """Resets the path: no module computes."""
        self.in_backward = False
        self.forward.clear()
        self.backward.clear()

    def current(self) -> tuple[str, str]:
        """The innermost module that computes, and the part of it."""
        modules = self.forward or self.backward
        if not modules:
            return "", ""
        name = list(modules)[-1]
        return name, modules[name]

    @property
    def recomputes(self) -> bool:
        """Whether a forward runs within the backward."""
        return self.in_backward and bool(self.forward)

    def _follow(self, name: str, module: nn.Module) -> None:
        def first(module: nn.Module, inputs: Any) -> None:
            # A recomputation ends where the last saved tensor is made, within some modules
            for other in list(self.forward):
                if not _is_in(name, other):
                    del self.forward[other]
            self.forward[name] = INPUT
            self._on_gradient(inputs, lambda: self.backward.pop(name, ""))

        def begin(module: nn.Module, inputs: Any) -> None:
            self.forward[name] = INSIDE
            self._on_gradient(inputs, lambda: self._set_backward(name, INPUT))

        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            self.forward[name] = OUTPUT
            self._on_gradient(output, lambda: self._set_backward(name, INSIDE))

        def last(module: nn.Module, inputs: Any, output: Any) -> None:
            self.forward.pop(name, None)
            self._on_gradient(output, lambda: self._set_backward(name, OUTPUT))

        module.register_forward_pre_hook(first, prepend=True)
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, prepend=True)
        module.register_forward_hook(last, always_call=True)

    def _set_backward(self, name: str, role: str) -> None:
        if role != OUTPUT:
            if name in self.backward:
                self.backward[name] = role
            return
        # A module may return what a module within it has returned, whose hook was called before
        within = {key: self.backward.pop(key) for key in list(self.backward) if _is_in(key, name)}
        self.backward.pop(name, None)
        self.backward[name] = OUTPUT
        self.backward |= within

    def _on_gradient(self, tensors: Any, act: Callable[[], object]) -> None:
        """Calls `act` when the first of these tensors has its gradient."""
        found = _with_gradients(tensors)

        def when_found(gradient: Tensor) -> None:
            act()

        if found:
            register_multi_grad_hook(found, when_found, mode="any")


def _with_gradients(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.requires_grad and torch.is_grad_enabled() else []
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _with_gradients(item)]
    return []


def _is_in(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")
