"""DeepSpeed's JSON."""

from __future__ import annotations

import json

import pytest
from foreign_configs import DEEPSPEED, imported, values
from messages import refused

BATCH = {"train_batch_size": 32}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


def test_zero_2_of_an_8b(tmp_path):
    config, draft = imported(tmp_path, "deepspeed", processes=4)
    names = "parallel.reshard_after_forward parallel.optimizer_offload training.compute_dtype"
    assert values(config, names) == ["never", True, "bfloat16"]
    names = "training.local_batch_size training.global_batch_size training.steps training.max_norm"
    assert values(config, names) == [4, 4 * 8 * 4, 100_000, 1.0]
    names = "schedule.name schedule.warmup_steps schedule.min_ratio optimizer.lr metrics.log_freq"
    assert values(config, names) == ["linear", 2000, 0.0, 3e-4, 100]
    # Gradients are reduced in the compute dtype there
    assert config.training.reduce_dtype == "bfloat16"
    assert [text.partition(":")[0] for text in draft.left] == ["lr"]
    assert [text.partition(":")[0] for text in draft.decisions] == [
        "optimizer.decayed",
        "model.flavor",
        "training.seq_len",
        "data.path",
        "data.tokenizer",
    ]


@pytest.mark.parametrize(
    ("zero", "names", "expected"),
    [
        ({"stage": 0}, "parallel.dp_replicate parallel.dp_shard", [-1, 1]),
        ({}, "parallel.dp_replicate parallel.dp_shard", [-1, 1]),
        ({"stage": 1}, "parallel.reshard_after_forward parallel.dp_shard", ["never", -1]),
        ({"stage": 2}, "parallel.reshard_after_forward parallel.dp_shard", ["never", -1]),
        ({"stage": 3}, "parallel.reshard_after_forward parallel.dp_shard", ["always", -1]),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "parallel.reshard_after_forward", ["8"]),
        ({"stage": 3, "mics_shard_size": 4}, "parallel.dp_replicate parallel.dp_shard", [-1, 4]),
        ({"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
         "parallel.cpu_offload parallel.optimizer_offload", [True, False]),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}},
         "parallel.cpu_offload parallel.optimizer_offload", [False, True]),
    ],
)  # fmt: skip
def test_stages(zero, names, expected, tmp_path):
    text = json.dumps({**BATCH, "zero_optimization": zero})
    config, _ = imported(tmp_path, "deepspeed", text)
    assert values(config, names) == expected


@pytest.mark.parametrize(
    ("entries", "names", "expected"),
    [
        ({"sequence_parallel_size": 4}, "parallel.cp parallel.cp_method", [4, "ulysses"]),
        ({"tensor_parallel": {"autotp_size": 2}}, "parallel.tp", [2]),
        ({"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500}},
         "training.compute_dtype training.loss_scale training.loss_scale_growth", ["float16", 4096.0, 500]),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "training.loss_scale", [128.0]),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, "training.reduce_dtype", ["float32"]),
        ({}, "training.compute_dtype training.max_norm", ["float32", 1.0]),
        ({"gradient_clipping": 0}, "training.max_norm", [0.0]),
        ({"optimizer": {"type": "Adam", "params": {}}},
         "optimizer.lr optimizer.betas optimizer.eps optimizer.weight_decay",
         [1e-3, (0.9, 0.999), 1e-8, 0.0]),
        # torch's AdamW decays by default, DeepSpeed's kernels do not
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, "optimizer.weight_decay", [0.01]),
        ({"optimizer": ADAM, "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 9}}},
         "schedule.name schedule.min_ratio schedule.warmup_steps optimizer.lr", ["cosine", 1e-4, 9, 1e-3]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "scheduler": {"type": "WarmupDecayLR", "params": {}}},
         "schedule.name schedule.min_ratio schedule.warmup_steps optimizer.lr", ["linear", 0.0, 1000, 1e-3]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "scheduler": {"type": "WarmupLR", "params": {}}},
         "schedule.name optimizer.lr", ["constant", 0.5]),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "recompute.mode recompute.offload",
         ["full", True]),
    ],
)  # fmt: skip
def test_values_and_defaults(entries, names, expected, tmp_path):
    config, _ = imported(tmp_path, "deepspeed", json.dumps({**BATCH, **entries}))
    assert values(config, names) == expected


