"""Stopping and going on: the stream of losses is that of a run that was never stopped."""

import dataclasses
import re
import shutil
from unittest import mock

import pytest
import torch
from checkpoints import read_step, write_step
from messages import assert_mentions, run_refused
from runs import curve, rows, samples_of_a_run, train_run, train_until

from titanlite.checkpoint.folders import list_steps
from titanlite.checkpoint.manifest import DTYPES, NAME, RunMetadata, read_manifest, to_text


# 4 repeats what 2 show
@pytest.mark.parametrize("processes", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_sigterm_and_resume_is_bit_identical(pool, arguments, tmp_path, processes):
    """One rank is signalled in step 4: all finish that step, save and leave with 75."""
    assert pool.run(processes, train_run, [*arguments, "--run.name=whole"]) == [0] * processes
    run = [*arguments, "--run.name=stopped"]
    assert pool.run(processes, train_until, 4, run) == [75] * processes
    assert list_steps(tmp_path / "stopped/checkpoints") == [4]
    assert pool.run(processes, train_run, run) == [0] * processes
    assert curve(tmp_path / "stopped") == curve(tmp_path / "whole")
    whole, stopped = ([set(row) for row in rows(tmp_path / name)] for name in ("whole", "stopped"))
    (resumed,) = [
        i for i, row in enumerate(rows(tmp_path / "stopped")) if row["step"] == 5 and "loss" in row
    ]
    # Measured from the second logged step of a process on
    missing = whole[resumed] - stopped[resumed]
    assert all(
        name.startswith(("step_seconds", "time/", "memory_", "host_", "slowest_", "fastest_"))
        for name in missing
    )
    stopped[resumed] |= missing
    assert stopped == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "low",
    [
        pytest.param(["optimizer.state_dtype=bfloat16"], marks=pytest.mark.slow),
        ["training.param_dtype=bfloat16", "optimizer.state_dtype=float32"],
    ],
    ids=str,
)
def test_low_precision_is_saved_as_it_is(pool, arguments, tmp_path, low):
    run = [*arguments, "--training.steps=1", *(f"--{option}" for option in low)]
    assert pool.run(1, train_run, run) == [0]
    saved = read_manifest(tmp_path / "debug/checkpoints/step-1").tensors
    dtypes = {
        name.partition(".")[0] + name.rpartition(".")[2]: entry.dtype
        for name, entry in saved.items()
    }
    weights, moments = ("BF16", "F32") if "param_dtype" in low[0] else ("F32", "BF16")
    assert (dtypes["modelweight"], dtypes["optimizerexp_avg"], dtypes["optimizerexp_avg_sq"]) == (
        weights,
        moments,
        moments,
    )


@pytest.mark.slow
def test_resume_with_muon_clipping_by_unit_and_z_loss_is_bit_identical(pool, arguments, tmp_path):
    """Also with a group; and what a resumed run may not change, or only by name."""
    (tmp_path / "groups.toml").write_text('[[optimizer.groups]]\npattern = "tok_*"\nlr = 1e-4\n')
    more = ["--optimizer.name=muon", "--optimizer.clip=agc", "--loss.z_loss=1e-3"]
    options = [str(tmp_path / "groups.toml"), *arguments[1:], *more]
    assert pool.run(2, train_run, [*options, "--run.name=whole"]) == [0, 0]
    run = [*options, "--run.name=stopped"]
    assert pool.run(2, train_until, 3, run) == [75, 75]
    with run_refused(
        "optimizer.name was muon and is adamw", "optimizer.name: cannot change within a run"
    ):
        pool.run(1, train_run, [*run, "--optimizer.name=adamw"])
    offer = "--checkpoint.accept=loss.z_loss,optimizer.clip"
    with run_refused(
        "optimizer.clip was agc and is norm", "loss.z_loss was 0.001 and is 0.0", offer
    ):
        pool.run(1, train_run, [*run, "--optimizer.clip=norm", "--loss.z_loss=0"])
    assert pool.run(2, train_run, run) == [0, 0]
    assert curve(tmp_path / "stopped") == curve(tmp_path / "whole")


