"""Every key a run can set: one frozen dataclass per TOML section (`config_parallel.py` has those of how it computes).

What it is: the schema. How TOML files and the command line become a `Config` is `configure.py`.
Why it is here: a function receives the *section* it needs, typed and immutable, so what a piece of code
can depend on is visible in its signature.
What it costs: nothing; no torch is imported, so a mistake is reported in a fraction of a second.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from titanlite.config_parallel import Comm, Compile, Float8, Loss, Parallel, Recompute, key

# Exit codes: wrong input; stopped by a signal after saving; ended by the watchdog because a process hangs
EXIT_CONFIG, EXIT_STOPPED, EXIT_HUNG = 2, 75, 124

LAUNCHED = "TITANLITE_LAUNCHED"  # in the environment of a process that our launcher has started without torchrun


class ConfigError(ValueError):
    """The user's input is wrong. Carries every problem found, one string each."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Run:
    """Where the run lives and what makes it repeatable."""

    name: str = key("", "name of the run's folder; empty: the config file's name")
    folder: str = key("outputs", "folder that holds the run folders")
    seed: int = key(42, "seed of the initial weights and of the order of the data", min=0, max=2**63 - 1)
    device: str = key("auto", "where to compute; auto: CUDA if there is any", choices=("auto", "cpu", "cuda"))
    sample_tokens: int = key(0, "tokens of sample text to print when training ends; 0: none", min=0)
    sample_prompt: str = key("def", "text the sample at the end continues")


@dataclass(frozen=True)
class Model:
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
class Data:
    """What to train on. Text is tokenised once, into a cache."""

    path: str = key("", "a text file or a folder of text files; empty: the Python standard library's source")
    pattern: str = key("**/*", "which files of the folder, as a glob pattern")
    tokenizer: str = key("", "a tiktoken rank file (Llama 3's tokenizer.model); empty: the bundled 4,096-token one")
    cache: str = key("", "folder of prepared data; empty: $TITANLITE_CACHE, or else ~/.cache/titanlite")


@dataclass(frozen=True)
class Training:
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
class Optimizer:
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
class Schedule:
    """The learning rate over the steps: warmup, then a decay."""

    name: str = key("cosine", "shape after the warmup", choices=("cosine", "linear", "wsd", "constant"))
    warmup_steps: int = key(100, "steps of linear warmup", min=0)
    decay_fraction: float = key(0.1, "wsd: part of all steps, at the end, over which the rate falls", min=0, max=1)
    min_ratio: float = key(0.1, "final rate as a part of the peak rate", min=0, max=1)


@dataclass(frozen=True)
class Checkpoint:
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
class Validation:
    """Loss on text that training never sees."""

    freq: int = key(0, "validate every so many steps, and before the first and after the last; 0: never", min=0)
    samples: int = key(0, "sequences to validate on; 0: all that were held out", min=0)


@dataclass(frozen=True)
class Metrics:
    """The console line and metrics.jsonl."""

    log_freq: int = key(10, "log every so many steps, and the first and the last", min=1)


@dataclass(frozen=True)
class Profiling:
    """Traces of the PyTorch profiler, for Perfetto or chrome://tracing."""

    enabled: bool = key(False, "write a trace of some steps into the run's folder")
    freq: int = key(100, "start a trace every so many steps", min=1)
    warmup_steps: int = key(2, "steps the profiler runs before it records", min=0)
    active_steps: int = key(2, "steps it records", min=1)


@dataclass(frozen=True)
class Config:
    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    parallel: Parallel = Parallel()
    recompute: Recompute = Recompute()
    compile: Compile = Compile()
    float8: Float8 = Float8()
    loss: Loss = Loss()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()


def portable(config: Config) -> str:
    """What must be the same on every node: all of it but where files lie on this one."""
    return repr(dataclasses.replace(config, data=Data(), run=dataclasses.replace(config.run, folder="")))


def sections() -> dict[str, type]:
    """Section name -> its dataclass, in the order they are shown."""
    return {f.name: type(f.default) for f in dataclasses.fields(Config)}
