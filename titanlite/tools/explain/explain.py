"""Runs a step, on real ranks or on pretended ones, and explains what happens.

What it is: chooses the back end, starts the processes, and puts together what they recorded. Up to
REAL processes the step is really run, on gloo, so that tensors have numbers. Of a larger layout the
first rank of each stage is pretended, as `titanlite plan` does: its tensors have only shapes.
Why it is here: the order in which a step communicates stands nowhere in the code. It follows from
autograd and the hooks of FSDP and tensor parallelism.
What it costs: a few seconds; for 405B on 512 pretended ranks about half a minute.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from titanlite.config.schema import Config
from titanlite.distributed.mesh import DATA_AXES
from titanlite.model.flavors import LlamaConfig
from titanlite.rules.check import check_layout
from titanlite.rules.degrees import local_batches, num_processes
from titanlite.runtime.errors import ConfigError
from titanlite.tools.explain.events import (
    ACTIVATIONS,
    GRADIENTS,
    Change,
    Doubled,
    Event,
    Explanation,
    Lane,
    Place,
)
from titanlite.tools.explain.holdings import holdings
from titanlite.tools.explain.sentences import explained, unit_of
from titanlite.tools.explain.step import Recorded, Stored, record_pretended, record_real
from titanlite.tools.plan.trace import untraceable
from titanlite.tools.verify.pool import Pool

REAL = 8  # processes
DEEP = 8  # blocks: of deeper models on pretended ranks, equal blocks are shown once
SHOWN = 3  # of those: the first, the last, and one that stands for all between
PROCESSES = 2  # pretended ranks at a time
TIMEOUT = 600  # seconds


class Run(NamedTuple):
    """A layout in the form in which it is run."""

    config: Config
    llama: LlamaConfig  # with fewer blocks, if equal ones are shown once
    degrees: dict[str, int]


def explain(
    config: Config, llama: LlamaConfig, processes: int, real: bool, doubling: bool = True
) -> Explanation:
    """Explains a step of a config on so many processes. Raises ConfigError if it cannot be run."""
    config = _with_dtype(config, real)
    problems = [text.partition("; expected --estimate")[0] for text in untraceable(config)]
    if config.recompute.mode == "memory_budget":
        problems.append(
            "recompute.mode = memory_budget: the compiler chooses what is computed again, and "
            "explain runs a step without it; expected none, selective or full"
        )
    if problems:
        raise ConfigError(problems)
    degrees = check_layout(config, llama, processes)
    run = Run(config, llama, degrees)
    if not real:
        run = _shortened(run)
    pool = Pool(["titanlite.tools.explain.step"], quiet=True)
    larger = _larger_runs(config, llama, degrees) if doubling else {}
    # A second count, on pretended ranks: of the layout as it is, and with each degree doubled
    counted = [one for one in larger.values() if isinstance(one, Run)]
    recorded: list[Recorded]
    if real:
        recorded = pool.run(processes, record_real, *run, timeout=TIMEOUT)
        if counted:
            counted = [_shortened(run), *counted]
        others = _pretend(pool, [(one, 0) for one in counted])
    else:
        firsts = _first_ranks(degrees)
        found = _pretend(pool, [*((run, rank) for rank in firsts), *((one, 0) for one in counted)])
        recorded = found[: len(firsts)]
        others = found[len(firsts) :]
        counted = [run, *counted]
        others = [recorded[0], *others]
    counts = [
        totals(_lane(other, one, llama).events) for one, other in zip(counted, others, strict=True)
    ]
    explanation = assemble(run, llama, recorded, real)
    return dataclasses.replace(explanation, doubled=_doubled(config, degrees, larger, counts))


def assemble(run: Run, llama: LlamaConfig, recorded: Sequence[Recorded], real: bool) -> Explanation:
    """Puts together what the ranks recorded, with sentences. `llama` has all blocks."""
    config = run.config
    degrees = run.degrees
    by_stage = {one.coordinates["pp"]: one.stored for one in recorded}
    return Explanation(
        title=config.run.name,
        degrees=degrees | ({"ep": config.parallel.ep} if config.parallel.ep > 1 else {}),
        processes=num_processes(degrees),
        real=real,
        local_batches=local_batches(config.training, degrees),
        tokens=config.training.global_batch_size * config.training.seq_len,
        blocks=llama.num_layers,
        shown_blocks=run.llama.num_layers,
        lanes=tuple(_lane(one, run, llama) for one in with_senders(recorded)),
        parameters=holdings(by_stage, degrees),
        doubled=(),
    )


def with_senders(recorded: Sequence[Recorded]) -> list[Recorded]:
    """Marks sent messages as forward or backward, which only the receiver has recorded.

    The n-th message from one rank to another is the n-th that the other receives from it.
    """
    received: dict[tuple[int, ...], list[Place]] = {}
    for one in recorded:
        for event in one.events:
            if event.kind == "recv":
                received.setdefault(event.ranks, []).append(event.place)
    result = []
    for one in recorded:
        sent: Counter[tuple[int, ...]] = Counter()
        events = []
        for event in one.events:
            if event.kind == "send":
                number = sent[event.ranks]
                sent[event.ranks] += 1
                there = received.get(event.ranks, [])
                if number < len(there) and there[number].role in (ACTIVATIONS, GRADIENTS):
                    place = dataclasses.replace(
                        event.place, phase=there[number].phase, role=there[number].role
                    )
                    event = dataclasses.replace(event, place=place)
            events.append(event)
        result.append(one._replace(events=events))
    return result


def _with_dtype(config: Config, real: bool) -> Config:
    """The config with `auto` resolved for this machine, or for pretended ranks as on a GPU."""
    training = config.training
    if training.compute_dtype == "auto":
        dtype = "float32" if real else "bfloat16"
        training = dataclasses.replace(training, compute_dtype=dtype)
    return dataclasses.replace(config, training=training)


def _first_ranks(degrees: Mapping[str, int]) -> list[int]:
    """One rank of each stage, since the others of the stage do the same."""
    per_stage = num_processes(degrees) // degrees["pp"]
    return [stage * per_stage for stage in range(degrees["pp"])]


def _shortened(run: Run) -> Run:
    """The model with a few blocks, if it has many and all are equal."""
    llama = run.llama
    equal = len(set(llama.windows(run.config.training.seq_len))) == 1 and not (
        run.config.lora.layers
        or run.config.training.frozen_patterns
        or run.config.parallel.prefetch
        or run.config.recompute.every > 1
    )
    if run.degrees["pp"] > 1 or llama.num_layers <= DEEP or not equal:
        return run
    return run._replace(llama=dataclasses.replace(llama, num_layers=SHOWN))


def _pretend(pool: Pool, jobs: Sequence[tuple[Run, int]]) -> list[Recorded]:
    def one(job: tuple[Run, int]) -> Recorded:
        run, rank = job
        (found,) = pool.run(1, record_pretended, *run, rank, timeout=TIMEOUT, joins=False)
        recorded: Recorded = found
        return recorded

    with ThreadPoolExecutor(PROCESSES) as threads:
        return list(threads.map(one, jobs))


def _lane(recorded: Recorded, run: Run, llama: LlamaConfig) -> Lane:
    """One rank's events with their sentences, each counted as often as it happens."""
    replicated = {
        stored.name: _computed_shape(stored)
        for stored in recorded.stored
        if not any(
            axis == "tp" and cut[0] >= 0 for axis, cut in zip(stored.axes, stored.cuts, strict=True)
        )
    }
    events = explained(recorded.events, replicated, llama.tied_embeddings)
    more = llama.num_layers - run.llama.num_layers
    if more:
        # The second block stands for all that are not shown
        events = tuple(
            dataclasses.replace(event, times=event.times * (1 + more))
            if block_of(event) == "layers.1"
            else event
            for event in events
        )
    return Lane(recorded.rank, recorded.coordinates, events, recorded.flops_after, recorded.peak)


