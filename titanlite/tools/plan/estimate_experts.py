"""Estimates what a mixture of experts does in a step, in the place of a dense feed-forward.

What it is: the terms of `estimate_compute.py`, `estimate_memory.py` and `estimate_traffic.py` in
which a block with experts differs. All experts are taken to be chosen equally often: then a rank
computes as many rows as it routes, R = k T, wherever it sends them. A layout whose router prefers
some experts needs more memory and time on the ranks that hold them. Imports no torch.

T is the number of tokens of a forward that a rank routes: with tp, which divides them, B S / tp.
What is kept of a mixture for its backward, per token (b bytes per number):

    input                                        b D
    rows, sorted by expert, and their results    2 b k D
    w1, silu, w3, their product                  4 b k F
    probabilities, sorted ones, their numbers    16 E
    orders of the rows, and weights              (16 + b) k, with ep 16 k more

`full` and `selective` keep the input, and repeat everything, the exchanges too: the last product,
whose result a dense block does not need again, is multiplied with the weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.tools.plan.counts import Calls, Counted, equal_parts
from titanlite.tools.plan.layout import Layout, Parameter, Stage

COUNT_BYTES = 8  # of a number of rows


def routed_tokens(layout: Layout) -> int:
    """T: the tokens of a forward that this rank routes."""
    return layout.tokens // layout.tp


def expert_rows(layout: Layout) -> int:
    """R: the rows of a forward that this rank's experts compute."""
    return routed_tokens(layout) * layout.llama.experts_per_token


def repeats_experts(layout: Layout, number: int) -> bool:
    """Whether a block's mixture is computed again, other than by the compiler's choice."""
    recompute = layout.config.recompute
    return recompute.mode in ("full", "selective") and number % recompute.every == 0


def expert_products(layout: Layout, parameter: Parameter, again: bool) -> Iterator[Counted]:
    """Yields the products of one matrix of all experts of this rank, in one forward and its
    backward.
    """
    experts, columns, inner = parameter.shape
    dtype = layout.compute_dtype
    for rows, count in equal_parts(expert_rows(layout), experts):
        yield (rows, inner, columns, dtype), count * (2 if again else 1)
        if parameter.name in layout.with_gradients:
            yield (rows, columns, inner, dtype), count
        if parameter.trained:
            yield (columns, rows, inner, dtype), count


def expert_calls(layout: Layout, stage: Stage, forwards: int) -> Iterator[Calls]:
    """The exchanges of a stage: in a forward one of counts, and two of rows, there and back, which
    its backward reverses.
    """
    rows_bytes = expert_rows(layout) * layout.llama.dim * layout.compute_bytes
    counts_bytes = layout.llama.num_experts * COUNT_BYTES
    passes = 0  # through a block's forward
    backwards = 0
    for number in stage.blocks:
        passes += 1 + repeats_experts(layout, number)
        backwards += layout.has_backward(stage.parameters_of(number))
    yield Calls("ep", "all_to_all", layout.ep, forwards * passes, counts_bytes)
    yield Calls("ep", "all_to_all", layout.ep, forwards * 2 * (passes + backwards), rows_bytes)


def balance_calls(layout: Layout, stages: list[Stage]) -> Iterator[Calls]:
    """Sums of each expert's tokens and probabilities over all ranks that route others, once a step
    (`router_balance.py`).
    """
    blocks = sum(len(stage.blocks) for stage in stages)
    if blocks:
        nbytes = blocks * 2 * layout.llama.num_experts * 8
        for axis in ("dp_replicate", "dp_shard", "cp", "tp"):
            yield Calls(axis, "all_reduce", layout.degrees[axis], 1, nbytes)


def kept_by_experts(layout: Layout) -> float:
    """Bytes that a mixture keeps of a forward without recomputation, its input too."""
    llama = layout.llama
    number = layout.compute_bytes
    per_row = number * (2 * llama.dim + 4 * llama.expert_ffn_dim) + 16 + number
    if layout.ep > 1:
        per_row += 16
    per_token = 16 * llama.num_experts + number * llama.dim
    return routed_tokens(layout) * (per_token + llama.experts_per_token * per_row)


def passing_through_experts(layout: Layout) -> float:
    """Bytes of a mixture beside those that it keeps, at its fullest moment.

    In the backward these are the gradients of hidden rows, or of the results and their product with
    the weights. With ep it is the end of a forward: rows before and after the first exchange, and
    results before the second one, in the order of experts and of ranks.
    """
    llama = layout.llama
    results = 4 if layout.ep > 1 else 2
    width = max(3 * llama.expert_ffn_dim, results * llama.dim)
    return expert_rows(layout) * width * layout.compute_bytes


def expert_bytes(layout: Layout, stages: list[Stage]) -> int:
    """Bytes that the operators between a mixture's products read and write, in eager mode.

    In bfloat16, per token: in the forward softmax and sort of the router (22 E); per row silu and
    product (10 F), two copies and two permutations, the weights and their sum (16 D), with ep two
    more permutations (8 D). Backward: the router's sort again, and the gradients of both (60 E),
    18 F, and 36 D, with ep 16 D more.
    """
    llama = layout.llama
    if not llama.num_experts:
        return 0
    scale = layout.compute_bytes / 2
    divided = layout.ep > 1
    forward = 22 * llama.num_experts
    forward += llama.experts_per_token * (
        10 * llama.expert_ffn_dim + (24 if divided else 16) * llama.dim
    )
    backward = 60 * llama.num_experts
    backward += llama.experts_per_token * (
        18 * llama.expert_ffn_dim + (52 if divided else 36) * llama.dim
    )
    passes = 0.0
    for stage in stages:
        for number in stage.blocks:
            passes += backward + forward * (1 + repeats_experts(layout, number))
    forwards = layout.local_batches * layout.microbatches
    return round(passes * scale * routed_tokens(layout) * forwards)
