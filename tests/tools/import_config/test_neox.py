"""GPT-NeoX's YAML."""

from __future__ import annotations

from foreign_configs import NEOX, imported, values


def test_a_7b_with_zero_1_and_fp16(tmp_path):
    config, draft = imported(tmp_path, "neox", processes=16)
    names = "parallel.tp parallel.pp parallel.reshard_after_forward recompute.mode"
    assert values(config, names) == [2, 1, "never", "full"]
    names = "training.global_batch_size training.local_batch_size training.steps training.max_norm"
    assert values(config, names) == [4 * 8 * 8, 4, 143_000, 1.0]
    names = "schedule.name schedule.warmup_steps schedule.min_ratio optimizer.weight_decay"
    assert values(config, names) == ["cosine", 2860, 0.1, 0.1]
    names = "training.compute_dtype training.loss_scale training.loss_scale_growth run.seed"
    assert values(config, names) == ["float16", 4096.0, 1000, 1234]
    names = "model.dim model.ffn_dim model.num_kv_heads model.embeddings validation.samples"
    assert values(config, names) == [4096, 11008, 32, "untied", 2560]
    assert draft.lacks == []


def test_another_architecture_is_said(tmp_path):
    text = NEOX.replace('"rmsnorm"', '"layernorm"').replace('"rotary-pct": 1', '"rotary-pct": 0.25')
    text = text.replace('"hidden-dropout": 0', '"hidden-dropout": 0.1')
    text = text.replace('"pipe-parallel-size": 1', '"pipe-parallel-size": 4')
    text = text.replace('"lr-decay-iters": 143000', '"lr-decay-iters": 100000')
    config, draft = imported(tmp_path, "neox", text)
    assert config.parallel.pp == 4
    assert [line.partition(" ")[0] for line in draft.lacks] == [
        "rotary_pct",
        "norm",
        "hidden_dropout",
        "lr_decay_iters",
    ]
    assert any("pp_microbatch_size" in line for line in draft.decisions)