@pytest.mark.slow  # rounding to another precision: tests/checkpoint/test_manifest.py
def test_precision_may_change_and_weights_of_any_begin_a_run(pool, arguments, tmp_path):
    """fp32, then moments in bfloat16, then parameters too, then fp32 again; and a new run from
    weights in bfloat16.
    """
    low = ["--optimizer.state_dtype=bfloat16", "--training.param_dtype=bfloat16"]
    for steps, keys in ((2, []), (4, low[:1]), (6, low), (8, [])):
        run = [*arguments, f"--training.steps={steps}", "--parallel.dp_shard=2", *keys]
        assert pool.run(2, train_run, run) == [0, 0]
    log = (tmp_path / "debug/log.txt").read_text()
    assert_mentions(
        log, "optimizer.state_dtype float32 -> bfloat16", "training.param_dtype bfloat16 -> float32"
    )
    losses = [row["loss"] for row in rows(tmp_path / "debug") if "loss" in row]
    assert losses[-1] < losses[0]
    begin = ["--run.name=next", f"--checkpoint.initial_load={tmp_path}/debug", *low]
    assert pool.run(1, train_run, [*arguments, *begin]) == [0]


@pytest.mark.parametrize(
    ("before", "layout_before", "after", "layout_after"),
    [
        # Slow: test_no_sample_is_repeated_or_skipped goes from 4 to 1 to 2, and tests/checkpoint
        # loads each of these layouts into others bit by bit.
        pytest.param(4, ["tp=2", "dp_shard=2"], 4, ["pp=2", "dp_shard=2"], marks=pytest.mark.slow),
        pytest.param(1, [], 4, [], marks=pytest.mark.slow),
        pytest.param(2, ["cp=2"], 2, ["tp=2"], marks=pytest.mark.slow),
        pytest.param(4, [], 1, [], marks=pytest.mark.slow),
        pytest.param(4, [], 2, [], marks=pytest.mark.slow),
    ],
)
def test_resume_in_another_layout(
    pool, arguments, whole_run, tmp_path, before, layout_before, after, layout_after
):
    run = [*arguments, "--run.name=stopped"]
    first, second = (
        [f"--parallel.{option}" for option in layout] for layout in (layout_before, layout_after)
    )
    assert pool.run(before, train_until, 3, [*run, *first]) == [75] * before
    assert pool.run(after, train_run, [*run, *second]) == [0] * after
    whole, stopped = curve(whole_run()), curve(tmp_path / "stopped")
    assert sorted(whole) == sorted(stopped)
    for step in whole:
        assert stopped[step] == pytest.approx(whole[step], rel=1e-5)


@pytest.mark.slow
def test_a_mixture_resumes_on_other_numbers_of_experts_per_process(
    pool, arguments, whole_run, tmp_path
):
    """Experts over 2 processes, then 4, then on one: losses of the weights and of their average are
    those of an uninterrupted run.
    """
    mixture = [
        "--model.num_experts=4",
        "--model.experts_per_token=2",
        "--model.expert_ffn_dim=32",
        "--loss.router_aux_loss=0.1",
        "--ema.decay=0.9",
        "--optimizer.eps=1e-5",
    ]
    run = [*arguments, *mixture]
    assert pool.run(4, train_until, 2, [*run, "--parallel.ep=2"]) == [75] * 4
    assert pool.run(4, train_until, 2, [*run, "--parallel.ep=4"]) == [75] * 4
    assert pool.run(1, train_run, run) == [0]
    assert "(saved by dp_shard=4 ep=4)" in (tmp_path / "debug/log.txt").read_text()
    whole = rows(whole_run(*mixture))
    resumed = rows(tmp_path / "debug")
    columns = ("loss", "grad_norm", "router_loss", "expert_load")
    for before, after in zip(whole, resumed, strict=True):
        for name in before:
            if name in columns or name.endswith("/loss"):
                assert after[name] == pytest.approx(before[name], rel=1e-5), (name, before["step"])
    assert {row["step"] for row in resumed if "loss" in row} == set(range(1, 7))
    assert any("ema" in name for row in resumed for name in row)


@pytest.mark.slow
def test_a_run_with_a_pipeline_ends_with_a_sample(pool, arguments, tmp_path):
    """No process holds the whole model: it comes from the checkpoint, and is what a run on one
    process ends with.
    """
    texts = []
    for processes, layout in ((1, []), (2, ["--parallel.pp=2"])):
        run = [
            *arguments,
            f"--run.name={processes}",
            "--validation.prompts=def",
            "--validation.prompt_tokens=20",
            "--training.steps=2",
            *layout,
        ]
        assert pool.run(processes, train_run, run) == [0] * processes
        log = (tmp_path / str(processes) / "log.txt").read_text()
        texts.append([line for line in log.splitlines() if line.startswith("  | ")])
    assert texts[0] == texts[1]
    assert texts[0][0].startswith("  | def")


