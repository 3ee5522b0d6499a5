"""Estimates the memory of a rank at the moment of the step when it holds most.

What it is: bytes per token that a block keeps for its backward, by recomputation mode, eager or
compiled; what FSDP gathers and reduces; the loss; and from these the four moments that can be the
highest: in the loss, when everything is kept; at the beginning and at the end of the backward; in
the update. What a program reserves is more: `reserved_bytes`. With experts in place of the
feed-forward, `estimate_experts.py` has what they keep. Imports no torch. Letters:
docs/parallelism.md.
What is kept of a block, per token (b bytes per number):

    input, and input of the second norm    2 b D / tp
    inputs of wq, wk, wv and of w1, w3     2 b D                   (gathered over tp)
    q, k, v after RoPE, attention's output (2 b H Dh + 2 b K Dh + 4 H) / tp
    w1, silu, w3, their product            4 b F / tp              (compiled: silu is repeated, 3)

    full         the input
    selective    the input, wq, wv, attention's output, w1, and in eager mode w2, which no gradient
                 needs (arXiv 2205.05198 and the operators of `activation_checkpoint.py`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from titanlite.parallel.stage_split import most_received
from titanlite.rules.compiled import compiles_loss
from titanlite.rules.loss_chunks import BLOCK_NUMEL
from titanlite.tools.plan.counts import Memory, RankCounts
from titanlite.tools.plan.estimate_experts import kept_by_experts, passing_through_experts
from titanlite.tools.plan.estimate_traffic import muon_numel
from titanlite.tools.plan.layout import DTYPE_BYTES, Layout, Stage, Unit

# Least and most that the allocator reserves, relative to what is allocated: it keeps pieces that no
# tensor fits in (benchmarks/results/2026-11-28-pretended_memory.md: 0.3 to 2 GiB on one GPU)
RESERVED_FRACTION = (1.0, 1.1)
RESERVED_OF_LOGITS = 1 / 4
CONTEXT_BYTES = 3 << 28  # of CUDA and NCCL, which the allocator does not see


@dataclass(frozen=True)
class Kept:
    """Bytes that one block keeps of one forward."""

    until_backward: float
    while_repeated: float  # what the recomputation adds in the backward


def block_activations(layout: Layout, trained: frozenset[str], repeats: bool) -> Kept:
    """Bytes that a block with these trained layers keeps of a forward.

    `repeats`: whether `recompute.mode` applies to it.
    """
    mode = layout.config.recompute.mode
    whole = _everything(layout, trained)
    stream = hidden_bytes(layout)
    if mode == "memory_budget":
        never_repeated = stream
        if layout.llama.num_experts and not layout.compiles_experts:
            never_repeated += kept_by_experts(layout)
        kept = never_repeated + layout.config.recompute.budget * (whole - never_repeated)
        return Kept(kept, whole - kept)
    if mode == "none" or not repeats:
        return Kept(whole, 0.0)
    if mode == "full":
        kept = 0.0 if layout.config.recompute.offload else stream
        return Kept(kept, whole)
    if layout.llama.num_experts:
        # Attention and the mixture are repeated one after the other
        return Kept(_selected_with_experts(layout), kept_by_experts(layout))
    selected = _selected(layout)
    return Kept(selected, whole - selected)


def hidden_bytes(layout: Layout) -> float:
    """The residual stream between blocks."""
    return layout.tokens * layout.compute_bytes * layout.llama.dim / layout.tp


def _attention_sizes(layout: Layout) -> tuple[float, float, float]:
    """Bytes of the queries, of the keys, and of the sums of the softmax, as a forward has them."""
    number = layout.tokens * layout.compute_bytes / layout.tp
    queries = number * layout.llama.q_dim
    keys = number * layout.llama.kv_dim
    sums = 4 * layout.tokens * layout.llama.num_heads / layout.tp
    return queries, keys, sums


def _everything(layout: Layout, trained: frozenset[str]) -> float:
    """Bytes that a block keeps without recomputation."""
    llama = layout.llama
    tokens = layout.tokens
    compute = layout.compute_bytes
    operand = compute  # what a matrix product keeps of its input
    float8 = layout.config.float8
    if float8.enabled and float8.scaling == "tensorwise":
        operand = 1
    queries, keys, sums = _attention_sizes(layout)
    hidden = tokens * compute * llama.ffn_dim / layout.tp

    total = 2 * hidden_bytes(layout) + 2 * 4 * tokens / layout.tp  # and the norms' factors
    if trained & {"wq", "wk", "wv"}:
        total += tokens * operand * llama.dim
    total += 2 * queries + 2 * keys + sums
    if layout.cp > 1:
        total += _of_context_parallel(layout)
    elif operand != compute:
        total += queries / compute
    if llama.qk_norm:
        total += queries + keys
    if llama.num_experts:
        total += kept_by_experts(layout)
    else:
        if trained & {"w1", "w3"}:
            total += tokens * operand * llama.dim
        total += (2 if layout.compiled else 3) * hidden
        if "w2" in trained:
            total += hidden * operand / compute
    if layout.config.lora.drops:
        lora = layout.config.lora
        for name in lora.target_names:
            width = {"w2": llama.ffn_dim, "wo": llama.q_dim}.get(name, llama.dim)
            total += tokens * (compute + 1) * width
    return total


def _of_context_parallel(layout: Layout) -> float:
    """Bytes that cp adds: attention keeps its operands, and wo the output in its own order.

    With all_gather these include the keys and values up to the ends of both chunks, together
    (2 cp + 1) / 2 cp of the sequence.
    """
    queries, keys, _ = _attention_sizes(layout)
    if layout.config.parallel.cp_method == "all_gather":
        chunks = (2 * layout.cp + 1) / 2  # in units of a rank's tokens
        return queries + 2 * keys * (chunks - 1)
    return queries


def _blocks(layout: Layout, stage: Stage) -> Counter[tuple[frozenset[str], bool]]:
    """Counts the blocks of a stage that a backward passes, equal ones together.

    They are described by the layers that need their input for a gradient, and by whether
    `recompute.mode` applies to them.
    """
    every = layout.config.recompute.every
    blocks: Counter[tuple[frozenset[str], bool]] = Counter()
    for number in stage.blocks:
        parameters = stage.parameters_of(number)
        trained = (one.name.split(".")[3] for one in parameters if one.trained)
        if layout.has_backward(parameters):
            blocks[frozenset(trained), number % every == 0] += 1
    return blocks


def _selected(layout: Layout) -> float:
    """Bytes that `selective` keeps of a block."""
    queries, keys, sums = _attention_sizes(layout)
    llama = layout.llama
    hidden = layout.tokens * layout.compute_bytes * llama.ffn_dim / layout.tp
    total = hidden_bytes(layout) + queries + keys + queries + sums + hidden
    if layout.cp > 1 and layout.config.parallel.cp_method == "ulysses":
        total += 2 * queries + 2 * keys
    if layout.tp > 1:
        total += hidden_bytes(layout)  # of wo, after its reduce-scatter
    if not layout.compiled:
        total += layout.tokens * layout.compute_bytes * llama.dim  # of w2, before it
        if layout.tp > 1:
            total += hidden_bytes(layout)
    return total


def _selected_with_experts(layout: Layout) -> float:
    """Bytes that `selective` keeps of a block with experts: the inputs of norms, attention and
    mixture, and inside attention what it keeps of a dense block.
    """
    queries, keys, sums = _attention_sizes(layout)
    stream = hidden_bytes(layout)
    factors = 2 * 4 * layout.tokens / layout.tp  # of the norms
    total = 3 * stream + layout.tp * stream + factors
    total += 2 * queries + keys + sums
    if layout.cp > 1 and layout.config.parallel.cp_method == "ulysses":
        total += 2 * queries + 2 * keys
    return total


def logits_bytes(layout: Layout) -> float:
    """Bytes of the loss at its peak: in fp32 the log-softmax, its gradient and that of the logits.

    With a sharded vocabulary the loss is made of single operators and has one more such tensor; a
    compiled loss needs half. With chunks these exist for a block of a chunk's logits, whose
    gradient takes their place, and there are the gradients of the hidden states and of the
    projection (fp32).
    """
    chunks = layout.config.loss.num_chunks
    width = layout.llama.vocab_size / layout.tp
    per_logit = 12
    if layout.tp > 1:
        per_logit = 16
    if compiles_loss(layout.config.compile, layout.compiled, "cuda"):
        per_logit = 6
    if layout.config.loss.z_loss:
        per_logit += 4
    logits = layout.tokens * width / chunks
    if chunks == 1:
        if layout.pp > 1:
            per_logit += layout.compute_bytes  # a stage keeps its output
        return per_logit * logits
    dim = layout.llama.dim
    total = layout.compute_bytes * (logits + layout.tokens * dim)
    total += per_logit * min(logits, BLOCK_NUMEL)
    if layout.config.lora.rank == 0:
        total += 4 * width * dim
    return total


@dataclass(frozen=True)
class States:
    """Bytes of parameters, gradients and moments on the device, and how many numbers are stored."""

    num_parameters: int
    num_trained: int
    parameters: int
    gradients: int
    optimizer: int


def states(layout: Layout, stages: list[Stage]) -> States:
    """The bytes that a rank holds between steps, and those of its gradients."""
    config = layout.config
    stored = 0
    trained = 0
    for stage in stages:
        for unit in stage.units:
            stored += unit.part_numel()
            trained += unit.part_numel(trained_only=True)
    state_bytes = DTYPE_BYTES[config.optimizer.state_dtype]
    moments = 2 * trained
    if config.optimizer.name == "muon":
        moments -= muon_numel(layout, stages, experts=True)
    optimizer = moments * state_bytes
    if config.ema.decay > 0:
        optimizer += 4 * trained
    parameters = stored * layout.param_bytes
    gradients = trained * layout.param_bytes
    if config.parallel.cpu_offload:
        return States(stored, trained, 0, 0, 0)
    if config.parallel.optimizer_offload:
        optimizer = 0
    return States(stored, trained, parameters, gradients, optimizer)


def memory(layout: Layout, stages: list[Stage], pp_rank: int) -> Memory:
    """The highest of the moments of a step."""
    return max(moments(layout, stages, pp_rank), key=lambda moment: moment.total)


def moments(layout: Layout, stages: list[Stage], pp_rank: int) -> list[Memory]:
    """The moments of a step of which one is the highest: in the loss, at the beginning and at the
    end of the backward, and in the update.
    """
    held = states(layout, stages)
    units = [unit for stage in stages for unit in stage.units]
    kept = _kept_activations(layout, stages, pp_rank)
    kinds = [kind for stage in stages for kind in _blocks(layout, stage)]
    blocks = [block_activations(layout, *kind) for kind in kinds] or [Kept(0.0, 0.0)]
    block = max(blocks, key=lambda one: one.until_backward + one.while_repeated)
    has_output = any(stage.has_output for stage in stages)
    logits = round(logits_bytes(layout)) if has_output else 0
    gathered = _Gathered.of(layout, units)
    whole = _unreduced(layout, units)
    messages = receive_buffers(layout, stages, pp_rank)
    gradients_in_block = _gradients_in_block(layout)
    from_before = held.gradients if layout.local_batches > 1 else 0
    unreduced_before = whole.all_units if layout.local_batches > 1 or layout.pp > 1 else 0

    between = Memory(
        parameters=held.parameters,
        gradients=0,
        optimizer=held.optimizer,
        whole_gradients=0,
        gathered=0,
        activations=0,
        logits=0,
        buffers=messages,
    )
    if layout.has_fsdp and not layout.config.parallel.reduce_every_microbatch:
        from_before = 0  # they wait whole, for one reduction at the end
    in_loss = replace(
        between,
        gradients=from_before,
        whole_gradients=unreduced_before,
        gathered=gathered.in_loss,
        activations=round(kept),
        logits=logits,
        buffers=messages + gathered.buffers_forward,
    )
    reduces_now = layout.has_fsdp and not whole.all_units
    begin = replace(
        between,
        gradients=max(from_before, whole.last_reduced if reduces_now else 0),
        whole_gradients=unreduced_before + whole.largest,
        gathered=gathered.in_backward,
        activations=round(kept + block.while_repeated + gradients_in_block),
        buffers=messages + (gathered.buffers_backward if reduces_now else 0),
    )
    per_block = block.until_backward + block.while_repeated + gradients_in_block
    end = replace(
        between,
        gradients=held.gradients - (0 if from_before else whole.of_first_units),
        whole_gradients=unreduced_before + (whole.largest if layout.has_fsdp else 0),
        gathered=gathered.in_backward,
        activations=round(per_block),
        buffers=messages + gathered.buffers_backward,
    )
    if layout.pp > 1:  # after the last microbatch, one unit after the other
        end = replace(
            end,
            gathered=0,
            activations=0,
            buffers=messages + gathered.buffers_backward // 2,
        )
    update = replace(between, gradients=held.gradients)
    return [in_loss, begin, end, update]


def _gradients_in_block(layout: Layout) -> float:
    """Bytes of the gradients of a block's widest tensors, while they are computed; with tp also of
    those of the gathered inputs, before their reduce-scatter.
    """
    if layout.llama.num_experts:
        return passing_through_experts(layout)
    number = layout.tokens * layout.compute_bytes
    gradients = 3 * number * layout.llama.ffn_dim / layout.tp
    if layout.tp > 1:
        gradients += 2 * number * layout.llama.dim
    return gradients


def _kept_activations(layout: Layout, stages: list[Stage], pp_rank: int) -> float:
    """The most bytes that the forwards keep whose backward has not begun."""
    total = 0.0
    for stage, forwards in zip(stages, layout.in_flight(pp_rank), strict=True):
        kept = 0.0
        for (trained, repeats), count in _blocks(layout, stage).items():
            kept += count * block_activations(layout, trained, repeats).until_backward
        if layout.pp > 1:
            kept += hidden_bytes(layout)  # what is sent, from which the backward begins
        if stage.has_output:
            kept += hidden_bytes(layout)
            if layout.config.loss.num_chunks == 1:
                kept += layout.tokens * layout.compute_bytes * layout.llama.dim
        total += forwards * kept
    return total


def receive_buffers(layout: Layout, stages: list[Stage], pp_rank: int) -> int:
    """Bytes of the hidden states and gradients that the stages of a rank have received, beside the
    inputs of microbatches in flight, which are activations.
    """
    if layout.pp == 1:
        return 0
    parallel = layout.config.parallel
    messages = 0
    for stage, in_flight in zip(stages, layout.in_flight(pp_rank), strict=True):
        inputs, gradients = most_received(
            stage.index,
            layout.pp,
            parallel.stages_per_process,
            parallel.pp_schedule,
            layout.microbatches,
        )
        messages += max(0, inputs - in_flight) + gradients
    return round(messages * hidden_bytes(layout))


@dataclass(frozen=True)
class _Gathered:
    """Weights in the compute dtype, and buffers of communication, by moment."""

    in_loss: int
    in_backward: int
    buffers_forward: int
    buffers_backward: int

    @classmethod
    def of(cls, layout: Layout, units: list[Unit]) -> _Gathered:
        compute = layout.compute_bytes
        blocks = _of_blocks(units)
        if not layout.has_fsdp:
            return cls._casts(layout, units)
        sharded = [unit for unit in units if unit.shards > 1] or units
        largest = max(unit.numel for unit in sharded)
        # Two reductions at a time: those of divided experts alternate with others
        others = [unit for unit in units if unit.axis == "dp_shard_cp"]
        reduced = max(unit.trained_numel for unit in sharded)
        reduced += max(unit.trained_numel for unit in others)
        kept = sum(unit.numel for unit in units if not unit.reshard)
        mode = layout.config.parallel.reshard_after_forward
        if mode.isdecimal():  # sharded over fewer ranks
            kept += sum(unit.numel for unit in units if unit.reshard) // int(mode)
        ahead = (1 + layout.config.parallel.prefetch) * max(blocks, default=0)
        freed = any(unit.reshard for unit in units)
        in_backward = kept + (ahead if freed else 0)
        if layout.pp > 1:  # the backward of a microbatch frees no weights
            in_backward = sum(unit.numel for unit in units)
        buffers_backward = reduced * layout.reduce_bytes
        if freed:
            buffers_backward += largest * compute
        return cls(
            in_loss=kept * compute,
            in_backward=in_backward * compute,
            buffers_forward=largest * compute if freed else 0,
            buffers_backward=buffers_backward,
        )

    @classmethod
    def _casts(cls, layout: Layout, units: list[Unit]) -> _Gathered:
        """Casts on one rank: a weight is cast at its use and kept until its gradient exists."""
        if layout.compute_dtype == layout.config.training.param_dtype:
            return cls(0, 0, 0, 0)
        compute = layout.compute_bytes
        numel = sum(unit.numel for unit in units if not unit.is_block)
        block = max((unit.numel for unit in units if unit.is_block), default=0)
        if not layout.llama.tied_embeddings:
            numel -= layout.llama.vocab_size * layout.llama.dim  # rows of the embedding are cast
        if layout.config.recompute.mode == "none":
            numel += sum(unit.numel for unit in units if unit.is_block)
            block = 0
        return cls(numel * compute, (numel + block) * compute, 0, 0)


def _of_blocks(units: list[Unit]) -> list[int]:
    """The elements of each block, whose units are gathered at the same time."""
    blocks: Counter[int] = Counter()
    for unit in units:
        if unit.block is not None:
            blocks[unit.block] += unit.numel
    return list(blocks.values())


@dataclass(frozen=True)
class _Unreduced:
    """Gradients before their reduction."""

    all_units: int  # where they wait for the last local batch or microbatch
    largest: int  # of one unit, as the backward computes it
    last_reduced: int  # the part of the last unit, after it
    of_first_units: int  # the parts of the first block and of the embedding before it; 0: no block


def _unreduced(layout: Layout, units: list[Unit]) -> _Unreduced:
    trained = [unit.trained_numel for unit in units]
    last = [unit for unit in units if not unit.is_block] or units
    part = last[-1].part_numel(trained_only=True) * layout.param_bytes
    all_units = 0
    waits = layout.pp > 1 or not layout.config.parallel.reduce_every_microbatch
    if layout.has_fsdp and waits:
        all_units = sum(trained) * layout.reduce_bytes
    of_first = 0
    numbers = [unit.block for unit in units]
    first = next((number for number in numbers if number is not None), None)
    if first is not None:
        end = max(i for i, number in enumerate(numbers) if number == first)
        of_first = sum(unit.part_numel(trained_only=True) for unit in units[: end + 1])
    return _Unreduced(
        all_units=all_units,
        largest=max(trained) * layout.compute_bytes,
        last_reduced=part,
        of_first_units=of_first * layout.param_bytes,
    )


def range_fits(low: int, high: int, machine_bytes: int) -> bool | None:
    """Whether a GPU can hold a reservation between `low` and `high`; None if it may."""
    if high + CONTEXT_BYTES <= machine_bytes:
        return True
    if low + CONTEXT_BYTES > machine_bytes:
        return False
    return None


def sharded_gradients(rank: RankCounts, degrees: Mapping[str, int]) -> int:
    """Bytes of a rank's gradients after the backward, if they are parts of sharded tensors."""
    if degrees["dp_shard"] * degrees["cp"] == 1:
        return 0
    return rank.memory.parameters * rank.num_trained // max(1, rank.num_parameters)


def reserved_bytes(memory: Memory, gradients: int) -> tuple[int, int]:
    """The least and the most bytes that the allocator reserves for this memory.

    `gradients`: see `sharded_gradients`. Those that do not exist at the fullest moment count at the
    upper end, and by half at the lower: they come in small pieces while activations are freed, and
    get memory beside them. On 8 GPUs in place of 128 torchtitan's 8B rows need 15 GiB more, of
    which 3.5 are gradients.
    """
    later = max(0, gradients - memory.gradients)
    of_logits = memory.logits * RESERVED_OF_LOGITS
    low = memory.total * RESERVED_FRACTION[0] + of_logits
    high = memory.total * RESERVED_FRACTION[1] + of_logits
    return round(low + later / 2), round(high + later)
