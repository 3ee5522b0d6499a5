"""Estimates the work of a step: matrix products, attention, and bytes of the other operators.

What it is: each linear layer has three products, (T, in) (in, out) in the forward and two of the
same size in the backward, T being the tokens of a forward on this rank; recomputation repeats some
of the first. What `memory_budget` repeats is the compiler's choice: between nothing and what `full`
does, by 1 - budget, is an upper bound, since it repeats first what is cheap. The other
operators are counted by the bytes that they read and write, one kernel each (eager
mode). Imports no torch. Letters: docs/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.model.flops import is_trained
from titanlite.tools.plan.counts import FLOAT8, Counted, Product
from titanlite.tools.plan.estimate_experts import (
    expert_bytes,
    expert_products,
    repeats_experts,
    routed_tokens,
)
from titanlite.tools.plan.layout import Layout, Parameter, Stage

# The products of a block in the order of its forward. No gradient needs the result of w2, so it is
# never computed again; `selective` keeps the results of every second product. With experts it ends
# in attention before the last one, wo.
ORDER = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")
REPEATED = {
    "full": ORDER[:-1],
    "selective": ("wk", "wo", "w3"),
    "memory_budget": ORDER[:-1],
}


def products(layout: Layout, stages: list[Stage]) -> tuple[Product, ...]:
    """The matrix products of a step, equal ones together."""
    counts: dict[tuple[int, int, int, str], float] = {}
    forwards = layout.local_batches * layout.microbatches
    for stage in stages:
        for (rows, inner, columns, dtype), count in _of_stage(layout, stage):
            key = (rows, inner, columns, dtype)
            counts[key] = counts.get(key, 0) + count * forwards
    return tuple(Product(*key, round(count)) for key, count in counts.items() if count)


def _repeated(layout: Layout, number: int) -> float:
    """The part of a block's forward that is computed again, if its mode repeats all it can."""
    recompute = layout.config.recompute
    if recompute.mode == "memory_budget":
        return 1 - recompute.budget
    return float(recompute.mode in REPEATED and number % recompute.every == 0)


def _of_stage(layout: Layout, stage: Stage) -> Iterator[Counted]:
    """Yields the shapes and counts of the products of one forward and its backward."""
    for number in stage.blocks:
        for parameter in stage.parameters_of(number):
            if parameter.is_expert:
                yield from expert_products(layout, parameter, repeats_experts(layout, number))
            elif len(parameter.shape) == 2:
                yield from _of_layer(layout, parameter, number)
    if stage.has_output:
        yield from _of_output(layout)


def _of_layer(layout: Layout, parameter: Parameter, number: int) -> Iterator[Counted]:
    """Yields the products of one linear layer of block `number`."""
    layer = parameter.name.split(".")[3]
    rows = routed_tokens(layout) if layer == "router" else layout.tokens
    columns, inner = parameter.shape
    dtype = _dtype(layout, parameter)
    yield (rows, inner, columns, dtype), 1 + _repeated_layer(layout, layer, number)
    # The first matrix of an adapter has the input of its layer
    name = parameter.name.replace(".lora_a.", ".")
    if name in layout.with_gradients or ".lora_b." in name:
        yield (rows, columns, inner, dtype), 1
    if parameter.trained:
        yield (columns, rows, inner, dtype), 1


def _repeated_layer(layout: Layout, layer: str, number: int) -> float:
    """How often recomputation repeats a linear layer of block `number`."""
    mode = layout.config.recompute.mode
    if layer == "router":
        return float(repeats_experts(layout, number))
    # What `selective` repeats before a mixture ends in attention
    if layer == "wo" and mode == "selective" and layout.llama.num_experts:
        return 0.0
    return _repeated(layout, number) if layer in REPEATED.get(mode, ()) else 0.0


