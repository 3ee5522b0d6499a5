"""Counts a step by running it on tensors without values, in a single process.

What it is: the training program's own model, techniques, loss, clipping and optimizer, on tensors
that have only shapes, in a process group whose other ranks do not exist. A `Recorder` counts. The
first and the last two ranks of the pp axis are traced; what lies between them is linear in the
rank. If a model is deep and its blocks are equal, two short models are traced, and what a block
adds is taken once for each further one. Each model of each rank is traced in a new process, because
torch remembers meshes.
Why it is here: formulas beside a program grow wrong when it changes. `estimate.py` has formulas,
and is compared with this.
What it costs: about 0.3 s for each traced block and local batch on one core, and 0.3 GB per
process.
What it does not see: what the compiler changes, since blocks run eagerly; kernels' workspaces; and
what differs between CPU and GPU, such as a document mask, which on a GPU is a list of blocks.
Float8 needs a GPU, and is not traced. A loss in chunks has the smaller blocks of a CPU, and needs
0.2 GB less. Tokens choose no experts: each rank of ep gets an equal share of the rows
(`equal_sizes`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from titanlite.config.schema import Config
from titanlite.data.rows import Batch
from titanlite.distributed.dtensor import local_part
from titanlite.distributed.mesh import Mesh
from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import Llama
from titanlite.parallel.expert_parallel import DividedExperts
from titanlite.parallel.parallelize import assign_shard, split_and_parallelize
from titanlite.parallel.stage_split import stage_indices, stage_modules
from titanlite.parallel.step import StepParts, Unmeasured, build_step_parts, optimizer_step
from titanlite.rules.degrees import local_batches, num_processes
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.progress import progress_bar
from titanlite.tools.plan.counts import (
    Collective,
    Memory,
    Product,
    RankCounts,
    StepCounts,
    equal_parts,
)
from titanlite.tools.plan.recorder import CATEGORIES, Recorder
from titanlite.tools.torch_private import (
    hide_shape_inference,
    join_pretended_group,
    pretended_tensors,
)
from titanlite.tools.verify.pool import Pool

# What was counted -> number. The keys are those of `Recorder`, ("parameters",) and ("trained",).
Numbers: TypeAlias = Counter[tuple[str | int, ...]]
# Blocks per stage of the shorter of the two models that stand for a deep one. The gathered weights
# of one unit are freed while others compute, so all cases occur within three blocks. In a pipeline
# the weights stay gathered, and one block is enough.
SHORT = 3
SHORT_STAGE = 1
AS_IT_IS = 0  # in place of a number of blocks
PROCESSES = 2  # at a time
TIMEOUT = 1800  # seconds


class Depths(NamedTuple):
    """The blocks per stage of the models that are traced: one, or two to continue the line."""

    blocks: tuple[int, ...]  # empty: the model as it is
    of_ranks: tuple[int, ...]  # blocks that each rank of the pp axis has


def trace(config: Config, llama: LlamaConfig, degrees: Mapping[str, int]) -> StepCounts:
    """Counts a step on each rank of the pp axis.

    `config` is a valid one for these degrees, with a `training.compute_dtype` that is not `auto`.
    Raises ConfigError for what cannot be traced without a GPU.
    """
    problems = list(untraceable(config))
    if problems:
        raise ConfigError(problems)
    pp = degrees["pp"]
    depths = _depths(config, llama, pp)
    traced = sorted({0, min(1, pp - 1), max(0, pp - 2), pp - 1})
    pool = Pool(["titanlite.tools.plan.trace"], quiet=True)

    jobs = [(pp_rank, blocks) for pp_rank in traced for blocks in depths.blocks or (AS_IT_IS,)]
    progress = progress_bar(len(jobs), "tracing", "model")

    def run(job: tuple[int, int]) -> Numbers:
        arguments = (config, llama, dict(degrees), *job)
        numbers: Numbers
        (numbers,) = pool.run(1, trace_rank, *arguments, timeout=TIMEOUT, joins=False)
        progress.update()
        return numbers

    found: dict[int, list[Numbers]] = {pp_rank: [] for pp_rank in traced}
    with progress, ThreadPoolExecutor(PROCESSES) as threads:
        for (pp_rank, _), numbers in zip(jobs, threads.map(run, jobs), strict=True):
            found[pp_rank].append(numbers)
    stages = config.parallel.stages_per_process
    ranks = []
    for pp_rank in range(pp):
        by_depth = found.get(pp_rank)
        if by_depth is None:
            part = (pp_rank - 1) / (pp - 3)
            by_depth = [
                _on_line(first, last, part)
                for first, last in zip(found[1], found[pp - 2], strict=True)
            ]
        numbers = by_depth[0]
        if len(by_depth) == 2:
            per_rank = stages if pp > 1 else 1
            first, second = (blocks * per_rank for blocks in depths.blocks)
            added = (depths.of_ranks[pp_rank] - first) / (second - first)
            numbers = _on_line(by_depth[0], by_depth[1], added)
        own_stages: tuple[int, ...] = (0,)
        if pp > 1:
            own_stages = tuple(stage_indices(pp_rank, pp, stages, config.parallel.pp_schedule))
        ranks.append(_rank_counts(pp_rank, own_stages, numbers))
    training = config.training
    tokens = training.global_batch_size * training.seq_len
    number = local_batches(training, degrees)
    return StepCounts("traced", dict(degrees), number, tokens, tuple(ranks))


def untraceable(config: Config) -> Iterator[str]:
    """Yields a message for each setting that cannot be traced without a GPU."""
    if config.float8.enabled and not config.float8.emulate:
        yield "float8.enabled = true: its products are traced on a GPU only; expected --estimate"


def _depths(config: Config, llama: LlamaConfig, pp: int) -> Depths:
    num_stages = pp * config.parallel.stages_per_process if pp > 1 else 1
    stages = stage_modules(llama, num_stages, config.parallel.stage_starts)
    sizes = [sum(name.startswith("layers.") for name in names) for names in stages]
    of_ranks = tuple(
        sum(
            sizes[i] for i in stage_indices(rank, pp, len(sizes) // pp, config.parallel.pp_schedule)
        )
        for rank in range(pp)
    )
    every = config.recompute.every
    stays_gathered = pp > 1 and config.parallel.reshard_after_forward in ("default", "never")
    short = SHORT_STAGE if stays_gathered else max(SHORT, config.parallel.prefetch + 2)
    short += (sizes[0] - short) % every if pp == 1 else -short % every
    equal = len(set(llama.windows(config.training.seq_len))) == 1 and not (
        config.lora.layers or config.training.frozen_patterns or "layers" in config.float8.skip
    )
    if not equal or (pp <= 4 and max(sizes) <= short + every):
        return Depths((), of_ranks)
    return Depths((short, short + every), of_ranks)


def _on_line(first: Numbers, second: Numbers, part: float) -> Numbers:
    """Interpolates each number: first + part (second - first)."""
    keys = first.keys() | second.keys()
    return Counter({key: round(first[key] + part * (second[key] - first[key])) for key in keys})


# What a worker runs


def trace_rank(
    config: Config, llama: LlamaConfig, degrees: dict[str, int], pp_rank: int, blocks: int
) -> Numbers:
    """The numbers of the first rank with this place in the pipeline; `blocks`: of each stage."""
    world_size = num_processes(degrees)
    join_pretended_group(pp_rank * (world_size // degrees["pp"]), world_size)
    mesh = Mesh("cpu", degrees, config.comm.group_timeout_seconds, config.parallel.ep)
    if blocks == AS_IT_IS:
        return count_step(config, llama, mesh)
    layers = blocks
    if degrees["pp"] > 1:
        num_stages = degrees["pp"] * config.parallel.stages_per_process
        layers = blocks * num_stages
        starts = ", ".join(f"layers.{blocks * stage}" for stage in range(1, num_stages))
        parallel = dataclasses.replace(config.parallel, pp_split=starts)
        config = dataclasses.replace(config, parallel=parallel)
    return count_step(config, dataclasses.replace(llama, num_layers=layers), mesh)


def build_parts(config: Config, llama: LlamaConfig, mesh: Mesh, pretended: bool) -> list[Llama]:
    """This rank's parts of the model, parallelised, on the meta device. Blocks run eagerly."""
    hide_shape_inference()
    with torch.device("meta"):
        model = Llama(llama, config.training.seq_len)
    parts = split_and_parallelize(model, config, mesh, compiled=False)
    if pretended and mesh.ep > 1:
        for part in parts:
            for block in part.layers.values():
                experts = block.get_submodule("feed_forward.experts")
                assert isinstance(experts, DividedExperts)
                experts.read_sizes = equal_sizes
    return parts


