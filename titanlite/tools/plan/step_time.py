"""Predicts the time of a step from its counts and a machine.

What it is: `Work` is what the busiest rank does, in seconds at the full speed of the machine;
`timed` divides every part by a rate, and adds what does not overlap.

    products        FLOPs / (peak of the dtype x `products` x s / (s + 150)), s the smallest side
    attention       FLOPs below the diagonal (half of S^2) / (peak x `attention` x kernel)
    kernel          the rate of the attention kernel, in parts of the fastest
    other operators bytes / (0.8 x memory bandwidth); compiled 0.45 of the bytes of eager mode
    optimizer       each state read and written once; Muon's products
    collectives     bytes in a ring / bandwidth x `links`, and a latency for each call
    host            launching the kernels of a block takes the CPU `host_ms` (forward and backward,
                    eager mode), and a message of a pipeline a fifth of that

The bandwidth of a group of ranks inside a node is that of the node's link. Where it spans nodes,
its rings enter and leave each node through the network ports of all its GPUs there: with k of them
it is k times that of one port, at most the link's. A message of two ranks goes through one port.
Ranks are in the order pp, dp_replicate, dp_shard, cp, tp, the last ones adjacent, so the inner axes
lie inside a node.

An all-to-all sends to each rank of the group its own part, so what goes to other nodes leaves
through the port of the GPU that has it.

What overlaps: FSDP's collectives with the computation of other units; only what is longer than the
computation is waited for, and the communication slows the computation by SLOWDOWN of its time. tp,
cp and ep are waited for in full, with `async_tp` the half of tp. In a pipeline the collectives of
weights come before and after the microbatches. A rank is idle for the schedule's bubble. The GPU
works while the CPU launches; where both take about equally long, each waits for the other at times,
so the two of them take (gpu^3 + cpu^3)^(1/3).

What is fitted: four rates per GPU with enough published rows (`fitted.py`), and the constants of
`Shared`; `benchmarks/plan_rows.py` fits them and prints the errors. Imports no torch.
References: roofline model (Williams 2009), NCCL's performance notes for rings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from titanlite.config.schema import PP_SCHEDULES, SPLIT_BACKWARD, Config
from titanlite.model.flavors import LlamaConfig, block_shapes
from titanlite.model.flops import PEAK_TFLOPS, flops_per_token
from titanlite.rules.compiled import reason_not_compiled
from titanlite.rules.degrees import AXES, num_processes
from titanlite.tools.plan.accuracy import Fitted
from titanlite.tools.plan.counts import FLOAT8, Collective, Product, RankCounts, StepCounts
from titanlite.tools.plan.fitted import FITTED
from titanlite.tools.plan.machines import Machine


@dataclass(frozen=True)
class Rates:
    """The fractions of a machine's peaks that programs reach, and the time of the host."""

    products: float = 0.65
    attention: float = 0.35  # of the fastest kernel for this GPU
    links: float = 0.7
    host_ms: float = 1.0  # not a fraction: milliseconds


@dataclass(frozen=True)
class Shared:
    """Constants of all machines, fitted together with the rates."""

    message: float = 0.2  # the launch of a message, as a part of `host_ms`
    sharpness: float = 3.0  # the exponent with which the times of CPU and GPU are added
    triton_hopper: float = 0.4  # the attention of these kernels on an H100 or H200, in parts of
    flash2_hopper: float = 0.5  # that of cuDNN; arXiv 2407.08608 has 1/1.5 to 1/2 for the second


SHARED = Shared()
HALF_SIDE = 150  # a product with a smallest side of this reaches half of the rate
COMPILED_BYTES = 0.45
COMPILED_HOST = 0.4  # of `host_ms`
MEMORY = 0.8  # of the memory's bandwidth
SLOWDOWN = 0.15
HOST_BANDWIDTH = 25e9  # bytes per second to CPU memory and back, of PCIe 4 x16
HOST_UPDATE = 1e9  # parameters per second of AdamW on the CPU
FULL_SPEED = Rates(products=1.0, attention=1.0, links=1.0, host_ms=1.0)
FASTEST = "cuDNN, FlashAttention 3"


