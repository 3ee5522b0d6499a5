"""Statistics of each block's output, and the largest attention logits.

What it is: on measured steps, a forward without gradients of the first local batch of each
data-parallel rank, before the step trains on it. A row of metrics.jsonl has for each block
`activation_mean/layers.<i>`, `activation_rms/...` and `activation_max/...` of the residual stream
after it (the last is the largest absolute value), and `attention_logit/...`, the largest q k /
sqrt(Dh) of a query and a key that it may attend to.
Why it is here: with bf16, logits in the hundreds and single activations in the thousands precede
many divergences (arXiv 2302.05442, 2309.14322).
What it costs: on measured steps one forward of one local batch, with attention's products computed
a second time in fp32, CHUNK of them at a time; two small all-reduces; and the host waits. Compiled
blocks run eagerly if the logits are measured; if not (see below), they run compiled, since the
hooks are outside of what is compiled.

How it is made: hooks on the blocks see their outputs. The logits do not exist in fused kernels, so
they are computed again from the arguments of each call of `F.scaled_dot_product_attention`, which
under context parallel has the keys of all ranks. Two kinds of attention call something else and
have no logits here: `parallel.cp_method = ring`, and FlexAttention, which serves
`data.document_mask` on CUDA.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from titanlite.data.stream import Batch
from titanlite.distributed.watchdog import mark_phase
from titanlite.observe.metrics import Metrics
from titanlite.probes.layer_norms import finite

logger = logging.getLogger("titanlite")
FIGURES = ("activation_mean", "activation_rms", "activation_max", "attention_logit")
CHUNK = 1 << 24  # logits in memory at a time, 4 bytes each


class Activations:
    """Measures batches with the blocks of this rank's stages, and writes rows with those of all
    ranks.
    """

    def __init__(self, stages: Any, metrics: Metrics, logits: bool) -> None:
        """`logits`: whether attention calls `F.scaled_dot_product_attention` with all keys."""
        self.stages = stages
        self.metrics = metrics
        self.logits = logits
        self.num_layers: int = stages.model_parts[0].config.num_layers
        self._block = 0  # whose forward is running

    def measure(self, batch: Batch) -> None:
        """A row for the current step.

        All ranks call it together, each with its batch, which stays as it is.
        """
        mark_phase("measuring activations")
        self.sums = torch.zeros(3, self.num_layers, dtype=torch.float64, device=self.metrics.device)
        # Of the outputs, and of the logits
        self.largest = torch.full_like(self.sums[:2], float("-inf"))
        handles = []
        for name, block in (
            named for part in self.stages.model_parts for named in part.layers.items()
        ):
            handles.append(block.register_forward_pre_hook(self._enter(int(name))))
            handles.append(block.register_forward_hook(self._leave))
        try:
            with self._logits():
                self.stages.evaluate(batch.apply(torch.clone))  # ring attention cuts it in place
        finally:
            for handle in handles:
                handle.remove()
        if dist.is_initialized() and dist.get_world_size() > 1:
            # Every rank has other tokens (of dp, cp, tp) or other blocks (pp); heads are divided
            # too.
            dist.all_reduce(self.sums)
            dist.all_reduce(self.largest, dist.ReduceOp.MAX)
        count, total, squares = self.sums
        self._write(torch.stack((total / count, (squares / count).sqrt(), *self.largest)).tolist())

    @contextlib.contextmanager
    def _logits(self) -> Iterator[None]:
        if not self.logits:
            yield
            return
        with torch.compiler.set_stance("force_eager"), _Attention(self._attend):
            yield

    def _enter(self, block: int) -> Callable[..., None]:
        def hook(module: Any, arguments: Any) -> None:
            self._block = block

        return hook

    def _leave(self, module: Any, arguments: Any, output: Any) -> None:
        """output: (B, S/cp/tp, D), of one microbatch"""
        output = output.to_local() if isinstance(output, DTensor) else output
        square = torch.linalg.vector_norm(output, dtype=torch.float64).square()
        count = torch.full_like(square, output.numel())
        self.sums[:, self._block] += torch.stack((count, output.sum(dtype=torch.float64), square))
        self._keep(0, output.abs().amax())

    def _attend(self, q: Tensor, k: Tensor, mask: Any, causal: bool) -> None:
        self._keep(1, largest_logit(q, k, mask, causal))

    def _keep(self, row: int, value: Tensor) -> None:
        self.largest[row, self._block] = torch.maximum(
            self.largest[row, self._block], value.double()
        )

    def _write(self, figures: list[list[float]]) -> None:
        row: dict[str, Any] = {"step": self.metrics.progress.step}
        shown = []
        for name, values in zip(FIGURES if self.logits else FIGURES[:3], figures, strict=False):
            row |= {f"{name}/layers.{i}": finite(value) for i, value in enumerate(values)}
            if name != "activation_mean":
                shown.append(f"{name} up to {max(values):.4g} (layers.{values.index(max(values))})")
        self.metrics.write(row)
        logger.info(f"step {row['step']}: {', '.join(shown)}")


class _Attention(TorchFunctionMode):
    """Within it, `record` gets queries, keys, mask and causality of each attention before it is
    computed.
    """

    def __init__(self, record: Callable[[Tensor, Tensor, Any, bool], None]) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            q, k, _, mask = args
            self.record(q, k, mask, kwargs["is_causal"])
        return func(*args, **kwargs)


@torch.no_grad()
def largest_logit(q: Tensor, k: Tensor, mask: Any, causal: bool) -> Tensor:
    """The largest q k / sqrt(Dh) of the allowed pairs, an fp32 scalar. q (B, H, Sq, Dh), k (B, K,
    Sk, Dh).

    `mask`: None, a bool tensor (B, 1, Sq, Sk), or torch's lower-right causal bias; `causal`:
    without a mask.
    """
    (batch, heads, queries, width), keys = q.shape, k.shape[2]
    k = k.float()[:, :, None].transpose(-1, -2)  # (B, K, 1, Dh, Sk)
    places = torch.arange(keys, device=q.device)
    last = torch.arange(queries, device=q.device)[:, None]  # the last key of each query
    last = (
        last + (keys - queries)
        if isinstance(mask, CausalBias)
        else last
        if causal
        else last * 0 + keys
    )
    largest = torch.full((), float("-inf"), device=q.device)
    rows = max(1, CHUNK // (batch * heads * keys))
    for start in range(0, queries, rows):
        part = slice(start, start + rows)
        # (B, K, H/K, rows, Sk)
        logits = q[:, :, part].float().unflatten(1, (k.shape[1], -1)) @ k * width**-0.5
        allowed = places <= last[part]
        if mask is not None and not isinstance(mask, CausalBias):
            allowed = allowed & mask[:, :, None, part]  # (B, 1, 1, rows, Sk)
        largest = torch.maximum(largest, logits.masked_fill(~allowed, float("-inf")).amax())
    return largest
