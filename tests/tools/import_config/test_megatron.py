"""Megatron-LM's arguments."""

from __future__ import annotations

import math

import pytest
from foreign_configs import imported, values


def test_gpt3_on_512_gpus(tmp_path):
    """Processes 8 x 64 stand in the script, so data 4: 384 microbatches and a bubble of 3.76 %."""
    config, draft = imported(tmp_path, "megatron")
    assert values(config, "parallel.tp parallel.pp parallel.reshard_after_forward") == [
        8,
        16,
        "never",
    ]
    training = config.training
    assert (training.global_batch_size, training.local_batch_size, training.steps) == (
        1536,
        384,
        300_000,
    )
    tokens_per_step = training.global_batch_size * training.seq_len
    assert tokens_per_step == 3_145_728
    assert round(tokens_per_step * training.steps / 1e9, 1) == 943.7
    microbatches = training.local_batch_size // config.parallel.pp_microbatch_size
    assert math.isclose((16 - 1) / (microbatches + 16 - 1), 0.0376, abs_tol=5e-5)
    assert config.model.num_layers // config.parallel.pp == 6
    names = "model.dim model.num_heads model.num_kv_heads model.ffn_dim model.embeddings"
    assert values(config, names) == [12288, 96, 96, 49152, "untied"]
    names = "optimizer.lr schedule.min_ratio schedule.warmup_steps recompute.mode run.seed"
    assert values(config, names) == [6e-5, 0.1, 300, "full", 1234]
    assert [text.partition(" ")[0] for text in draft.lacks] == ["load"]


@pytest.mark.parametrize(
    ("arguments", "names", "expected"),
    [
        ("--train-samples 1000 --seq-length 100 --lr-warmup-samples 50",
         "training.tokens training.steps schedule.warmup_steps", [0, 63, 4]),
        ("--lr-warmup-fraction .01 --train-iters 500", "schedule.warmup_steps", [5]),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 7 --lr-wsd-decay-style minus_sqrt",
         "schedule.name schedule.decay_steps schedule.decay", ["wsd", 7, "sqrt"]),
        ("--rampup-batch-size 32 32 6400 --global-batch-size 128 --micro-batch-size 4 --seq-length 100",
         "training.global_batch_size training.batch_ramp", [32, "128 by 32 from 640000 tokens"]),
        ("--tensor-model-parallel-size=2 --recompute-activations --fp16 --seed=7",
         "parallel.tp recompute.mode training.compute_dtype run.seed", [2, "selective", "float16", 7]),
        ("--pipeline-model-parallel-size 4 --num-layers 32 --num-layers-per-virtual-pipeline-stage 4",
         "parallel.pp_schedule parallel.pp_stages_per_process", ["Interleaved1F1B", 2]),
        ("--hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 2 "
         "--ffn-hidden-size 192 --swiglu", "model.num_kv_heads model.ffn_dim", [2, 192]),
        ("--tensorboard-dir tb --wandb-project p --distributed-timeout-minutes 10 --async-save",
         "metrics.sinks comm.timeout_seconds checkpoint.async_mode", [("tensorboard", "wandb"), 600, "async"]),
    ],
)  # fmt: skip
def test_arguments_in_a_line(arguments, names, expected, tmp_path):
    config, _ = imported(tmp_path, "megatron", arguments, ending="txt")
    assert values(config, names) == expected


@pytest.mark.parametrize(
    ("torchrun", "processes", "local", "said"),
    [
        ("", 0, 4, "128 / data-parallel processes; give --processes N"),
        ("--nproc_per_node 8 --nnodes $NNODES", 0, 4, "give --processes N"),
        ("--nproc_per_node 8", 0, 128, "for the 8 processes of one node"),
        ("--nproc_per_node 8 --nnodes $NNODES", 32, 32, ""),
    ],
)
def test_a_pipeline_of_unknown_width_leaves_the_local_batch_to_decide(
    torchrun, processes, local, said, tmp_path
):
    text = (
        f"torchrun {torchrun} pretrain_gpt.py --pipeline-model-parallel-size 2 "
        "--tensor-model-parallel-size 4 --global-batch-size 128 --micro-batch-size 1"
    )
    config, draft = imported(tmp_path, "megatron", text, processes=processes)
    names = "training.global_batch_size training.local_batch_size parallel.pp_microbatch_size"
    assert values(config, names) == [128, local, 1]
    assert ("training.local_batch_size" in draft.settings) == (local != 4)
    lines = [line for line in draft.decisions if line.startswith("training.local_batch_size")]
    assert len(lines) == bool(said)
    assert said in "".join(lines)


def test_what_differs_is_said(tmp_path):
    text = (
        "--lr 1e-3 --lr-decay-iters 5 --train-iters 9 --position-embedding-type learned_absolute "
        "--normalization LayerNorm --hidden-size 64 --hidden-dropout 0.1 --num-experts 8 --what 3 "
        "--pipeline-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 6"
    )
    config, draft = imported(tmp_path, "megatron", text)
    assert [line.partition(" ")[0] for line in draft.lacks] == [
        "position_embedding_type", "normalization", "hidden_dropout", "lr_decay_iters", "num_experts", "what",
    ]  # fmt: skip
    decided = "\n".join(draft.decisions)
    for word in ("SwiGLU", "use-distributed-optimizer", "--processes", "does not divide"):
        assert word in decided
    assert values(config, "schedule.name schedule.min_ratio optimizer.betas optimizer.weight_decay") == [
        "linear", 0.0, (0.9, 0.999), 0.01
    ]  # fmt: skip
