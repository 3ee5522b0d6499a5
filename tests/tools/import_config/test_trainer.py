"""TrainingArguments of Hugging Face's Trainer."""

from __future__ import annotations

import json

import pytest
from foreign_configs import imported, values


def test_lora_of_qwen_for_477_steps(tmp_path):
    config, draft = imported(tmp_path, "trainer", processes=2)
    names = (
        "training.steps schedule.warmup_steps training.local_batch_size training.global_batch_size"
    )
    assert values(config, names) == [477, 10, 2, 2 * 8 * 2]
    names = "lora.rank lora.alpha lora.dropout lora.targets model.flavor checkpoint.initial_load"
    assert values(config, names)[:5] == [16, 32, 0.05, "wq, wk, wv, wo", "from_checkpoint"]
    assert str(config.checkpoint.initial_load).endswith("Qwen/Qwen2.5-0.5B")
    names = "schedule.name schedule.min_ratio optimizer.lr optimizer.betas optimizer.weight_decay"
    assert values(config, names) == ["cosine", 0.0, 2e-4, (0.9, 0.999), 0.0]
    names = "validation.freq_epochs checkpoint.freq checkpoint.keep data.packing metrics.sinks"
    assert values(config, names) == [1, 100, 2, "best_fit", ("wandb",)]
    assert [text.partition(" ")[0] for text in draft.lacks] == ["label_smoothing_factor"]
    assert not any(text.startswith("data.tokenizer") for text in draft.decisions)


@pytest.mark.parametrize(
    ("arguments", "names", "expected"),
    [
        ({}, "training.epochs schedule.name schedule.warmup_steps optimizer.lr checkpoint.freq",
         [3.0, "linear", 0, 5e-5, 500]),
        ({"max_steps": -1, "num_train_epochs": 2, "warmup_ratio": 0.1},
         "training.epochs schedule.warmup_ratio", [2.0, 0.1]),
        ({"warmup_steps": 0.05, "max_steps": 100}, "schedule.warmup_steps", [5]),
        ({"lr_scheduler_type": "constant", "warmup_steps": 9}, "schedule.name schedule.warmup_steps",
         ["constant", 0]),
        ({"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-3, "lr_scheduler_kwargs": {"min_lr": 1e-4}},
         "schedule.name schedule.min_ratio", ["cosine", 0.1]),
        ({"fsdp": "shard_grad_op auto_wrap offload", "bf16": True},
         "parallel.reshard_after_forward parallel.cpu_offload", ["never", True]),
        ({"fsdp": ["full_shard"], "fsdp_config": {"activation_checkpointing": True}},
         "parallel.reshard_after_forward recompute.mode", ["always", "full"]),
        ({"save_strategy": "epoch", "eval_strategy": "steps", "eval_steps": 20, "use_cpu": True},
         "checkpoint.freq_epochs checkpoint.freq validation.freq run.device", [1.0, 0, 20, "cpu"]),
        ({"save_strategy": "no", "load_best_model_at_end": True, "report_to": "none", "fp16": True},
         "checkpoint.freq checkpoint.keep_best metrics.sinks training.compute_dtype", [0, 1, (), "float16"]),
    ],
)  # fmt: skip
def test_arguments(arguments, names, expected, tmp_path):
    config, _ = imported(tmp_path, "trainer", json.dumps({"output_dir": "o", **arguments}), "json")
    assert values(config, names) == expected


@pytest.mark.parametrize(
    ("arguments", "names", "expected", "lacks"),
    [
        ({"fsdp": "full_shard auto_wrap"}, "parallel.reshard_after_forward", ["always"], []),
        ({"fsdp": "some_shard"}, "parallel.reshard_after_forward", ["default"], ["fsdp = some_shard"]),
        ({"lora_target_modules": ["q_proj", ["v_proj"]]}, "lora.targets", ["wq"],
         ["lora_target_modules = ['v_proj']: expected some of q_proj"]),
        ({"optim": "paged_adamw_8bit"}, "optimizer.name optimizer.state_dtype", ["adamw", "bfloat16"],
         ["optim = paged_adamw_8bit: moments of 8 bits"]),
        ({"report_to": ["wandb", "comet_ml"]}, "metrics.sinks", [("wandb",)],
         ["report_to = comet_ml: metrics.sinks has tensorboard"]),
        ({"lr_scheduler_type": "cosine_with_restarts"}, "schedule.name", ["cosine"],
         ["lr_scheduler_type = cosine_with_restarts: cosine was taken"]),
    ],
)  # fmt: skip
def test_what_is_near_is_taken_and_said(arguments, names, expected, lacks, tmp_path):
    text = json.dumps({"output_dir": "o", **arguments})
    config, draft = imported(tmp_path, "trainer", text, "json")
    assert values(config, names) == expected
    assert len(draft.lacks) == len(lacks)
    for line, start in zip(draft.lacks, lacks, strict=True):
        assert line.lower().startswith(start.lower())


def test_what_is_decided_elsewhere(tmp_path):
    text = json.dumps({"deepspeed": "ds.json", "optim": "adafactor", "report_to": "all",
                       "lora_target_modules": "q_proj,lm_head", "dataset_name": "c4"})  # fmt: skip
    config, draft = imported(tmp_path, "trainer", text, "json")
    assert config.lora.targets == "wq"
    said = "\n".join(draft.lacks + draft.decisions)
    for word in ("optim = adafactor", "report_to = all", "lm_head", "deepspeed:", "'c4'"):
        assert word in said
