"""What a report says in words: spikes where they were put, means of the last two parts."""

from __future__ import annotations

import numpy as np
import pytest
from messages import assert_mentions
from report_runs import (
    CONFIG,
    EVENTS,
    EXPONENT,
    FLOOR,
    NOISE,
    SCALE,
    event,
    losses,
    write_lines,
    write_run,
)

from titanlite.tools.report.facts import differences, duration, findings, short, state, table
from titanlite.tools.report.loss_curve import FEWEST, WINDOW, find_spikes, improvement
from titanlite.tools.report.run_data import read_run


def test_the_final_table(tmp_path):
    facts = dict(table(read_run(write_run(tmp_path / "a"))))
    assert facts["steps"] == "3,000 of 3,000"
    assert facts["tokens"] == "12.29M"
    assert facts["best validation loss"].endswith("at step 3,000")
    assert facts["perplexity"] == "13.30"
    assert facts["MFU"] == "41.5%"
    assert facts["peak memory"] == "3.20 GiB"
    assert facts["time in steps"] == "2:05:00"
    assert facts["time from first to last event"] == "2:46:30"
    assert (facts["checkpoints saved"], facts["restarts after a failure"]) == ("3", "1")
    assert facts["parameters"] == "1,312,768"
    assert facts["batch"] == "16 sequences of 256 tokens"
    assert "" not in facts.values()


def test_several_validation_sets_have_names_and_their_mean_too(tmp_path):
    row = {"step": 1, "validation/loss": 2.5, "validation/a/loss": 2.0, "validation/b/loss": 3.0}
    facts = dict(table(read_run(write_run(tmp_path / "a", [row]))))
    losses = {name: value for name, value in facts.items() if name.startswith("validation loss")}
    assert losses == {
        "validation loss, "
        "mean": "2.5000", "validation loss, a": "2.0000", "validation loss, b": "3.0000",
    }  # fmt: skip
    assert facts["perplexity, mean"] == "12.18"


def test_the_load_of_experts_is_named_by_block(tmp_path):
    """Tokens of the most chosen of 4 experts over the mean: 24 of 64 is 1.5; blocks by number."""
    first = {"step": 1, "expert_load/layers.2": 4.0, "expert_load/layers.10": 4.0}
    last = {"step": 2, "expert_load/layers.2": 1.25, "expert_load/layers.10": 24 / (64 / 4)}
    facts = dict(table(read_run(write_run(tmp_path / "a", [first, last]))))
    assert facts["expert load, most/mean"] == "1.50 in layers.10"
    assert facts["expert load by block"] == "2: 1.25, 10: 1.50"


def test_what_is_not_known_is_left_out(tmp_path):
    assert list(dict(table(read_run(tmp_path)))) == ["state", "steps"]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (event("diverged", 30, 1e4), "ended: training has diverged"),
        (event("save", 30, 1e4), "finished"),
        (
            event("start", 30, 1e4),
            "running, or ended without a message: it was killed, failed with an error, or hung",
        ),
        (event("end", 3000, 1e4, finished=True), "finished"),
        (event("end", 30, 1e4, finished=False), "stopped, can be resumed"),
    ],
)
def test_the_state_is_that_of_the_last_event(tmp_path, last, expected):
    write_lines(tmp_path / "events.jsonl", [*EVENTS, last])
    assert state(read_run(tmp_path)) == expected


def test_the_state_of_a_run_without_events_is_not_known(tmp_path):
    assert state(read_run(tmp_path)).startswith("unknown")


def test_findings(tmp_path):
    run = read_run(write_run(tmp_path / "a"))
    run.broken = [70, 80]
    run.notes = ["metrics.jsonl: 1 damaged line was skipped"]
    text = " ".join(findings(run))
    assert_mentions(
        text,
        "in the last 30 logged steps, 2,710 to 3,000",
        "in the 30 before them, 2,410 to 2,700",
        "Spike at step 1,800",
        "not finite in 2 rows, first at step 70",
        "1 damaged line was skipped.",
    )


def test_findings_of_a_short_run_say_what_they_need(tmp_path):
    few = [{"step": step, "loss": 3.0} for step in range(1, 10)]
    text = " ".join(findings(read_run(write_run(tmp_path / "a", few))))
    assert_mentions(text, "the comparison needs 16", "each needs 48 before it")


def test_a_loss_that_rises_is_said_to_rise(tmp_path):
    rising = [{"step": step, "loss": 3.0 + 0.01 * step} for step in range(1, 101)]
    text = " ".join(findings(read_run(write_run(tmp_path / "a", rising))))
    assert_mentions(text, "The mean loss rose by 0.1", "3.9550 in the last 10", "No spike")


def test_settings_of_one_run_are_compared_with_the_defaults(tmp_path):
    found = differences([read_run(write_run(tmp_path / "a", config=CONFIG + "min_ratio = 0.2\n"))])
    assert found["head"] == ["key", "value", "default"]
    assert found["rows"] == [
        ["schedule.min_ratio", "0.2", "0.1"],
        ["training.steps", "3000", "1000"],
    ]


def test_settings_of_several_runs_are_compared_with_each_other(tmp_path):
    other = CONFIG.replace('"a"', '"b"').replace("warmup_steps = 100", "min_ratio = 0.3")
    runs = [read_run(write_run(tmp_path / "a")), read_run(write_run(tmp_path / "b", config=other))]
    found = differences(runs)
    assert found["head"] == ["key", "a", "b"]
    assert found["rows"] == [
        ["schedule.min_ratio", "not there", "0.3"],
        ["schedule.warmup_steps", "100", "not there"],
    ]


