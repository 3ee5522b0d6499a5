"""Predicts the time of a step from its counts and a machine.

What it is: divides every part of `StepCounts` by a rate, and adds what does not overlap.

    products        FLOPs / (peak of the dtype x `products` x s / (s + 150)), s the smallest side
    attention       FLOPs below the diagonal (half of S^2) / (peak x `attention`)
    other operators bytes / (0.8 x memory bandwidth); compiled 0.45 of the bytes of eager mode
    optimizer       each state read and written once; Muon's products
    collectives     bytes in a ring / bandwidth x `links`, and a latency for each call
    host            launching the kernels of a block takes the CPU `host_ms` (forward and backward,
                    eager mode); the GPU waits where this is longer than its own time

The bandwidth of a group of ranks inside a node is that of the node's link. Where it spans nodes,
its rings enter and leave each node through the network ports of all its GPUs there: with k of them
it is k times that of one port, at most the link's. A message of two ranks goes through one port.
Ranks are in the order pp, dp_replicate, dp_shard, cp, tp, the last ones adjacent, so the inner axes
lie inside a node.

What overlaps: FSDP's collectives with the computation of other units; only what is longer than the
computation is waited for, and the communication slows the computation by SLOWDOWN of its time. tp
and cp are waited for in full, with `async_tp` the half of tp. In a pipeline the collectives of
weights come before and after the microbatches. A rank is idle for the schedule's bubble.

What is fitted: four rates per GPU (`RATES`), where there are enough published rows;
`benchmarks/plan_rows.py` fits them and prints the errors. Imports no torch.
References: roofline model (Williams 2009), NCCL's performance notes for rings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from titanlite.config.schema import PP_SCHEDULES, SPLIT_BACKWARD, Config
from titanlite.model.flavors import LlamaConfig, block_shapes
from titanlite.model.flops import flops_per_token
from titanlite.rules.compiled import reason_not_compiled
from titanlite.rules.degrees import AXES, num_processes
from titanlite.tools.plan.counts import Collective, Product, RankCounts, StepCounts
from titanlite.tools.plan.machines import Machine


@dataclass(frozen=True)
class Rates:
    """The fractions of a machine's peaks that programs reach, and the time of the host."""

    products: float = 0.65
    attention: float = 0.35
    links: float = 0.7
    host_ms: float = 1.0  # not a fraction: milliseconds


# Rates by machine, fitted to half of the published rows of that GPU and judged on the other half
# (benchmarks/results/2026-11-26-plan_rows.md). Half of the A100-80GB rows are small models in a
# trainer of 2022, whose launches take long. Other machines have the default.
RATES: dict[str, Rates] = {
    "A100-40GB": Rates(products=0.75, attention=0.35, links=0.7, host_ms=1.0),
    "A100-80GB": Rates(products=0.7, attention=0.3, links=0.4, host_ms=2.8),
    "H100": Rates(products=0.6, attention=0.35, links=0.9, host_ms=1.0),
    "H100-96GB-500W": Rates(products=0.45, attention=0.2, links=0.7, host_ms=1.0),
    "H200": Rates(products=0.5, attention=0.35, links=0.55, host_ms=1.0),
    "GB200-NVL72": Rates(products=0.65, attention=0.35, links=0.9, host_ms=1.0),
}
HALF_SIDE = 150  # a product with a smallest side of this reaches half of the rate
FLOAT8_FACTOR = 0.9  # of `products`, for the peak of float8
COMPILED_BYTES = 0.45
COMPILED_HOST = 0.4  # of `host_ms`
MEMORY = 0.8  # of the memory's bandwidth
SLOWDOWN = 0.15
HOST_BANDWIDTH = 25e9  # bytes per second to CPU memory and back, of PCIe 4 x16
HOST_UPDATE = 1e9  # parameters per second of AdamW on the CPU


