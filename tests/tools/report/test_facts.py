"""What a report says in words."""

from __future__ import annotations

import pytest
from messages import assert_mentions
from report_runs import CONFIG, EVENTS, event, write_lines, write_run

from titanlite.tools.report.facts import differences, duration, findings, short, state, table
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
        (event("end", 3000, 1e4, "done: 3000 steps."), "finished"),
        (event("end", 30, 1e4, "stopped after step 30 of 3000"), "stopped, can be resumed"),
        (event("diverged", 30, 1e4), "ended: training has diverged"),
        (event("save", 30, 1e4), "finished"),
        (
            event("start", 30, 1e4),
            "running, or ended without a message: it was killed, failed with an error, or hung",
        ),
        (event("end", 3000, 1e4, "a new message", finished=True), "finished"),
        (event("end", 30, 1e4, "a new message", finished=False), "stopped, can be resumed"),
    ],
)
def test_the_state_is_that_of_the_last_event(tmp_path, last, expected):
    write_lines(tmp_path / "events.jsonl", [*EVENTS, last])
    assert state(read_run(tmp_path)) == expected


def test_the_state_of_an_old_run_is_not_known(tmp_path):
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