def test_no_sample_is_repeated_or_skipped(pool, arguments, tmp_path):
    """4 processes, then 1, then 2: together they read samples 0 .. 47 once each, in order of steps."""
    seen: list[int] = []
    for processes, stop_after, code in ((4, 2, 75), (1, 1, 75), (2, 99, 0)):
        results = pool.run(processes, samples_of_a_run, arguments, stop_after)
        assert all(exit_code == [code] for _, exit_code in results)
        seen += sorted(sample for samples, _ in results for sample in samples)
    assert seen == list(range(6 * 8))


def test_a_run_killed_before_its_first_checkpoint_starts_over(pool, arguments, tmp_path):
    folder = tmp_path / "debug"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        '{"step": 0, "validation/x/loss": 9.0}\n{"step": 1, "loss": 9.0}\n{"step": 2, "lo'
    )
    assert pool.run(1, train_run, arguments) == [0]
    assert list(curve(folder)) == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(folder)] == [0, 1, 2, 3, 3, 4, 5, 6, 6]


def test_finished_run_started_again_changes_nothing(pool, arguments, tmp_path):
    assert pool.run(1, train_run, arguments) == [0]
    before = rows(tmp_path / "debug")
    assert pool.run(2, train_run, arguments) == [0, 0]
    assert rows(tmp_path / "debug") == before


def test_a_step_whose_config_has_keys_that_have_left_resumes(pool, arguments, whole_run, tmp_path):
    """As one that was saved before preferences and scored answers were removed."""
    shutil.copytree(whole_run(), tmp_path / "debug")
    path = tmp_path / "debug/checkpoints/step-6"
    manifest = read_manifest(path)
    config = manifest.config | {"dpo": {"beta": 0.1}}
    config["validation"] = config["validation"] | {"questions": "", "answer_tokens": 16}
    (path / NAME).write_text(to_text(dataclasses.replace(manifest, config=config)))
    assert pool.run(1, train_run, [*arguments, "--training.steps=8"]) == [0]
    assert list(curve(tmp_path / "debug")) == list(range(1, 9))
    assert "dpo" not in read_manifest(path.with_name("step-8")).config


def test_keep_and_never(pool, arguments, tmp_path):
    assert pool.run(2, train_run, [*arguments, "--checkpoint.freq=1", "--checkpoint.keep=2"]) == [
        0,
        0,
    ]
    # 6 is not proven yet
    assert steps_and_others(tmp_path / "debug/checkpoints") == ([4, 5, 6], set())
    with run_refused("checkpoint.load = never", str(tmp_path / "debug"), "exists"):
        pool.run(1, train_run, [*arguments, "--checkpoint.load=never"])


def test_config_that_contradicts_the_checkpoint_names_the_keys(pool, arguments, tmp_path):
    assert pool.run(1, train_run, arguments) == [0]
    changed = [*arguments, "--model.dim=16", "--run.seed=7", "--training.steps=8"]
    with pytest.raises(AssertionError) as caught:
        pool.run(1, train_run, changed)
    message = str(caught.value).split("ConfigError:")[1]
    assert re.search(r"model\.dim .*32.* 16", message)
    assert re.search(r"run\.seed .*42.* 7", message)
    assert_mentions(message, "new run")
    assert "steps" not in message
    other = tmp_path / "other.txt"
    other.write_text("x = 1\n" * 20_000)
    with run_refused("the data ", "was numbers (", "is other (", "checkpoint.accept=data"):
        pool.run(1, train_run, [*arguments, f"--data.path={other}"])


@pytest.mark.slow
def test_changes_are_accepted_by_name_and_then_are_the_runs_own(pool, arguments, tmp_path):
    changed = [
        *arguments,
        "--run.seed=7",
        "--optimizer.lr=1e-4",
        "--optimizer.betas=[0.8, 0.9]",
        "--training.steps=8",
    ]
    assert pool.run(1, train_run, arguments) == [0]
    offer = "--checkpoint.accept=optimizer.betas,optimizer.lr,run.seed"
    with run_refused("optimizer.betas", "[0.9, 0.95]", "[0.8, 0.9]", offer):
        pool.run(1, train_run, changed)
    assert pool.run(1, train_run, [*changed, offer]) == [0]
    assert rows(tmp_path / "debug")[-1]["step"] == 8
    assert pool.run(1, train_run, [*changed, "--training.steps=9"]) == [0]


def test_divergence_stops_without_saving(pool, arguments, tmp_path):
    with pytest.raises(AssertionError, match=r"Diverged: .*step \d.*gradient norm.*nan"):
        pool.run(
            2,
            train_run,
            [*arguments, "--optimizer.lr=1e30", "--training.max_norm=0", "--checkpoint.freq=1"],
        )
    saved = list_steps(tmp_path / "debug/checkpoints")
    assert saved == list(curve(tmp_path / "debug"))


