"""Tensor parallel with sequence parallel and loss parallel (Megatron-LM: arXiv 1909.08053, 2205.05198).

What it is: each matrix is cut over the T processes of an axis. The first matrices of a pair (wq, wk, wv; w1, w3) are
cut by output, so each process has H/T heads or F/T hidden columns and computes on them alone; the second (wo, w2) is
cut by input, and the processes' partial results are summed. Between such pairs (norms, residuals) every process would
compute the same, so there the *sequence* is cut instead, S/T tokens each: sequence parallel. The all-reduce of
partial results becomes a reduce-scatter before, and an all-gather after, at the same total traffic. The vocabulary is
cut too, at both ends, and the loss is computed on the cut logits: loss parallel.

    x (B, S/T, D) --all-gather--> (B, S, D) --wq, wk, wv--> (B, S, H/T heads) --wo--> partial (B, S, D)
                                                                      --reduce-scatter--> (B, S/T, D)

What it costs, per process, block and microbatch, with b bytes per number and S the tokens that cp leaves: 2 all-gathers
and 2 reduce-scatters in the forward and as many in the backward, 8 b B S D (T-1)/T in all, and 2 all-reduces of D
numbers for the norms. They are waited for, so T stays within a node. The two ends add as much as half a block, and
the loss 3 all-reduces of B S numbers. Memory: matrices, gradients, moments and activations are 1/T (norms are whole).

How it is made: the table below names each module and what happens to its input, its weight and its output.
`parallelize_module` turns weights into DTensors on the tp axis. Every parameter is in the table, so the gradient norm
finds all of them on one mesh. Head counts in the model are read off the tensors, so GQA needs nothing more.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from titanlite.config.schema import ConfigError
from titanlite.distributed.torch_private import enable_async_tp
from titanlite.optim.loss import cross_entropy_sum
from titanlite.parallel.chunked_loss import DeferredOutput
from titanlite.parallel.pipeline_parallel import TiedWeight

# What travels between modules: the sequence cut (dim 1), a whole copy, or the vocabulary cut (last dim)
SEQUENCE_SHARD, REPLICATED, VOCABULARY_SHARD = Shard(1), Replicate(), Shard(-1)


def block_plan() -> dict[str, Any]:
    """What happens to the modules of a block. Its input and output are (B, S/T, D)."""
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(  # x, rope, cache
            input_layouts=(SEQUENCE_SHARD, None, None), desired_input_layouts=(REPLICATED, None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=SEQUENCE_SHARD),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(SEQUENCE_SHARD,), desired_input_layouts=(REPLICATED,)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=SEQUENCE_SHARD),
    }


def ends_plan(model: Any) -> dict[str, Any]:
    """What happens to the ends that this part of the model has."""
    plan: dict[str, Any] = {}
    if isinstance(model.tok_embeddings, nn.Embedding):
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=REPLICATED, output_layouts=SEQUENCE_SHARD)
    if isinstance(model.norm, nn.RMSNorm):
        # A pipeline may be cut between norm and output, the loss may project: what is handed on is a plain tensor.
        plan["norm"] = SequenceParallel(use_local_output=isinstance(model.output, (nn.Identity, DeferredOutput)))
    if isinstance(model.output, nn.Linear):
        plan["output"] = ColwiseParallel(input_layouts=SEQUENCE_SHARD, output_layouts=VOCABULARY_SHARD)
    elif not isinstance(model.output, (nn.Identity, DeferredOutput)):  # the embedding's weight, which is cut already
        plan["output"] = PrepareModuleInputOutput(
            input_layouts=(SEQUENCE_SHARD,),
            desired_input_layouts=(REPLICATED,),
            output_layouts=(VOCABULARY_SHARD,),
            desired_output_layouts=(VOCABULARY_SHARD,),
        )
    return plan


def apply_tp(model: Any, mesh: DeviceMesh, async_tp: bool) -> None:
    """Cuts a part of the model over the tp axis; nothing where that has one process."""
    if mesh.size() == 1:
        return
    parallelize_module(model, mesh, ends_plan(model))
    for block in model.layers.values():
        parallelize_module(block, mesh, block_plan())
    if isinstance(model.tok_embeddings, nn.Embedding):
        # The embedding's reduce-scatter is still under way here, and a compiled block that receives such a tensor
        # computes a wrong gradient for the embedding (torch 2.13); a copy waits for it.
        model.tok_embeddings.register_forward_hook(lambda module, args, output: output.clone())
    for end in (model.tok_embeddings, model.output):
        if isinstance(end, (TiedWeight, DeferredOutput)):  # which multiply nothing themselves
            for name, weight in end.named_parameters():
                setattr(end, name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))
    # Nobody changes the logits in place, which is what this warning of torch 2.13 is about.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    if async_tp:
        _enable_async_tp(mesh)


def _enable_async_tp(mesh: DeviceMesh) -> None:
    """Overlaps matmuls with communication, where the hardware can. Raises ConfigError where not."""
    if mesh.device_type != "cuda" or torch.cuda.get_device_capability() < (9, 0):
        raise ConfigError(
            "parallel.async_tp = true needs symmetric memory: CUDA devices of compute capability 9.0 (H100) or "
            "later, linked with NVLink; set it to false"
        )
    enable_async_tp(mesh.get_group())


def loss_parallel_cross_entropy_sum(logits: Tensor, labels: Tensor, mesh: DeviceMesh) -> Tensor:
    """`cross_entropy_sum` of logits (B, S, V/T), each process with its part of the vocabulary; labels (B, S).

    Needs `loss_context` around it and around its backward. The same value on all processes of the axis.
    """
    whole = DTensor.from_local(logits, mesh, [VOCABULARY_SHARD])
    loss = cross_entropy_sum(whole, labels)
    assert isinstance(loss, DTensor)
    return loss.to_local()


def loss_context(mesh: DeviceMesh) -> contextlib.AbstractContextManager[None]:
    """Where log-softmax and its gradient work on a vocabulary that is cut."""
    return loss_parallel() if mesh.size() > 1 else contextlib.nullcontext()
