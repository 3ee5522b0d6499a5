"""Megatron-LM's arguments."""

from __future__ import annotations

import pytest
from foreign_configs import GPT3, MEGATRON, imported, values
from messages import refused

from titanlite.model.flavors import resolve_flavor

LLAMA = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 100 --lr 1e-3 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--micro-batch-size 2 --global-batch-size 32 --attention-dropout 0 --hidden-dropout 0 "
    "--max-position-embeddings 100 "
)
STEPS = "--train-iters 500 "


def test_a_llama_of_7b_on_16_gpus(tmp_path):
    """Processes 8 x 2 stand in the script: on 2 data-parallel ranks a rank has 64 microbatches."""
    config, draft = imported(tmp_path, "megatron", processes=0)
    names = "parallel.tp parallel.pp parallel.reshard_after_forward parallel.pp_microbatch_size"
    assert values(config, names) == [4, 2, "never", 1]
    names = "training.global_batch_size training.local_batch_size training.steps training.seq_len"
    assert values(config, names) == [128, 64, 500_000, 4096]
    names = "model.rope_theta model.norm_eps model.embeddings model.rope_scaling model.num_kv_heads"
    assert values(config, names) == [10_000.0, 1e-5, "untied", None, 32]
    assert resolve_flavor(config.model, 32000).rope_scaling is None
    assert resolve_flavor(config.model, 32000).num_parameters == 6_738_415_616  # Llama 2's
    names = "optimizer.lr schedule.min_ratio recompute.mode run.seed training.max_norm"
    assert values(config, names) == [3e-4, 0.1, "full", 1234, 1.0]
    left = [text.partition(" ")[0] for text in draft.left]
    assert left == ["lr_decay_iters", "load", "lr:", "initial"]
    assert any(text.startswith("model.vocab_size:") and "512" in text for text in draft.decisions)


def test_the_warmup_is_a_fraction_of_the_decay_and_not_of_the_run(tmp_path):
    """0.001 of --lr-decay-iters 430000 are 430 steps; of --train-iters 500000 they would be 500."""
    config, draft = imported(tmp_path, "megatron")
    assert values(config, "schedule.name schedule.warmup_steps") == ["cosine", 430]
    assert draft.left[0] == "lr_decay_iters = 430000: the decay ends with the run, at 500000"


def test_gpt_3_is_refused(tmp_path):
    """4 x 12288 with GELU has two matrices; as SwiGLU's width it made 232.5B parameters of 175B."""
    with refused(
        "swiglu = False: the feed-forward is SwiGLU's, with three matrices; expected True",
        "default of normalization = LayerNorm: norms are RMSNorm; expected RMSNorm",
        "disable_bias_linear = False: linear layers have no biases",
        "position_embedding_type, use_rotary_position_embeddings = learned_absolute",
    ):
        imported(tmp_path, "megatron", GPT3, ending="sh")


def test_norms_and_biases_do_not_decay(tmp_path):
    config, _ = imported(tmp_path, "megatron")
    groups = [(group.pattern, group.weight_decay) for group in config.optimizer.groups]
    assert (config.optimizer.weight_decay, groups) == (0.1, [("*norm.weight", 0.0)])
    config, _ = imported(
        tmp_path, "megatron", MEGATRON.replace("--swiglu", "--swiglu --add-qkv-bias")
    )
    assert [group.pattern for group in config.optimizer.groups] == ["*norm.weight", "*.bias"]
    config, _ = imported(tmp_path, "megatron", MEGATRON.replace("decay 0.1", "decay 0"))
    assert values(config, "optimizer.weight_decay optimizer.groups") == [0.0, ()]


