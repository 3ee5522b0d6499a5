"""Estimates the collectives of a step: kinds, counts and bytes along each axis.

What it is: the formulas in the headers of `parallel/*.py`, with the ends of the model, the loss,
accumulation and recomputation. Left out: the scales of float8, and the sums of a logged step.
Imports no torch. Letters: docs/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.config.schema import V_SHAPED
from titanlite.rules.degrees import num_processes
from titanlite.tools.plan.counts import Calls, Collective
from titanlite.tools.plan.estimate_experts import balance_calls, expert_calls
from titanlite.tools.plan.layout import Layout, Stage, Unit


def collectives(layout: Layout, stages: list[Stage], pp_rank: int) -> tuple[Collective, ...]:
    """The calls of a rank in a step, summed by kind; groups of one rank are left out."""
    counts: dict[tuple[str, str, int], int] = {}
    sizes: dict[tuple[str, str, int], float] = {}
    for calls in _all_calls(layout, stages, pp_rank):
        if calls.size == 1 or calls.count == 0:
            continue
        axis = calls.axis
        if axis == "dp_shard_cp" and layout.cp == 1:
            axis = "dp_shard"
        key = (axis, calls.kind, calls.size)
        counts[key] = counts.get(key, 0) + calls.count
        sizes[key] = sizes.get(key, 0.0) + calls.count * calls.bytes_each
    return tuple(
        Collective(axis, kind, size, counts[axis, kind, size], round(sizes[axis, kind, size]))
        for axis, kind, size in sorted(counts)
    )


def _all_calls(layout: Layout, stages: list[Stage], pp_rank: int) -> Iterator[Calls]:
    for stage in stages:
        if layout.has_fsdp:
            ahead = max(1, layout.config.parallel.prefetch)
            for number, unit in enumerate(stage.units):
                # A backward gathers `prefetch` units in advance: also one that it does not pass
                following = stage.units[number : number + 1 + ahead]
                again = any(layout.has_backward(other.parameters) for other in following)
                yield from _sharding(layout, unit, again)
        if layout.tp > 1:
            yield from _tensor_parallel(layout, stage)
        if layout.cp > 1:
            yield from _context_parallel(layout, stage)
        if layout.ep > 1:
            yield from expert_calls(layout, stage, _forwards(layout))
    if layout.pp > 1:
        yield from _messages(layout, stages, pp_rank)
    if layout.config.optimizer.name == "muon":
        yield from _muon(layout, stages)
    if layout.llama.num_experts:
        yield from balance_calls(layout, stages)
    yield from _single_numbers(layout)


def _single_numbers(layout: Layout) -> Iterator[Calls]:
    """All-reduces of the numbers of tokens and targets, and of the sum of squares of all
    gradients.
    """
    for axis in ("dp_replicate", "dp_shard"):
        yield Calls(axis, "all_reduce", layout.degrees[axis], 1, 16)
    world = num_processes(layout.degrees)
    # An axis that has all ranks shares its group with `world`
    axis = next((axis for axis, degree in layout.degrees.items() if degree == world), "world")
    yield Calls(axis, "all_reduce", world, 1, 8)


def _sharding(layout: Layout, unit: Unit, again: bool) -> Iterator[Calls]:
    """All-gathers of the weights, reduce-scatters and all-reduces of their gradients.

    `again`: whether the backward gathers a unit that was freed.
    """
    n = unit.shards
    batches = layout.local_batches
    mode = layout.config.parallel.reshard_after_forward
    gathered = n * unit.part_numel() * layout.compute_bytes
    gathers = 1
    if unit.reshard and layout.pp > 1:
        # A backward leaves the weights gathered, a forward frees them. So those that follow a
        # backward gather nothing, and all others do. In any order that begins with a forward and
        # ends with a backward, that is one gather more than there are forwards.
        gathers = layout.microbatches + 1
    elif unit.reshard and again and mode.isdecimal():
        yield Calls(unit.axis, "all_gather", int(mode), batches, gathered)
    elif unit.reshard and again:
        gathers = 2
    gathers *= batches
    if mode == "never" and layout.pp == 1:  # once per step
        gathers = 1
    yield Calls(unit.axis, "all_gather", n, gathers, gathered)
    if unit.trained_numel == 0:
        return
    if not layout.config.parallel.reduce_every_microbatch:
        batches = 1
    part = unit.part_numel(trained_only=True) * layout.reduce_bytes
    yield Calls(unit.axis, "reduce_scatter", n, batches, n * part)
    yield Calls("dp_replicate", "all_reduce", layout.degrees["dp_replicate"], batches, part)


def _forwards(layout: Layout) -> int:
    """The forwards of a stage in a step."""
    return layout.local_batches * layout.microbatches


def recomputed_blocks(layout: Layout, stage: Stage) -> int:
    """The number of blocks of a stage that `recompute.mode` full or selective recomputes."""
    recompute = layout.config.recompute
    if recompute.mode not in ("full", "selective"):
        return 0
    return sum(number % recompute.every == 0 for number in stage.blocks)


def _tensor_parallel(layout: Layout, stage: Stage) -> Iterator[Calls]:
    """All-gathers before each pair of matrices, reduce-scatters after it; the backward reverses."""
    tp = layout.tp
    llama = layout.llama
    forwards = _forwards(layout)
    hidden = layout.tokens * llama.dim * layout.compute_bytes
    blocks = len(stage.blocks)
    again = recomputed_blocks(layout, stage)
    is_full = layout.config.recompute.mode == "full"
    ends = stage.has_embedding + stage.has_output
    # A frozen embedding has no gradient to gather; with adapters nor has the first block's input
    unneeded = stage.has_embedding and layout.config.lora.rank > 0
    pairs = 2  # of matrices that are cut: attention's and the feed-forward's
    if llama.num_experts:
        pairs = 1  # experts are whole
        if not is_full:  # attention is repeated from its gathered input on
            again = 0
    gathers = 2 * pairs * blocks + pairs * again + ends - unneeded
    reductions = 2 * pairs * blocks + again * is_full + ends - unneeded
    yield Calls("tp", "all_gather", tp, forwards * gathers, hidden)
    yield Calls("tp", "reduce_scatter", tp, forwards * reductions, hidden)

    # Gradients of weights that all ranks hold, summed where FSDP reduces them
    times = forwards
    number = layout.compute_bytes
    if layout.pp > 1:  # accumulated before
        times = layout.local_batches
        number = layout.reduce_bytes
    for unit in stage.units:
        for parameter in unit.parameters:
            if parameter.replicated and parameter.trained:
                yield Calls("tp", "all_reduce", tp, times, parameter.numel * number)
    if stage.has_output:  # the loss: the maximum, the sum, and the logit of the label
        chunks = layout.config.loss.num_chunks
        sums = 3 * chunks * forwards
        yield Calls("tp", "all_reduce", tp, sums, 4 * layout.tokens / chunks)
        if layout.config.loss.z_loss:
            gathered = 4 * layout.tokens * tp / chunks
            yield Calls("tp", "all_gather", tp, chunks * forwards, gathered)


def _context_parallel(layout: Layout, stage: Stage) -> Iterator[Calls]:
    """Exchanges of attention; recomputation repeats those of the forward, unless kept."""
    cp = layout.cp
    number = layout.compute_bytes * layout.tokens / layout.tp
    keys = number * layout.llama.kv_dim
    queries = number * layout.llama.q_dim
    calls = _forwards(layout) * len(stage.blocks)
    again = _forwards(layout) * recomputed_blocks(layout, stage)
    if layout.config.parallel.cp_method == "all_gather":
        yield Calls("cp", "all_gather", cp, calls + again, 2 * keys * cp)
        yield Calls("cp", "reduce_scatter", cp, calls, 2 * keys * cp)
        return
    if layout.config.recompute.mode == "selective":
        again = 0
    times = 2 * calls + again
    yield Calls("cp", "all_to_all", cp, 2 * times, queries)
    yield Calls("cp", "all_to_all", cp, 2 * times, keys)


def _messages(layout: Layout, stages: list[Stage], pp_rank: int) -> Iterator[Calls]:
    """Messages: hidden states to the next stage, gradients back, and those of a tied embedding."""
    parallel = layout.config.parallel
    last = layout.pp * parallel.stages_per_process - 1
    own = {stage.index for stage in stages}
    forwards = _forwards(layout)
    hidden = layout.compute_bytes * layout.tokens * layout.llama.dim / layout.tp
    for stage in stages:
        for neighbour in (stage.index - 1, stage.index + 1):
            if 0 <= neighbour <= last and neighbour not in own:
                yield Calls("pp", "send", layout.pp, forwards, hidden)
                yield Calls("pp", "recv", layout.pp, forwards, hidden)
    shares_embedding = layout.llama.tied_embeddings and parallel.pp_schedule not in V_SHAPED
    if shares_embedding and pp_rank in (0, layout.pp - 1):
        part = _tied_part(layout, stages)
        trained = 1 if part else 0
        yield Calls("pp", "send", layout.pp, trained, part)
        yield Calls("pp", "recv", layout.pp, trained, part)


def _tied_part(layout: Layout, stages: list[Stage]) -> int:
    """Bytes of this rank's gradient of the tied embedding; 0 if it is not trained."""
    for stage in stages:
        for unit in stage.units:
            for parameter in unit.parameters:
                if parameter.name == "tok_embeddings.weight" and parameter.trained:
                    return parameter.part_numel(layout.shards) * layout.param_bytes
    return 0