def test_numbers_and_times():
    assert [short(number) for number in (0, 999, 1000, 12_345, 1.5e9, 2e15)] == [
        "0", "999", "1k", "12.35k", "1.5B", "2000T",
    ]  # fmt: skip
    assert [duration(s) for s in (5, 65, 7384, 90_000)] == [
        "0:05",
        "1:05",
        "2:03:04",
        "1 d 1:00:00",
    ]


STEPS = np.arange(10, 10_001, 10)


@pytest.mark.parametrize("seed", range(10))
def test_a_curve_that_only_falls_has_no_spike(seed):
    assert find_spikes(STEPS, losses(STEPS, seed)) == []


@pytest.mark.parametrize("noise", [0.0, 0.001])
def test_it_has_none_with_little_noise(noise):
    rest = np.random.default_rng(0).normal(0, noise, len(STEPS))
    assert find_spikes(STEPS, FLOOR + SCALE * STEPS.astype(float) ** -EXPONENT + rest) == []


@pytest.mark.parametrize("seed", range(5))
def test_it_has_none_with_the_shape_of_a_short_run(seed):
    """A steep fall, then a cosine of the learning rate."""
    s = np.arange(1, 301)
    values = (
        2
        + 6.3 * np.exp(-s / 30)
        + 0.6 * np.cos(np.pi * s / 600)
        + np.random.default_rng(seed).normal(0, 0.05, 300)
    )
    assert find_spikes(s, values) == []


@pytest.mark.parametrize("place", [200, 300, 500, 990])
@pytest.mark.parametrize("width", [1, 4])
def test_a_spike_is_found_where_it_is(place, width):
    values = losses(STEPS)
    values[place : place + width] += np.linspace(1.0, 0.6, width)
    (spike,) = find_spikes(STEPS, values)
    assert spike.peak == spike.first == STEPS[place]
    assert spike.last == STEPS[place + width - 1]
    assert spike.value == values[place]
    assert 1.0 / NOISE / 2 < spike.z < 2 * 1.0 / NOISE


def test_two_spikes_are_two():
    values = losses(STEPS)
    values[[400, 402, 600]] += 1
    peaks = [spike.peak for spike in find_spikes(STEPS, values)]
    assert peaks == [STEPS[400], STEPS[402], STEPS[600]]


def test_a_new_level_is_one_spike_until_half_of_the_window_has_it():
    values = losses(STEPS)
    values[500:] += 1
    (spike,) = find_spikes(STEPS, values)
    assert spike.first == STEPS[500]
    assert STEPS[500 + WINDOW // 2 - 4] <= spike.last <= STEPS[500 + WINDOW // 2 + 4]


def test_a_value_that_is_low_is_no_spike():
    values = losses(STEPS)
    values[400] -= 1
    assert find_spikes(STEPS, values) == []


def test_windows_in_several_chunks_are_those_of_one():
    steps = np.arange(1, 200_001)
    values = 2 + np.random.default_rng(0).uniform(0, NOISE, len(steps))
    places = [65_536, 65_536 + WINDOW, 131_071 + WINDOW, 199_999]
    values[places] += 1
    assert [spike.peak - 1 for spike in find_spikes(steps, values)] == places


@pytest.mark.parametrize("count", [0, 1, FEWEST, WINDOW])
def test_few_losses_have_no_spike(count):
    assert find_spikes(np.arange(count), np.arange(count, dtype=float) ** 9) == []


@pytest.mark.parametrize(
    "values", [np.zeros(100), np.full(100, 5.0), np.linspace(1, 9, 100), np.full(100, -2.0)]
)
def test_curves_of_another_kind_have_none(values):
    assert find_spikes(np.arange(1, 101), values) == []


def test_the_last_tenth_is_compared_with_the_tenth_before():
    steps = np.arange(10, 1001, 10)
    values = np.full(100, 3.0)
    values[80:90] = [2.4, 2.6] * 5
    values[90:] = [2.1, 2.3] * 5
    found = improvement(steps, values)
    assert (found.before.first, found.before.last, found.before.count) == (810, 900, 10)
    assert (found.last.first, found.last.last, found.last.count) == (910, 1000, 10)
    assert (found.before.value, found.last.value) == (pytest.approx(2.5), pytest.approx(2.2))
    assert found.fall == pytest.approx(0.3)
    each = np.std([2.4, 2.6] * 5, ddof=1) / 10**0.5
    assert found.error == pytest.approx(2**0.5 * each)


def test_the_error_of_the_fall_is_that_of_many_runs():
    """The falls of 300 runs without a trend scatter by the error that each of them names."""
    steps = np.arange(1, 1001)
    noise = np.random.default_rng(0)
    found = [improvement(steps, noise.normal(3, 0.1, 1000)) for _ in range(300)]
    scatter = np.std([one.fall for one in found])
    assert np.mean([one.error for one in found]) == pytest.approx(scatter, rel=0.15)


def test_too_few_losses_are_not_compared():
    few = np.arange(2 * FEWEST - 1)
    assert improvement(few, few.astype(float)) is None
    enough = np.arange(2 * FEWEST)
    assert improvement(enough, enough.astype(float)).fall == -FEWEST