def attention_part(kernel: str, generation: str, shared: Shared = SHARED) -> float:
    """The rate of an attention kernel, as a part of the fastest one's on this generation of GPUs.

    On Ampere the fastest is FlashAttention 2, and Triton's is 1.3 to 2.5 times slower (arXiv
    2307.08691). FlashAttention 2 has no instructions of later generations, so on Blackwell it runs
    at the speed that it has on Hopper. FlexAttention is at 0.85 of FlashAttention 2 on Ampere
    (pytorch.org/blog/flexattention); on later generations no source was found, and the same is
    assumed.
    """
    if kernel == "flex":
        return 0.85 * attention_part("flash2", generation, shared)
    parts = {
        ("triton", "ampere"): 0.55,
        ("triton", "hopper"): shared.triton_hopper,
        ("flash2", "hopper"): shared.flash2_hopper,
        ("flash2", "blackwell"): shared.flash2_hopper * PEAK_TFLOPS["H100"] / PEAK_TFLOPS["B200"],
    }
    return parts.get((kernel, generation), 1.0)


def fitted_of(machine: Machine) -> Fitted | None:
    """What is known about the speed of a machine, or of the one that a user's is based on."""
    return FITTED.get(machine.base or machine.name)


def rates_of(machine: Machine) -> Rates:
    """The fitted rates of a machine; else the default."""
    fitted = fitted_of(machine)
    return Rates(*fitted.rates) if fitted else Rates()


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
    expert_parallel: float
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
            "expert_parallel",
            "messages",
            "bubble",
            "offload",
            "host",
        )
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Work:
    """What the busiest rank does in a step, in seconds at the full speed of the machine."""

    products: float
    attention: float
    pointwise: float  # at the speed that the memory reaches
    transfer: dict[str, float]  # by axis, ep too
    latency: dict[str, float]
    launches: float  # of blocks, in units of `host_ms`
    messages: int  # of the pipeline
    idle: float  # fraction of the pipeline's time
    optimizer: float
    optimizer_products: float  # Muon's
    offload: float


def step_time(
    counts: StepCounts,
    machine: Machine,
    config: Config,
    llama: LlamaConfig,
    rates: Rates | None = None,
) -> StepTime:
    """The time of a step with these counts. `rates` replaces the rates of the machine."""
    work = work_of(counts, machine, config, llama)
    part = attention_part(own_kernel(config, llama), machine.generation)
    parts = timed(work, rates or rates_of(machine), part, config)
    gpus = num_processes(counts.degrees)
    per_gpu = counts.tokens / sum(parts.values()) / gpus
    training = config.training
    flops = flops_per_token(llama, training.seq_len, config.lora, training.frozen_patterns)
    return StepTime(
        **parts,
        tokens_per_second=per_gpu,
        mfu=per_gpu * flops / (machine.peak_tflops * 1e12),
        warnings=topology_warnings(counts.degrees, machine),
    )


def own_kernel(config: Config, llama: LlamaConfig) -> str:
    """The attention kernel of `model/attention.py`: the fastest, or with a mask FlexAttention."""
    masked = config.data.document_mask or any(llama.windows(config.training.seq_len))
    return "flex" if masked else FASTEST


def timed(
    work: Work, rates: Rates, attention_part: float, config: Config, shared: Shared = SHARED
) -> dict[str, float]:
    """The seconds of each part of a step."""
    products = work.products / rates.products
    attention = work.attention / (rates.attention * attention_part)
    compute = products + attention + work.pointwise
    waits = {axis: work.transfer[axis] / rates.links + work.latency[axis] for axis in work.transfer}
    tensor_parallel = waits["tp"] / (2 if config.parallel.async_tp else 1)
    context_parallel = waits["cp"]
    expert_parallel = waits["ep"]

    communication = waits["dp_shard"] + waits["dp_replicate"]
    hidden = min(communication, compute)
    if work.messages:  # in a pipeline nothing is computed meanwhile
        hidden = 0.0
    sharding = communication - hidden + SLOWDOWN * hidden

    on_device = compute + tensor_parallel + context_parallel + expert_parallel
    launching = (work.launches + shared.message * work.messages) * rates.host_ms * 1e-3
    power = shared.sharpness
    working = (on_device**power + launching**power) ** (1 / power)
    return {
        "products": products,
        "attention": attention,
        "pointwise": work.pointwise,
        "optimizer": work.optimizer + work.optimizer_products / rates.products,
        "sharding": sharding,
        "tensor_parallel": tensor_parallel,
        "context_parallel": context_parallel,
        "expert_parallel": expert_parallel,
        "messages": waits["pp"],
        "bubble": working * work.idle / (1 - work.idle),
        "offload": work.offload,
        "host": working - on_device,
    }


