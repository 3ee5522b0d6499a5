"""nanotron's YAML."""

from __future__ import annotations

from foreign_configs import NANOTRON, imported, values


def test_wsd_on_16_processes(tmp_path):
    config, draft = imported(tmp_path, "nanotron")
    names = "parallel.tp parallel.pp parallel.pp_schedule parallel.reshard_after_forward"
    assert values(config, names) == [2, 2, "1F1B", "never"]
    names = "training.global_batch_size training.local_batch_size parallel.pp_microbatch_size"
    assert values(config, names) == [2 * 8 * 4, 16, 2]
    names = (
        "schedule.name schedule.decay schedule.decay_steps schedule.warmup_steps schedule.min_ratio"
    )
    assert values(config, names) == ["wsd", "sqrt", 2000, 500, 0.0]
    names = "model.dim model.num_kv_heads model.embeddings optimizer.weight_decay run.seed"
    assert values(config, names) == [2048, 8, "tied", 0.01, 7]
    assert draft.lacks == []
    assert config.run.name == "tiny"
    _, draft = imported(tmp_path, "nanotron", NANOTRON.replace("run: tiny", "run: a_%date_%jobid"))
    assert "run.name" not in draft.settings
    assert any(line.startswith("run.name: there it is 'a_%date") for line in draft.decisions)


def test_stage_0_a_decay_from_the_warmup_on_and_validation(tmp_path):
    text = NANOTRON.replace("zero_stage: 1", "zero_stage: 0").replace("1f1b", "afab")
    text = text.replace("lr_decay_starting_step: 8000", "lr_decay_starting_step: null")
    text = text.replace("style: 1-sqrt", "style: cosine").replace("interval: -1", "interval: 50")
    config, draft = imported(tmp_path, "nanotron", text)
    names = "parallel.dp_replicate parallel.dp_shard parallel.pp_schedule validation.freq"
    assert values(config, names) == [-1, 1, "GPipe", 50]
    assert config.schedule.name == "cosine"
    (lack,) = draft.lacks
    assert "lr_decay_steps = 2000" in lack