def train_with_a_bad_step(bad: int, arguments: list[str], rate: float = 1e30) -> int:
    """Like `train_run`, but the learning rate of one step is so large that the weights are finite
    and useless.
    """
    from titanlite.optim.schedule import Schedule

    def set_lr(schedule, step):
        lr = original(schedule, step)
        for group in schedule.optimizer.param_groups if step == bad else ():
            group["lr"] = rate
        return lr

    original = Schedule.set_lr
    with mock.patch.object(Schedule, "set_lr", set_lr):
        return train_run(arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "validation"),
    [("disabled", 1), pytest.param("disabled", 0, marks=pytest.mark.slow), ("async", 0)],
)
def test_one_bad_step_does_not_cost_the_last_good_checkpoint(
    pool, arguments, tmp_path, mode, validation
):
    """With `keep = 1`: the checkpoint of the bad step is found out by the next step, and passed
    over.

    Its validation loss is finite: with weights of 1e29, RMSNorm makes every logit about 0.
    """
    folder = tmp_path / "debug/checkpoints"
    saving = ["--checkpoint.freq=1", "--checkpoint.keep=1", f"--checkpoint.async_mode={mode}"]
    run = [*arguments, *saving, "--training.steps=6", f"--validation.freq={validation}"]
    with pytest.raises(
        AssertionError, match=r"Diverged: step 5: .*; the same command resumes from step 4"
    ):
        pool.run(2, train_with_a_bad_step, 4, run)
    assert steps_and_others(folder) == ([3, 4], set())
    with pytest.raises(
        AssertionError,
        match=r"Diverged: step 5: .*renamed to .*step-4.diverged.*checkpoint.load_step",
    ):
        pool.run(2, train_run, run)
    assert steps_and_others(folder) == ([3], {"step-4.diverged"})
    assert pool.run(2, train_run, run) == [0, 0]
    assert steps_and_others(folder) == ([5, 6], {"step-4.diverged"})
    assert pool.run(2, train_run, [*run, "--run.name=whole"]) == [0, 0]
    assert curve(tmp_path / "debug") == curve(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("validation", [0, 1])
def test_weights_that_are_useless_but_trainable_do_not_cost_the_last_plausible_checkpoint(
    pool, arguments, tmp_path, validation
):
    """Step 4 makes the loss 100 times as high, and all later gradients are finite."""
    folder = tmp_path / "debug/checkpoints"
    saving = ["--checkpoint.freq=1", "--checkpoint.keep=1", f"--validation.freq={validation}"]
    run = [*arguments, *saving, "--training.steps=6"]
    assert pool.run(2, train_with_a_bad_step, 4, run, 10.0) == [0, 0]
    assert min(loss for loss, _ in list(curve(tmp_path / "debug").values())[4:]) > 100
    assert steps_and_others(folder) == ([3, 5, 6], set())
    log = (tmp_path / "debug/log.txt").read_text()
    assert log.count("may be useless") == 1
    assert_mentions(log, "the checkpoint of step 4 may be useless", "Step 3 is kept")
    assert pool.run(1, train_run, [*run, "--training.steps=8"]) == [0]
    assert steps_and_others(folder) == ([3, 7, 8], set())
    back = [*run, "--training.steps=8", "--checkpoint.load_step=3"]
    assert pool.run(1, train_run, back) == [0]
    assert list_steps(folder) == [7, 8]


@pytest.mark.slow
def test_a_run_that_always_diverges_renames_one_checkpoint(pool, arguments, tmp_path):
    """Something else is the cause then, and the others stay, although they too were proven."""
    folder = tmp_path / "debug/checkpoints"
    run = [*arguments, "--checkpoint.freq=1", "--checkpoint.keep=0", "--validation.freq=0"]
    assert pool.run(1, train_run, run) == [0]
    worse = [*run, "--training.steps=9", "--training.max_norm=0"]
    for expected in ("step-6.diverged", "one was renamed already", "one was renamed already"):
        with pytest.raises(AssertionError, match=rf"Diverged: .*no step since.*{expected}"):
            pool.run(1, train_on_nan, worse)
    assert list_steps(folder) == [1, 2, 3, 4, 5]
    with pytest.raises(AssertionError, match="no step since step 2"):
        pool.run(1, train_on_nan, [*worse, "--checkpoint.load_step=2"])
    assert list_steps(folder) == [1, 2]


def train_on_nan(arguments: list[str]) -> int:
    with mock.patch(
        "titanlite.parallel.step.clip_gradients", return_value=torch.tensor(float("nan"))
    ):
        return train_run(arguments)


def steps_and_others(folder) -> tuple[list[int], set[str]]:
    return list_steps(folder), {path.name for path in folder.iterdir() if "." in path.name}


@pytest.mark.slow
def test_going_back_and_back_again(pool, arguments, tmp_path):
    """The same command resumes from what it has saved since; later steps of other commands are
    renamed.
    """
    folder = tmp_path / "debug/checkpoints"
    run = [*arguments, "--checkpoint.freq=2", "--checkpoint.keep=0", "--validation.freq=0"]
    back = [*run, "--checkpoint.load_step=2"]
    assert pool.run(1, train_run, run) == [0]
    whole = curve(tmp_path / "debug")
    assert pool.run(1, train_until, 3, back) == [75]  # its third step, which is step 5
    assert steps_and_others(folder) == ([2, 4, 5], {"step-4.superseded", "step-6.superseded"})
    assert pool.run(1, train_run, run) == [0]
    assert list_steps(folder) == [2, 4, 5, 6]
    assert pool.run(2, train_run, back) == [0, 0]  # from 5: 6 was not saved by this command
    assert steps_and_others(folder) == (
        [2, 4, 5, 6],
        {"step-4.superseded", "step-6.superseded", "step-6.superseded-2"},
    )
    assert {step: pytest.approx(row, rel=1e-5) for step, row in whole.items()} == curve(
        tmp_path / "debug"
    )
    with run_refused("checkpoint.load_step = 3", "2, 4, 5, 6"):
        pool.run(1, train_run, [*run, "--checkpoint.load_step=3"])


def poison(folder) -> None:
    """Makes the newest checkpoint, step 6, one that holds a NaN, with all its hashes right."""
    path = folder / "step-6"
    manifest, state = read_manifest(path), {}
    for name, entry in manifest.tensors.items():
        part, _, rest = name.partition(".")
        state.setdefault(part, {})[rest] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    read_step(path, manifest, state)
    state["model"]["norm.weight"][3] = float("nan")
    files = {
        name: (path / name).read_bytes()
        for name in manifest.files
        if not name.endswith(".safetensors")
    }
    path.rename(folder / "kept")
    write_step(
        folder, 6, state, files, RunMetadata(manifest.layout, manifest.config, manifest.data)
    )
    assert not read_manifest(path).finite


def test_a_checkpoint_that_is_not_finite_is_renamed(pool, arguments, tmp_path):
    run, folder = (
        [*arguments, "--checkpoint.freq=3", "--checkpoint.keep=0"],
        tmp_path / "debug/checkpoints",
    )
    assert pool.run(1, train_run, run) == [0]
    whole = curve(tmp_path / "debug")
    pool.run(1, poison, folder)
    with run_refused("step-6", "NaN"):
        pool.run(
            1, train_run, [*run, "--run.name=other", f"--checkpoint.initial_load={folder}/step-6"]
        )
    assert pool.run(1, train_run, run) == [0]
    assert steps_and_others(folder) == ([3, 6], {"step-6.nonfinite"})
    assert curve(tmp_path / "debug") == whole


@pytest.mark.slow
def test_going_back_survives_the_deletion_of_the_step(pool, arguments, tmp_path):
    run = [*arguments, "--checkpoint.freq=1", "--checkpoint.keep=2", "--validation.freq=0"]
    assert pool.run(1, train_run, [*run, "--training.steps=3"]) == [0]
    back = [*run, "--training.steps=9", "--checkpoint.load_step=2"]
    assert pool.run(1, train_until, 4, back) == [75]
    assert list_steps(tmp_path / "debug/checkpoints") == [4, 5, 6]  # 6 is not proven yet
    assert pool.run(1, train_run, back) == [0]
    log = (tmp_path / "debug/log.txt").read_text()
    assert_mentions(log, "checkpoint.load_step = 2", "training.steps 3 -> 9")
    assert list(curve(tmp_path / "debug")) == list(range(1, 10))


def test_going_back_to_a_damaged_step_names_the_others(pool, arguments, tmp_path):
    run = [*arguments, "--checkpoint.freq=2", "--checkpoint.keep=0", "--validation.freq=0"]
    assert pool.run(1, train_run, run) == [0]
    (tmp_path / "debug/checkpoints/step-4/data.json").unlink()
    with run_refused("checkpoint.load_step = 4", "damaged", "2, 6"):
        pool.run(1, train_run, [*run, "--checkpoint.load_step=4"])