def _computed_shape(stored: Stored) -> tuple[int, ...]:
    """The shape of a parameter as a rank computes with it, if tp does not divide it: ep may."""
    if "ep" not in stored.axes:
        return stored.shape
    ep = stored.sizes[stored.axes.index("ep")]
    return (stored.shape[0] // ep, *stored.shape[1:])


def block_of(event: Event) -> str:
    """The block whose weights or activations are communicated (layers.0), else empty."""
    name = event.place.module
    if event.place.parameters:
        name = unit_of(event.place.parameters)
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "layers" else ""


class Total(NamedTuple):
    """Calls and bytes of the collectives of one kind along one axis."""

    calls: int = 0
    whole_bytes: int = 0
    sent_bytes: int = 0


def totals(events: Sequence[Event]) -> dict[tuple[str, str], Total]:
    """Adds up these events: (axis, kind) -> total."""
    found: dict[tuple[str, str], Total] = {}
    for event in events:
        total = found.get((event.axis, event.kind), Total())
        found[event.axis, event.kind] = Total(
            total.calls + event.times,
            total.whole_bytes + event.times * event.whole_bytes,
            total.sent_bytes + event.times * event.sent_bytes,
        )
    return found


def _larger_runs(
    config: Config, llama: LlamaConfig, degrees: Mapping[str, int]
) -> dict[str, Run | str]:
    """Axis -> the layout with this degree doubled, or the reason why there is none.

    The global batch stays the same, or is doubled if it cannot be divided further.
    """
    runs: dict[str, Run | str] = {}
    for axis in [axis for axis, degree in degrees.items() if degree > 1] or ["dp_shard"]:
        for batches in (1, 2) if axis in DATA_AXES else (1,):
            try:
                runs[axis] = _larger(config, llama, degrees, axis, batches)
                break
            except ConfigError as error:
                runs[axis] = "; ".join(error.problems)
    return runs


def _doubled(
    config: Config,
    degrees: Mapping[str, int],
    larger: Mapping[str, Run | str],
    counts: Sequence[Mapping[tuple[str, str], Total]],
) -> tuple[Doubled, ...]:
    """The changes by each doubled degree. `counts`: of the layout, then of those of `larger`."""
    remaining = list(counts)
    before = remaining.pop(0) if remaining else {}
    result = []
    for axis, run in larger.items():
        if isinstance(run, str):
            result.append(Doubled(axis, degrees[axis], run, True, ()))
            continue
        after = remaining.pop(0)
        changes = [
            Change(*key, *before.get(key, Total()), *after.get(key, Total()))
            for key in sorted(before.keys() | after.keys())
        ]
        batch = run.config.training.global_batch_size
        same = batch == config.training.global_batch_size
        result.append(Doubled(axis, degrees[axis], "", same, tuple(changes)))
    return tuple(result)


def _larger(
    config: Config, llama: LlamaConfig, degrees: Mapping[str, int], axis: str, batches: int
) -> Run:
    """The layout with one degree doubled and `batches` times the global batch.

    Raises ConfigError.
    """
    changed: dict[str, Any] = {axis: 2 * degrees[axis]}
    parallel = dataclasses.replace(config.parallel, **changed)
    training = dataclasses.replace(
        config.training, global_batch_size=batches * config.training.global_batch_size
    )
    larger = dataclasses.replace(config, parallel=parallel, training=training)
    found = check_layout(larger, llama, 2 * num_processes(degrees))
    return _shortened(Run(larger, llama, found))
