"""Every private name of torch that only the tools use, in one place.

What it is: functions over names that begin with an underscore or live in a module that does: a
pretended process group and pretended tensors (`plan`, `explain`), and what a recorder reads of
torch's objects. Each says what it was checked on, and why there is no public way where that is not
obvious.
Why it is here: a private name may change with any release of torch. Then only this file has to be
changed.

"Checked" names the torch releases whose test run covered the use: 2.11, 2.13 and 2.15 on CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed import ProcessGroup

# AsyncCollectiveTensor: the result of a functional collective that is still in flight
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor as AsyncCollectiveTensor,
)
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def num_compiled_graphs() -> int:
    """Counts the graphs that torch.compile has made in this process. Checked: 2.11, 2.13, 2.15."""
    import torch._dynamo

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def join_pretended_group(rank: int, world_size: int) -> None:
    """Makes this process one rank of a group whose other ranks do not exist.

    Collectives return at once and leave their results as they are. The backend is for torch's own
    tests. Checked: 2.11, 2.13.
    """
    torch.distributed.init_process_group("fake", rank=rank, world_size=world_size)
    # Skip what stages send each other before their first step: in 2.13 a vote, whose outcome
    # `pipeline_stage_class` ignores, and which no message could carry here; in 2.11 a number
    from torch.distributed.pipelining import schedules, stage

    schedules._PipelineSchedule._warmup_p2p = lambda *arguments: None  # type: ignore[method-assign]
    stage._PipelineStageBase._get_init_p2p_neighbors_ops = (  # type: ignore[method-assign]
        lambda *arguments: []
    )


@contextlib.contextmanager
def pretended_tensors() -> Iterator[None]:
    """Makes tensors in this context have shapes and dtypes, but no numbers or memory; tensors made
    outside can be arguments. A number that is read from one is 1. Grouped products, whose shapes
    torch infers in bfloat16 only, have a result in each dtype. Checked: 2.13.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Ones(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                return 1.0 if args[0].is_floating_point() else 1
            if func is torch.ops.aten._grouped_mm.default:
                rows, matrices, ends = args[:3]
                groups = (len(ends),) if matrices.ndim == 2 else ()  # the gradients of matrices
                return rows.new_empty(*groups, rows.shape[0], matrices.shape[-1])
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(allow_non_fake_inputs=True), Ones():
        yield


def hide_shape_inference() -> None:
    """Hides from dispatch modes the operators that a DTensor runs on whole pretended tensors, once
    for each shape, to learn the shape of a result. Checked: 2.13.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    infer = ShardingPropagator._propagate_tensor_meta_non_cached

    def without_modes(propagator: ShardingPropagator, operation: Any) -> Any:
        with _disable_current_modes():
            return infer(propagator, operation)

    ShardingPropagator._propagate_tensor_meta_non_cached = without_modes  # type: ignore[method-assign, assignment]


def storage_address(storage: torch.UntypedStorage) -> int:
    """Returns an address that identifies a storage while it exists.

    A pretended storage has no `data_ptr`. Checked: 2.13.
    """
    return storage._cdata


def checkpoint_offset(tensor: Tensor) -> int:
    """Returns the byte of a `torch.save` file at which a tensor's storage begins; `torch.load` must
    have loaded the tensor on the meta device.

    torch's notes on serialization use this attribute of a storage (pytorch#134504), which has no
    public name. Read in 2.11 and 2.14. Checked: 2.13.
    """
    storage: Any = tensor.untyped_storage()
    return int(storage._checkpoint_offset)


def storage_info(file: str, begin: int, length: int) -> object:
    """Returns what the index of a DCP folder has for a saved part: its file and bytes.

    A public `FileSystemWriter.write_data` has to return it. Checked: 2.13.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, begin, length)


def returns_a_view(operator: OpOverload) -> bool:
    """Whether an operator returns a view of an argument. Checked: 2.13."""
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in operator._schema.returns
    )


def group_name(argument: object) -> str:
    """Returns the name of the process group in an operator's argument; "" if it is not a group.

    Operators of process groups get the group, functional collectives its name, a number. Checked:
    2.13.
    """
    if isinstance(argument, torch.ScriptObject):
        if "ProcessGroup" not in argument._type().qualified_name():
            return ""
        return str(ProcessGroup.unbox(argument).group_name)
    if isinstance(argument, ProcessGroup):
        return str(argument.group_name)
    return argument if isinstance(argument, str) and argument.isdecimal() else ""


def group_ranks(name: str) -> tuple[int, ...]:
    """Lists the ranks of the process group of this name, in the group's order.

    Only the search by name is private. Checked: 2.13.
    """
    resolve: Any = torch.distributed.distributed_c10d._resolve_process_group  # takes a `GroupName`
    group = resolve(name)
    return tuple(torch.distributed.get_process_group_ranks(group))


FSDP_METHODS = ("unshard", "post_backward")  # methods of `FSDPParamGroup` that communicate


def fsdp_parameters(frame: FrameType | None) -> tuple[str, ...]:
    """Lists the parameters that FSDP gathers or reduces together in this frame or one of its
    callers; empty if FSDP is not among them. Checked: 2.13.
    """
    while frame is not None:
        group: Any = None
        if frame.f_code.co_name in FSDP_METHODS:
            group = frame.f_locals.get("self")
        if hasattr(group, "fsdp_params"):
            return tuple(str(parameter._param_fqn) for parameter in group.fsdp_params)
        frame = frame.f_back
    return ()
