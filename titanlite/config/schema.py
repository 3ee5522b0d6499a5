"""Every key a run can set: one frozen dataclass per TOML section.

What it is: the schema. A field declares its type, default, help text and, if it has any, bounds or
choices. `load.py` makes a `Config` from TOML files and the command line.
Why it is here: a function receives the *section* that it needs, typed and immutable, so its
signature shows which settings it can depend on.
What it costs: nothing; no torch is imported, so a mistake is reported in a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

# Pipeline schedules, and their default number of stages per process
PP_SCHEDULES = dict.fromkeys(("GPipe", "1F1B"), 1)
PP_SCHEDULES |= dict.fromkeys(
    ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"), 2
)
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first and the last stage are on the same rank
# These compute the gradients of weights and of inputs in two calls
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)
# The types of ids in a file that does not state its own
ID_TYPES = ("auto", "uint8", "uint16", "uint32", "int64")
FROM_CHECKPOINT = "from_checkpoint"  # a flavor: the model of checkpoint.initial_load
# From this width on, bfloat16 and compiling pay off on a CPU with AMX: 2.5 times the speed of fp32
# at width 512, 0.89 at 128
WIDE = 256


# A key's value in a resumed run: "any" value; the "same" as in the checkpoint, unless
# checkpoint.accept names the key; or "fixed" to the checkpoint's
Resume: TypeAlias = Literal["any", "same", "fixed"]


def key(
    default: Any,
    help: str,
    *,
    min: float | None = None,
    max: float | None = None,
    choices: tuple[Any, ...] = (),
    items: type | None = None,
    resume: Resume = "any",
) -> Any:
    """Declares a config key: default, help and allowed values; bounds are inclusive.

    `items`: for a list, str or the dataclass of its tables. `resume`: whether a resumed run may
    change the value.
    """
    metadata = {"help": help, "min": min, "max": max, "choices": choices, "items": items}
    return field(default=default, metadata=metadata | {"resume": resume})


@dataclass(frozen=True)
class RunConfig:
    """Run folder, seed and device."""

    name: str = key("", "name of the run's folder; empty: the config file's name")
    folder: str = key("outputs", "folder that holds the run folders")
    seed: int = key(
        42,
        "seed of the initial weights and of the order of the data",
        min=0,
        max=2**63 - 1,
        resume="same",
    )
    device: str = key(
        "auto",
        "where to compute; auto: CUDA if there is any",
        choices=("auto", "cpu", "cuda"),
    )


@dataclass(frozen=True)
class ModelConfig:
    """Architecture: a flavor, and other values for some of its keys.

    A key that is absent (None) has the flavor's value.
    """

    flavor: str = key(
        "debug",
        "the architecture; from_checkpoint: that of checkpoint.initial_load, with its tokenizer",
        choices=(
            FROM_CHECKPOINT,
            "debug",
            "cpu_25m",
            "llama3_1b",
            "llama3_3b",
            "llama3_8b",
            "llama3_70b",
            "llama3_405b",
            "llama2_7b",
            "mistral_7b",
            "mistral_7b_v0.1",
            "smollm2_135m",
            "smollm2_360m",
            "smollm2_1.7b",
            "qwen2.5_0.5b",
            "qwen2.5_1.5b",
            "qwen2.5_7b",
            "qwen3_0.6b",
            "qwen3_1.7b",
            "qwen3_8b",
            "debug_moe",
            "qwen3_30b_a3b",
        ),
    )
    dim: int | None = key(None, "width of the residual stream", min=1, max=2**20)
    num_layers: int | None = key(None, "transformer blocks", min=1, max=2**14)
    num_heads: int | None = key(None, "query heads", min=1, max=2**14)
    num_kv_heads: int | None = key(
        None, "key and value heads (grouped-query attention)", min=1, max=2**14
    )
    head_dim: int | None = key(
        None, "width of a head; without a flavor's, dim / num_heads", min=1, max=2**14
    )
    ffn_dim: int | None = key(None, "hidden width of the feed-forward", min=1, max=2**22)
    num_experts: int | None = key(
        None, "experts in place of each feed-forward; 0: a dense model", min=0, max=2**12
    )
    experts_per_token: int | None = key(
        None, "experts that the router chooses for a token", min=1, max=2**12
    )
    expert_ffn_dim: int | None = key(
        None, "hidden width of an expert, a multiple of 8", min=1, max=2**22
    )
    rope_theta: float | None = key(None, "base of the frequencies of RoPE", min=2, max=1e12)
    rope_scaling: str | None = key(
        None,
        "how RoPE's frequencies change for sequences longer than those of pretraining",
        choices=("none", "llama3", "linear", "yarn"),
    )
    rope_factor: float | None = key(
        None, "by how much rope_scaling extends the context", min=1, max=1e6
    )
    rope_original_context: int | None = key(
        None,
        "tokens that rope_scaling extends (llama3, yarn); without a flavor's, 8192",
        min=1,
        max=2**31,
    )
    norm_eps: float | None = key(None, "epsilon of the norms", min=1e-12, max=0.1)
    sliding_window: int | None = key(
        None,
        "number of positions that a query attends to, its own and those before it; 0: all",
        min=0,
        max=2**31,
    )
    window_layers: str | None = key(
        None, "numbers of the blocks with the window, as in `0-2, 5`; or all"
    )
    qkv_bias: bool | None = key(None, "biases of the query, key and value layers")
    qk_norm: bool | None = key(None, "norms of queries and keys, before RoPE")
    embeddings: str | None = key(
        None,
        "whether the output projection uses the embedding's weight (tied) or has a separate "
        "one (untied)",
        choices=("tied", "untied"),
    )
    vocab_size: int | None = key(
        None,
        "number of token ids, at least the tokenizer's; without a flavor's, the tokenizer's",
        min=1,
        max=2**24,
    )


@dataclass(frozen=True)
class SourceConfig:
    """A source of training text."""

    path: str = key("", "as data.path")
    name: str = key("", "name in metrics and messages; empty: from the path")
    weight: float = key(
        1.0, "share of the training samples, relative to the weights of the other sources", min=0
    )
    pattern: str = key("", "glob pattern of the files to use; empty: data.pattern")
    field: str = key("", "the field that contains the text; empty: data.field")
    validation: str = key("", "path of the validation text; empty: a held-out part of this source")
    ids: str = key("auto", "as data.ids; auto: data.ids", choices=ID_TYPES)


@dataclass(frozen=True)
class PhaseConfig:
    """Weights of the sources from some step on."""

    from_step: int = key(0, "the first step with these weights", min=0)
    from_tokens: int = key(
        0, "instead of from_step: the number of training tokens before it, with padding", min=0
    )
    weights: tuple[tuple[str, float], ...] = key(
        (), "the weight of every source, as in { code = 0.2, web = 0.8 }"
    )


@dataclass(frozen=True)
class DataConfig:
    """Training data: sources, tokenizer, packing, and mixture. It is tokenised once."""

    path: str = key(
        "",
        "file, folder or hf:NAME of text, rows or ids, or a prepared folder; empty: python-stdlib",
    )
    pattern: str = key("**/*", "glob pattern of the files to use from the folder")
    field: str = key("text", "the field of JSONL and Parquet files that contains the text")
    ids: str = key(
        "auto",
        "type of the ids in token files that do not state it (.bin, raw .npy); auto: decided by "
        "the data",
        choices=ID_TYPES,
    )
    tokenizer: str = key(
        "",
        "a tiktoken rank file, a tokenizer.json, or a folder with one of them; empty: the bundled "
        "file",
    )
    cache: str = key(
        "",
        "folder of prepared data; empty: $TITANLITE_CACHE, or ~/.cache/titanlite if that is "
        "not set",
    )
    packing: str = key(
        "split",
        "how documents fill sequences: split (one after the other, cut into sequences) or "
        "best_fit (documents that fit "
        "are not cut; the rest of a sequence is padding)",
        choices=("split", "best_fit"),
        resume="same",
    )
    document_mask: bool = key(
        False,
        "attend only within a document, and restart positions at each document",
        resume="same",
    )
    sources: tuple[SourceConfig, ...] = key(
        (), "several sources, instead of data.path", items=SourceConfig
    )
    phases: tuple[PhaseConfig, ...] = key(
        (), "other weights of the sources, from given steps on", items=PhaseConfig, resume="same"
    )

    def all_sources(self) -> list[SourceConfig]:
        """Lists the sources with this section's defaults; without `sources`, the one at `path`."""
        sources = self.sources or (SourceConfig(self.path),)
        replace = dataclasses.replace
        return [
            replace(
                s,
                pattern=s.pattern or self.pattern,
                field=s.field or self.field,
                ids=self.ids if s.ids == "auto" else s.ids,
            )
            for s in sources
        ]

    def parts(self) -> list[DataConfig]:
        """Makes a section for each source alone, with its path, pattern, field and ids."""
        alone = dataclasses.replace(self, phases=())
        sources = self.all_sources()
        replace = dataclasses.replace
        return [
            replace(alone, sources=(s,), path=s.path, pattern=s.pattern, field=s.field, ids=s.ids)
            for s in sources
        ]


