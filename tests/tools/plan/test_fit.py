"""The fit of runs whose law is known, and runs that determine none."""

import json

import numpy as np
import pytest

from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.fit import (
    DELTA,
    UNKNOWNS,
    Point,
    fit_lines,
    fit_points,
    fit_record,
    fit_runs,
    read_points,
)
from titanlite.tools.plan.scaling import LAWS, LossLaw, scaling_laws, scaling_lines

TRUE = LossLaw(1.8, 60.0, 300.0, 0.3, 0.35)
SIZES = (200_000, 500_000, 1_300_000, 3_000_000)
LENGTHS = (244, 977, 3906, 15625)  # steps of 1,024 tokens
RESAMPLES = 30


def points_of(noise, seed=0, sizes=SIZES, lengths=LENGTHS):
    rng = np.random.default_rng(seed)
    return [
        Point(f"{n}-{steps}", n, 1024 * steps, TRUE.loss(n, 1024 * steps) * rng.lognormal(0, noise))
        for n in sizes
        for steps in lengths
    ]


def write_run(folder, point, steps=None, config=None, validation=("text",), planned=None):
    """A folder as a run leaves it: its loss falls to that of the point."""
    folder.mkdir(parents=True)
    last = int(point.tokens) // 1024
    shown = [1, last // 2, *range(last - last // 20, last + 1, max(1, last // 100)), last]
    rows = []
    for step in sorted({step for step in shown if step <= (steps or last)}):
        loss = point.loss + 0.1 * (last - step) / last
        rows.append({"step": step, "loss": loss, "tokens": 1024 * step})
    for name in validation:
        rows.append({"step": last // 2, f"validation/{name}/loss": point.loss + 1})
        rows.append({"step": last, f"validation/{name}/loss": point.loss})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = {"parameters": int(point.parameters)}
    start = {"time": 1.7e9, "event": "start", "step": 0, "text": "", "about": about}
    (folder / "events.jsonl").write_text(json.dumps(start) + "\n")
    tables = {"training": {"steps": planned or last}, "data": {"path": "a"}} | (config or {})
    text = ""
    for section, keys in tables.items():
        text += f"[{section}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items())
    (folder / "config.toml").write_text(text)
    return folder


def write_runs(tmp_path, points, **options):
    return [write_run(tmp_path / point.name, point, **options) for point in points]


def test_the_law_of_run_folders_is_recovered(tmp_path):
    fit = fit_runs(write_runs(tmp_path, points_of(0)), RESAMPLES)
    for name in UNKNOWNS:
        assert fit.estimate(name).value == pytest.approx(getattr(TRUE, name), rel=1e-3)
    assert fit.growth.value == pytest.approx(0.35 / 0.65, rel=1e-3)
    assert fit.error < 1e-6
    assert fit.measure == "validation/text/loss"
    assert not fit.undecided
    # A run of ten times as many FLOPs as any of these
    assert fit.loss(10e6, 50e6).value == pytest.approx(TRUE.loss(10e6, 50e6), rel=1e-4)
    assert fit.best_parameters(1e15).value == pytest.approx(TRUE.best_parameters(1e15), rel=1e-2)


def test_with_noise_the_intervals_contain_the_truth_nine_times_of_ten():
    """Of the unknowns, of the growth of the best N, and of a run ten times as large."""
    truths = {name: getattr(TRUE, name) for name in UNKNOWNS}
    truths |= {"growth": 0.35 / 0.65, "loss": TRUE.loss(10e6, 50e6)}
    contained = []
    for seed in range(6):
        fit = fit_points(points_of(0.003, seed), resamples=30)
        assert 0.001 < fit.error < 0.006
        estimates = {name: fit.estimate(name) for name in UNKNOWNS}
        estimates |= {"growth": fit.growth, "loss": fit.loss(10e6, 50e6)}
        contained += [one.low < truths[name] < one.high for name, one in estimates.items()]
    assert 0.8 <= np.mean(contained) < 1


def test_more_noise_gives_wider_intervals():
    widths = []
    for noise in (0.001, 0.01):
        estimate = fit_points(points_of(noise), resamples=20).estimate("alpha")
        widths.append(estimate.high - estimate.low)
    assert widths[1] > 3 * widths[0]


def test_no_change_of_an_unknown_improves_the_fit():
    points = points_of(0.005)
    law = fit_points(points, resamples=1).law

    def huber(unknowns):
        tried = LossLaw(**unknowns)
        total = 0.0
        for point in points:
            error = abs(np.log(tried.loss(point.parameters, point.tokens) / point.loss))
            total += error**2 / 2 if error <= DELTA else DELTA * (error - DELTA / 2)
        return total

    best = {name: getattr(law, name) for name in UNKNOWNS}
    for name in UNKNOWNS:
        for factor in (0.999, 1.001):
            assert huber(best | {name: best[name] * factor}) >= huber(best) * (1 - 1e-4)
    assert huber(best) < huber({name: getattr(TRUE, name) for name in UNKNOWNS})


def test_one_bad_run_hardly_moves_the_fit():
    """The Huber loss: least squares would follow a run that diverged."""
    points = points_of(0)
    points[5] = Point("bad", points[5].parameters, points[5].tokens, 2 * points[5].loss)
    fit = fit_points(points, resamples=1)
    assert fit.law.alpha == pytest.approx(TRUE.alpha, rel=0.05)
    assert fit.law.beta == pytest.approx(TRUE.beta, rel=0.05)
    assert fit.residuals[5] == pytest.approx(np.log(2), rel=0.05)


def test_the_interval_is_the_same_each_time():
    points = points_of(0.005)
    assert fit_points(points, resamples=3) == fit_points(points, resamples=3)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (points_of(0)[:5], "5 runs: expected at least 6"),
        (points_of(0, sizes=SIZES[:2]), "2 different numbers of parameters, 200K to 500K"),
        (
            points_of(0, lengths=(244,), sizes=range(10**5, 10**6, 10**5)),
            "1 different numbers of t",
        ),
        (
            points_of(0, sizes=(10**6, 11 * 10**5, 12 * 10**5)),
            "1.00M to 1.20M: expected at least 3",
        ),
        (
            [Point("", n, 20 * n, TRUE.loss(n, 20 * n)) for n in range(10**6, 8 * 10**6, 10**6)],
            "tokens of the runs follow from their parameters",
        ),
    ],
)
def test_runs_that_determine_no_law_are_refused(points, message):
    with pytest.raises(ConfigError, match=message):
        fit_points(points)


def test_an_unknown_that_the_runs_leave_open_is_named():
    """No run says what E is, if the loss falls as powers of N and D alone; nor alpha without A."""
    for law, name in (
        (LossLaw(0.0, 60.0, 300.0, 0.3, 0.35), "E"),
        (LossLaw(2, 0, 30, 1, 0.3), "alpha"),
    ):
        points = [
            Point("", n, 1024 * steps, law.loss(n, 1024 * steps))
            for n in SIZES
            for steps in LENGTHS
        ]
        fit = fit_points(points, resamples=2)
        assert name in fit.undecided
        assert "beta" not in fit.undecided
        (line,) = [line for line in fit_lines(fit) if line.startswith(f"  {name} ")]
        assert line.endswith("not determined")
        assert len(line) <= 80


def test_without_validation_the_training_loss_is_taken(tmp_path):
    points = points_of(0)
    folders = write_runs(tmp_path, points, validation=())
    read, measure = read_points(folders)
    assert measure.startswith("loss, mean of the last tenth")
    for one, point in zip(read, points, strict=True):
        assert point.loss < one.loss < point.loss + 0.01
        assert (one.parameters, one.tokens) == (point.parameters, point.tokens)


def test_with_several_sets_their_mean_is_taken(tmp_path):
    """As the run weighs them."""
    point = points_of(0)[0]
    folder = write_run(tmp_path / "run", point, validation=("a", "b"))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 244, "validation/loss": 3.25}) + "\n")
    read, measure = read_points([folder])
    assert measure == "validation/loss"
    assert read[0].loss == 3.25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 240}, "run: stopped at step 240 of 244; expected a finished run"),
        ({"config": {"lora": {"rank": 8}}}, "run: began with trained weights"),
        ({"config": {"checkpoint": {"initial_load": "x"}}}, "run: began with trained weights"),
        ({"config": {"training": {}}}, "run: found no training.steps in config.toml"),
    ],
)
def test_a_run_that_is_no_point_is_refused(tmp_path, options, message):
    folder = write_run(tmp_path / "run", points_of(0)[0], **options)
    with pytest.raises(ConfigError, match=message):
        fit_runs([folder])


