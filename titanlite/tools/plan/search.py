"""Searches the best layout for a model on a number of GPUs: estimates all that are allowed.

What it is: the products of degrees that are powers of two (dp_shard and dp_replicate have the
rest), with tp inside a node, ep up to its number of GPUs, pp <= 32 and cp <= 16, with and without
replicas, two pipeline schedules, and local batches of 1 to 16 that divide the global one. A layout
is refused if a rule of `rules/` excludes it or if it does not surely fit into the GPU's memory; of
the recomputation modes the first that fits is taken, since each repeats more than the one before.
If nothing fits, all are tried with the moments in CPU memory. What is left is ranked by the time of
a step (`step_time.py`).
Not searched: `pp_split`, `async_tp` and numbers of `reshard_after_forward`, which are reset to
their defaults, since most layouts exclude those of another one; other schedules, `cp_method`,
`memory_budget`, `recompute.offload` and `cpu_offload`, dtypes and float8, which stay as they are.
A key that is held, as one of the command line is, keeps its value in all layouts.
Why it is here: the fastest layout is rarely the one with the least communication, because memory
decides which layouts fit and how much they must recompute.
What it costs: about 20 ms per layout. Imports no torch.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from titanlite.config.schema import Config, ParallelConfig
from titanlite.model.flavors import LlamaConfig
from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.counts import Memory
from titanlite.tools.plan.estimate import estimate, layout_of
from titanlite.tools.plan.estimate_memory import memory, range_fits, reserved_bytes, states
from titanlite.tools.plan.layout import Layout
from titanlite.tools.plan.machines import Machine
from titanlite.tools.plan.step_time import StepTime, step_time

MODES = ("none", "selective", "full")  # each repeats more, and keeps less
CHUNKS = 8  # of the loss: they cost no time
LOCAL_BATCHES = (1, 2, 4, 8, 16)
MAX_PP = 32
MIN_TOKENS = 2048  # of a sequence on a rank of cp
DOES_NOT_FIT = "does not surely fit into the memory"
SEARCHED = (
    "parallel.pp",
    "parallel.dp_replicate",
    "parallel.dp_shard",
    "parallel.cp",
    "parallel.tp",
    "parallel.ep",
    "parallel.pp_schedule",
    "parallel.pp_microbatch_size",
    "parallel.pp_split",
    "parallel.async_tp",
    "parallel.reshard_after_forward",
    "parallel.optimizer_offload",
    "training.local_batch_size",
    "recompute.mode",
    "loss.num_chunks",
)
ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class Candidate:
    """A layout that is allowed and fits."""

    config: Config
    degrees: dict[str, int]
    memory: Memory  # of the rank that holds most
    reserved: int  # the most bytes that its allocator reserves
    time: StepTime

    @property
    def keys(self) -> dict[str, str | int]:
        """The keys that the search has chosen or reset, with their values."""
        parallel = self.config.parallel
        training = self.config.training
        chosen: dict[str, str | int] = {}
        for axis, degree in self.degrees.items():
            chosen[f"parallel.{axis}"] = degree
        chosen["parallel.ep"] = parallel.ep
        if self.degrees["pp"] > 1:
            chosen["parallel.pp_schedule"] = parallel.pp_schedule
            chosen["parallel.pp_microbatch_size"] = parallel.pp_microbatch_size
        chosen["parallel.pp_split"] = parallel.pp_split
        chosen["parallel.async_tp"] = parallel.async_tp
        chosen["parallel.reshard_after_forward"] = parallel.reshard_after_forward
        chosen["parallel.optimizer_offload"] = parallel.optimizer_offload
        chosen["training.local_batch_size"] = training.local_batch_size
        chosen["recompute.mode"] = self.config.recompute.mode
        chosen["loss.num_chunks"] = self.config.loss.num_chunks
        return chosen

    @property
    def name(self) -> str:
        """The layout in one line, without what is 1."""
        degrees = self.degrees | {"ep": self.config.parallel.ep}
        words = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
        words.append(f"local batch {self.config.training.local_batch_size}")
        words.append(f"recompute {self.config.recompute.mode}")
        if self.degrees["pp"] > 1:
            words.append(self.config.parallel.pp_schedule)
            words.append(f"microbatch {self.config.parallel.pp_microbatch_size}")
        if self.config.parallel.optimizer_offload:
            words.append("moments in CPU memory")
        return ", ".join(words)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    best: tuple[Candidate, ...]  # the fastest first
    tried: int
    refused: dict[str, int]  # reason -> layouts
    held: tuple[str, ...] = ()  # `section.key = value` of the keys that were not searched


@dataclass(frozen=True)
class Held:
    """The keys that keep the value of a config in all layouts."""

    config: Config
    keys: frozenset[str] = frozenset()

    def choices(self, name: str, values: Sequence[ValueT]) -> Sequence[ValueT]:
        """The values to try for a key."""
        return [self.value(name)] if name in self.keys else values  # type: ignore[list-item]

    def value(self, name: str) -> object:
        section, key = name.split(".")
        return getattr(getattr(self.config, section), key)

    @property
    def texts(self) -> tuple[str, ...]:
        """The keys with their values, as in a message."""
        return tuple(f"{name} = {self.value(name)}" for name in SEARCHED if name in self.keys)


def search(
    config: Config,
    llama: LlamaConfig,
    world_size: int,
    machine: Machine,
    keep: int = 10,
    given: frozenset[str] = frozenset(),
) -> SearchResult:
    """The fastest layouts of a config's model and global batch.

    `given`: keys whose values are held. Raises ConfigError if no layout fits.
    """
    if config.parallel.dp_shard == -1:  # what is left of the GPUs
        given -= {"parallel.dp_shard"}
    held = Held(config, given & frozenset(SEARCHED))
    config = _reset(held)
    result = _try_all(config, llama, world_size, machine, held)
    parallel = config.parallel
    on_gpu = not parallel.cpu_offload and not parallel.optimizer_offload
    may_offload = config.optimizer.name != "muon"  # a rule excludes Muon's
    may_offload = may_offload and "parallel.optimizer_offload" not in held.keys
    if not result.best and on_gpu and may_offload:
        offloaded = replace(config, parallel=replace(parallel, optimizer_offload=True))
        more = _try_all(offloaded, llama, world_size, machine, held)
        refused = Counter(result.refused) + Counter(more.refused)
        result = SearchResult(more.best, result.tried + more.tried, dict(refused))
    if not result.best:
        raise ConfigError(_nothing_found(config, world_size, machine, result, held))
    return replace(result, best=result.best[:keep], held=held.texts)


def _nothing_found(
    config: Config, world_size: int, machine: Machine, result: SearchResult, held: Held
) -> str:
    """The message if no layout is left."""
    refused = [f"{reason}: {count}" for reason, count in result.refused.items()]
    reasons = ", ".join(refused) or "the degrees do not divide the GPUs and the batch"
    message = (
        f"no layout of {world_size} {machine.name} trains this model with "
        f"training.global_batch_size = {config.training.global_batch_size} ({reasons}); "
        "expected more GPUs, or ones with more memory"
    )
    if held.keys:
        message += f", or fewer of the keys that are given: {', '.join(held.texts)}"
    return message


def _reset(held: Held) -> Config:
    """The config without the keys that fit one layout and would exclude most others."""
    config = held.config
    parallel = config.parallel
    (split,) = held.choices("parallel.pp_split", [""])
    (asynchronous,) = held.choices("parallel.async_tp", [False])
    reshard = parallel.reshard_after_forward
    if reshard.isdecimal():
        (reshard,) = held.choices("parallel.reshard_after_forward", ["default"])
    parallel = replace(
        parallel, pp_split=split, async_tp=asynchronous, reshard_after_forward=reshard
    )
    return replace(config, parallel=parallel)


def _try_all(
    config: Config, llama: LlamaConfig, world_size: int, machine: Machine, held: Held
) -> SearchResult:
    refused: Counter[str] = Counter()
    found: list[Candidate] = []
    tried = 0
    modes = held.choices("recompute.mode", MODES)
    for proposal in proposals(config, llama, world_size, machine, held):
        tried += 1
        candidate = evaluate(proposal, llama, world_size, machine, modes)
        if isinstance(candidate, Candidate):
            found.append(candidate)
        else:
            refused[candidate] += 1
    found.sort(key=lambda candidate: candidate.time.total)
    return SearchResult(tuple(found), tried, dict(refused.most_common()))


def proposals(
    config: Config,
    llama: LlamaConfig,
    world_size: int,
    machine: Machine,
    held: Held | None = None,
) -> Iterator[Config]:
    """The layouts to try, as configs without a mode of recomputation."""
    held = held or Held(config)
    batch = config.training.global_batch_size
    tensor = [n for n in _powers(machine.gpus_per_node) if llama.num_kv_heads % n == 0]
    context = [n for n in _powers(16) if config.training.seq_len // n >= MIN_TOKENS or n == 1]
    degrees = itertools.product(
        held.choices("parallel.tp", tensor),
        held.choices("parallel.pp", _powers(min(MAX_PP, llama.num_layers))),
        held.choices("parallel.cp", context),
    )
    (chunks,) = held.choices("loss.num_chunks", [max(CHUNKS, config.loss.num_chunks)])
    for tp, pp, cp in degrees:
        data, rest = divmod(world_size, tp * pp * cp)
        if rest or data == 0 or batch % data:
            continue
        sequences = batch // data
        for replicas in held.choices("parallel.dp_replicate", _replicas(data, tp * cp, machine)):
            shards, rest = divmod(data, replicas)
            if rest or shards not in held.choices("parallel.dp_shard", [shards]):
                continue
            layout = replace(
                config.parallel,
                tp=tp,
                pp=pp,
                cp=cp,
                dp_replicate=replicas,
                dp_shard=shards,
            )
            divided = [
                replace(layout, ep=ep)
                for ep in held.choices("parallel.ep", _expert_degrees(llama, shards * cp, machine))
            ]
            for one in divided:
                for parallel, local in _batches(one, sequences, held):
                    training = replace(config.training, local_batch_size=local)
                    loss = replace(config.loss, num_chunks=chunks)
                    yield replace(config, parallel=parallel, training=training, loss=loss)


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    powers = [1]
    while 2 * powers[-1] <= most:
        powers.append(2 * powers[-1])
    return powers


def _expert_degrees(llama: LlamaConfig, ranks: int, machine: Machine) -> list[int]:
    """Degrees of ep: those that divide the ranks of dp_shard x cp and the experts; 1 if dense."""
    if not llama.num_experts:
        return [1]
    sizes = (ranks, llama.num_experts)
    return [n for n in _powers(machine.gpus_per_node) if all(size % n == 0 for size in sizes)]


def _replicas(data: int, inner: int, machine: Machine) -> list[int]:
    """Degrees of dp_replicate: none, one replica per node, and plain data parallel."""
    per_node = max(1, machine.gpus_per_node // inner)
    choices = {1, data}
    if data > per_node and data % per_node == 0:
        choices.add(data // per_node)
    return sorted(choices)


def _batches(
    parallel: ParallelConfig, sequences: int, held: Held
) -> Iterator[tuple[ParallelConfig, int]]:
    """The layout with local batches that divide the sequences of a data-parallel rank."""
    name = "training.local_batch_size"
    if parallel.pp == 1:
        for local in held.choices(name, LOCAL_BATCHES):
            if sequences % local == 0:
                yield parallel, local
        return
    combinations = itertools.product(
        held.choices("parallel.pp_schedule", ("1F1B", "Interleaved1F1B")),
        held.choices("parallel.pp_microbatch_size", (1, 2)),
        held.choices(name, (sequences,)),
    )
    for schedule, micro, local in combinations:
        if sequences % local == 0 and local % micro == 0:
            yield replace(parallel, pp_schedule=schedule, pp_microbatch_size=micro), local


def evaluate(
    config: Config,
    llama: LlamaConfig,
    world_size: int,
    machine: Machine,
    modes: Sequence[str] = MODES,
) -> Candidate | str:
    """The layout with the first mode of recomputation that fits, or why there is none."""
    reason = ""
    for mode in modes:
        tried = replace(config, recompute=replace(config.recompute, mode=mode))
        try:
            layout = layout_of(tried, llama, world_size)
        except ConfigError as error:
            reason = reason or _of_rule(error)
            continue
        largest, gradients = _most(layout)
        low, high = reserved_bytes(largest, gradients)
        if range_fits(low, high, machine.memory_bytes) is not True:  # also if fragmented
            reason = DOES_NOT_FIT
            continue
        counts = estimate(tried, llama, world_size)
        time = step_time(counts, machine, tried, llama)
        return Candidate(tried, layout.degrees, largest, high, time)
    return reason


def _of_rule(error: ConfigError) -> str:
    """A reason that names only the key, since the values in the message differ between layouts."""
    key = re.match(r"[a-z0-9_]+\.[a-z0-9_]+", str(error))
    return f"a rule of {key[0]} excludes it" if key else "a rule excludes it"


def _most(layout: Layout) -> tuple[Memory, int]:
    """The memory of the fullest rank and the bytes of its gradients.

    It is one of the first two ranks, or the last, with the loss.
    """
    ranks = {0, min(1, layout.pp - 1), layout.pp - 1}
    held = []
    for rank in sorted(ranks):
        stages = layout.stages_of(rank)
        gradients = states(layout, stages).gradients if layout.shards > 1 else 0
        held.append((memory(layout, stages, rank), gradients))
    return max(held, key=lambda of_rank: reserved_bytes(*of_rank))


def why_slower(second: Candidate, first: Candidate) -> str:
    """The parts of a step in which the second layout takes longer, the largest first."""
    differences = {}
    for part, seconds in second.time.parts.items():
        differences[part] = seconds - first.time.parts[part]
    whole = second.time.total - first.time.total
    words = []
    for part in sorted(differences, key=lambda name: -differences[name])[:2]:
        if differences[part] > 0:
            words.append(f"{part.replace('_', ' ')} +{differences[part]:.3g} s")
    return f"{whole:.3g} s slower: {', '.join(words)}"


def as_toml(candidate: Candidate) -> str:
    """Formats the chosen keys as sections of a config file."""
    sections: dict[str, list[str]] = {}
    for name, value in candidate.keys.items():
        section, key = name.split(".")
        shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
        sections.setdefault(section, []).append(f"{key} = {shown}")
    blocks = ["\n".join([f"[{section}]", *lines]) for section, lines in sections.items()]
    return "\n\n".join(blocks) + "\n"
