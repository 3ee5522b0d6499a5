"""Tensor parallel with sequence parallel and loss parallel (Megatron-LM: arXiv 1909.08053,
2205.05198).

What it is: each weight matrix is cut over the ranks of the tp axis. The first matrices of a pair
(wq, wk, wv; w1, w3) are cut by output features, so each rank computes H/tp heads or F/tp hidden
columns. The second (wo, w2) is cut by input features, and the ranks' partial results are summed.
Between such pairs (norms, residuals) all ranks would compute the same, so there the *sequence* is
cut instead, S/tp tokens per rank: sequence parallel. The all-reduce of the partial results is
replaced by a reduce-scatter at the end of a pair and an all-gather before the next pair, with the
same total traffic. The embedding and the output layer are cut by vocabulary, and the loss is
computed on the sharded logits: loss parallel.

    x (B, S/tp, D) --all-gather--> (B, S, D) --wq, wk, wv--> (B, S, H/tp heads)
                   --wo--> partial sums (B, S, D) --reduce-scatter--> (B, S/tp, D)

    wq is (H Dh, D) and wo is (D, H Dh). With tp = 2, rank 1 holds the second half of the rows of
    wq, which compute its heads, and the second half of the columns of wo, which multiply the
    outputs of these heads.

Why it is here: only this axis makes the weight matrices smaller that a rank multiplies with. What
it costs, per rank, block and local batch, with b bytes per number and S tokens (after the division
by cp): 2 all-gathers and 2 reduce-scatters in the forward and as many in the backward, 8 b B S D
(tp-1)/tp bytes in all, and 2 all-reduces of D numbers for the norms' gradients. Recomputation
repeats part of the forward's: `selective` the 2 all-gathers (10 in place of 8), `full` also the
first reduce-scatter (11). The computation waits for all of them, so tp should stay within a node.
The embedding and the output layer together add as much as half a block, and the loss adds 3
all-reduces of B S numbers. Memory: matrices, their gradients and moments, and activations are 1/tp;
norms are replicated.

How it is made: the tables below name each module and the placement of its input, weight and output.
torch names the styles by the transposed weight: `ColwiseParallel` cuts the rows of wq (its output
features), `RowwiseParallel` the columns of wo; `parallelize_module` makes the weights DTensors on
the tp axis. Every parameter is in a table, norms included: torch's clipping multiplies all
gradients in one call, which cannot combine DTensors on one mesh with plain tensors or with other
meshes. The model takes the number of heads from the tensors, so grouped-query attention needs no
further code.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titanlite.distributed.torch_private import use_symmetric_memory
from titanlite.optim.loss import cross_entropy_sum
from titanlite.parallel.deferred_output import DeferredOutput, WeightHolder
from titanlite.parallel.lora import LoRALinear
from titanlite.runtime.errors import ConfigError

if TYPE_CHECKING:
    from titanlite.model.llama import Llama

# Placements of the tensors between modules: sequence sharded (dim 1), replicated, vocabulary
# sharded (last dim)
SEQUENCE_SHARD = Shard(1)
REPLICATED = Replicate()
VOCABULARY_SHARD = Shard(-1)


def block_plan(qk_norm: bool, experts: bool) -> dict[str, ParallelStyle]:
    """Maps each module of a block to the way it is parallelised.

    The block's input and output are (B, S/tp, D). Experts take and give tensors of this shape, and
    are not cut (`expert_parallel.py`).
    """
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(  # x, rope, mask, cache
            input_layouts=(SEQUENCE_SHARD, None, None, None),
            desired_input_layouts=(REPLICATED, None, None, None),
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=SEQUENCE_SHARD),
        "ffn_norm": SequenceParallel(use_local_output=experts),
    }
    if not experts:
        plan["feed_forward"] = PrepareModuleInput(
            input_layouts=(SEQUENCE_SHARD,), desired_input_layouts=(REPLICATED,)
        )
        plan["feed_forward.w1"] = ColwiseParallel()
        plan["feed_forward.w3"] = ColwiseParallel()
        plan["feed_forward.w2"] = RowwiseParallel(output_layouts=SEQUENCE_SHARD)
    # These norms act on each head (B, S, H/tp, Dh); weights are replicated, as for the other norms
    if qk_norm:
        for name in ("attention.q_norm", "attention.k_norm"):
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


def around_adapter(by_rows: bool) -> ParallelStyle:
    """Converts input and output of a layer with an adapter, which cuts its weight and its factors
    itself: torch's styles for linear layers know no parameters of submodules.
    """
    features = Shard(-1)
    if by_rows:
        return PrepareModuleInputOutput(
            input_layouts=REPLICATED,
            desired_input_layouts=REPLICATED,
            output_layouts=features,
            desired_output_layouts=features,
        )
    return PrepareModuleInputOutput(
        input_layouts=features,
        desired_input_layouts=features,
        output_layouts=Partial(),
        desired_output_layouts=SEQUENCE_SHARD,
    )


def ends_plan(model: Llama) -> dict[str, ParallelStyle]:
    """Maps the embedding, the norm and the output layer, as far as this part of the model has
    them, to the way they are parallelised.
    """
    plan: dict[str, ParallelStyle] = {}
    if isinstance(model.tok_embeddings, nn.Embedding):
        plan["tok_embeddings"] = RowwiseParallel(
            input_layouts=REPLICATED, output_layouts=SEQUENCE_SHARD
        )
    if isinstance(model.norm, nn.RMSNorm):
        # The norm returns a plain tensor if its output is sent to the next pipeline stage or to a
        # chunked loss.
        plan["norm"] = SequenceParallel(
            use_local_output=isinstance(model.output, (nn.Identity, DeferredOutput))
        )
    if isinstance(model.output, nn.Linear):
        plan["output"] = ColwiseParallel(
            input_layouts=SEQUENCE_SHARD, output_layouts=VOCABULARY_SHARD
        )
    elif not isinstance(
        model.output, (nn.Identity, DeferredOutput)
    ):  # a tied output uses the embedding's weight, sharded above
        plan["output"] = PrepareModuleInputOutput(
            input_layouts=(SEQUENCE_SHARD,),
            desired_input_layouts=(REPLICATED,),
            output_layouts=(VOCABULARY_SHARD,),
            desired_output_layouts=(VOCABULARY_SHARD,),
        )
    return plan


def apply_tp(model: Llama, mesh: DeviceMesh, async_tp: bool) -> None:
    """Shards a part of the model over the tp axis."""
    parallelize_module(model, mesh, ends_plan(model))
    for block in model.layers.values():
        plan = block_plan(model.config.qk_norm, model.config.num_experts > 0)
        for name, layer in block.named_modules():
            if isinstance(layer, LoRALinear):
                by_rows = isinstance(plan[name], ColwiseParallel)
                layer.shard(mesh, by_rows)
                plan[name] = around_adapter(by_rows)
        parallelize_module(block, mesh, plan)
    if isinstance(model.tok_embeddings, nn.Embedding):
        # The embedding's reduce-scatter is still in flight here, and a compiled block that receives
        # such a tensor computes a wrong gradient for the embedding (torch 2.13); a copy waits for
        # it. Eager blocks get it too, and so keep a plain tensor, as `titanlite plan` counts.
        model.tok_embeddings.register_forward_hook(lambda module, args, output: output.clone())
    # torch has no style for a module that only holds a weight; it is cut by vocabulary too
    for end in (model.tok_embeddings, model.output):
        if isinstance(end, WeightHolder):
            for name, weight in end.named_parameters():
                setattr(end, name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))
    # torch 2.13 warns that an output which is a view must not be changed in place. `to_local` makes
    # the logits one, and nothing changes them. Python has filters of a process only; this one names
    # the message.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    if async_tp:
        _prepare_async_tp(mesh)


def _prepare_async_tp(mesh: DeviceMesh) -> None:
    """Lets the compiler overlap matmuls with communication.

    Raises ConfigError if the hardware does not support it.
    """
    if mesh.device_type != "cuda" or torch.cuda.get_device_capability() < (9, 0):
        raise ConfigError(
            "parallel.async_tp = true needs symmetric memory: CUDA devices of compute capability "
            "9.0 (H100) or "
            "later, linked with NVLink; set it to false"
        )
    use_symmetric_memory(mesh.get_group())


def loss_parallel_cross_entropy_sum(logits: Tensor, labels: Tensor, mesh: DeviceMesh) -> Tensor:
    """Computes `cross_entropy_sum` of labels (B, S) and logits (B, S, V/tp), of which each rank has
    its part of the vocabulary.

    Forward and backward must run within torch's `loss_parallel`. The result is equal on all ranks
    of the axis.
    """
    loss = cross_entropy_sum(DTensor.from_local(logits, mesh, [VOCABULARY_SHARD]), labels)
    assert isinstance(loss, DTensor)
    return loss.to_local()
