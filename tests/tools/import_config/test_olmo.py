"""OLMo's YAML."""

from __future__ import annotations

import pytest
from foreign_configs import OLMO, imported, values
from messages import assert_mentions


def test_a_7b_on_1258_billion_tokens(tmp_path):
    config, draft = imported(tmp_path, "olmo")
    training = config.training
    tokens = training.steps * training.global_batch_size * training.seq_len
    assert round(tokens / 1e12, 3) == 1.258
    names = (
        "model.dim model.num_layers model.num_heads model.ffn_dim model.embeddings model.vocab_size"
    )
    assert values(config, names) == [4096, 32, 32, 11008, "untied", 50304]
    names = "schedule.name schedule.warmup_steps schedule.min_ratio optimizer.eps optimizer.decayed"
    assert values(config, names) == ["cosine", 5000, 0.1, 1e-5, "all"]
    names = "parallel.reshard_after_forward recompute.mode recompute.every loss.z_loss"
    assert values(config, names) == ["never", "full", 2, 1e-5]
    names = "training.local_batch_size checkpoint.keep metrics.sinks metrics.project run.name"
    assert values(config, names) == [2, 9, ("wandb",), "olmo", "OLMo-7B"]
    assert [text.partition(" ")[0] for text in draft.lacks] == ["save_interval_unsharded"]
    assert [text.partition(":")[0] for text in draft.decisions] == ["data.path", "data.tokenizer"]


def test_what_is_not_resolved_or_not_llamas_is_said(tmp_path):
    text = OLMO.replace("save_folder: workspace", "save_folder: ${path.choose:a,b}/x")
    text = text.replace(
        "  rope: true\n", "  rope: true\n  layer_norm_type: default\n  activation_type: gelu\n"
    )
    config, draft = imported(tmp_path, "olmo", text)
    assert "run.folder" not in draft.settings
    decided = "\n".join(draft.decisions)
    assert_mentions(decided, "run.folder: save_folder = ${path.choose:a,b}/x", "50280 ids")
    lacks = "\n".join(draft.lacks)
    assert_mentions(lacks, "model.layer_norm_type = default", "model.activation_type = gelu")
    assert config.model.vocab_size == 50304


def test_the_vocabulary_without_padding_or_a_tokenizer(tmp_path):
    text = OLMO.replace("  embedding_size: 50304\n", "").replace("tokenizer:", "other:")
    config, draft = imported(tmp_path, "olmo", text)
    assert config.model.vocab_size == 50280
    (said,) = [line for line in draft.decisions if line.startswith("data.tokenizer:")]
    assert "50280 ids" in said


@pytest.mark.parametrize(
    ("changed", "names", "expected"),
    [
        (("max_duration: 300000", "max_duration: 2e9T"), "training.steps", [477]),
        (("max_duration: 300000", "max_duration: 2ep"), "training.epochs", [2]),
        (("t_warmup: 5000", "t_warmup: 42000000\n  units: tokens"), "schedule.warmup_steps", [11]),
        (("SHARD_GRAD_OP", "HYBRID_SHARD\n  hybrid_sharding_num_model_replicas: 4"),
         "parallel.reshard_after_forward parallel.dp_replicate", ["always", 4]),
        (("SHARD_GRAD_OP", "NO_SHARD"), "parallel.dp_replicate parallel.dp_shard", [-1, 1]),
        (("one_in_two", "fine_grained"), "recompute.mode recompute.every", ["selective", 1]),
        (("decay_embeddings: true", "decay_embeddings: false"), "optimizer.decayed", ["linear"]),
        (("mlp_hidden_size: 22016", "mlp_ratio: 8"), "model.ffn_dim", [16384]),
    ],
)  # fmt: skip
def test_other_values(changed, names, expected, tmp_path):
    assert changed[0] in OLMO
    config, _ = imported(tmp_path, "olmo", OLMO.replace(*changed))
    assert values(config, names) == expected