@dataclass(frozen=True)
class TrainingConfig:
    """Number of steps, batch sizes and dtypes."""

    steps: int = key(1000, "optimizer steps of the whole run", min=1)
    tokens: int = key(
        0,
        "instead of steps: tokens of the whole run, with padding, rounded up to whole steps",
        min=0,
    )
    epochs: float = key(
        0.0, "instead of steps: passes over a single source, rounded up to whole steps", min=0
    )
    seq_len: int = key(256, "tokens of one sequence", min=2, max=2**24, resume="same")
    global_batch_size: int = key(16, "sequences per optimizer step, over all processes", min=1)
    batch_ramp: str = key(
        "", "other batch sizes later, as in `32 from step 101, 64 by 8 from 4e9 tokens`"
    )
    local_batch_size: int = key(
        4, "sequences that a process computes before it accumulates gradients", min=1
    )
    max_norm: float = key(
        1.0, "gradients are clipped to this global norm; 0: measured, not clipped", min=0
    )
    compute_dtype: str = key(
        "auto",
        "dtype of forward and backward; auto: bfloat16 on CUDA (float16 on GPUs without it), "
        "and on CPUs with bfloat16 "
        "instructions if the model is at least 256 wide; otherwise float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    loss_scale: float = key(
        65536.0, "float16: the initial scale of the loss, a power of two", min=1, max=2**24
    )
    loss_scale_growth: int = key(
        2000, "float16: the scale is doubled after so many steps without overflow", min=1
    )
    param_dtype: str = key(
        "float32",
        "dtype of parameters and gradients; bfloat16 saves 4 bytes per parameter and loses "
        "small updates",
        choices=("float32", "bfloat16"),
    )
    reduce_dtype: str = key(
        "float32",
        "dtype in which gradients are summed over processes",
        choices=("float32", "bfloat16"),
    )
    frozen: str = key(
        "",
        "parameters that are not trained, by patterns of their names, as in "
        "`tok_embeddings.*, layers.0.*`",
    )
    gc_freq: int = key(
        50, "run Python's garbage collection every this many steps; 0: when Python decides", min=0
    )

    @property
    def frozen_patterns(self) -> list[str]:
        """Lists the patterns in `frozen`."""
        return self.frozen.replace(",", " ").split()