def work_of(counts: StepCounts, machine: Machine, config: Config, llama: LlamaConfig) -> Work:
    """The work of the rank that computes longest."""
    degrees = counts.degrees
    compiled = not reason_not_compiled(config, degrees, llama.dim, "cuda")
    causal = _causal_part(config, degrees["cp"])
    computed = [_compute(rank, machine, compiled, causal) for rank in counts.ranks]
    compute = max(computed, key=lambda of_rank: of_rank.weight)
    busiest = counts.ranks[computed.index(compute)]

    transfer = dict.fromkeys((*AXES, "ep"), 0.0)
    latency = dict.fromkeys((*AXES, "ep"), 0.0)
    for collective in busiest.collectives:
        axis = collective.axis if collective.axis in transfer else "dp_shard"
        bandwidth, seconds = _speed(collective, degrees, machine)
        transfer[axis] += collective.sent_bytes / bandwidth
        latency[axis] += collective.count * seconds
    ends = [
        sum(call.count for call in rank.collectives if call.kind in ("send", "recv"))
        for rank in counts.ranks
    ]
    parallel = config.parallel
    microbatches = config.training.local_batch_size // parallel.pp_microbatch_size
    optimizer, optimizer_products = _optimizer(
        busiest, machine, config, llama, num_processes(degrees)
    )
    return Work(
        products=compute.products,
        attention=compute.attention,
        pointwise=compute.pointwise,
        transfer=transfer,
        latency=latency,
        launches=_launched_blocks(config, llama, counts, compiled),
        messages=max(ends) if degrees["pp"] > 1 else 0,
        idle=bubble_fraction(
            parallel.pp_schedule, degrees["pp"], microbatches, parallel.stages_per_process
        ),
        optimizer=optimizer,
        optimizer_products=optimizer_products,
        offload=_offload(busiest, config, counts.local_batches, degrees["pp"]),
    )


@dataclass(frozen=True)
class _Compute:
    products: float
    attention: float
    pointwise: float

    @property
    def weight(self) -> float:
        """Seconds at the default rates, to compare ranks."""
        rates = Rates()
        return self.products / rates.products + self.attention / rates.attention + self.pointwise


def _causal_part(config: Config, cp: int) -> float:
    """The fraction of the counted pairs of query and key that the causal mask leaves: S^2 / 2."""
    if cp > 1 and config.parallel.cp_method == "all_gather":
        return 2 * cp / (2 * cp + 1)
    return 0.5


def _compute(rank: RankCounts, machine: Machine, compiled: bool, causal: float) -> _Compute:
    products = sum(product_seconds(product, machine) for product in rank.products)
    moved = float(rank.pointwise_bytes)
    if compiled:
        compiled_bytes = rank.pointwise_bytes - rank.never_compiled_bytes
        moved = COMPILED_BYTES * compiled_bytes + rank.never_compiled_bytes
    for product in rank.products:
        if product.dtype in FLOAT8:  # both operands are rounded, mostly within other operators
            operands = (product.rows + product.columns) * product.inner
            moved += 2 * operands * product.count
    attention = rank.attention_flops * causal / (machine.peak_tflops * 1e12)
    pointwise = moved / (machine.memory_bandwidth * 1e9 * MEMORY)
    return _Compute(products, attention, pointwise)


