"""OLMo's YAML (allenai/OLMo, olmo/config.py; not OLMo-core, which has no files of keys)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from titanlite.tools.import_config.common import batch_sizes, sharding_strategy
from titanlite.tools.import_config.mapping import Draft, Format, Row, as_number, nothing

RECOMPUTED = {"whole_layer": 1, "one_in_two": 2, "one_in_three": 3, "one_in_four": 4}
AMOUNT = re.compile(r"([\d._]+(?:e[+-]?\d+)?)(T|ep)", re.IGNORECASE)


def _duration(draft: Draft) -> None:
    """A number of steps, `2e12T` tokens, or `1ep` epochs."""
    text = str(draft.value("max_duration"))
    match = AMOUNT.fullmatch(text)
    if match is None:
        draft.set("training.steps", draft.value("max_duration"), "max_duration")
    elif match[2] == "T":
        draft.set("training.tokens", as_number(match[1]), "max_duration")
    else:
        draft.set("training.epochs", as_number(match[1]), "max_duration")


def _attention(draft: Draft) -> None:
    draft.set("model.num_heads", draft.value("model.n_heads"), "model.n_heads")
    groups = draft.value("model.n_kv_heads") or draft.value("model.n_heads")
    draft.set("model.num_kv_heads", groups, "model.n_kv_heads model.n_heads")


def _feed_forward(draft: Draft) -> None:
    """The size there is that of both inputs of SwiGLU together."""
    size = draft.number("model.mlp_hidden_size")
    names = "model.mlp_hidden_size model.mlp_ratio model.d_model"
    if not size:
        size = draft.number("model.mlp_ratio") * draft.number("model.d_model")
    draft.set("model.ffn_dim", size / 2, names)


def _tying(draft: Draft) -> None:
    tied = "tied" if draft.value("model.weight_tying") else "untied"
    draft.set("model.embeddings", tied, "model.weight_tying")


def _warmup(draft: Draft) -> None:
    if draft.value("scheduler.units", "steps") == "tokens":
        draft.set("schedule.warmup_tokens", draft.value("scheduler.t_warmup"), "scheduler.t_warmup")
    else:
        draft.set("schedule.warmup_steps", draft.value("scheduler.t_warmup"), "scheduler.t_warmup")


def _decayed(draft: Draft) -> None:
    names = "optimizer.decay_norm_and_bias optimizer.decay_embeddings"
    both = draft.on("optimizer.decay_norm_and_bias") and draft.on("optimizer.decay_embeddings")
    draft.set("optimizer.decayed", "all" if both else "linear", names)


def _precision(draft: Draft) -> None:
    draft.set("training.compute_dtype", draft.value("precision"), "precision")


def _strategy(draft: Draft) -> None:
    sharding_strategy(draft, "fsdp.sharding_strategy")


def _replicas(draft: Draft) -> None:
    name = "fsdp.hybrid_sharding_num_model_replicas"
    draft.set("parallel.dp_replicate", draft.value(name), name)


def _recompute(draft: Draft) -> None:
    word = draft.value("activation_checkpointing")
    every = RECOMPUTED.get(str(word))
    if every:
        draft.set("recompute.mode", "full", "activation_checkpointing")
        draft.set("recompute.every", every, "activation_checkpointing")
    elif draft.on("activation_checkpointing"):
        draft.set("recompute.mode", "selective", "activation_checkpointing")


def _compile(draft: Draft) -> None:
    draft.set("compile.enabled", "true" if draft.value("compile") != "null" else "false", "compile")


def _z_loss(draft: Draft) -> None:
    if draft.on("softmax_auxiliary_loss"):
        name = "auxiliary_loss_multiplier"
        draft.set("loss.z_loss", draft.value(name, 1e-4), f"softmax_auxiliary_loss {name}")


def _batch(draft: Draft) -> None:
    batch_sizes(draft, "device_train_microbatch_size", "", "global_train_batch_size")


def _eval_samples(draft: Draft) -> None:
    batches = draft.number("eval_subset_num_batches")
    if batches > 0:
        samples = batches * max(1, draft.number("device_eval_batch_size"))
        names = "eval_subset_num_batches device_eval_batch_size"
        draft.set("validation.samples", samples, names)
        draft.decide("validation.samples: of one process there; multiply it by their number")


def _sinks(draft: Draft) -> None:
    draft.set("metrics.sinks", ["wandb"], "wandb.project")
    draft.set("metrics.project", draft.value("wandb.project"), "wandb.project")


def _data(draft: Draft) -> None:
    draft.decide(
        "data.path: the files under data.paths hold token ids; give the text, or the ids as .bin "
        "files, which titanlite prepare reads"
    )


def _tokenizer(draft: Draft) -> None:
    found = draft.value("tokenizer.identifier")
    draft.decide(f"data.tokenizer: there it is {found!r}; give its tokenizer.json{_ids(draft)}")


def _ids(draft: Draft) -> str:
    """How many ids the tokenizer has there, if the config says it."""
    ids = draft.value("model.vocab_size")
    return f" (model.vocab_size there: {ids} ids)" if ids else ""


def _vocabulary(draft: Draft) -> None:
    """The size of the embedding, which is the tokenizer's unless it is padded."""
    names = "model.embedding_size" if draft.on("model.embedding_size") else "model.vocab_size"
    draft.set("model.vocab_size", draft.value(names), names)
    if not any(name.startswith("tokenizer.") for name in draft.entries):
        draft.decide(f"data.tokenizer: the config does not say it{_ids(draft)}")


