"""TrainingArguments of Hugging Face's Trainer."""

from __future__ import annotations

import json

import pytest
from foreign_configs import imported, values
from messages import refused


def test_qwen_for_477_steps(tmp_path):
    config, draft = imported(tmp_path, "trainer", processes=2)
    names = (
        "training.steps schedule.warmup_steps training.local_batch_size training.global_batch_size"
    )
    assert values(config, names) == [477, 10, 2, 2 * 8 * 2]
    names = "schedule.name schedule.min_ratio optimizer.lr optimizer.betas optimizer.weight_decay"
    assert values(config, names) == ["cosine", 0.0, 2e-4, (0.9, 0.999), 0.1]
    names = "validation.freq_epochs checkpoint.freq checkpoint.keep metrics.sinks training.seq_len"
    assert values(config, names) == [1, 100, 2, ("wandb",), 1024]
    names = "model.flavor parallel.reshard_after_forward training.compute_dtype recompute.mode"
    assert values(config, names) == ["from_checkpoint", "always", "bfloat16", "full"]
    # Its weight decay spares norms, and biases
    assert [(g.pattern, g.weight_decay) for g in config.optimizer.groups] == [("*norm.weight", 0.0)]
    assert any("*.bias" in text for text in draft.decisions)
    assert [text.partition(" ")[0] for text in draft.left] == [
        "label_smoothing_factor",
        "run_name",
        "dataloader_num_workers",
        "lr:",
    ]
    assert not any(text.startswith("data.tokenizer") for text in draft.decisions)


@pytest.mark.parametrize(
    ("arguments", "names", "expected"),
    [
        ({}, "training.epochs schedule.name schedule.warmup_steps optimizer.lr checkpoint.freq",
         [3.0, "linear", 0, 5e-5, 500]),
        ({}, "training.compute_dtype parallel.dp_replicate parallel.dp_shard optimizer.groups",
         ["float32", -1, 1, ()]),
        ({}, "checkpoint.keep metrics.log_freq comm.timeout_seconds compile.enabled", [0, 500, 1800, "false"]),
        ({"max_steps": -1, "num_train_epochs": 2, "warmup_ratio": 0.1},
         "training.epochs schedule.warmup_ratio", [2.0, 0.1]),
        ({"warmup_steps": 0.05, "max_steps": 100}, "schedule.warmup_steps", [5]),
        ({"lr_scheduler_type": "constant", "warmup_steps": 9}, "schedule.name schedule.warmup_steps",
         ["constant", 0]),
        ({"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 9}, "schedule.name schedule.min_ratio",
         ["inverse_sqrt", 0.0]),
        ({"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-3, "lr_scheduler_kwargs": {"min_lr": 1e-4}},
         "schedule.name schedule.min_ratio", ["cosine", 0.1]),
        ({"lr_scheduler_type": "warmup_stable_decay", "max_steps": 100,
          "lr_scheduler_kwargs": {"num_decay_steps": 20, "min_lr_ratio": 0.2}},
         "schedule.name schedule.decay schedule.decay_steps schedule.min_ratio", ["wsd", "cosine", 20, 0.2]),
        ({"max_grad_norm": None}, "training.max_norm", [0.0]),
        ({"fsdp": "shard_grad_op auto_wrap offload", "bf16": True},
         "parallel.reshard_after_forward parallel.cpu_offload parallel.dp_shard", ["never", True, -1]),
        ({"fsdp": True, "fsdp_config": {"fsdp_reshard_after_forward": False, "activation_checkpointing": True}},
         "parallel.reshard_after_forward recompute.mode", ["never", "full"]),
        ({"fsdp": True, "parallelism_config": {"tp_size": 2, "cp_size": 4, "dp_shard_size": 2}},
         "parallel.tp parallel.cp parallel.dp_shard training.global_batch_size", [2, 4, 2, 16]),
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
    ("arguments", "parts"),
    [
        ({"optim": "adafactor"}, ["optim = adafactor", "adamw_torch"]),
        ({"optim": "paged_adamw_8bit"}, ["optim = paged_adamw_8bit"]),
        ({"lr_scheduler_type": "cosine_with_restarts"}, ["lr_scheduler_type = cosine_with_restarts"]),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, ["min_lr or min_lr_rate"]),
        ({"lr_scheduler_type": "inverse_sqrt"}, ["inverse_sqrt: expected a warm-up"]),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}}, ["num_cycles = 2"]),
        ({"fsdp": "hybrid_shard"}, ["fsdp = hybrid_shard"]),
        ({"parallelism_config": {"sp_size": 2}}, ["parallelism_config.sp_size = 2"]),
        # Absent degrees are 1 there: two processes, not 8 replicas of 2
        ({"parallelism_config": {"tp_size": 2}}, ["--processes 16: expected 2, the product"]),
        ({"parallelism_config": {"ep_size": 2}}, ["parallelism_config.ep_size = 2: not known"]),
        ({"fsdp": True, "parallelism_config": {"tp_size": 3}}, ["--processes 16: expected 3, the product"]),
        ({"per_device_train_batch_size": 1.5}, ["1.5: expected a whole number"]),
        # TRL's SFTConfig has other defaults
        ({"max_length": 1024, "packing": True}, ["max_length = 1024: not known", "packing = True"]),
        ({"lora_r": 16}, ["lora_r = 16: not known here as a field of TrainingArguments"]),
        ({"save_strategy": "sometimes"}, ["save_strategy", "sometimes"]),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_makes_no_file(arguments, parts, tmp_path):
    with refused(*parts):
        imported(tmp_path, "trainer", json.dumps({"output_dir": "o", **arguments}), "json")


def test_what_is_not_taken_over_or_decided_elsewhere(tmp_path):
    text = json.dumps({"deepspeed": "ds.json", "report_to": ["wandb", "comet_ml"],
                       "dataset_name": "c4", "average_tokens_across_devices": False,
                       "neftune_noise_alpha": 5})  # fmt: skip
    config, draft = imported(tmp_path, "trainer", text, "json")
    assert config.metrics.sinks == ("wandb",)
    said = "\n".join(draft.left + draft.decisions)
    for text in ("report_to = comet_ml: expected some of tensorboard", "'c4'", "deepspeed = ds.json",
                 "average_tokens_across_devices = False", "neftune_noise_alpha = 5"):  # fmt: skip
        assert text in said


def test_the_batch_needs_the_number_of_processes(tmp_path):
    with refused("per_device_train_batch_size", "give --processes N"):
        imported(tmp_path, "trainer", processes=0)
