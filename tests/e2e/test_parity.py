"""The same TOML gives the same losses on 1, 2 and 4 processes, in every kind of layout."""

import json

import pytest
from runs import curve, train_run, validation

LAYOUTS = [
    (2, []),
    (4, []),
    (4, ["--parallel.dp_replicate=2"]),
    (4, ["--parallel.dp_replicate=4", "--parallel.dp_shard=1"]),
    (4, ["--parallel.dp_replicate=2", "--training.local_batch_size=1"]),
    (4, ["--parallel.dp_replicate=2", "--training.local_batch_size=1", "--parallel.reduce_every_microbatch=false"]),
    (2, ["--parallel.reshard_after_forward=never", "--training.local_batch_size=1"]),
    (2, ["--parallel.reshard_after_forward=always", "--parallel.reduce_every_microbatch=false"]),
    (2, ["--recompute.mode=full", "--recompute.every=2"]),
    (2, ["--recompute.mode=selective"]),
    (2, ["--compile.enabled", "--compile.backend=aot_eager"]),
    (2, ["--compile.enabled", "--compile.backend=aot_eager", "--recompute.mode=selective"]),
    (2, ["--parallel.cpu_offload", "--parallel.prefetch=2"]),
    (2, ["--parallel.tp=2"]),
    (2, ["--parallel.cp=2"]),
    (2, ["--parallel.cp=2", "--parallel.cp_method=ulysses"]),
    (2, ["--parallel.pp=2"]),
    (2, ["--parallel.pp=2", "--parallel.pp_microbatch_size=2", "--parallel.pp_schedule=GPipe"]),
    (2, ["--parallel.pp=2", "--parallel.pp_schedule=ZBVZeroBubble", "--model.num_layers=4"]),
    (4, ["--parallel.pp=2", "--parallel.dp_shard=2", "--parallel.pp_schedule=Interleaved1F1B", "--model.num_layers=4"]),
    (4, ["--parallel.cp=2", "--parallel.tp=2", "--recompute.mode=selective"]),
    (4, ["--parallel.pp=2", "--parallel.tp=2"]),
]


@pytest.mark.parametrize(("processes", "layout"), LAYOUTS, ids=lambda value: str(value))
def test_losses_and_norms_equal_one_process(pool, arguments, tmp_path, processes, layout):
    arguments = [*arguments, *(option for option in layout if option.startswith("--model"))]
    assert pool.run(1, train_run, [*arguments, "--run.name=one"]) == [0]
    assert pool.run(processes, train_run, [*arguments, "--run.name=many", *layout], timeout=120) == [0] * processes
    one, many = curve(tmp_path / "one"), curve(tmp_path / "many")
    assert sorted(one) == sorted(many) == [1, 2, 3, 4, 5, 6]
    for step in one:
        assert many[step] == pytest.approx(one[step], rel=1e-5)
    assert validation(tmp_path / "many") == pytest.approx(validation(tmp_path / "one"), rel=1e-5)
    assert sorted(validation(tmp_path / "one")) == [0, 3, 6]


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
        assert validation(tmp_path / str(processes)) == pytest.approx(validation(tmp_path / "1"), rel=1e-5)


def test_accumulation_does_not_change_the_numbers(pool, arguments, tmp_path):
    for size in (1, 8):
        assert pool.run(1, train_run, [*arguments, f"--run.name={size}", f"--training.local_batch_size={size}"]) == [0]
    for step, values in curve(tmp_path / "1").items():
        assert values == pytest.approx(curve(tmp_path / "8")[step], rel=1e-5)


def test_a_run_records_the_dtype_that_auto_meant(pool, arguments, tmp_path):
    """So that going on where `auto` means another is told."""
    assert pool.run(1, train_run, [*arguments, "--run.name=run", "--run.device=cpu"]) == [0]
    assert 'compute_dtype = "float32"' in (tmp_path / "run/config.toml").read_text()
    manifest = next((tmp_path / "run/checkpoints").glob("step-*/manifest.json"))
    assert json.loads(manifest.read_text())["config"]["training"]["compute_dtype"] == "float32"
