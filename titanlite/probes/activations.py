"""Measures statistics of each block's output, and the largest attention logits.

What it is: on measured steps, a forward without gradients of the first local batch of each
data-parallel rank, before the step trains on it. A row of metrics.jsonl has for each block
`activation_mean/layers.<i>`, `activation_rms/...` and `activation_max/...` of the residual stream
after it (`activation_max` is the largest absolute value), and `attention_logit/...`, the largest
q k / sqrt(Dh) of a query and a key that it may attend to.
Why it is here: with bf16, logits in the hundreds and single activations in the thousands precede
many divergences (arXiv 2302.05442, 2309.14322).
What it costs: on measured steps one forward of one local batch, with attention's products computed
a second time in fp32, CHUNK of them at a time; two small all-reduces; and the host waits. Compiled
blocks run eagerly if the logits are measured; if not (see below), they run compiled, since the
hooks are outside of what is compiled.

How it is made: hooks on the blocks see their outputs. The logits do not exist in fused kernels, so
they are computed again from the arguments of each call of `F.scaled_dot_product_attention`, which
under context parallel has the keys of all ranks. FlexAttention, which serves `data.document_mask`
and sliding windows on CUDA, calls something else and has no logits here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from titanlite.data.rows import Batch
from titanlite.data.to_device import to_device
from titanlite.distributed.agreement import is_alone
from titanlite.observe.metrics import Metrics
from titanlite.parallel.stages import Stages
from titanlite.probes.layer_norms import finite
from titanlite.runtime.phases import Phase, mark_phase

logger = logging.getLogger("titanlite")
Mask: TypeAlias = "Tensor | CausalBias | None"
FIGURES = ("activation_mean", "activation_rms", "activation_max", "attention_logit")
CHUNK = 1 << 24  # logits in memory at a time, 4 bytes each


class Activations:
    """Measures the first local batch of every `metrics.activations_freq`-th step; 0: none.

    Rows have the figures of all ranks' blocks.
    """

    def __init__(self, freq: int, stages: Stages, metrics: Metrics) -> None:
        self.freq = freq
        self.stages = stages
        self.metrics = metrics
        self.num_layers = stages.model_parts[0].config.num_layers
        self._block = 0  # the block whose forward is running
        # For each block: number of outputs, their sum, and the sum of their squares
        self._sums = torch.zeros(3, self.num_layers, dtype=torch.float64, device=metrics.device)
        # For each block: the largest absolute output, and the largest logit
        self._largest = torch.zeros_like(self._sums[:2])

    def before_step(self, batches: list[Batch]) -> None:
        """Measures if it is time; call it before a step's first forward, with CPU batches."""
        if self.freq > 0 and self.metrics.progress.step % self.freq == 0:
            self.measure(batches[0])

    def measure(self, batch: Batch) -> None:
        """Measures a batch and writes a row for the current step.

        All ranks call it together, each with its batch, which is not changed.
        """
        mark_phase(Phase.MEASURE_ACTIVATIONS)
        logits = self.has_logits(batch)
        self._sums.zero_()
        self._largest.fill_(float("-inf"))
        handles = []
        for part in self.stages.model_parts:
            for name, block in part.layers.items():
                handles.append(block.register_forward_pre_hook(self._enter(int(name))))
                handles.append(block.register_forward_hook(self._leave))
        batch = batch.apply(lambda tensor: to_device(tensor, self.metrics.device))
        try:
            with self._recording() if logits else contextlib.nullcontext():
                self.stages.evaluate(batch)
        finally:
            for handle in handles:
                handle.remove()
        if not is_alone():
            # Ranks differ in tokens (dp, cp, tp), in blocks (pp) or in heads (tp).
            dist.all_reduce(self._sums)
            dist.all_reduce(self._largest, dist.ReduceOp.MAX)
        count, total, squares = self._sums
        figures = torch.stack((total / count, (squares / count).sqrt(), *self._largest))
        names = FIGURES if logits else FIGURES[:3]
        self._write(names, figures.tolist())

    def has_logits(self, batch: Batch) -> bool:
        """Whether attention calls `F.scaled_dot_product_attention` with all keys."""
        masked = batch.positions is not None or self.stages.windowed
        flex = masked and self.metrics.device.type == "cuda"
        return not flex

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Measures the logits of attention within this context; blocks run eagerly."""
        with torch.compiler.set_stance("force_eager"), _Attention(self._attend):
            yield

    def _enter(self, block: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: object) -> None:
            self._block = block

        return hook

    def _leave(self, module: nn.Module, arguments: object, output: Tensor) -> None:
        """Adds a block's output: (B, S/cp/tp, D), of one microbatch."""
        if isinstance(output, DTensor):
            output = output.to_local()
        square = torch.linalg.vector_norm(output, dtype=torch.float64).square()
        count = torch.full_like(square, output.numel())
        total = output.sum(dtype=torch.float64)
        self._sums[:, self._block] += torch.stack((count, total, square))
        self._raise_largest(0, output.abs().amax())

    def _attend(self, q: Tensor, k: Tensor, mask: Mask, causal: bool) -> None:
        self._raise_largest(1, largest_logit(q, k, mask, causal))

    def _raise_largest(self, row: int, value: Tensor) -> None:
        largest = self._largest[row, self._block]
        self._largest[row, self._block] = torch.maximum(largest, value.double())

    def _write(self, names: Sequence[str], figures: list[list[float]]) -> None:
        row: dict[str, Any] = {"step": self.metrics.progress.step}
        shown = []
        for name, values in zip(names, figures, strict=False):
            for i, value in enumerate(values):
                row[f"{name}/layers.{i}"] = finite(value)
            if name != "activation_mean":
                largest = max(values)
                shown.append(f"{name} up to {largest:.4g} (layers.{values.index(largest)})")
        self.metrics.write(row)
        logger.info(f"step {row['step']}: {', '.join(shown)}")