def test_folders_that_hold_no_run_are_refused_together(tmp_path):
    run = write_run(tmp_path / "run", points_of(0)[0])
    (tmp_path / "empty").mkdir()
    (run / "events.jsonl").unlink()
    with pytest.raises(ConfigError) as caught:
        fit_runs([tmp_path / "empty", run, run])
    assert caught.value.problems == [
        "empty: found no loss in metrics.jsonl; expected the folder of a run",
        "run: found no start with a number of parameters in events.jsonl; expected one",
        "run: is given twice",
    ]


def test_runs_on_other_text_do_not_compare(tmp_path):
    points = points_of(0)
    folders = write_runs(tmp_path, points[:-1])
    folders.append(write_run(tmp_path / "other", points[-1], config={"data": {"path": "b"}}))
    with pytest.raises(ConfigError, match=r"data\.path = 'a' in .*, 'b' in other: losses on other"):
        fit_runs(folders)


def test_lines_and_the_fit_beside_published_laws():
    fit = fit_points(points_of(0.003), resamples=RESAMPLES)
    lines = fit_lines(fit)
    assert all(len(line) <= 80 for line in lines)
    assert "16 runs: 200K to 3.00M parameters" in lines[1]
    assert "alpha" in "\n".join(lines)
    record = json.loads(json.dumps(fit_record(fit)))
    assert record["unknowns"]["beta"]["value"] == fit.law.beta
    assert len(record["points"]) == 16
    scaling = scaling_laws(flops=1e14, laws=[*LAWS, fit.as_law()])
    (own,) = [one for one in scaling.optima if one.law.name == "your runs"]
    assert own.extrapolated == 1
    assert own.parameters == pytest.approx(fit.law.best_parameters(1e14))
    lines = scaling_lines(scaling)
    assert all(len(line) <= 80 for line in lines)
    assert any("runs of your own" in line for line in lines)