@pytest.mark.parametrize(
    ("entries", "parts"),
    [
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
         ["optimizer.type, optimizer.params.adam_w_mode = Adam", "expected AdamW"]),
        ({"optimizer": {"type": "OneBitAdam", "params": {}}}, ["optimizer.type = OneBitAdam"]),
        ({"optimizer": {"type": "Muon", "params": {}}}, ["optimizer.type = Muon"]),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, ["scheduler.type = OneCycle", "WarmupLR"]),
        ({"zero_optimization": {"stage": 4}}, ["stage = 4", "from 0 to 3"]),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, ["zero_optimization.cpu_offload = True"]),
        ({"tensor_parallel": {"autotp_size": "auto"}}, ["autotp_size = auto", "write it here"]),
        ({"sequence_parallel_size": 3}, ["--processes 16", "a multiple of 3, the product of the degrees"]),
        ({"gradient_predivide_factor": 2.0}, ["gradient_predivide_factor = 2.0"]),
        ({"elasticity": {"enabled": True}}, ["elasticity.enabled = True"]),
        ({"sparse_attention": {"mode": "fixed"}}, ["sparse_attention.mode = fixed"]),
        ({"expert_parallel": {"enabled": True}}, ["expert_parallel.enabled = True"]),
        ({"train_micro_batch_size_per_gpu": 3}, ["32 sequences", "a multiple of 48"]),
        ({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}, ["32 sequences", "1 x 4"]),
        ({"gradient_accumulation_steps": "two"}, ["gradient_accumulation_steps = two: expected a number"]),
        ({"seed": 3}, ["seed = 3: not known here as a field of DeepSpeed 0.19.5"]),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_makes_no_file(entries, parts, tmp_path):
    with refused(*parts):
        imported(tmp_path, "deepspeed", json.dumps({**BATCH, **entries}))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler.params.warmup_type = log"),
        ({"fp16": {"enabled": True}}, "fp16.hysteresis = 2: every overflow halves the scale"),
        ({"fp16": {"enabled": True}}, "reduced in float32, not float16"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale = 128"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "device = nvme: offload to NVMe"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights = True"),
        ({"zero_optimization": {"reduce_bucket_size": 5}}, "reduce_bucket_size = 5: FSDP2"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype = bf16"),
    ],
)  # fmt: skip
def test_what_differs_is_named(entries, said, tmp_path):
    _, draft = imported(tmp_path, "deepspeed", json.dumps({**BATCH, **entries}))
    assert any(said in line for line in draft.left), draft.left


def test_values_that_another_file_has_are_to_be_decided(tmp_path):
    text = json.dumps({
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                                  "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto",
                      "warmup_max_lr": "auto", "warmup_min_lr": "auto", "total_num_steps": "auto"}},
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto",
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
    })  # fmt: skip
    config, draft = imported(tmp_path, "deepspeed", text)
    assert {setting.key.partition(".")[0] for setting in draft.changed()} == {
        "parallel",
        "schedule",
    }
    said = "\n".join(draft.decisions)
    for name in ("optimizer.params.lr", "train_batch_size", "bf16.enabled", "gradient_clipping"):
        assert f"{name} = auto, so another file has it" in said
    assert config.parallel.reshard_after_forward == "always"


def test_the_batch_needs_the_number_of_processes_unless_it_is_whole(tmp_path):
    with refused("train_micro_batch_size_per_gpu", "give --processes N"):
        imported(tmp_path, "deepspeed", processes=0)
    text = DEEPSPEED.replace('"train_micro_batch_size_per_gpu": 4', '"train_batch_size": 256')
    config, _ = imported(tmp_path, "deepspeed", text, processes=8)
    assert values(config, "training.global_batch_size training.local_batch_size") == [256, 4]
