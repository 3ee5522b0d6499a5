"""Budgets in tokens and epochs, and what is counted in parts of a run."""

from __future__ import annotations

import pytest
from messages import assert_mentions

from titanlite.config.budget import epochs_in_steps, warmup_problem
from titanlite.config.load import load_config
from titanlite.config.to_toml import to_toml
from titanlite.optim.schedule import lr_factor
from titanlite.runtime.errors import ConfigError

SAMPLES = 100  # of an epoch
SHAPE = [
    "--training.seq_len=100",
    "--training.global_batch_size=8",
    "--training.local_batch_size=8",
]


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (800, 1), (801, 2), (80_000, 100)])
def test_tokens_are_rounded_up_to_steps(tokens, steps, tmp_path):
    config = load_config(
        ["debug", *SHAPE, f"--training.tokens={tokens}", f"--schedule.warmup_tokens={tokens}"]
    )
    assert (config.training.steps, config.training.tokens) == (steps, 0)
    assert (config.schedule.warmup_steps, config.schedule.warmup_tokens) == (steps, 0)
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    longer = load_config([str(tmp_path / "resolved.toml"), "--training.steps=1000"])
    assert longer.training.steps == 1000


def test_small_milestones_are_read_again(tmp_path):
    """Parts of the peak rate below 1e-4 are written with an exponent."""
    milestones = "3.16e-5 from step 11, 0.00001 from 16_000 tokens, 0.5e-99 from step 3_000"
    config = load_config(["debug", *SHAPE, "--schedule.name=step", "--schedule.min_ratio=0",
                          f"--schedule.milestones={milestones}"])  # fmt: skip
    assert (
        config.schedule.milestones
        == "3.16e-05 from step 11, 1e-05 from step 21, 5e-100 from step 3000"
    )
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert load_config([str(tmp_path / "resolved.toml")]) == config
    assert lr_factor(config.schedule, 2000, 5000) == 1e-5


def test_a_decay_fraction_of_0_replaces_steps_of_a_file(tmp_path):
    (tmp_path / "base.toml").write_text('[schedule]\nname = "wsd"\ndecay_steps = 7\n')
    schedule = load_config([str(tmp_path / "base.toml"), "--schedule.decay_fraction=0"]).schedule
    assert (schedule.decay_fraction, schedule.decay_steps) == (0, 0)
    config = load_config([str(tmp_path / "base.toml")])
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert load_config([str(tmp_path / "resolved.toml")]).schedule.decay_steps == 7


@pytest.mark.parametrize(("epochs", "steps"), [("1.1", 11), ("1.11", 12), ("0.01", 1)])
def test_epochs_are_rounded_up_to_steps(epochs, steps):
    """1.1 * 100 / 10 is more than 11 in binary fractions."""
    config = load_config(["debug", *SHAPE[:1], "--training.global_batch_size=10", "--training.local_batch_size=5",
                          f"--training.epochs={epochs}"])  # fmt: skip
    assert epochs_in_steps(config, SAMPLES).training.steps == steps


def test_a_decay_in_tokens_waits_for_the_number_of_steps():
    """With a budget in epochs it is known when the data is; 16 of 200 rows are used by steps of 8,
    the others of 16.
    """
    config = load_config(["debug", *SHAPE, "--training.epochs=2", "--training.batch_ramp=16 from "
                                                                  "step 3",
                          "--schedule.name=wsd", "--schedule.decay_tokens=1601"])  # fmt: skip
    assert config.schedule.decay_tokens == 1601
    config = epochs_in_steps(config, SAMPLES)
    assert config.training.steps == 2 + 12  # 11.5 steps of 16, rounded up
    assert (config.schedule.decay_steps, config.schedule.decay_tokens) == (2, 0)


def test_the_last_of_file_and_command_line_counts(tmp_path):
    (tmp_path / "base.toml").write_text(
        "[training]\ntokens = 800_000\n[schedule]\nwarmup_tokens = 8000\n"
    )
    (tmp_path / "run.toml").write_text('base = "base.toml"\n[training]\nepochs = 1.5\n')
    base, run = str(tmp_path / "base.toml"), str(tmp_path / "run.toml")
    assert load_config([base, *SHAPE]).training.steps == 1000
    assert load_config([base, *SHAPE]).schedule.warmup_steps == 10
    assert load_config([base, *SHAPE, "--schedule.warmup_steps=0"]).schedule.warmup_steps == 0
    assert load_config([base, "--training.steps=7"]).training.steps == 7
    assert load_config([run]).training.epochs == 1.5
    assert load_config([run, "--training.steps=7"]).training.epochs == 0


