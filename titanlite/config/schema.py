"""Every key a run can set: one frozen dataclass per TOML section.

What it is: the schema. A field declares its type, its default, a line for `--help` and, where it has them, its bounds
or choices. How TOML files and the command line become a `Config` is `load.py`.
Why it is here: a function receives the *section* it needs, typed and immutable, so what a piece of code
can depend on is visible in its signature.
What it costs: nothing; no torch is imported, so a mistake is reported in a fraction of a second.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

# Exit codes: wrong input; stopped by a signal after saving; ended by the watchdog because a process hangs
EXIT_CONFIG, EXIT_STOPPED, EXIT_HUNG = 2, 75, 124

LAUNCHED = "TITANLITE_LAUNCHED"  # in the environment of a process that our launcher has started without torchrun

# Pipeline schedules, and how many stages each process holds by default
PP_SCHEDULES = dict.fromkeys(("GPipe", "1F1B"), 1)
PP_SCHEDULES |= dict.fromkeys(
    ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"), 2
)
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first and the last stage are on the same rank
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")  # weights' gradients apart from inputs'
WIDE = 256  # the width from which a CPU gains by bfloat16 and by compiling (benchmarks/levers.py)


class ConfigError(ValueError):
    """The user's input is wrong. Carries every problem found, one string each."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("\n".join(self.problems))


def key(
    default: Any, help: str, *, min: float | None = None, max: float | None = None, choices: tuple[Any, ...] = ()
) -> Any:
    """A config key: default, one line of help, and the values allowed (bounds are inclusive)."""
    return field(default=default, metadata={"help": help, "min": min, "max": max, "choices": choices})


@dataclass(frozen=True)
class RunConfig:
    """Where the run lives and what makes it repeatable."""

    name: str = key("", "name of the run's folder; empty: the config file's name")
    folder: str = key("outputs", "folder that holds the run folders")
    seed: int = key(42, "seed of the initial weights and of the order of the data", min=0, max=2**63 - 1)
    device: str = key("auto", "where to compute; auto: CUDA if there is any", choices=("auto", "cpu", "cuda"))
    sample_tokens: int = key(0, "tokens of sample text to print when training ends; 0: none", min=0)
    sample_prompt: str = key("def", "text the sample at the end continues")


@dataclass(frozen=True)
class ModelConfig:
    """Which Llama. A value of 0 means: what the flavor says."""

    flavor: str = key(
        "debug",
        "the architecture",
        choices=("debug", "cpu_25m", "llama3_1b", "llama3_3b", "llama3_8b", "llama3_70b", "llama3_405b"),
    )
    dim: int = key(0, "width of the residual stream", min=0, max=2**20)
    num_layers: int = key(0, "transformer blocks", min=0, max=2**14)
    num_heads: int = key(0, "query heads", min=0, max=2**14)
    num_kv_heads: int = key(0, "key and value heads (grouped-query attention)", min=0, max=2**14)
    ffn_dim: int = key(0, "hidden width of the feed-forward", min=0, max=2**22)
    embeddings: str = key(
        "flavor",
        "whether the output projection is the embedding's weight (tied) or has its own (untied)",
        choices=("flavor", "tied", "untied"),
    )
    vocab_size: int = key(
        0, "token ids; at least the tokenizer's. 0: the flavor's, or else the tokenizer's", min=0, max=2**24
    )


@dataclass(frozen=True)
class DataConfig:
    """What to train on. Text is tokenised once, into a cache."""

    path: str = key("", "a text file or a folder of text files; empty: the Python standard library's source")
    pattern: str = key("**/*", "which files of the folder, as a glob pattern")
    tokenizer: str = key("", "a tiktoken rank file (Llama 3's tokenizer.model); empty: the bundled 4,096-token one")
    cache: str = key("", "folder of prepared data; empty: $TITANLITE_CACHE, or else ~/.cache/titanlite")


