"""Names that other trainers use, and our names for the same.

What it is: tables of keys, values and layers, by which `mistakes.py` answers a user who types a
key of DeepSpeed, Megatron-LM, torchtitan, OLMo, GPT-NeoX, nanotron or Hugging Face's Trainer.
Why it is here: `warmup_ratio` resembles none of our keys, so a search for similar names would
suggest nothing, or a key that means something else. `titanlite import-config` reads whole files,
and docs/coming_from.md has the tables of each trainer.
What it costs: nothing; imports no torch.
"""

from __future__ import annotations

import functools

# Layers, by PEFT's names -> ours
PROJECTIONS = {
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
# Our key -> the names elsewhere, in lower case, with spaces between them
KEYS = {
    "training.steps": "max_steps train_iters total_steps train_steps num_steps max_train_steps "
    "total_num_steps max_iters num_train_steps train_batches max_duration",
    "training.tokens": "max_tokens train_tokens total_tokens num_tokens",
    "training.tokens = samples * training.seq_len": "train_samples",
    "training.epochs": "num_train_epochs num_epochs train_epochs max_epochs",
    "training.seq_len": "seq_length sequence_length max_seq_length max_seq_len max_sequence_length "
    "block_size context_length max_position_embeddings n_positions max_length",
    "training.local_batch_size": "per_device_train_batch_size micro_batch_size "
    "train_micro_batch_size_per_gpu device_train_microbatch_size train_batch_size_per_gpu "
    "device_batch_size microbatch_size",
    "training.global_batch_size, in sequences over all processes": "train_batch_size "
    "global_train_batch_size batch_size total_batch_size",
    "training.global_batch_size; the number of accumulation steps follows from it": (
        "gradient_accumulation_steps batch_accumulation_per_replica grad_accumulation_steps "
        "accumulate_grad_batches grad_accum_steps num_microbatches"
    ),
    "training.batch_ramp": "rampup_batch_size batch_size_rampup",
    "training.max_norm": "max_grad_norm clip_grad gradient_clipping clip_grad_norm grad_clip "
    "gradient_clip_val max_gradient_norm",
    'training.compute_dtype = "bfloat16"': "bf16 bfloat16",
    'training.compute_dtype = "float16"': "fp16 float16 half",
    "training.compute_dtype": "precision mixed_precision torch_dtype mixed_precision_param "
    "params_dtype autocast amp",
    "training.reduce_dtype": "mixed_precision_reduce accumulate_grad_in_fp32 "
    "communication_data_type accumulate_allreduce_grads_in_fp32",
    "training.loss_scale, a power of two": "initial_loss_scale initial_scale_power",
    "training.loss_scale_growth": "loss_scale_window",
    "training.gc_freq": "manual_gc_interval gc_interval",
    "optimizer.lr": "learning_rate max_lr peak_lr base_lr",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "optimizer.name": "optim optimizer_type",
    "optimizer.weight_decay": "wd",
    "schedule.name": "lr_scheduler_type lr_decay_style scheduler lr_scheduler",
    "schedule.warmup_ratio": "lr_warmup_fraction warmup_fraction pct_start warmup_proportion",
    "schedule.warmup_steps": "lr_warmup_iters num_warmup_steps warmup_iters warmup_num_steps "
    "t_warmup lr_warmup_steps",
    "schedule.warmup_tokens = samples * training.seq_len": "lr_warmup_samples",
    "schedule.min_ratio, a fraction of optimizer.lr": "min_lr min_learning_rate lr_min alpha_f "
    "min_decay_lr min_lr_ratio min_lr_factor lr_min_ratio cos_min_ratio",
    "schedule.decay_steps (wsd); other schedules end with training.steps": "lr_decay_iters "
    "lr_decay_steps lr_wsd_decay_iters",
    "schedule.decay_fraction": "decay_ratio lr_decay_ratio",
    "parallel.tp": "tensor_parallel_degree tensor_model_parallel_size tensor_parallel_size "
    "model_parallel_size tp_size tensor_parallel",
    "parallel.pp": "pipeline_parallel_degree pipeline_model_parallel_size pipeline_parallel_size "
    "pipe_parallel_size pp_size",
    "parallel.cp": "context_parallel_degree context_parallel_size cp_size "
    "sequence_parallel_size ulysses_sequence_parallel_size",
    "parallel.tp, which includes it": "sequence_parallel enable_sequence_parallel",
    "parallel.dp_shard": "data_parallel_shard_degree fsdp_size dp_shard_size data_parallel_degree",
    "parallel.dp_replicate": "data_parallel_replicate_degree dp_size data_parallel_size "
    "num_replicas",
    "parallel.pp_schedule": "pipeline_parallel_schedule pp_engine",
    "parallel.pp_microbatch_size": "pipeline_parallel_microbatch_size",
    "parallel.pp_stages_per_process": "num_virtual_stages_per_pipeline_rank",
    'parallel.reshard_after_forward: "always" for ZeRO-3, "never" for ZeRO-2 and ZeRO-1; DDP is '
    "parallel.dp_replicate": "zero_stage zero_optimization stage sharding_strategy "
    "fsdp_sharding_strategy use_distributed_optimizer zero ddp deepspeed fsdp "
    "fsdp_config fsdp_reshard_after_forward",
    "parallel.cpu_offload, or parallel.optimizer_offload for the moments alone": (
        "offload_optimizer offload_param fsdp_offload_params enable_cpu_offload "
        "optimizer_cpu_offload"
    ),
    "parallel.prefetch": "forward_prefetch backward_prefetch fsdp_backward_prefetch "
    "fsdp_forward_prefetch stage3_prefetch_bucket_size",
    "parallel.reduce_every_microbatch": "no_sync",
    "parallel.async_tp": "enable_async_tensor_parallel tp_comm_overlap",
    "recompute.mode": "gradient_checkpointing activation_checkpointing activation_checkpoint "
    "recompute_granularity recompute_method use_recompute checkpoint_activations ac_mode "
    "selective_ac_option activation_checkpointing_mode",
    "recompute.every": "recompute_num_layers checkpoint_num_layers",
    "compile.enabled": "torch_compile compile_model use_compile",
    "compile.backend": "torch_compile_backend",
    "float8.enabled": "fp8 enable_fp8 fp8_format enable_fp8_linear",
    "loss.z_loss": "z_loss_multiplier softmax_auxiliary_loss z_loss_weight "
    "auxiliary_loss_multiplier",
    "loss.num_chunks": "chunked_loss logits_chunks",
    "checkpoint.freq": "save_steps save_interval checkpoint_interval checkpointing_steps "
    "checkpoint_freq save_freq checkpoint_every",
    "checkpoint.freq_epochs": "save_epochs",
    "checkpoint.keep": "save_total_limit keep_latest_k keep_last_n_checkpoints "
    "save_num_checkpoints_to_keep",
    "checkpoint.initial_load": "model_name_or_path init_from pretrained_checkpoint finetune_from "
    "initial_load_path",
    "checkpoint.load and checkpoint.load_step": "resume_from_checkpoint load_path resume "
    "resume_checkpoint_path",
    "checkpoint.async_mode": "async_save async_checkpoint async_checkpointing",
    "validation.freq": "eval_steps eval_interval val_check_interval eval_freq eval_every "
    "val_interval",
    "validation.freq_epochs": "eval_epochs",
    "validation.samples": "eval_iters eval_batches max_eval_samples",
    "metrics.log_freq": "logging_steps log_interval log_every steps_per_print log_every_n_steps "
    "iteration_step_info_interval console_log_interval",
    "metrics.sinks": "report_to use_wandb enable_wandb enable_tensorboard tensorboard_dir wandb "
    "tensorboard",
    "metrics.project": "wandb_project",
    "run.folder": "output_dir save_folder dump_folder checkpoints_path",
    "run.name": "run_name exp_name experiment_name exp job_name wandb_exp_name",
    "run.device": "accelerator use_cpu no_cuda",
    "comm.timeout_seconds": "ddp_timeout nccl_timeout distributed_timeout_minutes",
    "debug.deterministic": "full_determinism deterministic_mode",
    "data.path": "dataset train_file data_path dataset_name train_data_paths dataset_path "
    "train_data",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_name_or_path hf_assets_path "
    "vocab_file tokenizer_model",
    "data.sources, with a weight for each": "dataset_weights data_weights blend data_mixture",
    "data.packing": "sample_packing",
    "model.dim": "hidden_size d_model n_embd embed_dim",
    "model.num_layers": "num_hidden_layers n_layers n_layer",
    "model.num_heads": "num_attention_heads n_heads n_head",
    "model.num_kv_heads": "num_key_value_heads n_kv_heads num_query_groups",
    "model.ffn_dim": "ffn_hidden_size intermediate_size mlp_hidden_size",
    "model.head_dim": "kv_channels",
    "model.rope_theta": "rotary_base rotary_emb_base",
    "model.norm_eps": "rms_norm_eps norm_epsilon layer_norm_eps layernorm_epsilon",
    "model.vocab_size": "padded_vocab_size embedding_size",
    "model.embeddings": "tie_word_embeddings weight_tying untie_embeddings_and_output_weights "
    "tie_embeddings",
    "lora.rank": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "lora_target_modules target_modules",
    "profiling.enabled": "enable_profiling profile",
    "profiling.freq": "profile_freq",
    "torchrun's arguments, or NGPU": "num_processes nproc_per_node num_gpus",
}

# Like KEYS, but with the section: the last word of these names is also one of ours
FULL_NAMES = {
    "model.flavor, as llama3_8b": "model.name model.type model.model_type model.arch model.size",
}

# Key -> our value -> the words of others for it, in lower case, with spaces between them
VALUES = {
    "optimizer.name": {
        "adamw": "adam adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused fusedadam adam_w "
        "deepspeedcpuadam cpuadam cpu_adam",
    },
    "optimizer.state_dtype": {"bfloat16": "bf16", "float32": "fp32"},
    "schedule.name": {
        "cosine": "cosine_with_min_lr cosine_with_warmup cosine_with_restarts warmupcosinelr "
        "coswithwarmup cosine_annealing",
        "linear": "linear_with_warmup warmupdecaylr linearwithwarmup",
        "constant": "constant_with_warmup warmuplr constantwithwarmup",
        "inverse_sqrt": "inverse-square-root inverse_square_root invsqrtwithwarmup",
        "wsd": "warmup_stable_decay warmup-stable-decay trapezoidal",
        "step": "steplr multistep multisteplr piecewise",
    },
    "schedule.decay": {"sqrt": "1-sqrt minus_sqrt"},
    "training.compute_dtype": {
        "bfloat16": "bf16 bf16-mixed bf16-true amp_bf16 torch.bfloat16",
        "float16": "fp16 half 16-mixed amp_fp16 torch.float16",
        "float32": "fp32 no false float torch.float32",
    },
    "training.param_dtype": {"float32": "fp32", "bfloat16": "bf16"},
    "training.reduce_dtype": {"float32": "fp32", "bfloat16": "bf16"},
    "parallel.pp_schedule": {"GPipe": "afab all_forward_all_backward"},
    "parallel.cp_method": {"all_gather": "allgather", "ulysses": "a2a alltoall", "ring": "p2p"},
    "parallel.reshard_after_forward": {"always": "true full_shard", "never": "false shard_grad_op"},
    "recompute.mode": {
        "selective": "op selective_op",
        "full": "true whole_layer uniform block",
        "none": "false off",
    },
    "checkpoint.async_mode": {
        "async_pinned": "async_with_pinned_mem",
        "async": "true",
        "disabled": "false",
    },
    "float8.scaling": {"rowwise": "rowwise_with_gw_hp row", "tensorwise": "dynamic tensor"},
    "run.device": {"cuda": "gpu cuda:0"},
    "model.embeddings": {"tied": "true", "untied": "false"},
}


@functools.cache
def _by_name() -> dict[str, str]:
    """Maps each name elsewhere to our key."""
    tables = {**KEYS, **FULL_NAMES}
    return {name: here for here, names in tables.items() for name in names.split()}


def foreign_key(name: str) -> str:
    """Finds our key for another trainer's; empty if the name is in none of the tables.

    `name` may have a section before it, as in `training.max_steps`, and hyphens.
    """
    full = name.lower().replace("-", "_")
    last = full.rpartition(".")[2]
    return _by_name().get(full) or _by_name().get(last, "")


def foreign_value(key: str, value: object) -> str:
    """Finds our value of a key for another trainer's; empty if it is in none of the tables."""
    word = str(value).lower()
    for ours, words in VALUES.get(key, {}).items():
        if word in words.split():
            return ours
    return ""