def test_two_budgets_at_once(tmp_path):
    for argv in (
        ["--training.steps=3", "--training.tokens=5"],
        ["--training.epochs=3", "--training.tokens=5"],
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(["debug", *argv])
        names = [word.partition("=")[0][2:] for word in argv]
        assert_mentions(caught.value.problems[0], *names, "only one")
    (tmp_path / "run.toml").write_text("[schedule]\nwarmup_steps = 0\nwarmup_tokens = 5\n")
    with pytest.raises(
        ConfigError, match=r"run.toml: schedule.warmup_steps and schedule.warmup_tokens"
    ):
        load_config([str(tmp_path / "run.toml")])


def test_without_a_budget_in_epochs_the_config_stays():
    config = load_config(["debug"])
    assert epochs_in_steps(config, SAMPLES) == config


@pytest.mark.parametrize(
    ("ratio", "total", "steps"),
    [("0.1", 100, 10), ("0.1", 110, 11), ("0.101", 100, 11), ("1", 9, 9)],
)
def test_a_warmup_as_a_part_of_all_steps_is_rounded_up(ratio, total, steps):
    """0.1 * 110 is more than 11 in binary fractions."""
    asked = [f"--schedule.warmup_ratio={ratio}", f"--training.steps={total}"]
    schedule = load_config(["debug", *asked]).schedule
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (steps, 0)


def test_a_warmup_as_a_part_waits_for_the_number_of_steps(tmp_path):
    config = load_config(["debug", *SHAPE, "--training.epochs=2", "--schedule.warmup_ratio=0.5"])
    assert config.schedule.warmup_ratio == 0.5
    (tmp_path / "debug.toml").write_text(to_toml(config))
    assert load_config([str(tmp_path / "debug.toml")]) == config
    config = epochs_in_steps(config, SAMPLES)
    assert config.training.steps == 25
    assert (config.schedule.warmup_steps, config.schedule.warmup_ratio) == (13, 0)


def test_a_warmup_as_a_part_excludes_one_in_steps_and_replaces_that_of_a_base(tmp_path):
    (tmp_path / "base.toml").write_text("[schedule]\nwarmup_steps = 7\n")
    base = str(tmp_path / "base.toml")
    assert load_config([base, "--schedule.warmup_ratio=0.2"]).schedule.warmup_steps == 200
    with pytest.raises(ConfigError, match=r"warmup_steps and schedule.warmup_ratio: expected only"):
        load_config([base, "--schedule.warmup_ratio=0.2", "--schedule.warmup_steps=0"])
    with pytest.raises(
        ConfigError, match=r"warmup_tokens and schedule.warmup_ratio: expected only"
    ):
        load_config([base, "--schedule.warmup_ratio=0.2", "--schedule.warmup_tokens=9"])


def test_a_decay_in_tokens_is_written_and_read_again_before_the_data_is_known(tmp_path):
    asked = ["--training.epochs=2", "--schedule.name=wsd", "--schedule.decay_tokens=1601"]
    config = load_config(["debug", *SHAPE, *asked])
    (tmp_path / "debug.toml").write_text(to_toml(config))
    assert load_config([str(tmp_path / "debug.toml")]) == config


@pytest.mark.parametrize(("epochs", "freq"), [("1", 13), ("0.5", 7), ("0.001", 1), ("2.08", 26)])
@pytest.mark.parametrize("section", ["checkpoint", "validation"])
def test_a_frequency_in_epochs_is_rounded_up_to_steps(section, epochs, freq, tmp_path):
    """100 samples are 12.5 steps of 8. The default of checkpoint.freq does not count beside it."""
    config = load_config(["debug", *SHAPE, f"--{section}.freq_epochs={epochs}"])
    (tmp_path / "debug.toml").write_text(to_toml(config))
    assert load_config([str(tmp_path / "debug.toml")]) == config
    resolved = getattr(epochs_in_steps(config, SAMPLES), section)
    assert (resolved.freq, resolved.freq_epochs) == (freq, 0)


def test_a_frequency_in_epochs_of_a_file_is_replaced(tmp_path):
    (tmp_path / "a.toml").write_text("[checkpoint]\nfreq_epochs = 1\n")
    for freq in (0, 9):
        section = load_config([str(tmp_path / "a.toml"), f"--checkpoint.freq={freq}"]).checkpoint
        assert (section.freq, section.freq_epochs) == (freq, 0)


@pytest.mark.parametrize("key", ["checkpoint.freq_epochs", "validation.freq_epochs"])
def test_epochs_need_one_length_and_one_number_of_steps(key, tmp_path):
    (tmp_path / "a.toml").write_text('[[data.sources]]\npath = "a"\n[[data.sources]]\npath = "b"\n')
    for asked in ([str(tmp_path / "a.toml")], ["debug", "--training.batch_ramp=32 from step 9"]):
        with pytest.raises(ConfigError) as caught:
            load_config([*asked, f"--{key}=1"])
        assert_mentions(caught.value.problems[0], f"{key} = 1.0", "different", key[:-7])


@pytest.mark.parametrize(
    ("steps", "warmup", "words"),
    [
        (100, "steps=99", ""),
        (100, "steps=100", "0.002 is that of the last step alone"),
        (100, "steps=400", "the last rate is 0.0005, and the peak rate 0.002 is never reached"),
        (1, "steps=1", ""),
        (8, "ratio=1.0", "warmup_steps = 8, and the run has 8 steps"),
        (8, "tokens=80_000", "warmup_steps = 100, and the run has 8 steps"),
    ],
)
def test_a_warmup_as_long_as_the_run_is_a_warning(steps, warmup, words):
    options = [*SHAPE, f"--training.steps={steps}", f"--schedule.warmup_{warmup}"]
    problem = warmup_problem(load_config(["debug", "--optimizer.lr=0.002", *options]))
    assert words in problem
    assert bool(problem) == bool(words)
    if "never" in words:
        config = load_config(["debug", *options])
        assert lr_factor(config.schedule, steps, steps) == 0.25
