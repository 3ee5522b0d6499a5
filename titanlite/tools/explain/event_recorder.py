"""Records the collectives of a step one by one.

What it is: the `Recorder` of `titanlite plan`, which sees every operator and counts it. This one
also notes, for each collective, where the program was, what was in memory, and some numbers of the
tensors before and after.
Why it is here: the totals of `plan` and the events of `explain` come from one count.
What it costs: a walk up the stack for each collective; plan's own recorder does not do it.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.distributed.mesh import Mesh
from titanlite.runtime.phases import add_listener, remove_listener
from titanlite.tools.explain.events import ACTIVATIONS, GRADIENTS, Event, Place
from titanlite.tools.explain.module_path import ModulePath
from titanlite.tools.plan.recorder import (
    Call,
    Recorder,
    kind_of,
    names_of,
    only_shapes,
    tensors_in,
)
from titanlite.tools.torch_private import (
    fsdp_parameters,
    group_name,
    group_ranks,
    storage_address,
)

ROOT = Path(__file__).parents[3]
# The parts of a run; tools take the place of train.py
OURS = str(ROOT / "titanlite")
TOOLS = str(ROOT / "titanlite" / "tools")
MESSAGES = ("send", "recv")
PIECES = 3  # numbers that are shown of each rank's part of a tensor
SOME = 6  # and of a tensor that is not in such parts


class Pending(NamedTuple):
    """A result to which the communication may still write."""

    number: int  # of the event
    offset: int
    numel: int
    dtype: torch.dtype
    parts: int  # of this many ranks


class EventRecorder(Recorder):
    """Context manager that counts what this rank does and keeps its collectives in order."""

    def __init__(self, mesh: Mesh, vocab_size: int, path: ModulePath, values: bool) -> None:
        """`values`: also reads numbers of the tensors, which exist on real ranks only."""
        super().__init__(mesh, vocab_size)
        self.path = path
        self.values = values
        self.events: list[Event] = []
        self.afters: dict[int, tuple[float | None, ...]] = {}  # event number -> values
        self.pending: dict[int, Pending] = {}  # by the address of a storage
        self.before: tuple[float | None, ...] = ()  # of the collective that begins
        self.phase = "data"
        self.local_batch = -1
        self.fullest = 0  # bytes, since the last event
        self.flops_before = 0
        self.step_peak: dict[str, int] = {}

    def __enter__(self) -> EventRecorder:
        add_listener(self.path.mark)
        super().__enter__()
        self.fullest = sum(self.held.values())
        self.step_peak = dict(self.held)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, stack)
        remove_listener(self.path.mark)

    def _add(self, category: str, nbytes: int) -> None:
        super()._add(category, nbytes)
        total = sum(self.held.values())
        self.fullest = max(self.fullest, total)
        if total > sum(self.step_peak.values()):
            self.step_peak = dict(self.held)

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kind = kind_of(func)
        space, name = names_of(func)
        # These end a communication: to wait for a reduce-scatter of gloo copies its result
        ends = name in ("wait_tensor", "copy_")
        if self.pending and not ends and not space.startswith("_c10d") and not only_shapes(func):
            self._read(args)  # what is used has been waited for
        parts = 1
        if kind and self.values:
            if not _has_sizes(args):
                parts = len(group_ranks(next(group for group in map(group_name, args) if group)))
            *_, given = tensors_in(args)
            self.before = ()
            if kind != "recv":  # which has nothing before
                of_parts = kind in ("reduce_scatter", "all_to_all")
                self.before = excerpt(given, parts if of_parts else 1)
        num_events = len(self.events)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if ends and self.pending:
            self._read(args)
        if len(self.events) > num_events and self.values and kind != "send":
            written = args if space == "c10d" else result
            self._await(parts if kind in ("all_gather", "all_to_all") else 1, written)
        return result

    def begins(self, phase: str, local_batch: int, times: int) -> None:
        """Begins a part of the step, which counts so many times."""
        self.path.reset()
        self.phase = phase
        self.local_batch = local_batch
        self.times = times

    def count(self, call: Call) -> None:
        super().count(call)
        given = call.tensors[-1]  # a result is before it
        place = self._place()
        if place.function == "sum_shared_gradients":
            place = dataclasses.replace(place, module="tok_embeddings", role="")
        elif call.kind in MESSAGES and place.phase in ("forward", "backward"):
            place = _of_message(place, call)
        self.events.append(
            Event(
                number=len(self.events) + 1,
                kind=call.kind,
                axis=call.axis,
                ranks=_ranks(call),
                operation=_operation(call, place.function),
                shape=tuple(given.shape),
                dtype=str(given.dtype).removeprefix("torch."),
                whole_bytes=call.whole_bytes,
                times=self.times,
                flops=self.flops - self.flops_before,
                held=dict(self.held),
                peak=max(self.fullest, sum(self.held.values())),
                local_batch=self.local_batch,
                place=place,
                before=self.before,
            )
        )
        self.flops_before = self.flops
        self.fullest = sum(self.held.values())

    def _place(self) -> Place:
        module, role = self.path.current()
        phase = self.phase
        if phase == "forward" and self.path.in_backward:
            phase = "backward"
        frame: FrameType | None = sys._getframe(1)
        line, function = _innermost(frame)
        parameters = fsdp_parameters(frame)
        return Place(phase, module, role, self.path.recomputes, line, function, parameters)

    # Numbers

    def _await(self, parts: int, written: object) -> None:
        """Notes the first of these tensors as the result, to be read when an operator uses it."""
        result = next(iter(tensors_in(written)))
        self.pending[storage_address(result.untyped_storage())] = Pending(
            len(self.events), int(result.storage_offset()), result.numel(), result.dtype, parts
        )

    def _read(self, arguments: object) -> None:
        """Reads the results that are among the arguments."""
        for tensor in tensors_in(arguments):
            pending = self.pending.pop(storage_address(tensor.untyped_storage()), None)
            if pending is not None:
                whole = torch.empty(0, dtype=pending.dtype).set_(
                    tensor.untyped_storage(), pending.offset, (pending.numel,), (1,)
                )
                self.afters[pending.number] = excerpt(whole, pending.parts)

    def finished(self) -> list[Event]:
        """All events, with the numbers that were read after them."""
        return [
            dataclasses.replace(event, after=self.afters.get(event.number, ()))
            for event in self.events
        ]


def _has_sizes(arguments: tuple[Any, ...]) -> bool:
    """Whether an all-to-all has a size for each part: the parts of its tensors differ."""
    return any(isinstance(one, list) and one and type(one[0]) is int for one in arguments)


def excerpt(tensor: Tensor, parts: int) -> tuple[float | None, ...]:
    """A few numbers of each of so many equal parts; None stands for one that is not finite."""
    flat = tensor.detach().reshape(-1)
    count = PIECES if parts > 1 else SOME
    if flat.numel() % parts:
        parts = 1
    values = flat.reshape(parts, -1)[:, :count].flatten().tolist()
    return tuple(float(value) if math.isfinite(value) else None for value in values)


def _of_message(place: Place, call: Call) -> Place:
    """The place of a message, by whether torch receives it into a tensor with a gradient.

    That is so for activations only. A sent tensor never has a gradient, so `explain.py` takes its
    place from the receiver.
    """
    if call.kind == "send":
        return dataclasses.replace(place, module="", role="")
    if call.tensors[-1].requires_grad:
        return dataclasses.replace(place, phase="forward", module="", role=ACTIVATIONS)
    return dataclasses.replace(place, phase="backward", module="", role=GRADIENTS)


def _ranks(call: Call) -> tuple[int, ...]:
    """The ranks of the group; for a message the sender and the receiver."""
    ranks = group_ranks(call.group)
    if call.kind not in MESSAGES:
        return ranks
    peer = ranks[next(word for word in call.arguments if type(word) is int)]
    return (dist.get_rank(), peer) if call.kind == "send" else (peer, dist.get_rank())


def _operation(call: Call, function: str) -> str:
    """The operation of a reduction: functional collectives name it, most others sum."""
    if "reduce" not in call.kind:
        return ""
    if function == "bitwise_or":
        return "bitwise or"
    words = [word for word in call.arguments if isinstance(word, str) and not word.isdecimal()]
    return words[0] if words else "sum"


def _innermost(frame: FrameType | None) -> tuple[str, str]:
    """The line of ours outside tools/ that runs, and its function."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OURS) and not file.startswith(TOOLS):
            path = Path(file).relative_to(ROOT)
            return f"{path}:{frame.f_lineno}", frame.f_code.co_name
        frame = frame.f_back
    return "", ""
