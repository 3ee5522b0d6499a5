"""GPT-NeoX's YAML (configs/neox_arguments.md): Megatron's keys beside DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping

from titanlite.tools.import_config import deepspeed
from titanlite.tools.import_config.common import batch_sizes, decide_flavor, min_ratio, whole
from titanlite.tools.import_config.mapping import Draft, Format, Row, nothing


def _shape(draft: Draft) -> None:
    decide_flavor(draft)
    heads = draft.value("num_attention_heads")
    draft.set("model.num_heads", heads, "num_attention_heads")
    groups = draft.value("num_kv_heads") or heads
    draft.set("model.num_kv_heads", groups, "num_kv_heads num_attention_heads")


def _width(draft: Draft) -> None:
    draft.set("model.dim", draft.value("hidden_size"), "hidden_size")
    names = "intermediate_size hidden_size"
    size = draft.value("intermediate_size") or 4 * whole(draft.number("hidden_size"))
    draft.set("model.ffn_dim", size, names)


def _tying(draft: Draft) -> None:
    untied = draft.on("no_weight_tying")
    draft.set("model.embeddings", "untied" if untied else "tied", "no_weight_tying")


def _positions(draft: Draft) -> None:
    kind = draft.value("pos_emb")
    if kind != "rotary":
        draft.lack("pos_emb", kind, "positions are RoPE's")
    part = draft.number("rotary_pct")
    if 0 < part < 1:
        draft.lack("rotary_pct", part, "RoPE turns the whole head")


def _norm(draft: Draft) -> None:
    if draft.value("norm") != "rmsnorm":
        draft.lack("norm", draft.value("norm"), "norms are RMSNorm")


def _decay(draft: Draft) -> None:
    draft.set("schedule.name", draft.value("lr_decay_style"), "lr_decay_style")
    decay = draft.number("lr_decay_iters")
    if decay and decay != draft.number("train_iters"):
        draft.lack("lr_decay_iters", decay, "the decay ends with the last step")


def _lowest(draft: Draft) -> None:
    min_ratio(draft, "min_lr", "optimizer.params.lr")


def _recompute(draft: Draft) -> None:
    if draft.on("checkpoint_activations"):
        draft.set("recompute.mode", "full", "checkpoint_activations")
    if draft.number("checkpoint_num_layers") > 1:
        value = draft.value("checkpoint_num_layers")
        draft.lack("checkpoint_num_layers", value, "the input of every block is kept")


def _precision(draft: Draft) -> None:
    if draft.has("precision"):
        draft.set("training.compute_dtype", draft.value("precision"), "precision")


def _batch(draft: Draft) -> None:
    batch_sizes(
        draft, "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
    )
    if draft.get("parallel.pp") > 1:
        draft.decide(
            "training.local_batch_size: with pp it has all microbatches of a step; set "
            "parallel.pp_microbatch_size to the size there"
        )


def _saving(draft: Draft) -> None:
    draft.set("checkpoint.freq", draft.value("checkpoint_factor"), "checkpoint_factor")


def _data(draft: Draft) -> None:
    draft.decide(
        "data.path: the data there is in .bin and .idx files, which titanlite prepare reads"
    )


def _tokenizer(draft: Draft) -> None:
    draft.decide(f"data.tokenizer: there it is {str(draft.value('vocab_file'))[:80]!r}")


def _pipeline(draft: Draft) -> None:
    """0 there is no pipeline."""
    draft.set("parallel.pp", max(1, draft.number("pipe_parallel_size")), "pipe_parallel_size")


def _sinks(draft: Draft) -> None:
    if draft.on("use_wandb"):
        draft.set("metrics.sinks", ["wandb"], "use_wandb")


def _eval_samples(draft: Draft) -> None:
    samples = draft.number("eval_iters") * draft.get("training.global_batch_size")
    draft.set("validation.samples", samples, "eval_iters")


NOT_HERE = ("train_micro_batch_size_per_gpu", "tensorboard.enabled")
ROWS = (
    Row("model_parallel_size", "parallel.tp"),
    Row("pipe_parallel_size", "parallel.pp", "0 there is 1", _pipeline),
    Row("sequence_parallel", "", "part of `parallel.tp`", nothing),
    Row("num_layers", "model.num_layers"),
    Row(
        "hidden_size intermediate_size",
        "model.dim model.ffn_dim",
        "4 `hidden_size` by default",
        _width,
    ),
    Row("num_attention_heads num_kv_heads", "model.num_heads model.num_kv_heads", "", _shape),
    Row("rotary_emb_base", "model.rope_theta"),
    Row("rms_norm_epsilon layernorm_epsilon", "model.norm_eps"),
    Row("no_weight_tying", "model.embeddings", "", _tying),
    Row("pos_emb rotary_pct", "", "RoPE of the whole head is the one kind", _positions),
    Row("norm", "", "RMSNorm is the one kind", _norm),
    Row("gpt_j_residual", "", "attention and feed-forward follow each other"),
    Row("hidden_dropout attention_dropout", "", "there is no dropout but that of adapters"),
    Row("max_position_embeddings", "", "the length of training is `training.seq_len`", nothing),
    Row("seq_length", "training.seq_len"),
    Row("train_iters", "training.steps"),
    Row("precision", "training.compute_dtype", "", _precision),
    Row("lr_decay_style lr_decay_iters", "schedule.name", "", _decay),
    Row("warmup", "schedule.warmup_ratio", "a part of `lr_decay_iters`, which is the run's end"),
    Row("min_lr", "schedule.min_ratio", "`min_lr` / `optimizer.params.lr`", _lowest),
    Row("weight_decay", "optimizer.weight_decay"),
    Row("checkpoint_activations checkpoint_num_layers", "recompute.mode", "`full`", _recompute),
    Row(
        "partition_activations synchronize_each_layer",
        "",
        "inputs of blocks are sharded with tp",
        nothing,
    ),
    Row("checkpoint_factor save_interval", "checkpoint.freq", "", _saving),
    Row("keep_last_n_checkpoints", "checkpoint.keep"),
    Row("save", "run.folder"),
    Row(
        "load finetune",
        "",
        "a run resumes from its own folder; `checkpoint.initial_load` begins with weights",
    ),
    Row("eval_interval", "validation.freq"),
    Row("log_interval", "metrics.log_freq"),
    Row("seed", "run.seed", "the default there is 1234"),
    Row("data_path train_data_paths data_dir", "data.path", "to decide", _data),
    Row("vocab_file merge_file", "data.tokenizer", "to decide", _tokenizer),
    Row(
        "steps_per_print tokenizer_type data_impl split distributed_backend init_method "
        "output_layer_init_method scaled_upper_triang_masked_softmax_fusion bias_gelu_fusion "
        "mlp_multiple_of make_vocab_size_divisible_by attention_config use_flashattn "
        "override_lr_scheduler num_workers launcher activation norm_type use_bias_in_norms "
        "use_bias_in_attn_linear use_bias_in_mlp",
        "",
        "nothing to set",
        nothing,
    ),
    Row("use_wandb", "metrics.sinks", "", _sinks),
    Row("wandb_project", "metrics.project"),
    *(
        row
        for row in deepspeed.ROWS
        if row.theirs not in ("steps_per_print", "gradient_clipping")
        and not row.theirs.startswith(NOT_HERE)
    ),
    Row("gradient_clipping", "training.max_norm", "the default there is 1"),
    Row(
        "train_micro_batch_size_per_gpu gradient_accumulation_steps train_batch_size",
        "training.local_batch_size training.global_batch_size",
        "",
        _batch,
    ),
    Row("eval_iters", "validation.samples", "times the global batch size", _eval_samples),
)


def defaults(entries: Mapping[str, object]) -> dict[str, object]:
    """Of neox_arguments.md, where they are not ours."""
    silent: dict[str, object] = {
        "lr_decay_style": "linear",
        "warmup": 0.01,
        "seed": 1234,
    }
    if "optimizer.params.lr" in entries:
        silent["min_lr"] = 0.0
    if "optimizer.type" in entries:
        silent["optimizer.params.betas"] = [0.9, 0.999]
    return silent


NEOX = Format(
    "neox",
    "GPT-NeoX",
    ROWS,
    defaults,
)
