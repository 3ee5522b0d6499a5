"""DeepSpeed's JSON."""

from __future__ import annotations

import json

import pytest
from foreign_configs import DEEPSPEED, imported, values


def test_zero_2_of_an_8b(tmp_path):
    config, draft = imported(tmp_path, "deepspeed", processes=4)
    names = "parallel.reshard_after_forward parallel.optimizer_offload training.compute_dtype"
    assert values(config, names) == ["never", True, "bfloat16"]
    names = "training.local_batch_size training.global_batch_size training.steps training.max_norm"
    assert values(config, names) == [4, 4 * 8 * 4, 100_000, 1.0]
    names = "schedule.name schedule.warmup_steps schedule.min_ratio optimizer.lr metrics.log_freq"
    assert values(config, names) == ["linear", 2000, 0.0, 3e-4, 100]
    assert draft.lacks == []
    assert [text.partition(":")[0] for text in draft.decisions] == [
        "model.flavor",
        "training.seq_len",
        "data.path",
        "data.tokenizer",
    ]


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, ["default", -1, 1]),
        (1, ["never", 1, -1]),
        (2, ["never", 1, -1]),
        (3, ["always", 1, -1]),
    ],
)
def test_stages(stage, expected, tmp_path):
    text = json.dumps({"zero_optimization": {"stage": stage}, "gradient_clipping": 0.5})
    config, _ = imported(tmp_path, "deepspeed", text)
    names = "parallel.reshard_after_forward parallel.dp_replicate parallel.dp_shard"
    assert values(config, names) == expected
    assert config.training.max_norm == 0.5


def test_offload_of_parameters_includes_the_moments_and_nvme_has_no_equal(tmp_path):
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    text = json.dumps({"zero_optimization": zero})
    config, _ = imported(tmp_path, "deepspeed", text)
    assert values(config, "parallel.cpu_offload parallel.optimizer_offload") == [True, False]
    zero["offload_param"] = {"device": "nvme", "nvme_path": "/disk"}
    config, draft = imported(tmp_path, "deepspeed", json.dumps({"zero_optimization": zero}))
    assert values(config, "parallel.cpu_offload parallel.optimizer_offload") == [False, True]
    assert any("NVMe" in text for text in draft.lacks)


def test_fp16_and_its_scale(tmp_path):
    fp16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2}
    config, draft = imported(tmp_path, "deepspeed", json.dumps({"fp16": fp16, "seed": 0}))
    names = "training.compute_dtype training.loss_scale training.loss_scale_growth"
    assert values(config, names) == ["float16", 4096.0, 500]
    assert draft.lacks == []
    fixed = {"fp16": {"enabled": True, "loss_scale": 128}}
    config, draft = imported(tmp_path, "deepspeed", json.dumps(fixed))
    assert config.training.loss_scale == 128
    assert "dynamic" in draft.lacks[0]


def test_defaults_of_its_optimizer_and_values_that_another_file_has(tmp_path):
    text = json.dumps(
        {
            "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
            "train_batch_size": 32,
            "scheduler": {"type": "OneCycle"},
        }
    )
    config, draft = imported(tmp_path, "deepspeed", text)
    names = "optimizer.betas optimizer.weight_decay training.max_norm optimizer.lr"
    assert values(config, names) == [(0.9, 0.999), 0.0, 0.0, 3e-4]
    assert values(config, "training.global_batch_size training.local_batch_size") == [32, 1]
    assert "optimizer.params.lr: auto" in draft.decisions[0]
    assert any("scheduler.type = OneCycle" in text for text in draft.lacks)


def test_a_missing_batch_size_follows_from_the_others(tmp_path):
    text = DEEPSPEED.replace('"train_micro_batch_size_per_gpu": 4', '"train_batch_size": 256')
    config, _ = imported(tmp_path, "deepspeed", text, processes=8)
    assert values(config, "training.global_batch_size training.local_batch_size") == [256, 4]
