"""Counts what a step does, operator by operator: collectives, matrix products, and live memory.

What it is: a dispatch mode. torch calls it for every operator that reaches a device, in forward,
backward and update, those inside DTensor's operators included. It runs the operator, on fake
tensors or on real ones, and counts. A tensor's memory is followed by its storage, from its first
appearance until Python or autograd frees it; FSDP frees and allocates gathered weights by
`UntypedStorage.resize_`, which is followed too.
Why it is here: the numbers come from the program that trains, so they hold for every combination of
techniques, and for techniques that are added later.
What it costs: about 50 microseconds per operator. One method of torch is replaced meanwhile.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from titanlite.distributed.dtensor import local_part
from titanlite.distributed.mesh import Mesh
from titanlite.runtime.phases import Phase, add_listener, remove_listener
from titanlite.tools.plan.counts import Memory, equal_parts
from titanlite.tools.torch_private import (
    AsyncCollectiveTensor,
    TorchDispatchMode,
    group_name,
    returns_a_view,
    storage_address,
)

# Operators of process groups, and functional collectives -> kind
KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}
# Where the operands of a matrix product are among the arguments of an operator
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_scaled_mm": 0, "_grouped_mm": 0}
PARTS = {Phase.BACKWARD: "backward", Phase.UPDATE: "update"}  # others: forward
CATEGORIES = tuple(Memory.__dataclass_fields__)


class Live(NamedTuple):
    """A storage in memory."""

    reference: weakref.ref[torch.UntypedStorage]
    category: str
    nbytes: int


class Call(NamedTuple):
    """A collective, or one end of a message."""

    kind: str  # of KINDS
    axis: str
    size: int  # ranks of the group
    group: str  # the name of the process group
    whole_bytes: int  # of the gathered result, of the tensor that is reduced, of the message
    arguments: tuple[Any, ...]  # of the operator
    tensors: tuple[Tensor, ...]  # those among them


class Recorder(TorchDispatchMode):
    """Context manager that counts what this rank does. Register a model's parameters first.

    `EventRecorder` (`titanlite/tools/explain/`) also keeps the collectives one by one.
    """

    def __init__(self, mesh: Mesh, vocab_size: int) -> None:
        """`vocab_size`: the columns of this rank's logits, by which they are recognised."""
        super().__init__()
        self.axes = mesh.axes_of_groups()
        self.degrees = mesh.degrees
        self.ep = mesh.ep
        self.vocab_size = vocab_size
        self.part = "forward"
        self.times = 1  # weight of the operators that run now
        # ("calls", axis, kind, ranks), ("bytes", axis, kind, ranks), ("attention",),
        # ("pointwise",), ("product", rows, inner, columns, dtype)
        self.counts: Counter[tuple[str | int, ...]] = Counter()
        self.flops = 0  # of the products and the attention that were run, each once
        self.live: dict[int, Live] = {}  # by the address of the storage
        self.held = dict.fromkeys(CATEGORIES, 0)
        self.peaks: dict[str, dict[str, int]] = {}  # part of the step -> at its fullest moment
        self.kept: dict[str, int] = {}  # when the last backward began
        self.weight_shapes: set[tuple[int, ...]] = set()

    # Before the step: the state of the run

    def register_model(self, parts: Iterable[nn.Module]) -> None:
        """Registers parameters and buffers, and marks each gradient when autograd has made it."""
        for part in parts:
            for parameter in part.parameters():
                self._register(local_part(parameter), "parameters")
                self.weight_shapes.add(_gathered_shape(parameter))
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._gradient)
            for buffer in part.buffers():
                self._register(buffer, "buffers")

    def register(self, tensors: Iterable[Tensor], category: str) -> None:
        """Registers tensors that the step reads or has made."""
        for tensor in tensors:
            self._register(local_part(tensor), category)

    def _gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._register(local_part(parameter.grad), "gradients")

    # Memory

    def _register(self, tensor: Tensor, category: str) -> None:
        """Counts the tensor's storage in this category from now on."""
        storage = tensor.untyped_storage()
        address = storage_address(storage)
        known = self.live.get(address)
        if known is not None:
            self._add(known.category, -known.nbytes)
            self.live[address] = known._replace(category=category)
            self._add(category, known.nbytes)
            return
        reference = weakref.ref(storage, functools.partial(self._freed, address))
        self.live[address] = Live(reference, category, storage.nbytes())
        self._add(category, storage.nbytes())

    def _freed(self, address: int, reference: object) -> None:
        gone = self.live.pop(address, None)
        if gone is not None:
            self._add(gone.category, -gone.nbytes)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        address = storage_address(storage)
        known = self.live.get(address)
        if known is not None:
            self.live[address] = known._replace(nbytes=storage.nbytes())
            self._add(known.category, storage.nbytes() - known.nbytes)

    def _add(self, category: str, nbytes: int) -> None:
        self.held[category] += nbytes
        total = sum(self.held.values())
        if total > sum(self.peaks.get(self.part, {}).values()):
            self.peaks[self.part] = dict(self.held)

    def category(self, tensor: Tensor) -> str:
        """The category of a tensor's storage; empty if it was never seen."""
        known = self.live.get(storage_address(tensor.untyped_storage()))
        return known.category if known else ""

    def _category_of_result(self, name: str, inputs: list[Tensor], result: Tensor) -> str:
        sources = {self.category(tensor) for tensor in inputs}
        of_weights = bool(sources & {"parameters", "gathered"})
        if of_weights and len(inputs) == 1:
            return "gathered"  # a cast
        if sources == {"gradients"}:
            return "gradients"
        if tuple(result.shape) in self.weight_shapes and result.ndim > 1:
            # An activation can have the shape of a weight (S = D). The product that makes a
            # gradient has no weight among its operands; what is made of a gradient stays one.
            made = name in PRODUCTS and not of_weights
            if made or "embedding" in name or "whole_gradients" in sources:
                return "whole_gradients"
        if result.ndim > 1 and result.shape[-1] == self.vocab_size:
            return "logits"
        return "activations"

    # The step

    def __enter__(self) -> Recorder:
        add_listener(self._mark)
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            original(storage, size)
            self._resized(storage)

        self._resize = original
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, stack)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        remove_listener(self._mark)

    def _mark(self, phase: Phase) -> None:
        self.enter(PARTS.get(phase, "forward"))

    def enter(self, part: str) -> None:
        """Begins a part of the step: forward, backward, late backward or update."""
        if part == "backward":
            self.kept = dict(self.held)
        self.part = part

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # they run first, so the operators inside them are seen
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        space, name = names_of(func)
        kind = kind_of(func)
        inputs = list(tensors_in((args, tuple(kwargs.values()))))
        outputs = list(tensors_in(result))
        if space == "fsdp":
            self._fsdp(name, inputs, outputs, kwargs)
        elif kind:
            self.count(self._call(space, kind, args, inputs))
        elif name == "_grouped_mm":
            self._grouped_product(*args[:3])
        elif name in PRODUCTS:
            self._product(args[PRODUCTS[name] :])
        elif "scaled_dot_product" in name:
            self._attention(name, inputs)
        elif not only_shapes(func):
            moved = sum(map(_nbytes, inputs)) + sum(map(_nbytes, outputs))
            self.counts["pointwise",] += self.times * moved
        for output in outputs:
            if storage_address(output.untyped_storage()) not in self.live:
                self._register(output, self._category_of_result(name, inputs, output))
        return result

    def _fsdp(
        self, name: str, inputs: list[Tensor], outputs: list[Tensor], kwargs: Mapping[str, Any]
    ) -> None:
        """Counts the copies into and out of the tensors that FSDP communicates."""
        if name == "split_with_sizes_copy":
            self.register(kwargs["out"], "gathered")
        elif name == "all_gather_copy_in":
            self.register(outputs, "buffers")
        elif name == "chunk_cat":
            self.register([kwargs["out"]], "buffers")
        self.counts["pointwise",] += self.times * sum(map(_nbytes, inputs))

    def _axis(self, group: str, space: str, kind: str) -> tuple[str, int]:
        """The axis of a group, and its ranks.

        Axes that have all ranks share one group. Of these, FSDP, HSDP and ep do not call functional
        collectives, and tp and cp do.
        """
        axis, size = self.axes.get(group, ("part of dp_shard_cp", 0))
        if axis != "world":
            return axis, size
        if space == "c10d" and kind == "all_to_all" and self.ep == size:
            return "ep", size
        of_weights = space == "c10d" and kind in ("all_gather", "reduce_scatter")
        if of_weights and self.degrees["dp_shard"] * self.degrees["cp"] == size:
            return ("dp_shard" if self.degrees["cp"] == 1 else "dp_shard_cp"), size
        wide = [name for name, degree in self.degrees.items() if degree == size]
        return (wide[0] if wide else axis), size

    def _call(self, space: str, kind: str, args: tuple[Any, ...], inputs: list[Tensor]) -> Call:
        group = next(group for group in map(group_name, args) if group)
        axis, size = self._axis(group, space, kind)
        whole = sum(map(_nbytes, inputs))
        if kind in ("all_gather", "reduce_scatter"):
            # Into a tensor of the caller: its argument and the result are both among the inputs
            whole = max(map(_nbytes, inputs))
            if len(inputs) == 1 and kind == "all_gather":
                whole *= size
        elif kind == "all_to_all":  # likewise, and the argument may have another size
            whole = _nbytes(inputs[-1])
        return Call(kind, axis, size, group, whole, args, tuple(inputs))

    def count(self, call: Call) -> None:
        """Counts a collective that begins."""
        if call.kind == "reduce_scatter" and len(call.tensors) == 2:
            self.register(call.tensors[:1], "gradients")
        self.counts["calls", call.axis, call.kind, call.size] += self.times
        self.counts["bytes", call.axis, call.kind, call.size] += self.times * call.whole_bytes

    def _product(self, operands: tuple[Any, ...]) -> None:
        left, right = operands[:2]
        batch = math.prod(left.shape[:-2])
        self._count_products(left.shape[-2], left.shape[-1], right.shape[-1], left.dtype, batch)

    def _count_products(
        self, rows: int, inner: int, columns: int, dtype: torch.dtype, count: int
    ) -> None:
        name = str(dtype).removeprefix("torch.")
        self.counts["product", rows, inner, columns, name] += self.times * count
        self.flops += 2 * count * rows * inner * columns

    def _grouped_product(self, rows: Tensor, matrices: Tensor, ends: Tensor) -> None:
        """Counts the products of experts, which are divided equally: their sizes are numbers on the
        device.
        """
        columns = matrices.shape[-1]
        is_gradient = matrices.ndim == 2  # of matrices: (rows, R) times (R, columns)
        height, width = rows.shape
        for size, count in equal_parts(width if is_gradient else height, len(ends)):
            if is_gradient:
                self._count_products(height, size, columns, rows.dtype, count)
            else:
                self._count_products(size, width, columns, rows.dtype, count)

    def _attention(self, name: str, inputs: list[Tensor]) -> None:
        first = 1 if "backward" in name else 0  # after the gradient of the result
        queries, keys = inputs[first : first + 2]  # (B, H, Sq, Dh), (B, K, Sk, Dh)
        forward = 4 * queries.numel() * keys.shape[-2]
        flops = 2 * forward if first else forward
        self.counts["attention",] += self.times * flops
        self.flops += flops

    def numbers(self) -> Counter[tuple[str | int, ...]]:
        """All counts, and two kinds of bytes: ("memory", part of the step, category), held at the
        fullest moment of the part, and ("kept", category), held when the last backward began.
        """
        numbers = self.counts.copy()
        for part, held in self.peaks.items():
            for category, nbytes in held.items():
                numbers["memory", part, category] = nbytes
        for category, nbytes in self.kept.items():
            numbers["kept", category] = nbytes
        return numbers


def _gathered_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of a parameter as a rank computes with it: divided by tp and ep, not by FSDP."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for axis, placement in enumerate(parameter.placements):
            if names[axis] in ("tp", "ep") and isinstance(placement, Shard):
                shape[placement.dim] //= parameter.device_mesh.size(axis)
    return tuple(shape)


def tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@functools.cache
def names_of(func: Any) -> tuple[str, str]:
    """The namespace and name of an operator without its overload: c10d::allreduce_."""
    space, _, name = func.name().partition("::")
    return space, name.partition(".")[0]


def kind_of(func: Any) -> str:
    """The kind of collective that an operator is; empty if it is none."""
    space, name = names_of(func)
    return KINDS.get(name, "") if space in ("c10d", "_c10d_functional", "_dtensor") else ""


@functools.cache
def only_shapes(func: Any) -> bool:
    """Whether an operator moves no data: it returns a view, memory without values, or a device."""
    names = ("empty", "wait_tensor", "prim::")
    return returns_a_view(func) or any(name in func.name() for name in names)
