"""The same TOML gives the same losses on 1, 2 and 4 processes, in every kind of layout."""

import json

import pytest
from runs import curve, train_run, train_until, validation

# Layouts that test_bits.py does not show equal to one process in every bit
LAYOUTS = [
    (
        4,
        [
            "--parallel.dp_replicate=2",
            "--training.local_batch_size=1",
            "--parallel.reduce_every_microbatch=false",
        ],
    ),
    (
        4,
        [
            "--parallel.pp=2",
            "--parallel.dp_shard=2",
            "--parallel.pp_schedule=Interleaved1F1B",
            "--model.num_layers=4",
        ],
    ),
]
# Slow, since tests of the room hold the same promise without a training run.
VARIANTS = [
    # tests/tools/verify/test_compare.py: each axis in one step
    (4, ["--parallel.cp=2", "--parallel.tp=2", "--recompute.mode=selective"]),
    (2, ["--parallel.tp=2"]),
    (2, ["--parallel.cp=2"]),
    (2, ["--parallel.pp=2"]),
    (4, ["--parallel.pp=2", "--parallel.tp=2"]),
    # test_fsdp: weights and gradients on four processes, and with replicas
    (4, []),
    (4, ["--parallel.dp_replicate=2"]),
    (4, ["--parallel.dp_replicate=4", "--parallel.dp_shard=1"]),
    (4, ["--parallel.dp_replicate=2", "--training.local_batch_size=1"]),
    # test_compile: gradients of compiled blocks
    (2, ["--compile.enabled", "--compile.backend=aot_eager"]),
    (2, ["--compile.enabled", "--compile.backend=aot_eager", "--recompute.mode=selective"]),
    # test_context_parallel: values and gradients of Ulysses attention
    (2, ["--parallel.cp=2", "--parallel.cp_method=ulysses"]),
    # test_pipeline_parallel: the loss of each schedule
    (2, ["--parallel.pp=2", "--parallel.pp_microbatch_size=2", "--parallel.pp_schedule=GPipe"]),
]


@pytest.mark.parametrize(
    ("processes", "layout"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in VARIANTS)],
    ids=lambda value: str(value),
)
def test_losses_and_norms_equal_one_process(
    pool, arguments, whole_run, tmp_path, processes, layout
):
    assert pool.run(processes, train_run, [*arguments, *layout], timeout=120) == [0] * processes
    alone = whole_run(*(option for option in layout if option.startswith("--model")))
    one, many = curve(alone), curve(tmp_path / "debug")
    assert sorted(one) == sorted(many) == [1, 2, 3, 4, 5, 6]
    for step in one:
        assert many[step] == pytest.approx(one[step], rel=1e-5)
    assert validation(tmp_path / "debug") == pytest.approx(validation(alone), rel=1e-5)
    assert sorted(validation(alone)) == [0, 3, 6]


@pytest.mark.slow  # the promise above, with the config and the corpus of the shipped debug flavor
def test_debug_flavor_for_20_steps(pool, tmp_path):
    arguments = [
        "debug",
        f"--run.folder={tmp_path}",
        "--training.steps=20",
        "--metrics.log_freq=1",
        "--checkpoint.freq=0",
    ]
    arguments += ["--validation.samples=16"]
    for processes in (1, 2, 4):
        run = [*arguments, f"--run.name={processes}"]
        assert pool.run(processes, train_run, run, timeout=240) == [0] * processes
    one = curve(tmp_path / "1")
    assert len(one) == 20
    for processes in (2, 4):
        many = curve(tmp_path / str(processes))
        for step in one:
            assert many[step] == pytest.approx(one[step], rel=1e-5)
        assert validation(tmp_path / str(processes)) == pytest.approx(
            validation(tmp_path / "1"), rel=1e-5
        )


@pytest.mark.slow
def test_accumulation_does_not_change_the_numbers(whole_run):
    eight, one = (curve(whole_run(f"--training.local_batch_size={size}")) for size in (1, 8))
    for step, values in eight.items():
        assert values == pytest.approx(one[step], rel=1e-5)


def test_a_run_records_the_dtype_that_auto_meant(whole_run):
    """So that a resume where `auto` means another is reported."""
    folder = whole_run("--run.device=cpu")
    assert 'compute_dtype = "float32"' in (folder / "config.toml").read_text()
    manifest = next((folder / "checkpoints").glob("step-*/manifest.json"))
    assert json.loads(manifest.read_text())["config"]["training"]["compute_dtype"] == "float32"


@pytest.mark.slow
def test_rounding_stays_rounding_in_the_preset_of_a_mixture(pool, tmp_path):
    """No token chooses other experts in the first 60 steps because local batches are larger."""
    losses = []
    for size in (2, 8):
        run = ["debug_moe", f"--run.folder={tmp_path}", f"--run.name={size}"]
        run += [f"--training.local_batch_size={size}", "--metrics.log_freq=1"]
        run += ["--validation.freq=0", "--validation.prompts="]
        assert pool.run(1, train_until, 60, run, timeout=500) == [75]
        losses.append({step: loss for step, (loss, _) in curve(tmp_path / str(size)).items()})
    assert len(losses[0]) == 60
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
