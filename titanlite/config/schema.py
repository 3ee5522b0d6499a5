"""Every key a run can set: one frozen dataclass per TOML section.

What it is: the schema. A field declares its type, default, help text and, if it has any, bounds or choices. `load.py`
makes a `Config` from TOML files and the command line.
Why it is here: a function receives the *section* that it needs, typed and immutable, so its signature shows which
settings it can depend on.
What it costs: nothing; no torch is imported, so a mistake is reported in a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from typing import Any

# Exit codes: wrong input; stopped by a signal after saving; ended by the watchdog because of a hang
EXIT_CONFIG, EXIT_STOPPED, EXIT_HUNG = 2, 75, 124

# Environment variables of processes that the launcher started: the prepared data; on rank 0 also a listening socket
LAUNCHED, LISTENER = "TITANLITE_LAUNCHED", "TITANLITE_LISTENER"

# Pipeline schedules, and their default number of stages per process
PP_SCHEDULES = dict.fromkeys(("GPipe", "1F1B"), 1)
PP_SCHEDULES |= dict.fromkeys(
    ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"), 2
)
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first and the last stage are on the same rank
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)  # gradients of weights and of inputs in two calls
WIDE = 256  # from this width on, bfloat16 and compiling pay off on a CPU (benchmarks/levers.py)


def printable(text: str) -> str:
    """The text in one line; names from files could otherwise move the cursor or forge a message."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class ConfigError(ValueError):
    """The user's input is wrong. Contains every problem found, one line each, cut where it is very long."""

    def __init__(self, problems: str | list[str]) -> None:
        found = map(printable, [problems] if isinstance(problems, str) else problems)
        self.problems = [text if len(text) < 2000 else text[:2000] + "..." for text in found]
        super().__init__("\n".join(self.problems))


def suggestion(word: str, allowed: list[str], cutoff: float = 0.65) -> str:
    """`; did you mean X?` for the most similar allowed word, "" if none is similar. Equally similar ones are all named.

    `cutoff`: the similarity required, from 0 to 1 for the same word.
    """
    word = word[:199]  # SequenceMatcher treats longer ones differently
    near = {other: SequenceMatcher(None, other, word).ratio() for other in get_close_matches(word, allowed, 9, cutoff)}
    best = [other for other in allowed if other in near and near[other] == max(near.values())]
    return f"; did you mean {' or '.join(best)}?" if best else ""


def key(
    default: Any, help: str, *, min: float | None = None, max: float | None = None, choices: tuple[Any, ...] = ()
) -> Any:
    """A config key: default, help text and allowed values (bounds are inclusive)."""
    return field(default=default, metadata={"help": help, "min": min, "max": max, "choices": choices})


@dataclass(frozen=True)
class RunConfig:
    """Run folder, seed and device."""

    name: str = key("", "name of the run's folder; empty: the config file's name")
    folder: str = key("outputs", "folder that holds the run folders")
    seed: int = key(42, "seed of the initial weights and of the order of the data", min=0, max=2**63 - 1)
    device: str = key("auto", "where to compute; auto: CUDA if there is any", choices=("auto", "cpu", "cuda"))
    sample_tokens: int = key(0, "tokens of sample text to print when training ends; 0: none", min=0)
    sample_prompt: str = key("def", "prompt of the sample text")


@dataclass(frozen=True)
class ModelConfig:
    """Architecture. A value of 0 stands for the flavor's value."""

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
        "whether the output projection uses the embedding's weight (tied) or has a separate one (untied)",
        choices=("flavor", "tied", "untied"),
    )
    vocab_size: int = key(
        0,
        "number of token ids, at least the tokenizer's; 0: the flavor's, or else the tokenizer's",
        min=0,
        max=2**24,
    )


@dataclass(frozen=True)
class DataConfig:
    """Training text. It is tokenised once, into a cache."""

    path: str = key("", "a text file or a folder of text files; empty: the Python standard library's source")
    pattern: str = key("**/*", "glob pattern of the files to use from the folder")
    tokenizer: str = key("", "a tiktoken rank file (Llama 3's tokenizer.model); empty: the bundled 4,096-token one")
    cache: str = key("", "folder of prepared data; empty: $TITANLITE_CACHE, or ~/.cache/titanlite if that is not set")


