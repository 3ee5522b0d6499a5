"""Small configs of other trainers, as their users' guides write them."""

from __future__ import annotations

from pathlib import Path

from titanlite.config.keys import setting
from titanlite.config.load import load_config
from titanlite.config.schema import Config
from titanlite.tools.import_config.detect import import_config
from titanlite.tools.import_config.mapping import Draft, to_toml

# An 8B with ZeRO-2 on 4 GPUs
DEEPSPEED = """{
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 8,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8,
                                            "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-4,
                                                    "warmup_num_steps": 2000,
                                                    "total_num_steps": 100000}},
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": 5e8,
                        "allgather_bucket_size": 5e8, "contiguous_gradients": true,
                        "offload_optimizer": {"device": "cpu", "pin_memory": true}},
  "gradient_clipping": 1.0,
  "steps_per_print": 100,
  "activation_checkpointing": {"partition_activations": true},
  "wall_clock_breakdown": false
}
"""

# GPT-3's 175B on 512 GPUs: tensor 8, pipeline 16, data 4
MEGATRON = """#!/bin/bash
# bubble: 15 / 399
GPUS_PER_NODE=8
NUM_NODES=64
SEQ=2048

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes ${NUM_NODES}
    --master_addr $MASTER_ADDR
)
MODEL_ARGS="--num-layers 96 --hidden-size 12288 \\
    --num-attention-heads 96 --seq-length $SEQ --max-position-embeddings $SEQ \\
    --swiglu --normalization RMSNorm --position-embedding-type rope \\
    --untie-embeddings-and-output-weights"
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py $MODEL_ARGS \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --sequence-parallel \\
    --micro-batch-size 1 --global-batch-size 1536 --train-iters 300000 \\
    --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --lr-warmup-iters 300 \\
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --bf16 \\
    --use-distributed-optimizer --recompute-granularity full --recompute-method uniform \\
    --recompute-num-layers 1 --data-path 1.0 corpus_text_document --split 949,50,1 \\
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --save ckpt --load ckpt \\
    --save-interval 1000 --eval-interval 500 --eval-iters 10 --log-interval 10 2>&1 | tee log
"""

TORCHTITAN = """[job]
dump_folder = "./outputs"
description = "Llama 3 8B"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/Llama-3.1-8B"
converters = ["float8"]
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.2
decay_type = "sqrt"
min_lr_factor = 0.1
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
context_parallel_degree = 2
context_parallel_rotate_method = "alltoall"
[checkpoint]
enable = true
interval = 500
async_mode = "async_with_pinned_mem"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[compile]
enable = true
components = ["model", "loss"]
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["attention.wk", "output"]
[metrics]
log_freq = 10
enable_tensorboard = true
"""

# 1.258T tokens
OLMO = """run_name: OLMo-7B
seed: 6198
wandb:
  name: ${run_name}
  project: olmo
model:
  d_model: 4096
  n_heads: 32
  n_layers: 32
  mlp_hidden_size: 22016
  weight_tying: false
  rope: true
  rope_theta: 10000
  flash_attention: true
  max_sequence_length: 2048
  vocab_size: 50280
  embedding_size: 50304
compile: null
optimizer:
  name: adamw
  learning_rate: 3.0e-4
  weight_decay: 0.1
  eps: 1e-5
  decay_norm_and_bias: true
  decay_embeddings: true
  betas: [0.9, 0.95]
scheduler:
  name: cosine_with_warmup
  t_warmup: 5000
  alpha_f: 0.1
tokenizer:
  identifier: allenai_eleuther-ai-gpt-neox-20b.json
save_folder: workspace
save_interval: 1000
save_num_checkpoints_to_keep: 9
save_interval_unsharded: 1000
max_duration: 300000
global_train_batch_size: 2048
device_train_microbatch_size: 2
precision: amp_bf16
fsdp:
  wrapping_strategy: by_block
  precision: mixed
  sharding_strategy: SHARD_GRAD_OP
max_grad_norm: 1.0
activation_checkpointing: one_in_two
softmax_auxiliary_loss: true
auxiliary_loss_multiplier: 1e-5
eval_interval: 1000
console_log_interval: 10
data:
  num_workers: 16
  paths: [part-0.npy]
"""

