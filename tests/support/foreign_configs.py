"""Small configs of other trainers, as their users' guides write them."""

from __future__ import annotations

import json
from pathlib import Path

from titanlite.config.keys import setting
from titanlite.config.load import load_config
from titanlite.config.schema import Config
from titanlite.tools.import_config.draft import Draft
from titanlite.tools.import_config.importer import import_config
from titanlite.tools.import_config.translate import to_toml

# An 8B with ZeRO-2 on 4 GPUs
DEEPSPEED = """{
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 8,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8,
                                            "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-4,
                                                    "warmup_num_steps": 2000,
                                                    "warmup_type": "linear",
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

# A Llama of 7B on 16 GPUs: tensor 4, pipeline 2, data 2
MEGATRON = """#!/bin/bash
# bubble: 1 / 65
GPUS_PER_NODE=8
NUM_NODES=2
SEQ=4096

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes ${NUM_NODES}
    --master_addr $MASTER_ADDR
)
MODEL_ARGS="--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 \\
    --num-attention-heads 32 --seq-length $SEQ --max-position-embeddings $SEQ \\
    --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope \\
    --attention-dropout 0.0 --hidden-dropout 0.0 --untie-embeddings-and-output-weights"
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py $MODEL_ARGS \\
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel \\
    --micro-batch-size 1 --global-batch-size 128 --train-iters 500000 --attention-backend auto \\
    --lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine --lr-warmup-fraction .001 \\
    --lr-decay-iters 430000 \\
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --bf16 \\
    --use-distributed-optimizer --recompute-granularity full --recompute-method uniform \\
    --recompute-num-layers 1 --data-path 1.0 corpus_text_document \\
    --tokenizer-model llama2.model --save ckpt --load ckpt \\
    --save-interval 1000 --eval-interval 500 --eval-iters 10 --log-interval 10 2>&1 | tee log
"""

# examples/gpt3/train_gpt3_175b_distributed.sh of core_v0.19.0: what its arguments say
GPT3 = """torchrun --nproc_per_node 8 --nnodes 16 pretrain_gpt.py \\
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 \\
    --max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1 \\
    --global-batch-size 1536 --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 \\
    --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 \\
    --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000 \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
"""

TORCHTITAN = """[job]
dump_folder = "./outputs"
description = "Llama 3 8B"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/Llama-3.1-8B"
converters = ["quantize.linear.float8"]
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
filter_fqns = ["output"]
[metrics]
log_freq = 10
enable_tensorboard = true
"""

# 477 steps, with 10 of warm-up and an accumulation of 8
TRAINER = """output_dir: outputs
run_name: qwen
model_name_or_path: Qwen/Qwen2.5-0.5B
max_steps: 477
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 2e-4
lr_scheduler_type: cosine
warmup_steps: 10
weight_decay: 0.1
bf16: true
gradient_checkpointing: true
fsdp: full_shard auto_wrap
eval_strategy: epoch
save_strategy: steps
save_steps: 100
save_total_limit: 2
logging_steps: 5
report_to: [wandb]
optim: adamw_torch_fused
block_size: 1024
dataloader_num_workers: 4
label_smoothing_factor: 0.1
"""


def _linear(inputs: int, outputs: int) -> dict[str, object]:
    return {"param_init": None, "in_features": inputs, "out_features": outputs, "bias": False}


def model_tree(dim: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> object:
    """A model as torchtitan 0.3 writes it into the JSON of a run."""
    head_dim = dim // heads
    norm = {"param_init": None, "normalized_shape": dim, "eps": 1e-05, "elementwise_affine": True}
    attention = {
        "sharding_config": None,
        "n_heads": heads,
        "inner_attention": {"param_init": None, "block_size": 128, "kernel_options": {}},
        "dim": dim,
        "qkv_linear": {
            "head_dim": head_dim,
            "n_heads": heads,
            "n_kv_heads": kv_heads,
            "wqkv": _linear(dim, dim + 2 * kv_heads * head_dim),
        },
        "wo": _linear(dim, dim),
        "qk_norm": None,
        "n_kv_heads": kv_heads,
        "head_dim": None,
        "rope": {
            "dim": head_dim,
            "max_context_length": 131072,
            "theta": 500000,
            "scaling": "llama",
            "scaling_factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_factor": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_seq_len": 4096,
            "truncate": True,
        },
    }
    block = {
        "attention": attention,
        "feed_forward": {"w1": _linear(dim, ffn), "w2": _linear(ffn, dim), "w3": _linear(dim, ffn)},
        "moe": None,
        "attention_norm": norm,
        "ffn_norm": norm,
    }
    return {
        "dim": dim,
        "vocab_size": vocab,
        "lm_head": _linear(dim, vocab),
        "tok_embeddings": {"num_embeddings": vocab, "embedding_dim": dim},
        "norm": norm,
        "layers": [block] * layers,
        "enable_weight_tying": False,
    }


def torchtitan_run(**sections: dict[str, object]) -> str:
    """The JSON of a run of an 8B with torchtitan 0.3, with other values of some sections."""
    kwargs = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-08, "weight_decay": 0.1}
    group = {"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": kwargs}
    run: dict[str, object] = {
        "model_spec": {
            "name": "llama3",
            "flavor": "8B",
            "model": model_tree(4096, 32, 32, 8, 14336, 128256),
        },
        "hf_assets_path": "./assets/hf/Llama-3.1-8B",
        "dump_folder": "./outputs",
        "dataloader": {"dataset": {"source": {"path": "allenai/c4"}}, "seed": 42},
        "optimizer": {"param_groups": [group], "implementation": "fused"},
        "training": {
            "num_tokens_per_microbatch_per_dp_rank": 8192,
            "num_tokens_per_train_step": 524288,
            "max_context_length": 8192,
            "steps": 1000,
        },
        "parallelism": {"tensor_parallel_degree": 2},
        "activation_checkpoint": {"force_recompute_mm_shapes_by_fqns": ["moe.router.gate"]},
        "loss": {"num_chunks": 8, "loss_fn": {"global_vocab_size": 128256}},
    }
    for name, entries in sections.items():
        table = run.get(name, {})
        assert isinstance(table, dict)
        run[name] = {**table, **entries}
    return json.dumps(run)


# Format -> the ending of its file, and a config
SAMPLES = {
    "torchtitan": ("toml", TORCHTITAN),
    "torchtitan-json": ("json", torchtitan_run()),
    "megatron": ("sh", MEGATRON),
    "deepspeed": ("json", DEEPSPEED),
    "trainer": ("yaml", TRAINER),
}


def imported(
    folder: Path, name: str, text: str = "", ending: str = "", processes: int = 16
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