def rates_of(machine: Machine) -> Rates:
    """The fitted rates of a machine, or of the one that a user's is based on; else the default."""
    return RATES.get(machine.base or machine.name, Rates())


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step on the slowest rank, by part; the parts add up to `total`."""

    products: float
    attention: float
    pointwise: float
    optimizer: float
    sharding: float  # waiting for dp_shard and dp_replicate, and what they slow down
    tensor_parallel: float
    context_parallel: float
    messages: float  # of the pipeline
    bubble: float
    offload: float
    host: float  # waiting for kernels to be launched
    tokens_per_second: float  # per GPU
    mfu: float  # a fraction of the bf16 peak, FLOPs as in PaLM
    warnings: tuple[str, ...]

    @property
    def parts(self) -> dict[str, float]:
        """Name -> seconds."""
        names = (
            "products",
            "attention",
            "pointwise",
            "optimizer",
            "sharding",
            "tensor_parallel",
            "context_parallel",
            "messages",
            "bubble",
            "offload",
            "host",
        )
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def step_time(
    counts: StepCounts,
    machine: Machine,
    config: Config,
    llama: LlamaConfig,
    rates: Rates | None = None,
) -> StepTime:
    """The time of a step with these counts. `rates` replaces the rates of the machine."""
    used = rates or rates_of(machine)
    degrees = counts.degrees
    compiled = not reason_not_compiled(config, degrees, llama.dim, "cuda")
    causal = _causal_part(config, degrees["cp"])
    computed = [_compute(rank, machine, used, compiled, causal) for rank in counts.ranks]
    compute = max(computed, key=lambda of_rank: of_rank.total)
    busiest = counts.ranks[computed.index(compute)]

    waits = dict.fromkeys((*AXES, "world"), 0.0)
    for collective in busiest.collectives:
        axis = collective.axis if collective.axis in AXES else "dp_shard"
        waits[axis] += collective_seconds(collective, degrees, machine, used)
    tensor_parallel = waits["tp"] / (2 if config.parallel.async_tp else 1)
    context_parallel = waits["cp"]

    communication = waits["dp_shard"] + waits["dp_replicate"]
    hidden = min(communication, compute.total)
    if degrees["pp"] > 1:
        hidden = 0.0
    sharding = communication - hidden + SLOWDOWN * hidden

    schedule = config.parallel.pp_schedule
    training = config.training
    microbatches = training.local_batch_size // config.parallel.pp_microbatch_size
    idle = bubble_fraction(
        schedule, degrees["pp"], microbatches, config.parallel.stages_per_process
    )
    on_device = compute.total + tensor_parallel + context_parallel
    host = max(0.0, _host_seconds(config, llama, counts, used, compiled) - on_device)
    working = on_device + host
    bubble = working * idle / (1 - idle)
    optimizer = _optimizer(busiest, machine, used, config, llama, num_processes(degrees))
    offload = _offload(busiest, config, counts.local_batches, degrees["pp"])

    seconds = working + bubble + sharding + waits["pp"] + optimizer + offload
    per_gpu = counts.tokens / seconds / num_processes(degrees)
    flops = flops_per_token(llama, training.seq_len, config.lora, training.frozen_patterns)
    return StepTime(
        products=compute.products,
        attention=compute.attention,
        pointwise=compute.pointwise,
        optimizer=optimizer,
        sharding=sharding,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
        messages=waits["pp"],
        bubble=bubble,
        offload=offload,
        host=host,
        tokens_per_second=per_gpu,
        mfu=per_gpu * flops / (machine.peak_tflops * 1e12),
        warnings=topology_warnings(degrees, machine),
    )


@dataclass(frozen=True)
class _Compute:
    products: float
    attention: float
    pointwise: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.pointwise


def _causal_part(config: Config, cp: int) -> float:
    """The fraction of the counted pairs of query and key that the causal mask leaves: S^2 / 2."""
    if cp > 1 and config.parallel.cp_method == "all_gather":
        return 2 * cp / (2 * cp + 1)
    return 0.5


def _compute(
    rank: RankCounts, machine: Machine, rates: Rates, compiled: bool, causal: float
) -> _Compute:
    products = sum(product_seconds(product, machine, rates) for product in rank.products)
    peak = machine.peak_tflops * 1e12
    attention = rank.attention_flops * causal / (peak * rates.attention)
    moved = float(rank.pointwise_bytes)
    if compiled:
        moved *= COMPILED_BYTES
    for product in rank.products:
        if product.dtype == "float8":  # both operands are rounded, mostly within other operators
            operands = (product.rows + product.columns) * product.inner
            moved += 2 * operands * product.count
    pointwise = moved / (machine.memory_bandwidth * 1e9 * MEMORY)
    return _Compute(products, attention, pointwise)


def _host_seconds(
    config: Config, llama: LlamaConfig, counts: StepCounts, rates: Rates, compiled: bool
) -> float:
    """The time to launch the kernels of a step.

    A forward takes a third of it, which recomputation repeats.
    """
    pp = counts.degrees["pp"]
    microbatches = 1
    if pp > 1:
        microbatches = config.training.local_batch_size // config.parallel.pp_microbatch_size
    blocks = llama.num_layers / pp * counts.local_batches * microbatches
    passes = 1.0
    if config.recompute.mode in ("full", "selective"):
        passes += 1 / 3 / config.recompute.every
    elif config.recompute.mode == "memory_budget":
        passes += (1 - config.recompute.budget) / 3
    seconds = blocks * passes * rates.host_ms * 1e-3
    return seconds * COMPILED_HOST if compiled else seconds


def product_seconds(product: Product, machine: Machine, rates: Rates) -> float:
    """The time of all these products."""
    tflops = machine.peak_tflops * rates.products
    if product.dtype == "float32":
        tflops = (machine.float32_tflops or machine.peak_tflops / 8) * rates.products
    elif product.dtype == "float8" and machine.float8_tflops:
        tflops = machine.float8_tflops * rates.products * FLOAT8_FACTOR
    side = min(product.rows, product.inner, product.columns)
    return product.flops / (tflops * 1e12 * side / (side + HALF_SIDE))


def ranks_per_node(axis: str, size: int, degrees: dict[str, int], machine: Machine) -> int:
    """The number of ranks of a group along an axis that share a node."""
    if axis == "world":
        return min(size, machine.gpus_per_node)
    of_weights = axis.endswith("dp_shard_cp")  # or a part of it
    name = "dp_shard" if of_weights else axis
    inner = math.prod(degrees[other] for other in AXES[AXES.index(name) + 1 :])
    if of_weights:
        inner = degrees["tp"]
    return min(size, max(1, machine.gpus_per_node // inner))


def collective_seconds(
    collective: Collective, degrees: dict[str, int], machine: Machine, rates: Rates
) -> float:
    """The time of all these calls of a step."""
    size = collective.size
    together = ranks_per_node(collective.axis, size, degrees, machine)
    nodes = -(-size // together)
    bandwidth = machine.link_bandwidth
    latency = machine.link_latency_us * max(1.0, math.log2(max(2, together)))
    if nodes > 1:
        bandwidth = min(bandwidth, together * machine.network_bandwidth)
        latency += machine.network_latency_us * math.log2(nodes)
    if collective.kind in ("send", "recv"):  # from one GPU to one other
        latency = machine.link_latency_us
        if nodes > 1:
            bandwidth = min(machine.link_bandwidth, machine.network_bandwidth)
            latency = machine.network_latency_us
    if collective.kind == "recv":
        return 0.0  # the same time as the send of the other rank
    transfer = collective.sent_bytes / (bandwidth * 1e9 * rates.links)
    return transfer + collective.count * latency * 1e-6


def bubble_fraction(schedule: str, pp: int, microbatches: int, stages: int) -> float:
    """The idle part of a pipeline's time: (pp - 1) / (v M + pp - 1) with v stages per rank.

    Schedules that compute the gradients of weights in the bubble leave a third of it (arXiv
    2401.10241).
    """
    if pp == 1:
        return 0.0
    steps = microbatches * (stages if PP_SCHEDULES[schedule] > 1 else 1)
    idle = float(pp - 1)
    if schedule in SPLIT_BACKWARD:
        idle /= 3
    return idle / (steps + idle)


def _optimizer(
    rank: RankCounts,
    machine: Machine,
    rates: Rates,
    config: Config,
    llama: LlamaConfig,
    world_size: int,
) -> float:
    """The time of the update: reads gradients twice (first for their norm), and reads and writes
    weights and moments.
    """
    held = rank.memory
    gradients = held.parameters  # also where they are not held at the peak
    moved = 2 * held.parameters + 2 * held.optimizer + 2 * gradients
    seconds = moved / (machine.memory_bandwidth * 1e9 * MEMORY)
    if config.optimizer.name != "muon":
        return seconds
    flops = 0
    for shape in block_shapes(llama).values():
        if len(shape) == 2:
            short = min(shape)
            long = max(shape)
            flops += 20 * short * short * long + 10 * short**3
    share = flops * llama.num_layers / world_size
    return seconds + share / (machine.peak_tflops * 1e12 * rates.products)


def _offload(rank: RankCounts, config: Config, local_batches: int, pp: int) -> float:
    """The time of copies to CPU memory and back, and of the update there.

    `cpu_offload` copies a shard up at each all-gather (`estimate_traffic.py`): before each forward
    of a local batch (with pp those of all microbatches) and once before its
    backward, or, where weights stay gathered, once per step, with pp once per local batch. It
    copies its gradient down at each reduction.
    """
    numbers = rank.num_parameters
    parallel = config.parallel
    if parallel.cpu_offload:
        mode = parallel.reshard_after_forward
        forwards = 1
        up = local_batches
        if pp > 1:
            forwards = config.training.local_batch_size // parallel.pp_microbatch_size
        if mode == "never" and pp == 1:
            up = 1
        elif mode != "never" and not (mode == "default" and pp > 1):
            up *= forwards + 1
        down = local_batches if parallel.reduce_every_microbatch else 1
        copied = (up + down) * numbers
        number = 4 if config.training.param_dtype == "float32" else 2
        return copied * number / HOST_BANDWIDTH + numbers / HOST_UPDATE
    if parallel.optimizer_offload:
        moments = 4 if config.optimizer.state_dtype == "bfloat16" else 8
        return 2 * moments * numbers / HOST_BANDWIDTH
    return 0.0


def topology_warnings(degrees: dict[str, int], machine: Machine) -> tuple[str, ...]:
    """Warnings about axes that communicate over a slower link than they should."""
    warnings = []
    inside = machine.gpus_per_node
    if degrees["tp"] > inside or inside % degrees["tp"]:
        warnings.append(
            f"parallel.tp = {degrees['tp']} crosses nodes of {inside} GPUs ({machine.name}): its "
            f"collectives, which the computation waits for, go over {machine.network_bandwidth:g} "
            f"in place of {machine.link_bandwidth:g} GB/s; expected a divisor of {inside}"
        )
    return tuple(warnings)