def _of_output(layout: Layout) -> Iterator[Counted]:
    """Yields the products of the output layer, in the chunks of the loss."""
    chunks = layout.config.loss.num_chunks
    rows = -(-layout.tokens // chunks)
    width = layout.llama.vocab_size // layout.tp
    dim = layout.llama.dim
    dtype = layout.compute_dtype
    yield (rows, dim, width, dtype), chunks
    if "output.weight" in layout.with_gradients:
        yield (rows, width, dim, dtype), chunks
    if is_trained("output.weight", layout.llama, layout.config.lora, layout.frozen):
        yield (width, rows, dim, dtype), chunks


def _dtype(layout: Layout, parameter: Parameter) -> str:
    """The dtype of a layer's products: float8 where the layer is converted."""
    float8 = layout.config.float8
    skipped = any(part in parameter.name for part in float8.skipped)
    fits = all(side % 16 == 0 for side in parameter.shape)
    if float8.enabled and not parameter.is_adapter and fits and not skipped:
        return FLOAT8[0] if float8.scaling == "tensorwise" else FLOAT8[1]
    return layout.compute_dtype


def attention_flops(layout: Layout, stages: list[Stage]) -> int:
    """Counts 12 H Dh per pair of query and key (PaLM), and 4 H Dh for each further forward; 4 H Dh
    in a block of which no gradient is needed.

    With `cp_method = all_gather` the queries of a rank attend to the keys up to the ends of its two
    chunks, which are (2 cp + 1) / 4 cp of the sequence.
    """
    llama = layout.llama
    seq_len = layout.config.training.seq_len
    windows = llama.windows(seq_len)
    gradients = layout.with_gradients
    repeats = layout.config.recompute.mode != "selective"
    total = 0.0
    for stage in stages:
        for number in stage.blocks:
            again = _repeated(layout, number) if repeats else 0.0
            times = 4 + 4 * again
            if f"layers.{number}.attention" in gradients:
                times += 8
            total += times * (windows[number] or seq_len)
    queries = layout.tokens * layout.local_batches * layout.microbatches
    flops = round(total) * queries * llama.num_heads * llama.head_dim // layout.tp
    if layout.cp > 1 and layout.config.parallel.cp_method == "all_gather":
        return flops * (2 * layout.cp + 1) // (4 * layout.cp)
    return flops


def pointwise_bytes(layout: Layout, stages: list[Stage]) -> int:
    """Bytes that norms, RoPE, residuals, SwiGLU, the loss and the copies of FSDP read and write.

    Bytes per token, by the kernels of eager mode in bfloat16. Forward of a block: two norms and two
    sums (20 D), the product with silu (10 F), RoPE through fp32 (20 of q and k). Backward: the same
    of the sums and norms, and the sums of gradients of a shared input (42 D, 18 F).
    """
    llama = layout.llama
    scale = layout.compute_bytes / 2
    tp = layout.tp
    dim = llama.dim * (1 / tp + 1) / 2  # half of it between pairs of matrices
    turned = (llama.q_dim + llama.kv_dim) / tp
    hidden = 0.0 if llama.num_experts else llama.ffn_dim / tp
    forward = 20 * dim + 10 * hidden + 20 * turned
    backward = 42 * dim + 18 * hidden + 20 * turned
    per_token = 0.0
    copied = 0
    for stage in stages:
        again = sum(_repeated(layout, number) for number in stage.blocks)
        per_token += len(stage.blocks) * (forward + backward) + again * forward
        if stage.has_output:
            per_token += 50 * llama.vocab_size / tp
        if stage.has_embedding:
            per_token += 12 * llama.dim / tp
        for unit in stage.units:
            times = 2 if unit.reshard else 1
            copied += 4 * unit.numel * times + 6 * unit.trained_numel
    forwards = layout.local_batches * layout.microbatches
    total = per_token * scale * layout.tokens * forwards
    if layout.has_fsdp:
        total += copied * layout.local_batches
    return round(total) + expert_bytes(layout, stages)