@pytest.mark.parametrize(
    ("arguments", "names", "expected"),
    [
        (STEPS, "optimizer.betas optimizer.weight_decay schedule.name schedule.min_ratio",
         [(0.9, 0.999), 0.01, "linear", 0.0]),
        (STEPS, "training.compute_dtype model.embeddings parallel.dp_replicate parallel.dp_shard",
         ["float32", "tied", -1, 1]),
        # SwiGLU's width is 8/3 of the model's, in multiples of 64
        (STEPS, "model.ffn_dim model.num_kv_heads", [128, 8]),
        ("--train-samples 1000 --lr-warmup-samples 50",
         "training.tokens training.steps schedule.warmup_steps", [0, 32, 2]),
        ("--train-samples 1000 --lr-decay-samples 500 --lr-warmup-fraction 0.2",
         "training.steps schedule.warmup_steps", [32, 4]),
        (STEPS + "--lr-warmup-fraction .01", "schedule.warmup_steps", [5]),
        (STEPS + "--lr-decay-style WSD --lr-wsd-decay-iters 7 --lr-wsd-decay-style minus_sqrt",
         "schedule.name schedule.decay_steps schedule.decay", ["wsd", 7, "sqrt"]),
        (STEPS + "--tensor-model-parallel-size=2 --recompute-activations --fp16 --seed=7 "
         "--initial-loss-scale 65536 --hysteresis 1 --accumulate-allreduce-grads-in-fp32",
         "parallel.tp recompute.mode training.compute_dtype run.seed training.loss_scale_growth",
         [2, "selective", "float16", 7, 1000]),
        (STEPS + "--bf16 --grad-reduce-in-bf16", "training.compute_dtype training.reduce_dtype",
         ["bfloat16", "bfloat16"]),
        (STEPS + "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
         "parallel.pp_schedule parallel.pp_stages_per_process", ["Interleaved1F1B", 2]),
        (STEPS + "--group-query-attention --num-query-groups 2 --ffn-hidden-size 192",
         "model.num_kv_heads model.ffn_dim", [2, 192]),
        (STEPS + "--group-query-attention", "model.num_kv_heads", [1]),  # Megatron's default
        (STEPS + "--num-query-groups 2", "model.num_kv_heads", [8]),  # counts with the switch alone
        (STEPS + "--use-rope-scaling --rotary-base 500000",
         "model.rope_theta model.rope_scaling model.rope_factor", [500000.0, "llama3", 8.0]),
        (STEPS + "--rotary-seq-len-interpolation-factor 4", "model.rope_scaling model.rope_factor",
         ["linear", 4.0]),
        (STEPS + "--vocab-size 1000 --tensor-model-parallel-size 2", "model.vocab_size", [1024]),
        (STEPS + "--vocab-size 1000 --make-vocab-size-divisible-by 10", "model.vocab_size", [1000]),
        (STEPS + "--padded-vocab-size 1001", "model.vocab_size", [1001]),
        (STEPS + "--lr-decay-style inverse-square-root --lr-warmup-iters 20 --min-lr 2e-4",
         "schedule.name schedule.warmup_steps schedule.min_ratio", ["inverse_sqrt", 20, 0.2]),
        (STEPS + "--clip-grad 0", "training.max_norm", [0.0]),
        (STEPS + "--use-torch-fsdp2 --reset-position-ids --reset-attention-mask",
         "parallel.reshard_after_forward data.document_mask", ["always", True]),
        (STEPS + "--tensorboard-dir tb --wandb-project p --distributed-timeout-minutes 20 --async-save",
         "metrics.sinks metrics.project comm.timeout_seconds checkpoint.async_mode",
         [("tensorboard", "wandb"), "p", 1200, "async"]),
    ],
)  # fmt: skip
def test_arguments_in_a_line(arguments, names, expected, tmp_path):
    config, _ = imported(tmp_path, "megatron", LLAMA + arguments, ending="txt", processes=4)
    assert values(config, names) == expected


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("--expert-model-parallel-size 8", ["expert_model_parallel_size = 8"]),
        ("--num-experts 8", ["num_experts = 8", "dense"]),
        ("--hierarchical-context-parallel-sizes 2 4", ["hierarchical_context_parallel_sizes = 2 4"]),
        ("--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2",
         ["--processes 4: expected a multiple of 16, the product of the degrees"]),
        # There the warm-up is then one sample, so the rate of step 1 is 1 / sqrt(32) of the peak
        ("--lr-decay-style inverse-square-root", ["inverse-square-root: expected a warm-up"]),
        ("--train-samples 100 --lr-decay-style inverse-square-root", ["expected a warm-up"]),
        ("--tensor-model-parallel-size $TP", ["tensor_model_parallel_size = $TP", "a variable"]),
        ("--pipeline-model-parallel-layout Et|L", ["pipeline_model_parallel_layout"]),
        ("--optimizer sgd", ["optimizer = sgd", "expected one of adam"]),
        ("--squared-relu", ["squared_relu = True"]),
        ("--rotary-percent 0.5", ["rotary_percent = 0.5"]),
        ("--window-size 128,0", ["window_size"]),
        ("--apply-residual-connection-post-layernorm", ["dense Llama; expected False"]),
        ("--fp8-format hybrid", ["fp8_format = hybrid"]),
        ("--rampup-batch-size 32 32 6400", ["rampup_batch_size", "training.batch_ramp"]),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 7", ["lr_wsd_decay_style = exponential"]),
        ("--lr-decay-style WSD --lr-wsd-decay-style linear", ["lr_wsd_decay_iters = None"]),
        ("--train-samples 100", ["500, 100: expected one of them"]),
        ("--global-batch-size 30", ["not arguments", "--global_batch_size has two values, 32 and 30"]),
        ("--moe-router-topk 2", ["moe_router_topk = 2: not known here"]),
        ("--my-own 3", ["my_own = 3: not known here as a field of Megatron-LM core 0.19.0"]),
        ("--layernorm-epsilon 1e-5", ["layernorm_epsilon = 1e-5", "did you mean norm_epsilon?"]),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_makes_no_file(arguments, parts, tmp_path):
    with refused(*parts):
        imported(tmp_path, "megatron", LLAMA + STEPS + arguments, ending="txt", processes=4)