def muon_numel(layout: Layout, stages: list[Stage], experts: bool) -> int:
    """Elements of the Muon matrices on this rank; `experts`: with theirs, which are whole here."""
    return sum(
        parameter.part_numel(unit.shards)
        for stage in stages
        for unit in stage.units
        for parameter in unit.parameters
        if unit.is_block
        and parameter.trained
        and (len(parameter.shape) == 2 or (experts and parameter.is_expert))
    )


def _muon(layout: Layout, stages: list[Stage]) -> Iterator[Calls]:
    """All-to-alls over each axis to whole matrices and back; replicas all-gather the results."""
    number = 4 if layout.config.optimizer.muon_dtype == "float32" else 2
    part = muon_numel(layout, stages, experts=False) * number
    matrices = sum(
        len(parameter.shape) == 2
        for stage in stages
        for unit in stage.units
        if unit.is_block
        for parameter in unit.parameters
    )
    replicas = layout.degrees["dp_replicate"]
    groups = max(1, matrices // max(1, replicas * layout.shards * layout.tp))
    yield Calls("dp_shard_cp", "all_to_all", layout.shards, 2 * groups, part / groups)
    yield Calls("tp", "all_to_all", layout.tp, 2 * groups, part / groups)
    yield Calls("dp_replicate", "all_gather", replicas, groups, part / groups)