@dataclass(frozen=True)
class TrainingConfig:
    """Number of steps, batch sizes and dtypes."""

    steps: int = key(1000, "optimizer steps of the whole run", min=1)
    seq_len: int = key(256, "tokens of one sequence", min=2, max=2**24)
    global_batch_size: int = key(16, "sequences per optimizer step, over all processes", min=1)
    local_batch_size: int = key(4, "sequences that a process computes before it accumulates gradients", min=1)
    max_norm: float = key(1.0, "gradients are clipped to this global norm; 0: measured, not clipped", min=0)
    compute_dtype: str = key(
        "auto",
        "dtype of forward and backward; auto: bfloat16 on CUDA, and on CPUs with bfloat16 instructions if the model is "
        "at least 256 wide; otherwise float32",
        choices=("auto", "float32", "bfloat16"),
    )
    param_dtype: str = key(
        "float32",
        "dtype of parameters and gradients; bfloat16 saves 4 bytes per parameter and loses small updates",
        choices=("float32", "bfloat16"),
    )
    reduce_dtype: str = key(
        "float32", "dtype in which gradients are summed over processes", choices=("float32", "bfloat16")
    )
    gc_freq: int = key(50, "run Python's garbage collection every this many steps; 0: when Python decides", min=0)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW."""

    lr: float = key(3e-4, "peak learning rate", min=0)
    betas: tuple[float, float] = key((0.9, 0.95), "decay of the first and of the second moment", min=0, max=0.999999)
    eps: float = key(1e-8, "added to the denominator", min=0)
    weight_decay: float = key(0.1, "decoupled weight decay", min=0)
    decayed: str = key(
        "all", "parameters with weight decay: all, or only the weights of linear layers", choices=("all", "linear")
    )
    state_dtype: str = key(
        "float32", "dtype of the moments; bfloat16 saves 4 bytes per parameter", choices=("float32", "bfloat16")
    )
    implementation: str = key("auto", "auto: fused", choices=("auto", "fused", "foreach", "for-loop"))


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate schedule: warmup, then a decay."""

    name: str = key("cosine", "shape after the warmup", choices=("cosine", "linear", "wsd", "constant"))
    warmup_steps: int = key(100, "steps of linear warmup", min=0)
    decay_fraction: float = key(0.1, "wsd: fraction of all steps, at the end, in which the rate decays", min=0, max=1)
    min_ratio: float = key(0.1, "final rate as a fraction of the peak rate", min=0, max=1)


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout. The product of the five degrees is the number of processes; one may be -1."""

    pp: int = key(1, "pipeline parallel: processes that the layers are divided over; -1: what remains", min=-1)
    dp_replicate: int = key(1, "replicas of the model (HSDP when dp_shard > 1); -1: what remains", min=-1)
    dp_shard: int = key(-1, "FSDP2: processes that a replica's parameters are sharded over; -1: what remains", min=-1)
    cp: int = key(1, "context parallel: processes that each sequence is divided over; -1: what remains", min=-1)
    tp: int = key(1, "tensor parallel: processes that each layer's matrices are divided over; -1: what remains", min=-1)
    reshard_after_forward: str = key(
        "default",
        "free gathered weights after the forward (less memory, more traffic): default (all units but the last; none "
        "with pp > 1), always, never, or a number of processes over which they stay sharded",
    )
    reduce_every_microbatch: bool = key(
        True, "sum gradients over processes after each local batch (less memory); false: once per step"
    )
    cpu_offload: bool = key(False, "keep parameters, gradients and moments in CPU memory; compute on the GPU")
    prefetch: int = key(0, "number of units to gather ahead; 0: FSDP2's default, one", min=0, max=64)
    async_tp: bool = key(
        False, "overlap the communication of tensor parallel with its matrix products (CUDA, with compile)"
    )
    cp_method: str = key(
        "all_gather",
        "how attention gets all keys: all_gather (of keys and values), ulysses (all-to-all of heads), ring (CUDA)",
        choices=("all_gather", "ulysses", "ring"),
    )
    pp_schedule: str = key("1F1B", "order of forwards and backwards in the pipeline", choices=tuple(PP_SCHEDULES))
    pp_microbatch_size: int = key(1, "sequences of a microbatch; each local batch is divided into microbatches", min=1)
    pp_stages_per_process: int = key(0, "stages per process; 0: the schedule's default, 1 or 2", min=0)
    pp_split: str = key(
        "", "first module of each stage but the first, as in `layers.2, layers.4`; empty: balanced by size"
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
    """Activation checkpointing: activations are recomputed in the backward instead of kept."""

    mode: str = key(
        "none",
        "none; full: keep only each block's input; selective: also keep the results of expensive operators; "
        "memory_budget: the compiler keeps what fits into `budget`",
        choices=("none", "full", "selective", "memory_budget"),
    )
    every: int = key(1, "full and selective: apply it to every n-th block only", min=1)
    budget: float = key(
        0.5, "memory_budget: fraction of the activations' memory to use; 1: recompute nothing", min=0, max=1
    )


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile, block by block."""

    enabled: str = key(
        "auto",
        "compile each transformer block; auto: on CUDA, on CPU under Linux if the model is at least 256 wide (not with "
        "options that cannot be compiled), and always with recompute.mode = memory_budget",
        choices=("auto", "true", "false"),
    )
    loss: bool = key(False, "compile the loss")
    backend: str = key("inductor", "the compiler", choices=("inductor", "aot_eager", "eager"))