def _launched_blocks(
    config: Config, llama: LlamaConfig, counts: StepCounts, compiled: bool
) -> float:
    """The blocks of a step whose kernels are launched, compiled ones as parts of one.

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
    if llama.num_experts:  # only attention is compiled
        compiled = False
    return blocks * passes * (COMPILED_HOST if compiled else 1.0)


def product_seconds(product: Product, machine: Machine) -> float:
    """The time of all these products at the peak of their dtype, less what small sides lose.

    With a scale for each row, float8 is as fast as bfloat16 (torchtitan's benchmarks/
    asyncTP_llama3_h100_2025-06: 600 tokens/s beside 597).
    """
    tflops = machine.peak_tflops
    if product.dtype == "float32":
        tflops = machine.float32_tflops or machine.peak_tflops / 8
    elif product.dtype == "float8" and machine.float8_tflops:
        tflops = machine.float8_tflops
    side = min(product.rows, product.inner, product.columns)
    return product.flops / (tflops * 1e12 * side / (side + HALF_SIDE))


def ranks_per_node(axis: str, size: int, degrees: dict[str, int], machine: Machine) -> int:
    """The number of ranks of a group along an axis that share a node."""
    if axis == "world":
        return min(size, machine.gpus_per_node)
    if axis in ("ep", "expert_shard"):  # which divide dp_shard x cp, ep inside
        inner = degrees["tp"]
        if axis == "expert_shard":
            inner *= degrees["dp_shard"] * degrees["cp"] // size
        return min(size, max(1, machine.gpus_per_node // inner))
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
    bandwidth, latency = _speed(collective, degrees, machine)
    return collective.sent_bytes / (bandwidth * rates.links) + collective.count * latency


def _speed(
    collective: Collective, degrees: dict[str, int], machine: Machine
) -> tuple[float, float]:
    """The bytes per second of these calls at the full speed of the links, and their latency."""
    size = collective.size
    together = ranks_per_node(collective.axis, size, degrees, machine)
    nodes = -(-size // together)
    bandwidth = machine.link_bandwidth
    latency = machine.link_latency_us * max(1.0, math.log2(max(2, together)))
    if nodes > 1:
        bandwidth = min(bandwidth, together * machine.network_bandwidth)
        latency += machine.network_latency_us * math.log2(nodes)
    if collective.kind == "all_to_all" and nodes > 1:
        sent = size - 1  # parts of a rank's tensor, of which these go to other nodes
        to_others = size - together
        bandwidth = min(machine.link_bandwidth, machine.network_bandwidth * sent / to_others)
    if collective.kind in ("send", "recv"):  # from one GPU to one other
        latency = machine.link_latency_us
        if nodes > 1:
            bandwidth = min(machine.link_bandwidth, machine.network_bandwidth)
            latency = machine.network_latency_us
    if collective.kind == "recv":
        latency = 0.0  # the same time as the send of the other rank
    return bandwidth * 1e9, latency * 1e-6


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
    config: Config,
    llama: LlamaConfig,
    world_size: int,
) -> tuple[float, float]:
    """The time of the update: reads gradients twice (first for their norm), and reads and writes
    weights and moments. The second number is that of Muon's products, at the peak.
    """
    held = rank.memory
    trained = held.parameters * rank.num_trained / rank.num_parameters
    gradients = trained  # also where they are not held at the peak
    moved = 2 * trained + 2 * held.optimizer + 2 * gradients
    seconds = moved / (machine.memory_bandwidth * 1e9 * MEMORY)
    if config.optimizer.name != "muon":
        return seconds, 0.0
    flops = 0
    for shape in block_shapes(llama).values():
        if len(shape) >= 2:  # an expert's matrices are matrices like others
            short = min(shape[-2:])
            long = max(shape[-2:])
            number = math.prod(shape[:-2])
            flops += number * (20 * short * short * long + 10 * short**3)
    share = flops * llama.num_layers / world_size
    return seconds, share / (machine.peak_tflops * 1e12)


def _offload(rank: RankCounts, config: Config, local_batches: int, pp: int) -> float:
    """The time of copies to CPU memory and back, and of the update there.

    `cpu_offload` copies a shard up at each all-gather (`estimate_traffic.py`): before each forward
    of a local batch (with pp those of all microbatches) and once before its
    backward, or, where weights stay gathered, once per step, with pp once per local batch. It
    copies its gradient down at each reduction.
    """
    trained = rank.num_trained
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
        copied = up * rank.num_parameters + down * trained
        number = 4 if config.training.param_dtype == "float32" else 2
        return copied * number / HOST_BANDWIDTH + trained / HOST_UPDATE
    if parallel.optimizer_offload:
        moments = 4 if config.optimizer.state_dtype == "bfloat16" else 8
        return 2 * moments * trained / HOST_BANDWIDTH
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
