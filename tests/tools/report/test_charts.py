"""Which charts a report has, and which points."""

from __future__ import annotations

import numpy as np
from report_runs import rows, write_run

from titanlite.tools.report.charts import MOST_LINES, axis, charts
from titanlite.tools.report.run_data import Run, read_run
from titanlite.tools.report.thin import extremes, means, numbers


def by_title(runs: list[Run]) -> dict[str, dict]:
    return {chart["title"]: chart for chart in charts(runs)}


def test_a_chart_without_values_is_left_out(tmp_path):
    few = [{"step": step, "loss": 3.0, "tps": 5.0} for step in (1, 2)]
    found = by_title([read_run(write_run(tmp_path / "a", few))])
    assert list(found) == ["Loss"]
    assert [series["label"] for series in found["Loss"]["series"]] == ["training"]


def test_the_parts_of_a_step_are_of_the_same_rows(tmp_path):
    found = by_title([read_run(write_run(tmp_path / "a"))])["Time of a step by part"]
    assert found["kind"] == "stack"
    assert [series["label"] for series in found["series"]] == [
        "data",
        "forward",
        "backward",
        "optimizer",
        "other",
    ]
    assert len({tuple(series["x"]) for series in found["series"]}) == 1
    assert sum(series["y"][0] for series in found["series"]) == 0.1 + 0.8 + 1.4 + 0.2 + 0.01


def test_of_many_layers_some_are_shown_and_only_of_one_run(tmp_path):
    run = read_run(write_run(tmp_path / "a"))
    chart = by_title([run])["Gradient norm of each layer"]
    assert len(chart["series"]) == MOST_LINES
    assert chart["help"] == "8 of 12"
    assert (chart["series"][0]["label"], chart["series"][-1]["label"]) == ("layers.0", "layers.11")
    assert "Gradient norm of each layer" not in by_title([run, run])


def test_the_load_of_experts_is_drawn_for_each_block(tmp_path):
    loads = {f"expert_load/layers.{block}": 1.0 + block for block in range(3)}
    metrics = [{"step": step, "expert_load": 3.0, "router_loss": 2.1, **loads} for step in (1, 2)]
    found = by_title([read_run(write_run(tmp_path / "a", metrics))])
    assert found["Load of the experts"]["series"][0]["y"] == [3.0, 3.0]
    assert found["Auxiliary loss of the router"]["series"][0]["y"] == [2.1, 2.1]
    each = found["Load of the experts of each block, most over mean"]["series"]
    assert {one["label"]: one["y"][-1] for one in each} == {
        "layers.0": 1.0, "layers.1": 2.0, "layers.2": 3.0,
    }  # fmt: skip


def test_two_runs_are_in_the_same_charts(tmp_path):
    runs = [read_run(write_run(tmp_path / "a")), read_run(write_run(tmp_path / "b", rows(1000)))]
    found = by_title(runs)
    assert [series["run"] for series in found["Loss"]["series"]] == [0, 0, 1, 1]
    assert {"Time of a step by part, a", "Time of a step by part, b"} <= set(found)


def test_several_validation_sets_have_a_mean(tmp_path):
    values = {"validation/web/loss": 3.0, "validation/code/loss": 2.0, "validation/loss": 2.5}
    metrics = [{"step": 1, "loss": 4.0}, {"step": 1, **values}]
    run = read_run(write_run(tmp_path / "a", metrics))
    labels = [series["label"] for series in by_title([run])["Loss"]["series"]]
    assert labels == [
        "training",
        "validation, mean of all sets",
        "validation, web",
        "validation, code",
    ]
    labels = [series["label"] for series in by_title([run, run])["Loss"]["series"]]
    assert labels == ["training", "validation, mean of all sets"] * 2


def test_a_logarithmic_axis_is_a_choice_only_for_positive_values(tmp_path):
    metrics = [{"step": step, "loss": 3.0, "grad_norm": step - 1} for step in (1, 2, 3)]
    found = by_title([read_run(write_run(tmp_path / "a", metrics))])
    assert found["Loss"]["log"]
    assert not found["Gradient norm"]["log"]


def test_tokens_and_hours_of_steps(tmp_path):
    found = axis(read_run(write_run(tmp_path / "a")))
    assert found["step"][0] == found["tokens"][0] == found["hours"][0] == 0
    np.testing.assert_allclose(np.interp(1555, found["step"], found["tokens"]), 4096 * 1555)
    np.testing.assert_allclose(
        np.interp(1555, found["step"], found["hours"]), 2.5 * 1555 / 3600, rtol=1e-4
    )


def test_a_spike_of_one_point_in_a_million_remains():
    x = np.arange(1_000_000)
    y = np.sin(x / 1e5)
    y[777_777], y[123_456] = 9.0, -9.0
    few_x, few_y = extremes(x, y, 500)
    assert len(few_x) <= 500
    assert few_y.max() == 9.0
    assert few_y.min() == -9.0
    assert few_x[0] == 0
    assert few_x[-1] == 999_999
    assert (np.diff(few_x) > 0).all()


def test_few_points_stay_as_they_are():
    x, y = np.arange(10), np.arange(10.0)
    assert extremes(x, y, 10)[0] is x
    assert means(x, y, 10)[1] is y


def test_means_keep_the_mean():
    x, y = np.arange(1000), np.random.default_rng(0).normal(size=1000)
    mx, my = means(x, y, 100)
    assert len(mx) == 100
    np.testing.assert_allclose(my.mean(), y.mean())


def test_numbers_have_the_digits_of_a_plot():
    assert numbers(np.array([1 / 3, 2.0, 1234567.8, 0.0, 1e-9])) == [0.33333, 2, 1234600, 0, 1e-9]
    assert all(type(value) is int for value in numbers(np.array([3.0, 1e6])))