@dataclass(frozen=True)
class TrainingConfig:
    """How much, in what portions and in which number formats."""

    steps: int = key(1000, "optimizer steps of the whole run", min=1)
    seq_len: int = key(256, "tokens of one sequence", min=2, max=2**24)
    global_batch_size: int = key(16, "sequences per optimizer step, over all processes", min=1)
    local_batch_size: int = key(4, "sequences one process computes at a time; accumulation follows", min=1)
    max_norm: float = key(1.0, "gradients are clipped to this global norm; 0: measured only", min=0)
    compute_dtype: str = key(
        "auto",
        "dtype of forward and backward; auto: bfloat16 on CUDA, and on CPUs that multiply it if the model is wide "
        "enough to gain, else float32",
        choices=("auto", "float32", "bfloat16"),
    )
    param_dtype: str = key(
        "float32",
        "dtype of parameters and gradients; bfloat16 saves 4 bytes per parameter, and small updates are lost",
        choices=("float32", "bfloat16"),
    )
    reduce_dtype: str = key(
        "float32", "dtype in which gradients are summed over processes", choices=("float32", "bfloat16")
    )
    gc_freq: int = key(50, "collect Python garbage every so many steps; 0: leave it to Python", min=0)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW."""

    lr: float = key(3e-4, "peak learning rate", min=0)
    betas: tuple[float, float] = key((0.9, 0.95), "decay of the first and of the second moment", min=0, max=0.999999)
    eps: float = key(1e-8, "added to the denominator", min=0)
    weight_decay: float = key(0.1, "decoupled weight decay", min=0)
    decayed: str = key(
        "all", "what decays: all parameters, or only the linear layers' weights", choices=("all", "linear")
    )
    state_dtype: str = key(
        "float32", "dtype of the moments; bfloat16 saves 4 bytes per parameter", choices=("float32", "bfloat16")
    )
    implementation: str = key("auto", "auto: fused", choices=("auto", "fused", "foreach", "for-loop"))


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the steps: warmup, then a decay."""

    name: str = key("cosine", "shape after the warmup", choices=("cosine", "linear", "wsd", "constant"))
    warmup_steps: int = key(100, "steps of linear warmup", min=0)
    decay_fraction: float = key(0.1, "wsd: part of all steps, at the end, over which the rate falls", min=0, max=1)
    min_ratio: float = key(0.1, "final rate as a part of the peak rate", min=0, max=1)


@dataclass(frozen=True)
class ParallelConfig:
    """How the processes share the work. The product of the five degrees is the number of processes."""

    pp: int = key(1, "pipeline stages' processes: each holds some of the layers; -1: what is left", min=-1)
    dp_replicate: int = key(1, "replicas of the model (HSDP when dp_shard > 1); -1: what is left", min=-1)
    dp_shard: int = key(-1, "processes a replica's parameters are sharded over (FSDP2); -1: what is left", min=-1)
    cp: int = key(1, "context parallel: processes a sequence is cut over; -1: what is left", min=-1)
    tp: int = key(1, "tensor parallel: processes a layer's matrices are cut over; -1: what is left", min=-1)
    reshard_after_forward: str = key(
        "default",
        "free gathered weights after the forward (less memory, more traffic): default (all but the last; never with "
        "pp > 1), always, never, or a number: keep them sharded over so many processes",
    )
    reduce_every_microbatch: bool = key(
        True, "sum gradients over processes after each microbatch (less memory); false: once per step"
    )
    cpu_offload: bool = key(False, "keep parameters, gradients and moments in CPU memory, computing on the GPU")
    prefetch: int = key(0, "gather weights so many units ahead; 0: FSDP2's own choice, one", min=0, max=64)
    async_tp: bool = key(False, "overlap tensor parallel's communication with its matmuls (CUDA, with compile)")
    cp_method: str = key(
        "all_gather",
        "how attention sees all keys: all_gather (of keys and values), ulysses (all-to-all of heads), ring (CUDA)",
        choices=("all_gather", "ulysses", "ring"),
    )
    pp_schedule: str = key("1F1B", "order of the microbatches in the pipeline", choices=tuple(PP_SCHEDULES))
    pp_microbatch_size: int = key(1, "sequences of a microbatch; training.local_batch_size is cut into these", min=1)
    pp_stages_per_process: int = key(0, "stages each process holds; 0: what the schedule needs, 1 or 2", min=0)
    pp_split: str = key(
        "", "where each stage but the first begins, as in `layers.2, layers.4`; empty: balanced by the work"
    )

    @property
    def stages_per_process(self) -> int:
        return self.pp_stages_per_process or PP_SCHEDULES[self.pp_schedule]

    @property
    def stage_starts(self) -> list[str]:
        """The names in `pp_split`."""
        return self.pp_split.replace(",", " ").split()