def equal_sizes(sizes: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """The rows that go to and come from each rank of ep if all experts are chosen equally often.

    It takes the place of `read_sizes` of `expert_parallel.py` on pretended ranks, whose tokens
    choose no experts: `sizes` (2, ep) has no numbers.
    """
    parts = []
    for size, count in equal_parts(num_rows, sizes.shape[1]):
        parts += count * [size]
    return parts, parts


def build_step(
    model_parts: list[Llama],
    config: Config,
    mesh: Mesh,
    device: torch.device,
    initialised: bool = False,
) -> StepParts:
    """Gives the parts of the model memory, and the optimizer its states.

    `initialised`: draws the weights as a new run does; else the values are undefined.
    """
    for part in model_parts:
        part.to_empty(device=device)
        if initialised:
            part.init_weights(config.run.seed, assign_shard, device)
        part.reset_rope(device)
    parts = build_step_parts(model_parts, config, mesh, device, compiled=False)
    _make_states(model_parts, parts.optimizer)
    return parts


def watch(parts: StepParts, recorder: Recorder) -> None:
    """Registers with the recorder what exists before the step."""
    recorder.register_model(parts.stages.model_parts)
    recorder.register(_state_tensors(parts.optimizer), "optimizer")
    recorder.register(parts.ema.averages, "optimizer")
    for part in parts.stages.model_parts:
        _mark_middle(part, recorder)


def count_step(
    config: Config,
    llama: LlamaConfig,
    mesh: Mesh,
    pretended: bool = True,
    make: Callable[[Mesh, int], Recorder] = Recorder,
) -> Numbers:
    """Builds this rank's part of the model, runs a step, and returns what was counted.

    Not `pretended`: with real tensors, whose values are any, and the second step is counted, since
    in the first one the stages of a pipeline send each other additional messages. `make`: the
    recorder, for a caller that wants more of it than its counts.
    """
    device = torch.device("cpu")
    config = dataclasses.replace(config, compile=dataclasses.replace(config.compile, loss="false"))
    model_parts = build_parts(config, llama, mesh, pretended)
    with pretended_tensors() if pretended else contextlib.nullcontext():
        parts = build_step(model_parts, config, mesh, device)
        recorder = make(mesh, llama.vocab_size // mesh["tp"].size())
        watch(parts, recorder)
        if not pretended:
            take_step(config, parts)
        with recorder:
            take_step(config, parts, recorder)
        numbers = recorder.numbers()
        for part in model_parts:
            for parameter in part.parameters():
                numbers["parameters",] += local_part(parameter).numel()
                if parameter.requires_grad:
                    numbers["trained",] += local_part(parameter).numel()
    return numbers


class _Times(Unmeasured):
    """Tells a recorder how often each of at most three local batches counts."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        """`number`: local batches of the step, of which the second stands for all in the middle."""
        self.recorder = recorder
        self.number = number

    def after_backward(self, i: int, num_batches: int, num_targets: Tensor) -> None:
        following_is_middle = i + 1 < num_batches - 1
        self.recorder.times = self.number - 2 if following_is_middle else 1


def take_step(config: Config, parts: StepParts, recorder: Recorder | None = None) -> None:
    """The step of train.py on local batches of zeros: all of them, or with a recorder at most
    three, of which the second stands for all between the first and the last.
    """
    number = local_batches(config.training, parts.stages.mesh.degrees)
    measures = Unmeasured()
    shown = number
    if recorder:
        measures = _Times(recorder, number)
        shown = min(number, 3)
    batches = [local_zeros(config, parts.device) for _ in range(shown)]
    samples = range(config.training.global_batch_size)
    optimizer_step(1, batches, samples, parts, measures)


def _make_states(parts: Iterable[Llama], optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer's states by a first step."""
    for part in parts:
        for parameter in part.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                yield value


def local_zeros(config: Config, device: torch.device) -> Batch:
    """A local batch of zeros with the fields that batches of this config have."""
    training = config.training
    shape = (training.local_batch_size, training.seq_len)
    zeros = torch.zeros(shape, dtype=torch.int64, device=device)
    batch = Batch(zeros, zeros)
    if config.data.document_mask:
        batch = batch._replace(positions=torch.zeros_like(zeros))
    if config.lora.drops:
        batch = batch._replace(dropout_keys=torch.zeros_like(zeros))
    if config.data.packing == "best_fit":
        batch = batch._replace(padding=torch.zeros_like(zeros, dtype=torch.bool))
    return batch


def _mark_middle(part: Llama, recorder: Recorder) -> None:
    """Divides the backward of a part in the middle of its blocks.

    The fullest moment is near one of the ends of the backward. Each half has a peak of its own, so
    that two short models have their peaks at the same place.
    """
    blocks = list(part.layers.values())

    def mark(module: object, inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: recorder.enter("late backward"))

    if blocks:
        blocks[len(blocks) // 2].register_forward_hook(mark)


def _rank_counts(pp_rank: int, stages: tuple[int, ...], numbers: Numbers) -> RankCounts:
    parts = {key[1] for key in numbers if key[0] == "memory"}
    memories = [
        Memory(*(numbers["memory", part, category] for category in CATEGORIES)) for part in parts
    ]
    collectives = []
    products = []
    for key, count in numbers.items():
        if key[0] == "calls":
            axis, kind, size = key[1:]
            whole_bytes = numbers["bytes", axis, kind, size]
            collectives.append(Collective(str(axis), str(kind), int(size), count, whole_bytes))
        elif key[0] == "product":
            rows, inner, columns, dtype = key[1:]
            products.append(Product(int(rows), int(inner), int(columns), str(dtype), count))
    return RankCounts(
        pp_rank,
        stages,
        numbers["parameters",],
        numbers["trained",],
        max(memories, key=lambda memory: memory.total),
        tuple(sorted(products, key=lambda product: -product.flops)),
        numbers["attention",],
        numbers["pointwise",],
        tuple(sorted(collectives, key=lambda call: (call.axis, call.kind))),
    )