@dataclass(frozen=True)
class GroupConfig:
    """Parameters with other settings. A parameter belongs to the first group whose pattern fits."""

    pattern: str = key("", "glob pattern of parameter names, as in layers.*.attention.w?.weight")
    lr: float | None = key(None, "peak learning rate; absent: optimizer.lr", min=0)
    weight_decay: float | None = key(
        None, "weight decay; absent: by optimizer.weight_decay and optimizer.decayed", min=0
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or Muon for the matrices of the blocks and AdamW for the other parameters."""

    name: str = key("adamw", "the optimizer", choices=("adamw", "muon"), resume="fixed")
    lr: float = key(3e-4, "peak learning rate", min=0, resume="same")
    betas: tuple[float, float] = key(
        (0.9, 0.95),
        "decay of the first and of the second moment",
        min=0,
        max=0.999999,
        resume="same",
    )
    eps: float = key(1e-8, "added to the denominator", min=0, resume="same")
    weight_decay: float = key(0.1, "decoupled weight decay", min=0, resume="same")
    decayed: str = key(
        "all",
        "parameters with weight decay: all, or only the weights of linear layers",
        choices=("all", "linear"),
        resume="same",
    )
    state_dtype: str = key(
        "float32",
        "dtype of the moments; bfloat16 saves 4 bytes per parameter",
        choices=("float32", "bfloat16"),
    )
    implementation: str = key(
        "auto", "auto: fused", choices=("auto", "fused", "foreach", "for-loop")
    )
    groups: tuple[GroupConfig, ...] = key(
        (), "parameters with another learning rate or decay", items=GroupConfig, resume="same"
    )
    muon_momentum: float = key(
        0.95, "muon: decay of the average of gradients", min=0, max=0.999999, resume="same"
    )
    muon_scale: str = key(
        "adamw",
        "muon: size of updates, AdamW's or Jordan's",
        choices=("adamw", "original"),
        resume="same",
    )
    muon_dtype: str = key(
        "auto", "muon: products; auto: bfloat16 on CUDA", choices=("auto", "float32", "bfloat16")
    )
    clip: str = key(
        "norm",
        "clip to training.max_norm, or agc: each unit by its weights",
        choices=("norm", "agc"),
        resume="same",
    )
    agc_factor: float = key(
        0.01,
        "agc: largest norm of a unit's gradient divided by that of its weights",
        min=1e-6,
        resume="same",
    )

    def uses_muon(self, name: str, num_dims: int) -> bool:
        """Whether Muon updates a parameter, with one moment; AdamW has two. A moment has the
        parameter's shape and the dtype `state_dtype`.
        """
        return self.name == "muon" and num_dims >= 2 and name.startswith("layers.")


@dataclass(frozen=True)
class StabilityConfig:
    """Bad steps: a loss or gradient that is not finite, or a spike.

    With another action than `stop`, or with a threshold, their updates are withheld on the device.
    """

    action: str = key(
        "stop", "end the run, skip the update, or roll back", choices=("stop", "skip", "rollback")
    )
    threshold: float = key(
        0.0, "robust z-score from which a loss or gradient norm is a spike; 0: none is", min=0
    )
    window: int = key(128, "steps whose losses and norms are compared with", min=16, max=65536)
    warmup_steps: int = key(100, "first steps of the run, in which there are no spikes", min=0)
    max_skips: int = key(
        16, "skip: end the run after this many steps in a row that are not finite", min=1
    )
    max_rollbacks: int = key(
        3, "rollback: how often, in the whole run; each excludes its samples", min=1
    )


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate schedule: warmup, then a decay."""

    name: str = key(
        "cosine", "shape", choices=("cosine", "linear", "wsd", "constant", "inverse_sqrt", "step")
    )
    warmup_steps: int = key(100, "steps of linear warmup", min=0)
    warmup_tokens: int = key(
        0, "instead of warmup_steps: tokens, with padding, rounded up to whole steps", min=0
    )
    warmup_ratio: float = key(
        0.0, "instead of warmup_steps: part of all steps, rounded up to whole steps", min=0, max=1
    )
    decay: str = key(
        "linear", "wsd: shape of the decay at the end", choices=("linear", "sqrt", "cosine")
    )
    decay_fraction: float = key(
        0.1, "wsd: fraction of all steps, at the end, in which the rate decays", min=0, max=1
    )
    decay_steps: int = key(0, "wsd, instead of decay_fraction: steps", min=0)
    decay_tokens: int = key(
        0,
        "wsd, instead of decay_fraction: tokens, with padding, rounded up to whole steps",
        min=0,
    )
    milestones: str = key(
        "", "step: parts of the peak rate, as in `0.316 from step 801, 0.1 from 2e9 tokens`"
    )
    min_ratio: float = key(
        0.1, "lowest rate after the warmup, as a fraction of the peak rate", min=0, max=1
    )


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout.

    The product of the five degrees is the number of processes; one may be -1.
    """

    pp: int = key(
        1, "pipeline parallel: processes that the layers are divided over; -1: what remains", min=-1
    )
    dp_replicate: int = key(
        1, "replicas of the model (HSDP when dp_shard > 1); -1: what remains", min=-1
    )
    dp_shard: int = key(
        -1,
        "FSDP2: processes that a replica's parameters are sharded over; -1: what remains",
        min=-1,
    )
    cp: int = key(
        1,
        "context parallel: processes that each sequence is divided over; -1: what remains",
        min=-1,
    )
    tp: int = key(
        1,
        "tensor parallel: processes that each layer's matrices are divided over; -1: what remains",
        min=-1,
    )
    reshard_after_forward: str = key(
        "default",
        "free gathered weights after the forward (less memory, more traffic): default (all "
        "units but the last; none with pp > 1), always (with pp > 1 a unit is gathered again for "
        "each microbatch), never, or a number of processes over which they stay sharded",
    )
    reduce_every_microbatch: bool = key(
        True,
        "sum gradients over processes after each local batch, not each microbatch of a pipeline "
        "(less memory); false: once per step",
    )
    optimizer_offload: bool = key(
        False, "keep the moments in CPU memory, and copy them to the GPU for the update"
    )
    cpu_offload: bool = key(
        False, "keep parameters, gradients and moments in CPU memory; compute on the GPU"
    )
    prefetch: int = key(
        0, "number of units to gather ahead; 0: FSDP2's default, one", min=0, max=64
    )
    ep: int = key(
        1,
        "expert parallel: processes of dp_shard x cp that the experts are divided over",
        min=1,
    )
    async_tp: bool = key(
        False,
        "overlap the communication of tensor parallel with its matrix products (CUDA, with "
        "compile)",
    )
    cp_method: str = key(
        "all_gather",
        "how attention gets all keys: all_gather (of keys and values), ulysses (all-to-all "
        "of heads)",
        choices=("all_gather", "ulysses"),
    )
    pp_schedule: str = key(
        "1F1B", "order of forwards and backwards in the pipeline", choices=tuple(PP_SCHEDULES)
    )
    pp_microbatch_size: int = key(
        1, "sequences of a microbatch; each local batch is divided into microbatches", min=1
    )
    pp_stages_per_process: int = key(
        0, "stages per process; 0: the schedule's default, 1 or 2", min=0
    )
    pp_split: str = key(
        "",
        "first module of each stage but the first, as in `layers.2, layers.4`; empty: "
        "balanced by size",
    )

    @property
    def stages_per_process(self) -> int:
        return self.pp_stages_per_process or PP_SCHEDULES[self.pp_schedule]

    @property
    def stage_starts(self) -> list[str]:
        """Lists the names in `pp_split`."""
        return self.pp_split.replace(",", " ").split()


@dataclass(frozen=True)
class RecomputeConfig:
    """Activation checkpointing: activations are recomputed in the backward instead of kept."""

    mode: str = key(
        "none",
        "none; full: keep only each block's input; selective: also keep the results of "
        "expensive operators; "
        "memory_budget: the compiler keeps what fits into `budget`",
        choices=("none", "full", "selective", "memory_budget"),
    )
    offload: bool = key(False, "full: keep the inputs of blocks in CPU memory until the backward")
    every: int = key(1, "full and selective: apply it to every n-th block only", min=1)
    budget: float = key(
        0.5,
        "memory_budget: fraction of the activations' memory to use; 1: recompute nothing",
        min=0,
        max=1,
    )


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile, block by block."""

    enabled: str = key(
        "auto",
        "compile each transformer block; auto: on CUDA, on CPU under Linux if the model is "
        "at least 256 wide (not with "
        "options that cannot be compiled), and always with recompute.mode = memory_budget",
        choices=("auto", "true", "false"),
    )
    loss: str = key(
        "auto",
        "compile the loss; auto: on CUDA, if the blocks are compiled",
        choices=("auto", "true", "false"),
    )
    backend: str = key("inductor", "the compiler", choices=("inductor", "aot_eager", "eager"))


@dataclass(frozen=True)
class Float8Config:
    """Matrix products in 8 bits in the blocks' linear layers."""

    enabled: bool = key(
        False, "train with float8 (CUDA devices of compute capability 8.9 or later; with compile)"
    )
    skip: str = key(
        "",
        "linear layers that are not converted, by parts of their names, as in `attention.wk, "
        "layers.0.`",
    )
    scaling: str = key(
        "tensorwise", "one scale per tensor, or one per row", choices=("tensorwise", "rowwise")
    )
    emulate: bool = key(False, "compute the same numbers with fp32 products: slow, on any device")

    @property
    def skipped(self) -> list[str]:
        """Lists the names in `skip`."""
        return self.skip.replace(",", " ").split()


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, which are trained instead of the weights (docs/finetune.md)."""

    rank: int = key(
        0, "rank of the adapters; 0: no adapters, the weights are trained", min=0, resume="fixed"
    )
    alpha: float = key(16.0, "an adapter is multiplied by alpha / rank", min=0, resume="same")
    rslora: bool = key(
        False, "an adapter is multiplied by alpha / sqrt(rank) instead", resume="same"
    )
    dropout: float = key(
        0.0,
        "share of an adapter's inputs that is set to 0 in training, as 0.05; 0: none",
        min=0,
        max=0.999999,
        resume="same",
    )
    targets: str = key(
        "wq, wk, wv, wo",
        "layers of a block with adapters, of wq, wk, wv, wo, w1, w2, w3",
        resume="fixed",
    )
    layers: str = key(
        "", "numbers of the blocks with adapters, as in `0-3, 7`; empty: all", resume="fixed"
    )

    @property
    def scale(self) -> float:
        """The factor by which an adapter's output is multiplied."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def drops(self) -> bool:
        """Whether there are adapters with dropout."""
        return self.rank > 0 and self.dropout > 0

    @property
    def target_names(self) -> list[str]:
        """Lists the names in `targets`."""
        return self.targets.replace(",", " ").split()

    def adapts_layer(self, number: int) -> bool:
        """Whether the block of this number has adapters."""
        words = self.layers.replace(",", " ").split()
        for word in words:
            first, _, last = word.partition("-")
            if int(first) <= number <= int(last or first):
                return True
        return not words


@dataclass(frozen=True)
class EmaConfig:
    """Exponential moving average of the weights, beside them."""

    decay: float = key(
        0.0,
        "share of itself that the average keeps in a step, as 0.999; 0: none",
        min=0,
        max=0.999999,
    )
    validate: bool = key(True, "also report the validation loss of the averaged weights")


@dataclass(frozen=True)
class LossConfig:
    """Cross entropy, optionally with z-loss."""

    num_chunks: int = key(
        0,
        "number of chunks of tokens for which the output projection and the loss are "
        "computed one after the other: "
        "n chunks need 1/n of the memory for logits; 1: all at once; 0: as many (1, 2, 4, ...) as "
        "keep the fp32 logits of a chunk within 1 GB",
        min=0,
        max=65536,
    )
    z_loss: float = key(
        0.0,
        "coefficient of the squared logarithm of the softmax's denominator (PaLM: 1e-4)",
        min=0,
        resume="same",
    )
    router_aux_loss: float = key(
        0.0,
        "coefficient of the loss that balances experts, over the whole global batch; 0: off",
        min=0,
        resume="same",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints in the run folder.

    A run resumes from the newest complete checkpoint in its folder.
    """

    freq: int = key(500, "save every this many steps; 0: only at the end", min=0)
    freq_epochs: float = key(
        0.0,
        "instead of freq: passes over a single source, rounded up to whole steps",
        min=0,
    )
    freq_minutes: float = key(
        0.0, "save also this many minutes after the last save; 0: by steps only", min=0
    )
    async_mode: str = key(
        "disabled",
        "disabled: training waits until a checkpoint is written; async: training continues "
        "while a copy is written, whose memory is kept for the next save",
        choices=("disabled", "async"),
    )
    retries: int = key(
        2, "how often a failed save is tried again before the run ends", min=0, max=10
    )
    keep: int = key(
        3,
        "number of newest checkpoints to keep, and one more until the newest is proven; 0: all",
        min=0,
    )
    keep_every: int = key(
        0, "always keep the checkpoints of steps that are a multiple of this; 0: none", min=0
    )
    keep_best: int = key(0, "number of checkpoints with the lowest validation loss to keep", min=0)
    load: str = key(
        "auto",
        "auto: resume if the run folder has a checkpoint; never: refuse a used folder",
        choices=("auto", "never"),
    )
    load_step: int = key(
        0, "resume from this step (new run: of initial_load), renaming later ones; 0: newest", min=0
    )
    initial_load: str = key(
        "",
        "initial weights of a run without a checkpoint: a run folder, or any format that "
        "`convert` reads",
    )
    export: str = key(
        "none",
        "the model in the run's folder when the run has finished: hf for transformers, torch "
        "(model.pt), or peft for adapters",
        choices=("none", "hf", "torch", "peft"),
    )
    accept: str = key(
        "", "keys that may differ from the checkpoint on resuming, as in `run.seed, optimizer.lr`"
    )

    @property
    def accepted(self) -> list[str]:
        """Lists the keys in `accept`."""
        return self.accept.replace(",", " ").split()


@dataclass(frozen=True)
class ValidationConfig:
    """Validation loss, on text that is not used for training, and samples of text."""

    freq: int = key(
        0, "validate every this many steps, before the first and after the last; 0: never", min=0
    )
    freq_epochs: float = key(
        0.0,
        "instead of freq: passes over a single source, rounded up to whole steps",
        min=0,
    )
    samples: int = key(
        0, "sequences of each source to validate on; 0: its whole validation split", min=0
    )
    prompts: tuple[str, ...] = key(
        (), 'continued at each validation and at the end: ["def ", "import "]', items=str
    )
    prompt_tokens: int = key(64, "tokens to continue each prompt by", min=1, max=8192)
    prompt_temperature: float = key(
        0.7, "of sampling, from the 50 most likely tokens; 0: always the likeliest", min=0
    )


@dataclass(frozen=True)
class MetricsConfig:
    """The console line and metrics.jsonl, and where else metrics go (docs/metrics.md)."""

    sinks: tuple[str, ...] = key(
        (), "also write metrics to", choices=("tensorboard", "wandb", "mlflow"), items=str
    )
    project: str = key(
        "", "W&B project, MLflow experiment; empty: their environment variable, or titanlite"
    )
    wandb_mode: str = key(
        "auto", "auto: $WANDB_MODE, or offline", choices=("auto", "offline", "online")
    )
    mlflow_uri: str = key(
        "", "MLflow server; empty: $MLFLOW_TRACKING_URI, or the file mlflow.db in run.folder"
    )
    log_freq: int = key(10, "log every this many steps, and the first and the last", min=1)
    step_times: bool = key(True, "log the time of each part of a step, and more about memory")
    rank_waits: bool = key(
        False,
        "also log waits for other ranks, and the slowest rank; wraps functions of torch",
    )
    noise_scale_freq: int = key(
        0, "measure the gradient noise scale every this many steps; 0: never", min=0
    )
    layer_norms_freq: int = key(
        0, "norms of each layer's gradient, weights and update, every this many steps", min=0
    )
    activations_freq: int = key(
        0, "statistics of each block's output and attention, every this many steps", min=0
    )


@dataclass(frozen=True)
class ProfilingConfig:
    """Traces of the PyTorch profiler, for Perfetto or chrome://tracing.

    `touch <run folder>/PROFILE` requests one.
    """

    enabled: bool = key(False, "write traces of some steps to the run folder, again and again")
    freq: int = key(100, "start a trace every this many steps", min=1)
    warmup_steps: int = key(2, "steps for which the profiler runs before it records", min=0)
    active_steps: int = key(2, "steps that the profiler records", min=1)
    ranks: str = key("all", "ranks that record: all, or numbers with commas between them")
    memory: bool = key(False, "also record every allocation of CUDA memory")


@dataclass(frozen=True)
class CommConfig:
    """Time-outs of communication."""

    timeout_seconds: int = key(
        300,
        "the run ends, and reports the rank, when a process makes no progress for so long",
        min=1,
        max=604800,
    )
    step_timeout_seconds: int = key(
        100,
        "the same within a training step, from the second step on, if it is less",
        min=1,
        max=604800,
    )

    @property
    def group_timeout_seconds(self) -> int:
        """Time-out of a collective: later than the watchdog's, which names the blocking rank."""
        return self.timeout_seconds + 10


@dataclass(frozen=True)
class DebugConfig:
    """Settings that help to find out why two runs differ."""

    deterministic: bool = key(
        False, "two runs of a layout on the same devices are equal, bit for bit; slower on GPUs"
    )
    cudnn_attention: bool = key(
        True, "false: attention by FlashAttention where torch would choose cuDNN"
    )


@dataclass(frozen=True)
class Config:
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    stability: StabilityConfig = StabilityConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    compile: CompileConfig = CompileConfig()
    float8: Float8Config = Float8Config()
    lora: LoraConfig = LoraConfig()
    ema: EmaConfig = EmaConfig()
    loss: LossConfig = LossConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    metrics: MetricsConfig = MetricsConfig()
    profiling: ProfilingConfig = ProfilingConfig()
    comm: CommConfig = CommConfig()
    debug: DebugConfig = DebugConfig()


def portable(config: Config) -> str:
    """Writes the settings that must be the same on every node: all but paths of files."""
    sources = tuple(
        SourceConfig(name=source.name, weight=source.weight) for source in config.data.sources
    )
    data = dataclasses.replace(
        config.data, path="", pattern="", field="", tokenizer="", cache="", sources=sources
    )
    run = dataclasses.replace(config.run, folder="")
    return repr(dataclasses.replace(config, data=data, run=run))


@functools.cache
def sections() -> dict[str, type]:
    """Maps each section to its dataclass, in the order of `--help`."""
    return {f.name: type(f.default) for f in dataclasses.fields(Config)}
