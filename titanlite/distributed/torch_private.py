"""Every private name of torch that a run uses, in one place.

What it is: thin functions over names that begin with an underscore or live in a module that does.
Each says why there is no public way, what it was checked on, and the upstream issue where there is
one. Nothing else in the core uses such names, and the tools only through `tools/torch_private.py`;
a test imports each of them. The exceptions are `__create_chunk_list__` and `__create_write_items__`
in `checkpoint/planner.py`: methods by which a tensor of any library tells DCP its parts.
Why it is here: a private name may change with any release of torch. Then only this file has to be
changed.

"Checked" names the torch releases whose test run covered the use: 2.11, 2.13 and 2.15 on CPU.

The oldest release that is supported is 2.11; in spring 2027 it becomes 2.13. These names have a
public twin that can replace them from a later release on. When that release is the oldest, a test
fails until the private name is gone:

    from   private name                public twin
    2.13   _scaled_mm                  torch.nn.functional.scaled_mm
    2.13   activation_memory_budget    torch.autograd.graph.region_activation_memory_budget
    2.14   _set_pg_timeout             torch.distributed.set_timeout
    2.15   _foreach_                   torch.foreach
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed.tensor  # registers the operators used below
import torch.nn.attention.flex_attention  # registers its operators
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed import ProcessGroup, Store, distributed_c10d
from torch.utils._triton import has_triton_package as has_triton_package

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage  # slow to import

Shape: TypeAlias = Sequence[int]

# Operators on lists of tensors, one kernel for many. torch.foreach makes them public in 2.15
# (pytorch#193607).
# Checked: 2.11, 2.13, 2.15.
foreach_add_ = torch._foreach_add_
foreach_addcdiv_ = torch._foreach_addcdiv_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt

# Products of float8 matrices. The public torch.nn.functional.scaled_mm is in 2.11 too, but calls
# another operator, aten._scaled_mm_v2: in 2.11 it has no kernel for CPUs and inductor has no
# templates for it; in 2.13 the compiler does not overlap it for `async_tp`. Not measured on a GPU.
# Checked: 2.11, 2.13, 2.15.
scaled_mm = torch._scaled_mm

# Recording of CUDA allocations, and its file for torch's memory viewer; torch documents these
# names, and no public ones exist. Not run on a GPU yet.
record_memory_history = torch.cuda.memory._record_memory_history
dump_memory_history = torch.cuda.memory._dump_snapshot

# Operators of tensor and context parallel, by the names that a checkpoint policy sees.
# Functional collectives have no public module. Checked: 2.11, 2.13, 2.15.
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default
SHARD_ALL_TO_ALL = torch.ops._dtensor.shard_dim_alltoall.default
SCALED_MM = torch.ops.aten._scaled_mm.default
FUSED_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,  # imported on 2.11 and 2.13
)


def call_kernel(operator: OpOverload, *args: object) -> Any:
    """Calls an operator's kernel for all devices.

    Called through the public `torch.library.get_kernel` it would keep the GIL. Checked: 2.11, 2.13.
    """
    return operator._op_dk(torch.DispatchKey.CompositeExplicitAutograd, *args)


def attention_backend(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> int:
    """Returns the `SDPBackend` that causal attention would use; no public function reports it.

    Checked: 2.11, 2.13, 2.15.
    """
    return torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=enable_gqa)


def mkldnn_has_bfloat16() -> bool:
    """Whether torch was built with a library that multiplies bfloat16 on this CPU.

    `torch.cpu.get_capabilities` describes the CPU only. Checked: 2.11, 2.13, on x86.
    """
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def set_group_timeout(group: ProcessGroup, seconds: float) -> None:
    """Sets the time-out of collectives, as `init_device_mesh` cannot (pytorch#119613).

    `torch.distributed.set_timeout` is public from 2.14 on. Checked: 2.11, 2.13, 2.15.
    """
    if hasattr(distributed_c10d, "set_timeout"):
        distributed_c10d.set_timeout(timedelta(seconds=seconds), group)
    else:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def clone_default_store() -> Store:
    """Opens a second connection to the store through which the process group was joined (no public
    access: pytorch#151960).

    A second one, because torch itself waits in the first for seconds, which blocks other requests.
    Checked: 2.11, 2.13, 2.15.
    """
    store: Any = distributed_c10d._get_default_store()  # the type stub lacks `clone`
    clone: Store = store.clone()
    return clone


def flight_recorder() -> str:
    """Returns the last collectives of this process as JSON, or a sentence if torch does not record
    them.

    The first name exists in NCCL builds, the second in gloo builds of 2.13 and later.
    Checked: 2.13, 2.15.
    """
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump:
            return dump().decode(errors="replace")
    return "not in this torch"


def set_activation_memory_budget(budget: float) -> None:
    """Sets the share of the activations' memory that graphs compiled from now on may keep; 1 keeps
    all.

    `torch.autograd.graph.region_activation_memory_budget` makes it public in 2.13
    (pytorch#185979), for one region of a graph.
    Under tensor parallel a graph has meshes among its inputs, whose size the partitioner must count
    as zero. Checked: 2.11, 2.13, 2.15.
    """
    import torch._functorch.config

    if budget < 1 and torch.__version__ < "2.13":  # torch compares versions, not strings
        count_grouped_attention()
    functorch: Any = torch._functorch.config
    functorch.activation_memory_budget = budget
    if hasattr(functorch, "unsafe_treat_script_objects_as_zero_size"):
        functorch.unsafe_treat_script_objects_as_zero_size = budget < 1


def count_grouped_attention() -> None:
    """Gives torch formulas for the FLOPs of attention in which query heads share key/value heads.

    With a memory budget the partitioner weighs each operator by its FLOPs. The formulas of torch
    2.11 raise an AssertionError for these heads on GPUs (pytorch#177188, in 2.13). torch has no
    public way to replace a formula: `register_flop_formula` refuses a second one, so the first is
    removed. Checked: 2.11, 2.13.
    """
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    def forward(q: Shape, k: Shape, v: Shape, *args: object, **rest: object) -> int:
        batch, heads, queries, width = q  # (B, H, Sq, Dh)
        # Scores, then their products with values
        return int(2 * batch * heads * queries * k[2] * (width + v[3]))

    def backward(grad: Shape, q: Shape, k: Shape, v: Shape, *args: object, **rest: object) -> int:
        batch, heads, queries, width = q
        # Three products of width Dh: the scores again, the gradients of q and of k. Two of the
        # values' width: the gradients of the scores and of v
        return int(2 * batch * heads * queries * k[2] * (3 * width + 2 * v[3]))

    for kernel in ("flash", "efficient", "cudnn"):
        for suffix, formula in (("", forward), ("_backward", backward)):
            operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{suffix}")
            flop_registry.pop(operator, None)
            register_flop_formula(operator)(formula)


# Option of inductor: it splits matmuls to overlap them with tensor parallel's communication (arXiv
# 2105.05720). Only this private switch exists. It must be an option of the call of `torch.compile`:
# from 2.13 on a global setting holds for one thread, and on CUDA the backward is compiled in
# another. Checked: 2.11, 2.13, that both graphs get it.
OVERLAP_TENSOR_PARALLEL: dict[str, Any] = {"_micro_pipeline_tp": True}


def use_symmetric_memory(group: ProcessGroup) -> None:
    """Enables symmetric memory for a group. Without this deprecated call the compiler does not
    overlap the group's communication (pytorch#193027).

    Run on 2.11 and 2.13, on a GPU that computes nothing (tests/nullgpu).
    """
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def find_vector_instructions() -> None:
    """Makes inductor detect the processor's vector instructions, and remember them. Checked: 2.13.

    Inductor compiles a library, and loads it in a process that it starts by `python -c`. The module
    is not public.
    """
    # Imports inductor, which only a compiled run needs
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    pick_vec_isa()


@functools.cache
def pipeline_stage_class() -> type[PipelineStage]:
    """Defines a `PipelineStage` that works in every schedule, unpickles no messages of others, and
    holds a buffer only for messages that are under way or in use.

    torch's own fails if two neighbouring stages share a process, as at the turn of a V: (1) In 2.11
    stages exchange a first message with their neighbours, and gloo cannot send one to the process
    itself; 2.13 no longer calls that method, and 2.15 no longer has it. (2) In 2.11 to 2.15 `eval`,
    which runs forwards only, still passes gradients to the neighbour.

    From 2.13 on stages vote, by messages in 2.13 and an all-reduce in 2.15, whether all were given
    the shapes of their inputs and outputs. If one says no, or its message is damaged, they send
    each other pickled objects. Here all have the shapes (2.11 then unpickles nothing). The vote
    still takes place, because it connects the neighbours, but its outcome, which a schedule assigns
    to `_inference_mode`, is ignored.

    Until 2.14 a stage allocates a buffer for the input and one for the gradient of each microbatch,
    and keeps them (pytorch#136380); from 2.15 on a buffer exists from the receive to the
    computation. Here the buffers of earlier releases do too: they are on the meta device, without
    memory, before `get_fwd_recv_ops` or `get_bwd_recv_ops` and after the computation that reads
    them. (Autograd keeps an input until its backward; `most_received` counts both.) Such a stage
    also keeps each output of a validation; here until the turn of its backward, which does nothing.

    In all releases a schedule keeps the losses of a step. Each keeps its graph, which keeps the
    microbatch's input. Here a loss is detached after its backward.

    It is a function because the import of `torch.distributed.pipelining` takes half a second.
    Checked: 2.11, 2.13, 2.15.
    """
    from torch.distributed import P2POp
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.stage import _RecvInfo

    class Stage(PipelineStage):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.split_losses: dict[int, Tensor] = {}  # of backwards in two calls

        def backward_one_chunk(
            self,
            bwd_chunk_id: int,
            loss: Tensor | None = None,
            full_backward: bool = True,
            last_backward: bool = False,
        ) -> None:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            if loss is None:
                return
            if full_backward:
                loss.detach_()
            else:
                self.split_losses[bwd_chunk_id] = loss

        def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            loss = self.split_losses.pop(bwd_chunk_id, None)
            if loss is not None:
                loss.detach_()

        def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
            return [
                op
                for op in super()._get_init_p2p_neighbors_ops()
                if op.group_peer != self.group_rank
            ]

        def get_local_bwd_output(self, mb_index: int) -> Any:
            return super().get_local_bwd_output(mb_index) if self.has_backward else ()

        def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
            if self.has_backward:
                super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    mode = getattr(torch.distributed.pipelining._utils, "InferenceMode", None)  # from 2.13 on
    if mode is not None:
        Stage._inference_mode = property(lambda stage: mode.STATIC, lambda stage, outcome: None)  # type: ignore[assignment]
    if hasattr(_RecvInfo, "allocate_buffer"):  # from 2.15 on
        return Stage

    # To be removed when 2.15 is the oldest release that is supported: it has few buffers itself
    class StageWithFewBuffers(Stage):
        def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
            device = self.device
            self.device = torch.device("meta")
            metadata = super()._prepare_forward_infra(*args, **kwargs)
            self.device = device
            if not self.is_first:
                self.no_inputs = [info.buffer for info in self.args_recv_info[0]]
            return metadata

        def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
            device = self.device
            self.device = torch.device("meta")
            metadata = super()._prepare_backward_infra(*args, **kwargs)
            self.device = device
            self.no_gradients = [info.buffer for info in self.grad_recv_info[0]]
            return metadata

        def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
            if not self.is_first:
                allocate_buffers(self.args_recv_info[fwd_chunk_id], self.device, self.has_backward)
            return super().get_fwd_recv_ops(fwd_chunk_id)

        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            if not self.is_first:
                replace_buffers(self.args_recv_info[fwd_chunk_id], self.no_inputs)
            return output

        def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
            if self.has_backward and not self.is_last:
                allocate_buffers(self.grad_recv_info[bwd_chunk_id], self.device, False)
            return super().get_bwd_recv_ops(bwd_chunk_id)

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            if not self.has_backward:
                self.fwd_cache.pop(bwd_chunk_id)
            elif not self.is_last:
                replace_buffers(self.grad_recv_info[bwd_chunk_id], self.no_gradients)

    return StageWithFewBuffers


def allocate_buffers(infos: Iterable[Any], device: torch.device, requires_grad: bool) -> None:
    """Gives memory to the buffer of each of torch's `_RecvInfo`. Checked: 2.13.

    What has no gradient has no buffer for it.
    """
    for info in infos:
        if info.buffer is not None:
            buffer = torch.empty_like(info.buffer, device=device)
            info.buffer = buffer.requires_grad_(requires_grad)


def replace_buffers(infos: Iterable[Any], buffers: Iterable[Tensor | None]) -> None:
    """Sets the buffer of each of torch's `_RecvInfo`. Checked: 2.13.

    All microbatches get the same tensors without memory: a new object for each would be allocated
    in the memory that the loss has freed, which then does not fit the next loss (glibc 2.36).
    """
    for info, buffer in zip(infos, buffers, strict=True):
        info.buffer = buffer