@dataclass(frozen=True)
class RecomputeConfig:
    """Activation checkpointing: what is recomputed in the backward instead of kept."""

    mode: str = key(
        "none",
        "none; full: each block's input is kept; selective: costly results too (a list of operators); "
        "memory_budget: the compiler keeps what fits in `budget`",
        choices=("none", "full", "selective", "memory_budget"),
    )
    every: int = key(1, "full and selective: apply it to every n-th block only", min=1)
    budget: float = key(
        0.5, "memory_budget: part of the activations' memory to use; 1: recompute nothing", min=0, max=1
    )


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile, block by block."""

    enabled: str = key(
        "auto",
        "compile each transformer block; auto: on CUDA, and on Linux on CPUs if the model is at least 256 wide (not "
        "with what cannot be compiled), and wherever recompute.mode is memory_budget",
        choices=("auto", "true", "false"),
    )
    loss: bool = key(False, "compile the loss too")
    backend: str = key("inductor", "the compiler", choices=("inductor", "aot_eager", "eager"))


@dataclass(frozen=True)
class Float8Config:
    """8-bit matrix products in the blocks' linear layers."""

    enabled: bool = key(False, "train with float8 (CUDA devices of compute capability 8.9 or later; with compile)")
    skip: str = key(
        "", "linear layers that keep their precision: parts of their names, as in `attention.wk, layers.0.`"
    )
    emulate: bool = key(False, "the same numbers by fp32 products, on any device, slowly")

    @property
    def skipped(self) -> list[str]:
        """The names in `skip`."""
        return self.skip.replace(",", " ").split()


@dataclass(frozen=True)
class LossConfig:
    """Cross entropy."""

    num_chunks: int = key(
        1,
        "project onto the vocabulary and compute the loss for so many parts of the tokens, one after the other: "
        "logits take 1/n of the memory",
        min=1,
        max=65536,
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Resumable state in the run's folder. A run whose folder holds a checkpoint resumes from the newest whole one."""

    freq: int = key(500, "save every so many steps; 0: only at the end", min=0)
    freq_minutes: float = key(0.0, "save too when the last save is so many minutes ago; 0: steps alone decide", min=0)
    async_mode: str = key(
        "disabled",
        "disabled: training waits for a save; async: it goes on while a copy is written; async_pinned: a copy in "
        "pinned memory (CUDA)",
        choices=("disabled", "async", "async_pinned"),
    )
    retries: int = key(2, "try a save that failed so many times again before the run ends", min=0, max=10)
    keep: int = key(3, "keep the newest so many; 0: all", min=0)
    keep_every: int = key(0, "keep every so many-th step for good; 0: none", min=0)
    keep_best: int = key(0, "keep so many with the lowest validation loss", min=0)
    load: str = key(
        "auto", "auto: resume if there is a checkpoint; never: refuse a used folder", choices=("auto", "never")
    )
    load_step: int = key(0, "go back to this step; later ones are set aside. 0: the newest", min=0)
    initial_load: str = key(
        "", "a run without a checkpoint begins with these weights: a run's folder, or any format that `convert` reads"
    )
    trust_pickle: bool = key(False, "unpickle the index of a stock DCP folder: whoever made it can run code here")
    accept: str = key("", "changes to accept on resuming, as in `run.seed, optimizer.lr`")

    @property
    def accepted(self) -> list[str]:
        """The keys in `accept`."""
        return self.accept.replace(",", " ").split()


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on text that training never sees."""

    freq: int = key(0, "validate every so many steps, and before the first and after the last; 0: never", min=0)
    samples: int = key(0, "sequences to validate on; 0: all that were held out", min=0)


@dataclass(frozen=True)
class MetricsConfig:
    """The console line and metrics.jsonl."""

    log_freq: int = key(10, "log every so many steps, and the first and the last", min=1)


@dataclass(frozen=True)
class ProfilingConfig:
    """Traces of the PyTorch profiler, for Perfetto or chrome://tracing."""

    enabled: bool = key(False, "write a trace of some steps into the run's folder")
    freq: int = key(100, "start a trace every so many steps", min=1)
    warmup_steps: int = key(2, "steps the profiler runs before it records", min=0)
    active_steps: int = key(2, "steps it records", min=1)


@dataclass(frozen=True)
class CommConfig:
    """How long a process may keep the others waiting."""

    timeout_seconds: int = key(
        300, "a process that stands still for so long ends the run, which names it", min=1, max=604800
    )
    step_timeout_seconds: int = key(
        100, "the same within a training step, from the second on, if that is less", min=1, max=604800
    )

    @property
    def group_timeout_seconds(self) -> int:
        """A collective's own time-out: after the watchdog's, which knows whom the others wait for."""
        return self.timeout_seconds + 10


@dataclass(frozen=True)
class Config:
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    compile: CompileConfig = CompileConfig()
    float8: Float8Config = Float8Config()
    loss: LossConfig = LossConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    metrics: MetricsConfig = MetricsConfig()
    profiling: ProfilingConfig = ProfilingConfig()
    comm: CommConfig = CommConfig()


def portable(config: Config) -> str:
    """What must be the same on every node: all of it but where files lie on this one."""
    return repr(dataclasses.replace(config, data=DataConfig(), run=dataclasses.replace(config.run, folder="")))


def sections() -> dict[str, type]:
    """Section name -> its dataclass, in the order they are shown."""
    return {f.name: type(f.default) for f in dataclasses.fields(Config)}