@pytest.mark.parametrize(
    "name", ["--num-layers 4", "--hidden-size 64", "--lr 1e-3", "--seq-length 100"]
)
def test_what_megatron_needs_is_needed_here_too(name, tmp_path):
    text = (LLAMA + STEPS).replace(name + " ", "")
    missing = name[2:].partition(" ")[0].replace("-", "_")
    with refused(f"{missing}: missing; the program needs it too"):
        imported(tmp_path, "megatron", text, ending="txt", processes=4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--hidden-dropout 0.1", "hidden_dropout = 0.1: there is no dropout"),
        ("--init-method-std 0.006", "init_method_std = 0.006: weights begin"),
        ("--fp16", "default of initial_loss_scale = 4294967296: it begins with 65536"),
        ("--fp16", "= False: gradients are reduced in float32, not float16"),
        ("--fp16 --loss-scale 128", "loss_scale = 128: the scale is always dynamic"),
        ("--attention-backend local", "attention_backend = local: the kernel"),
        ("--weight-decay-incr-style cosine", "weight_decay_incr_style = cosine"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", "block 2: every block"),
        ("--reset-position-ids", "data.document_mask does both"),
        ("--split 949,50,1", "split = 949,50,1: whole documents are held out"),
    ],
)  # fmt: skip
def test_what_differs_is_named(arguments, said, tmp_path):
    text = (LLAMA + STEPS).replace("--hidden-dropout 0 " if "dropout" in arguments else "\n", "")
    _, draft = imported(tmp_path, "megatron", text + arguments, ending="txt", processes=4)
    assert any(said in line for line in draft.left), draft.left


def test_paths_in_variables_are_left_to_the_user(tmp_path):
    text = LLAMA + STEPS + "--save $OUT/x --tensorboard-dir $LOGS --wandb-project $P --data-path $D"
    config, draft = imported(tmp_path, "megatron", text, ending="txt", processes=4)
    assert values(config, "run.folder metrics.sinks") == ["outputs", ("tensorboard", "wandb")]
    assert "run.folder: save = $OUT/x there, which is not resolved" in draft.decisions
    assert "metrics.project: wandb_project = $P there, which is not resolved" in draft.decisions


@pytest.mark.parametrize(
    ("torchrun", "processes", "local"),
    [
        ("--nproc_per_node 8", 0, 32),
        ("--nproc_per_node 8 --nnodes 4", 0, 8),
        ("--nproc_per_node 8 --nnodes $NNODES", 32, 8),
    ],
)
def test_a_pipeline_has_its_microbatches_in_one_local_batch(torchrun, processes, local, tmp_path):
    text = f"torchrun {torchrun} x.py {LLAMA} {STEPS} --pipeline-model-parallel-size 2 "
    text += "--tensor-model-parallel-size 4"
    config, _ = imported(tmp_path, "megatron", text, processes=processes)
    names = "training.global_batch_size training.local_batch_size parallel.pp_microbatch_size"
    assert values(config, names) == [32, local, 2]


def test_a_pipeline_of_unknown_width_makes_no_file(tmp_path):
    text = f"--nnodes $N {LLAMA} {STEPS} --pipeline-model-parallel-size 2"
    with refused("micro_batch_size", "give --processes N"):
        imported(tmp_path, "megatron", text, ending="sh", processes=0)