NEOX = """{
  "pipe-parallel-size": 1,
  "model-parallel-size": 2,
  "num-layers": 32,
  "hidden-size": 4096,
  "num-attention-heads": 32,
  "intermediate-size": 11008,
  "seq-length": 2048,
  "norm": "rmsnorm",
  "pos-emb": "rotary",
  "rotary-pct": 1,
  "no-weight-tying": true,
  "optimizer": {"type": "Adam", "params": {"lr": 0.0003, "betas": [0.9, 0.95]}},
  "min_lr": 0.00003,
  "zero_optimization": {"stage": 1, "allgather_partitions": True, "overlap_comm": True,},
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 8,
  "checkpoint-activations": true,
  "checkpoint-num-layers": 1,
  "gradient_clipping": 1.0,
  "weight-decay": 0.1,
  "hidden-dropout": 0,
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 12},
  "train-iters": 143000,
  "lr-decay-iters": 143000,
  "lr-decay-style": "cosine",
  "warmup": 0.02,
  "checkpoint-factor": 1000,
  "eval-interval": 1000,
  "eval-iters": 10,
  "log-interval": 100,
}
"""

NANOTRON = """checkpoints:
  checkpoint_interval: 1000
  checkpoints_path: checkpoints
data_stages:
- data:
    seed: 42
  name: Stable
  start_training_step: 1
general:
  project: debug
  run: tiny
  seed: 7
logging:
  iteration_step_info_interval: 5
model:
  dtype: bfloat16
  model_config:
    hidden_size: 2048
    intermediate_size: 8192
    num_attention_heads: 32
    num_hidden_layers: 24
    num_key_value_heads: 8
    rms_norm_eps: 1.0e-05
    tie_word_embeddings: true
    vocab_size: 49152
optimizer:
  accumulate_grad_in_fp32: true
  clip_grad: 1.0
  learning_rate_scheduler:
    learning_rate: 0.0005
    lr_decay_starting_step: 8000
    lr_decay_steps: 2000
    lr_decay_style: 1-sqrt
    lr_warmup_steps: 500
    min_decay_lr: 0
  optimizer_factory:
    adam_beta1: 0.9
    adam_beta2: 0.95
    adam_eps: 1.0e-08
    name: adamW
  weight_decay: 0.01
  zero_stage: 1
parallelism:
  dp: 4
  pp: 2
  pp_engine: 1f1b
  tp: 2
  tp_mode: REDUCE_SCATTER
tokenizer:
  tokenizer_name_or_path: gpt2
tokens:
  batch_accumulation_per_replica: 8
  micro_batch_size: 2
  sequence_length: 2048
  train_steps: 10000
  val_check_interval: -1
"""

# 477 steps, with 10 of warmup and an accumulation of 8
TRAINER = """output_dir: outputs
run_name: qwen-lora
model_name_or_path: Qwen/Qwen2.5-0.5B
max_steps: 477
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 2e-4
lr_scheduler_type: cosine
warmup_steps: 10
bf16: true
gradient_checkpointing: true
eval_strategy: epoch
save_strategy: steps
save_steps: 100
save_total_limit: 2
logging_steps: 5
report_to: [wandb]
optim: adamw_torch_fused
max_length: 1024
packing: true
use_peft: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [q_proj, k_proj, v_proj, o_proj]
dataloader_num_workers: 4
label_smoothing_factor: 0.1
"""

ACCELERATE = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
use_cpu: false
"""

# Format -> the ending of its file, and a config
SAMPLES = {
    "deepspeed": ("json", DEEPSPEED),
    "megatron": ("sh", MEGATRON),
    "torchtitan": ("toml", TORCHTITAN),
    "olmo": ("yaml", OLMO),
    "neox": ("yml", NEOX),
    "nanotron": ("yaml", NANOTRON),
    "trainer": ("yaml", TRAINER),
    "accelerate": ("yaml", ACCELERATE),
}


def imported(
    folder: Path, name: str, text: str = "", ending: str = "", processes: int = 0
) -> tuple[Config, Draft]:
    """Imports a config of a format, the sample unless `text` is given, and loads the result."""
    own_ending, sample = SAMPLES[name]
    path = folder / f"foreign.{ending or own_ending}"
    path.write_text(text or sample)
    form, draft = import_config(path, name if text else "", processes)
    assert form.name == name
    out = folder / "ours.toml"
    out.write_text(to_toml(draft, path.name, form))
    return load_config([str(out)]), draft


def values(config: Config, names: str) -> list[object]:
    """The values of our keys; `names` has spaces between them."""
    return [setting(config, name) for name in names.split()]