class _Attention(TorchFunctionMode):
    """Calls `record` with queries, keys, mask and causality of each attention in this context,
    before it is computed.
    """

    def __init__(self, record: Callable[[Tensor, Tensor, Mask, bool], None]) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            q, k, _, mask = args
            self.record(q, k, mask, kwargs["is_causal"])
        return func(*args, **kwargs)


@torch.no_grad()
def largest_logit(q: Tensor, k: Tensor, mask: Mask, causal: bool) -> Tensor:
    """Computes the largest q k / sqrt(Dh) of the allowed pairs, an fp32 scalar.

    q (B, H, Sq, Dh), k (B, K, Sk, Dh); `mask`: None, a bool tensor (B, 1, Sq, Sk), or torch's
    lower-right causal bias; `causal`: without a mask.
    """
    batch, heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    k = k.float()[:, :, None].transpose(-1, -2)  # (B, K, 1, Dh, Sk)
    positions = torch.arange(num_keys, device=q.device)
    # The last key that each query may attend to, (Sq, 1)
    last = torch.full((num_queries, 1), num_keys, device=q.device)
    if isinstance(mask, CausalBias):
        last = torch.arange(num_queries, device=q.device)[:, None] + (num_keys - num_queries)
    elif causal:
        last = torch.arange(num_queries, device=q.device)[:, None]
    largest = torch.full((), float("-inf"), device=q.device)
    rows = max(1, CHUNK // (batch * heads * num_keys))
    for start in range(0, num_queries, rows):
        part = slice(start, start + rows)
        queries = q[:, :, part].float().unflatten(1, (k.shape[1], -1))  # (B, K, H/K, rows, Dh)
        logits = queries @ k * head_dim**-0.5  # (B, K, H/K, rows, Sk)
        allowed = positions <= last[part]
        if mask is not None and not isinstance(mask, CausalBias):
            allowed = allowed & mask[:, :, None, part]  # (B, 1, 1, rows, Sk)
        largest = torch.maximum(largest, logits.masked_fill(~allowed, float("-inf")).amax())
    return largest
