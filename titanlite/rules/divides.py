"""Rules of divisibility: batches, sequences, heads, layers and microbatches.

What it is: one function for each technique that divides something over ranks. Each yields a message
for every size that cannot be divided, with the nearest values that can. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from titanlite.config.batch_sizes import segments, size_problems
from titanlite.config.mistakes import suggestion
from titanlite.config.schema import PP_SCHEDULES, V_SHAPED, Config
from titanlite.model.flavors import LlamaConfig
from titanlite.rules.degrees import data_ranks, multiples, nearest, num_processes, start


def batch(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires that a step's sequences divide into local batches over data-parallel ranks."""
    yield from size_problems(config.training, data_ranks(degrees))


def noise_scale(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires two or more local batches in a step for `metrics.noise_scale_freq`."""
    training = config.training
    freq = config.metrics.noise_scale_freq
    portion = training.local_batch_size * data_ranks(degrees)
    if freq and training.global_batch_size < 2 * portion:
        yield (
            f"metrics.noise_scale_freq = {freq} compares the first local batch of a step with all "
            f"of them, and training.global_batch_size = {training.global_batch_size} is one of "
            f"training.local_batch_size = {training.local_batch_size} in each of "
            f"{data_ranks(degrees)} data-parallel processes; expected a smaller local batch, "
            f"or a global one of at least {2 * portion}"
        )


def reshard_group(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires that a number in `parallel.reshard_after_forward` divides FSDP's ranks."""
    mode = config.parallel.reshard_after_forward
    words = ["default", "always", "never"]
    if mode in words:
        return
    shown = f'parallel.reshard_after_forward = "{mode}"'
    if not mode.isdecimal():
        yield f"{shown}: expected default, always, never or a number{suggestion(mode, words)}"
        return
    if degrees["pp"] * degrees["tp"] * config.parallel.ep > 1:
        # It would deadlock: each row of the mesh makes only its own process groups, but all ranks
        # must take part in making each group. Experts are sharded over fewer ranks than the rest.
        yield (
            f"{shown}: a number works without parallel.pp, parallel.tp and parallel.ep only; "
            "with them use default, always or never"
        )
        return
    size = degrees["dp_shard"] * degrees["cp"]
    divisors = [n for n in range(2, size) if size % n == 0]
    if int(mode) not in divisors:
        allowed = ", ".join(str(n) for n in divisors)
        if not divisors:
            allowed = f"none for {size}, so use default, always or never"
        yield (
            f"{shown}: expected a number of processes that divides parallel.dp_shard x "
            f"parallel.cp = {size} and is neither 1 nor all of them; allowed: {allowed}"
        )


def tensor_parallel(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires that tp divides heads, feed-forward width, vocabulary and the sequence."""
    tp = degrees["tp"]
    cp = degrees["cp"]
    sizes = {
        "model.num_heads": llama.num_heads,
        "model.num_kv_heads": llama.num_kv_heads,
        "model.vocab_size": llama.vocab_size,
    }
    if not llama.num_experts:  # experts are not cut
        sizes["model.ffn_dim"] = llama.ffn_dim
    if config.training.seq_len % cp == 0:  # otherwise `context_parallel` reports it
        name = "training.seq_len / parallel.cp" if cp > 1 else "training.seq_len"
        sizes[name] = config.training.seq_len // cp
    broken = [f"{name} = {size}" for name, size in sizes.items() if size % tp]
    if broken:
        all_sizes = [*sizes.values(), num_processes(degrees)]
        fitting = nearest(tp, lambda n: all(size % n == 0 for size in all_sizes), llama.num_heads)
        yield (
            f"parallel.tp = {tp} does not divide {' and '.join(broken)}; "
            f"nearest that divide all: {fitting}"
        )


def expert_parallel(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires that ep divides dp_shard x cp and the number of experts."""
    ep = config.parallel.ep
    if ep == 1:
        return
    if not llama.num_experts:
        yield f"parallel.ep = {ep}: model.num_experts = 0, a dense model; expected parallel.ep = 1"
        return
    shards = degrees["dp_shard"] * degrees["cp"]
    sizes = {"parallel.dp_shard x parallel.cp": shards, "model.num_experts": llama.num_experts}
    broken = [f"{name} = {size}" for name, size in sizes.items() if size % ep]
    if broken:
        fitting = nearest(ep, lambda n: all(size % n == 0 for size in sizes.values()), shards)
        remedy = f"nearest that divide both: {fitting}"
        if llama.num_experts % ep == 0 and config.parallel.dp_shard == -1:
            fewest = math.lcm(ep, degrees["cp"])
            more = -(-shards // fewest) * fewest
            remedy += f"; or {start(num_processes(degrees) // shards * more)}"
        yield f"parallel.ep = {ep} does not divide {' and '.join(broken)}; {remedy}"


def context_parallel(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires that 2 cp divides the sequence; for Ulysses, cp the sequence and the heads."""
    cp = degrees["cp"]
    if cp == 1:
        return
    if config.parallel.cp_method == "ulysses":
        yield from _ulysses(config, llama, degrees)
        return
    seq_len = config.training.seq_len
    world_size = num_processes(degrees)
    if seq_len % (2 * cp):
        fitting = nearest(
            cp,
            lambda n: n == 1 or (seq_len % (2 * n) == 0 and world_size % n == 0),
            world_size,
        )
        yield (
            f"training.seq_len = {seq_len} is not a multiple of 2 x parallel.cp = {2 * cp} (each "
            "process has a chunk from the head and one from the tail); nearest: "
            f"{multiples(seq_len, 2 * cp)}, or parallel.cp = {fitting}"
        )


def _ulysses(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    cp = degrees["cp"]
    tp = degrees["tp"]
    sizes = {
        "training.seq_len": config.training.seq_len,
        "model.num_heads / parallel.tp": llama.num_heads // tp,
        "model.num_kv_heads / parallel.tp": llama.num_kv_heads // tp,
    }
    broken = [f"{name} = {size}" for name, size in sizes.items() if size % cp]
    if broken:
        all_sizes = [*sizes.values(), num_processes(degrees)]
        fitting = nearest(cp, lambda n: all(size % n == 0 for size in all_sizes), llama.num_heads)
        yield (
            f"parallel.cp = {cp} with parallel.cp_method = ulysses does not divide "
            f"{' and '.join(broken)}; nearest that divide all: {fitting}; "
            "all_gather needs no heads to divide"
        )


def pipeline_stages(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterator[str]:
    """Requires a layer or more per stage, and a number of stages that the schedule supports."""
    pp = degrees["pp"]
    schedule = config.parallel.pp_schedule
    per_process = config.parallel.stages_per_process
    if pp == 1:
        return
    if not stages_fit_schedule(config):
        yield (
            f"parallel.pp_stages_per_process = {per_process}: {schedule} needs "
            f"{PP_SCHEDULES[schedule]} (or 0)"
        )
        return
    stages = pp * per_process
    num_layers = llama.num_layers
    world_size = num_processes(degrees)
    if num_layers < stages:
        fitting = nearest(
            pp, lambda n: n * per_process <= num_layers and world_size % n == 0, num_layers
        )
        yield (
            f"parallel.pp = {pp} with {per_process} stages each ({schedule}) needs at least "
            f"{stages} layers; model.num_layers = {num_layers}; "
            f"nearest parallel.pp: {fitting or 'only 1'}"
        )


def stages_fit_schedule(config: Config) -> bool:
    """Whether `parallel.pp_schedule` supports `parallel.pp_stages_per_process`."""
    schedule = config.parallel.pp_schedule
    default = PP_SCHEDULES[schedule]
    fixed = default == 1 or schedule in V_SHAPED
    return not fixed or config.parallel.stages_per_process == default


def pipeline_microbatches(
    config: Config, llama: LlamaConfig, degrees: dict[str, int]
) -> Iterator[str]:
    """Requires that a local batch divides into a number of microbatches that the schedule runs."""
    pp = degrees["pp"]
    if pp == 1 or not stages_fit_schedule(config):
        return
    schedule = config.parallel.pp_schedule
    stages = pp * config.parallel.stages_per_process
    local = config.training.local_batch_size
    size = config.parallel.pp_microbatch_size
    if local % size:
        fitting = nearest(size, lambda n: local % n == 0, local)
        yield (
            f"parallel.pp_microbatch_size = {size} does not divide training.local_batch_size = "
            f"{local}; nearest that do: {fitting}"
        )
        return
    if _fits_schedule(schedule, local // size, pp, stages):
        return
    # The largest local batch that divides every step's batch over the data-parallel ranks
    common = math.gcd(*(segment.size for segment in segments(config.training)))
    largest = common // data_ranks(degrees)

    def fits(n: int) -> bool:
        divides = n % size == 0 and largest % n == 0
        return divides and _fits_schedule(schedule, n // size, pp, stages)

    fitting = nearest(local, fits, largest)
    yield (
        f"training.local_batch_size = {local} is {local // size} microbatches of "
        f"parallel.pp_microbatch_size = {size}, which parallel.pp_schedule = {schedule} with {pp} "
        f"processes and {stages} stages does not take; nearest that do: "
        f"{fitting or 'none with this training.global_batch_size, raise it'}"
    )


def _fits_schedule(schedule: str, microbatches: int, pp: int, stages: int) -> bool:
    """Whether torch's schedule of that name runs this number of microbatches."""
    if schedule in ("1F1B", "DualPipeV"):
        return microbatches >= stages
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, microbatches // pp)
        return microbatches % rounds == 0
    return True