def _norm(draft: Draft) -> None:
    kind = draft.value("model.layer_norm_type")
    if kind != "rms":
        draft.lack("model.layer_norm_type", kind, "norms are RMSNorm; there it is LayerNorm")


def _activation(draft: Draft) -> None:
    kind = draft.value("model.activation_type")
    if kind != "swiglu":
        draft.lack("model.activation_type", kind, "the feed-forward is SwiGLU")


ROWS = (
    Row("run_name", "run.name"),
    Row("seed", "run.seed"),
    Row("save_folder", "run.folder"),
    Row("model.d_model", "model.dim"),
    Row("model.n_layers", "model.num_layers"),
    Row("model.n_heads model.n_kv_heads", "model.num_heads model.num_kv_heads", "", _attention),
    Row(
        "model.mlp_hidden_size model.mlp_ratio",
        "model.ffn_dim",
        "half of it: there it counts both inputs of SwiGLU",
        _feed_forward,
    ),
    Row("model.weight_tying", "model.embeddings", "", _tying),
    Row("model.rope_theta", "model.rope_theta"),
    Row("model.layer_norm_eps", "model.norm_eps"),
    Row(
        "model.embedding_size model.vocab_size",
        "model.vocab_size",
        "`embedding_size`, which is padded, if it is given",
        _vocabulary,
    ),
    Row("model.layer_norm_type", "", "RMSNorm (`rms`) is the one kind", _norm),
    Row("model.activation_type", "", "SwiGLU is the one kind", _activation),
    Row("model.max_sequence_length", "training.seq_len"),
    Row(
        "model.attention_dropout model.residual_dropout model.embedding_dropout",
        "",
        "there is no dropout but that of adapters",
    ),
    Row("model.clip_qkv model.alibi model.multi_query_attention", "", "not built"),
    Row("model.*", "", "the block is Llama's: RMSNorm, SwiGLU, RoPE, no biases", nothing),
    Row(
        "max_duration",
        "training.steps training.tokens training.epochs",
        "a number, `2e12T`, or `1ep`",
        _duration,
    ),
    Row(
        "global_train_batch_size device_train_microbatch_size",
        "training.global_batch_size training.local_batch_size",
        "",
        _batch,
    ),
    Row("max_grad_norm", "training.max_norm"),
    Row("precision", "training.compute_dtype", "", _precision),
    Row("optimizer.name", "optimizer.name"),
    Row("optimizer.learning_rate", "optimizer.lr"),
    Row("optimizer.betas", "optimizer.betas"),
    Row("optimizer.eps", "optimizer.eps"),
    Row("optimizer.weight_decay", "optimizer.weight_decay"),
    Row(
        "optimizer.decay_norm_and_bias optimizer.decay_embeddings",
        "optimizer.decayed",
        "`all` if both, else `linear`",
        _decayed,
    ),
    Row("optimizer.metrics_log_interval", "metrics.layer_norms_freq"),
    Row("scheduler.name", "schedule.name"),
    Row(
        "scheduler.t_warmup scheduler.units",
        "schedule.warmup_steps schedule.warmup_tokens",
        "",
        _warmup,
    ),
    Row("scheduler.alpha_f", "schedule.min_ratio"),
    Row(
        "scheduler.warmup_min_lr scheduler.t_max",
        "",
        "the warmup begins at peak / warmup, and the decay ends with the run",
    ),
    Row(
        "fsdp.sharding_strategy",
        "parallel.reshard_after_forward parallel.dp_replicate parallel.dp_shard",
        '`FULL_SHARD`: `"always"`; `SHARD_GRAD_OP`: `"never"`; `NO_SHARD`: replicas',
        _strategy,
    ),
    Row("fsdp.hybrid_sharding_num_model_replicas", "parallel.dp_replicate", "", _replicas),
    Row(
        "fsdp.precision", "training.param_dtype", "always float32, unless this key is set", nothing
    ),
    Row(
        "fsdp.wrapping_strategy fsdp.use_orig_params distributed_strategy",
        "",
        "a unit is a block",
        nothing,
    ),
    Row(
        "activation_checkpointing",
        "recompute.mode recompute.every",
        "`whole_layer`: `full`; `one_in_two`: `every = 2`; `fine_grained`: `selective`",
        _recompute,
    ),
    Row("compile.*", "", "`compile.enabled`: blocks are compiled on GPUs by default", nothing),
    Row(
        "softmax_auxiliary_loss auxiliary_loss_multiplier",
        "loss.z_loss",
        "the default there is 1e-4",
        _z_loss,
    ),
    Row("save_interval", "checkpoint.freq", "sharded checkpoints, from which any layout resumes"),
    Row("save_num_checkpoints_to_keep", "checkpoint.keep"),
    Row(
        "save_interval_unsharded save_num_unsharded_checkpoints_to_keep save_interval_ephemeral",
        "",
        "one kind of checkpoint; `checkpoint.keep_every` keeps some for good",
    ),
    Row(
        "load_path",
        "",
        "a run resumes from its own folder; `checkpoint.initial_load` begins with weights",
    ),
    Row("eval_interval", "validation.freq"),
    Row("eval_subset_num_batches device_eval_batch_size", "validation.samples", "", _eval_samples),
    Row("console_log_interval", "metrics.log_freq"),
    Row("wandb.project", "metrics.sinks metrics.project", "", _sinks),
    Row("wandb.*", "", "the run's name and folder are used", nothing),
    Row("data.paths data.datasets data.*", "data.path", "to decide", _data),
    Row("tokenizer.identifier tokenizer.*", "data.tokenizer", "to decide", _tokenizer),
    Row("evaluators", "", "`validation` of a source, `titanlite evaluate`"),
    Row(
        "speed_monitor.* save_overwrite remote_save_folder dry_run gen1_gc_interval "
        "no_pre_train_checkpoint",
        "",
        "nothing to set: a used folder is resumed, never overwritten",
        nothing,
    ),
)


def defaults(entries: Mapping[str, object]) -> dict[str, object]:
    """The file names what it needs."""
    return {}


OLMO = Format(
    "olmo",
    "OLMo",
    ROWS,
    defaults,
)
