"""Decides which layers form a pipeline stage, and which stages a rank holds; counts what a stage
receives.

What it is: arithmetic on the model's sizes. A block and the output layer count with their number of
parameters, which is proportional to their compute. The embedding has no matrix product, but it
takes memory on the rank that keeps most activations, so it counts with half its parameters. The
split minimises the largest count of a stage.
Why it is here: it imports no torch, so `tools/plan` computes the stages of a layout at once.
"""

from __future__ import annotations

import itertools
import math

from titanlite.config.schema import V_SHAPED
from titanlite.model.flavors import LlamaConfig, block_shapes


def stage_indices(rank: int, size: int, per_rank: int, schedule: str) -> list[int]:
    """Lists a rank's stages: rank, rank + pp, ... in a loop, or rank and 2 pp - 1 - rank in a V."""
    if schedule in V_SHAPED:
        return [rank, 2 * size - 1 - rank]
    return list(range(rank, size * per_rank, size))


def most_received(
    index: int, size: int, per_rank: int, schedule: str, microbatches: int
) -> tuple[int, int]:
    """Returns the most inputs, and the most gradients of its outputs, that a stage has received and
    still holds.

    An input is held until its microbatch's backward, so it is one of the activations that a
    microbatch keeps; a gradient until the backward that begins with it. 1F1B and GPipe also keep
    the last message until the next is to be received. Schedules with several stages per rank
    receive up to a lap ahead: as many microbatches as pass through one stage before the next.
    """
    lap = microbatches // max(1, microbatches // size)  # pp, or a little more
    inputs = min(microbatches, 2 * lap)
    gradients = min(microbatches, lap)
    if schedule == "1F1B":
        inputs = min(microbatches, max(2, size - index))
        gradients = 2
    elif schedule == "GPipe":
        inputs = microbatches
        gradients = 2
    elif schedule == "LoopedBFS":
        inputs = microbatches
        gradients = microbatches
    if index == 0:
        inputs = 0
    if index == size * per_rank - 1:
        gradients = 0
    return inputs, gradients


def balanced_split(weights: list[int], num_stages: int) -> list[int]:
    """Returns where stages begin, as indices into `weights`, so that the largest sum of weights in
    a stage is minimal.

    The first weight is the embedding's, the last the output layer's, the others the blocks'; each
    stage has at least one block. Among equally good splits it takes the one with the lightest last
    stages, because the last stage also computes the loss.
    """
    blocks = len(weights) - 2
    sums = [0, *itertools.accumulate(weights)]  # sums[i]: the sum of weights[:i]

    def first_index(begin: int) -> int:
        """Returns the index in `weights` at which a stage starts whose first block is `begin`."""
        return begin + 1 if begin > 0 else 0

    def cost(begin: int, end: int) -> int:
        """Sums the weights of blocks begin .. end - 1, and of the model's ends next to them."""
        end_index = len(weights) if end == blocks else end + 1
        return sums[end_index] - sums[first_index(begin)]

    # Dynamic programming. For the blocks before `end`, divided into the stages so far: the cost of
    # the heaviest stage, and the first block of each
    best: dict[int, tuple[int, list[int]]] = {}
    for end in range(1, blocks + 1):
        best[end] = (cost(0, end), [0])
    for stage in range(1, num_stages):
        with_stage: dict[int, tuple[int, list[int]]] = {}
        for end in range(stage + 1, blocks + 1):
            choices = []
            for begin in range(stage, end):  # the blocks begin .. end - 1 are this stage
                heaviest, starts = best[begin]
                choices.append((max(heaviest, cost(begin, end)), [*starts, begin]))
            with_stage[end] = min(choices)
        best = with_stage
    return [first_index(begin) for begin in best[blocks][1]]


def stage_modules(model: LlamaConfig, num_stages: int, explicit: list[str]) -> list[list[str]]:
    """Lists the names of each stage's modules.

    `explicit`: the first module of each stage but the first; empty: balanced.
    """
    layers = [f"layers.{number}" for number in range(model.num_layers)]
    order = ["tok_embeddings", *layers, "norm", "output"]
    if explicit:
        starts = [0, *(order.index(name) for name in explicit)]
    else:
        block = sum(math.prod(shape) for shape in block_shapes(model).values())
        vocabulary = model.vocab_size * model.dim
        starts = balanced_split([vocabulary // 2, *[block] * len(layers), vocabulary], num_stages)
    return [order[begin:end] for begin, end in zip(starts, [*starts[1:], len(order)], strict=True)]
