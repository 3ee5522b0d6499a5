"""Rules of pipeline parallel: layers, stages, microbatches and schedules. Imported if pp > 1."""

from __future__ import annotations

import math
from collections.abc import Iterable

from titanlite.config.batch_sizes import segments
from titanlite.config.mistakes import suggestion
from titanlite.config.schema import PP_SCHEDULES, SPLIT_BACKWARD, V_SHAPED, Config, ParallelConfig
from titanlite.model.flavors import LlamaConfig
from titanlite.rules.degrees import nearest, world


def pipeline_problems(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """What does not fit a pipeline of `degrees["pp"]` processes."""
    yield from _stages(config, llama, degrees)
    if config.parallel.pp_schedule in SPLIT_BACKWARD:
        yield from _split_backward(config)


def _stages(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """Layers are divided over stages, and each schedule needs certain numbers of microbatches."""
    parallel = config.parallel
    pp = degrees["pp"]
    name = config.parallel.pp_schedule
    per = parallel.stages_per_process
    usual = PP_SCHEDULES[name]
    stages = pp * per
    if per != usual and (usual == 1 or name in V_SHAPED):
        yield f"parallel.pp_stages_per_process = {per}: {name} needs {usual} (or 0)"
        return
    if llama.num_layers < stages:
        near = nearest(
            pp, lambda n: n * per <= llama.num_layers and world(degrees) % n == 0, llama.num_layers
        )
        yield (
            f"parallel.pp = {pp} with {per} stages each ({name}) needs at least {stages} layers; model.num_layers = "
            f"{llama.num_layers}; nearest parallel.pp: {near or 'only 1'}"
        )
    yield from _split(parallel, stages, llama.num_layers)
    if not parallel.reduce_every_microbatch:
        yield "parallel.reduce_every_microbatch = false: a pipeline sums gradients once per local batch; leave it true"
    batch = config.training.local_batch_size
    size = parallel.pp_microbatch_size
    if batch % size:
        near = nearest(size, lambda n: batch % n == 0, batch)
        yield (
            f"parallel.pp_microbatch_size = {size} does not divide training.local_batch_size = {batch}; "
            f"nearest that do: {near}"
        )
    elif not _fits_schedule(name, batch // size, pp, stages):
        whole = math.gcd(*(part.size for part in segments(config.training))) // (
            degrees["dp_replicate"] * degrees["dp_shard"]
        )
        near = nearest(
            batch,
            lambda n: (
                n % size == 0 and whole % n == 0 and _fits_schedule(name, n // size, pp, stages)
            ),
            whole,
        )
        yield (
            f"training.local_batch_size = {batch} is {batch // size} microbatches of parallel.pp_microbatch_size = "
            f"{size}, which parallel.pp_schedule = {name} with {pp} processes and {stages} stages does not take; "
            f"nearest that do: {near or 'none with this training.global_batch_size, raise it'}"
        )


def _fits_schedule(name: str, microbatches: int, pp: int, stages: int) -> bool:
    """Whether torch's schedule of that name runs this number of microbatches."""
    if name in ("1F1B", "DualPipeV"):
        return microbatches >= stages
    if name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return microbatches % max(1, microbatches // pp) == 0
    return True


def _split(parallel: ParallelConfig, stages: int, num_layers: int) -> Iterable[str]:
    """`parallel.pp_split` has one module name for each stage but the first, in the model's order."""
    names = parallel.stage_starts
    text = parallel.pp_split
    if not names:
        return
    order = [*(f"layers.{i}" for i in range(num_layers)), "norm", "output"]
    for name in names:
        if name not in order:
            yield f"parallel.pp_split: no module {name!r}{suggestion(name, order)}; allowed: layers.N, norm, output"
            return
    if len(names) != stages - 1:
        yield f"parallel.pp_split = {text!r} names {len(names)}; expected {stages - 1}, one per later stage"
        return
    positions = [order.index(name) for name in names]
    if positions != sorted(set(positions)):
        yield f"parallel.pp_split = {text!r}: expected each name once and in the model's order"


def _split_backward(config: Config) -> Iterable[str]:
    """Schedules that compute a block's two gradients separately support neither compiled blocks nor
    `selective`.
    """
    compile = config.compile
    parallel = config.parallel
    others = ", ".join(name for name in PP_SCHEDULES if name not in SPLIT_BACKWARD)
    why = f"parallel.pp_schedule = {parallel.pp_schedule} computes a layer's two gradients in separate calls, which"
    budget = config.recompute.mode == "memory_budget"
    asked = (
        "compile.enabled = true" if compile.enabled == "true" else "recompute.mode = memory_budget"
    )
    if compile.enabled == "true" or (budget and compile.enabled == "auto"):
        yield f"{why} compiled blocks do not support; with {asked} use one of {others}"
    if config.recompute.mode == "selective":
        yield f"{why} recompute.mode = selective does not support; use recompute.mode = full, or one of {others}"