@dataclass(frozen=True)
class Float8Config:
    """Matrix products in 8 bits in the blocks' linear layers."""

    enabled: bool = key(False, "train with float8 (CUDA devices of compute capability 8.9 or later; with compile)")
    skip: str = key(
        "", "linear layers that are not converted, by parts of their names, as in `attention.wk, layers.0.`"
    )
    emulate: bool = key(False, "compute the same numbers with fp32 products: slow, on any device")

    @property
    def skipped(self) -> list[str]:
        """The names in `skip`."""
        return self.skip.replace(",", " ").split()


@dataclass(frozen=True)
class LossConfig:
    """Cross entropy."""

    num_chunks: int = key(
        1,
        "number of chunks of tokens for which the output projection and the loss are computed one after the other: "
        "n chunks need 1/n of the memory for logits",
        min=1,
        max=65536,
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints in the run folder. A run resumes from the newest complete checkpoint in its folder."""

    freq: int = key(500, "save every this many steps; 0: only at the end", min=0)
    freq_minutes: float = key(0.0, "save also this many minutes after the last save; 0: by steps only", min=0)
    async_mode: str = key(
        "disabled",
        "disabled: training waits until a checkpoint is written; async: training continues while a copy is written; "
        "async_pinned: as async, but the memory of the copy is kept for the next save",
        choices=("disabled", "async", "async_pinned"),
    )
    retries: int = key(2, "how often a failed save is tried again before the run ends", min=0, max=10)
    keep: int = key(3, "number of newest checkpoints to keep; 0: all", min=0)
    keep_every: int = key(0, "always keep the checkpoints of steps that are a multiple of this; 0: none", min=0)
    keep_best: int = key(0, "number of checkpoints with the lowest validation loss to keep", min=0)
    load: str = key(
        "auto",
        "auto: resume if the run folder has a checkpoint; never: refuse a used folder",
        choices=("auto", "never"),
    )
    load_step: int = key(0, "resume from this step; later checkpoints are renamed. 0: the newest", min=0)
    initial_load: str = key(
        "", "initial weights of a run without a checkpoint: a run folder, or any format that `convert` reads"
    )
    accept: str = key("", "keys that may differ from the checkpoint on resuming, as in `run.seed, optimizer.lr`")

    @property
    def accepted(self) -> list[str]:
        """The keys in `accept`."""
        return self.accept.replace(",", " ").split()


@dataclass(frozen=True)
class ValidationConfig:
    """Validation loss, on text that is not used for training."""

    freq: int = key(0, "validate every this many steps, before the first and after the last; 0: never", min=0)
    samples: int = key(0, "sequences to validate on; 0: the whole validation split", min=0)


@dataclass(frozen=True)
class MetricsConfig:
    """The console line and metrics.jsonl."""

    log_freq: int = key(10, "log every this many steps, and the first and the last", min=1)


@dataclass(frozen=True)
class ProfilingConfig:
    """Traces of the PyTorch profiler, for Perfetto or chrome://tracing."""

    enabled: bool = key(False, "write traces of some steps to the run folder")
    freq: int = key(100, "start a trace every this many steps", min=1)
    warmup_steps: int = key(2, "steps for which the profiler runs before it records", min=0)
    active_steps: int = key(2, "steps that the profiler records", min=1)


@dataclass(frozen=True)
class CommConfig:
    """Time-outs of communication."""

    timeout_seconds: int = key(
        300, "the run ends, and reports the rank, when a process makes no progress for so long", min=1, max=604800
    )
    step_timeout_seconds: int = key(
        100, "the same within a training step, from the second step on, if it is less", min=1, max=604800
    )

    @property
    def group_timeout_seconds(self) -> int:
        """Time-out of a collective: later than the watchdog's, which reports which rank blocks the others."""
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
    """The settings that must be the same on every node: all but the paths of files."""
    return repr(dataclasses.replace(config, data=DataConfig(), run=dataclasses.replace(config.run, folder="")))


@functools.cache
def sections() -> dict[str, type]:
    """Section name -> its dataclass, in the order of `--help`."""
    return {f.name: type(f.default) for f in dataclasses.fields(Config)}
