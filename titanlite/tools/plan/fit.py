"""The scaling law of one's own runs: L(N, D) = E + A / N^alpha + B / D^beta.

What it is: each finished run is a point: N parameters, D tokens, and its loss at the end. The law
minimises the sum of Huber losses (delta = 1e-3) of log L, which is approach 3 of Chinchilla. With
n = log(N / N0), d = log(D / D0), N0 and D0 the geometric means of the runs,

    log L = log(exp(e) + exp(a - alpha n) + exp(b - beta d))

has five unknowns (e, a, b, alpha, beta), and derivatives that are the shares of the three terms.

1. Starts: for each (alpha, beta) of a grid, L is linear in E, A and B: weighted least squares.
2. The best starts are improved by Gauss-Newton steps with Levenberg and Marquardt's damping, in
   which each run has the weight that makes least squares equal the Huber loss. The lowest wins.
3. The interval: the same, from the result and from the best start, for RESAMPLES sets of runs that
   are drawn from the runs with replacement (bootstrap), with a fixed seed. A resample that could
   not determine a fit is drawn again. Intervals contain 90 % of the resamples' values.

All starts and resamples are solved at once, as arrays (batch, runs).
Why it is here: published laws are those of other text, tokenizers and models. A few small runs of
one's own say what a larger one will reach, and how little they say about it.
What it does not say: anything about other text, another schedule, or sizes far from those of the
runs; and nothing about the noise of seeds, if there is one run for each N and D. Only the end of a
run counts, because before it the learning rate has not decayed. If text is repeated, D counts the
repetitions.
What it costs: half a second for 12 runs.
Reference: Hoffmann et al. 2022 (arXiv 2203.15556, section 3.3 and appendix D.2). Besiroglu et al.
2024 (arXiv 2404.10102) find that its optimiser stopped too early; a test here checks that no change
of an unknown improves the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.amounts import exponent, short
from titanlite.tools.plan.scaling import Law, LossLaw, law_of_loss
from titanlite.tools.report.run_data import Run, read_runs

UNKNOWNS = ("E", "A", "B", "alpha", "beta")
DELTA = 1e-3  # of the Huber loss, on log L
RESAMPLES = 300
INTERVAL = (5.0, 95.0)  # percentiles
SEED = 0

FEWEST_RUNS = 6  # for five unknowns
FEWEST_SIZES = 3
FEWEST_LENGTHS = 3
LEAST_RANGE = 2.0  # largest over smallest N, and D
MOST_ALIKE = 0.99  # correlation of log N and log D
NOTHING = 0.01  # an E below this part of the lowest loss counts as 0

EXPONENTS = np.geomspace(0.05, 2.0, 14)  # of the grid
NUM_STARTS = 6
NUM_STEPS = 300
LEAST_FALL = 1e-7  # of the Huber loss in a step, as a part of it: less ends the descent
MOST_DAMPING = 1e8
# Bounds of (e, a, b, alpha, beta). E, A and B at N0 and D0: e^-9 nats are nothing
LOW = np.array([-9.0, -9.0, -9.0, 0.005, 0.005])
HIGH = np.array([5.0, 5.0, 5.0, 4.0, 4.0])

# Settings in which the runs must agree, since losses on other text or tokens do not compare
SAME_TEXT = ("data.path", "data.tokenizer", "data.field", "data.sources")


@dataclass(frozen=True)
class Point:
    """A finished run."""

    name: str
    parameters: float
    tokens: float
    loss: float

    @property
    def flops(self) -> float:
        return 6 * self.parameters * self.tokens


@dataclass(frozen=True)
class Estimate:
    """A value and its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """The law of some runs."""

    points: tuple[Point, ...]
    measure: str  # which loss it is of
    law: LossLaw
    resampled: tuple[LossLaw, ...]  # one for each resample
    residuals: tuple[float, ...]  # log of measured over fitted loss, in the order of the points

    def estimate(self, name: str) -> Estimate:
        """E, A, B, alpha or beta."""
        values = [getattr(one, name) for one in self.resampled]
        return _estimate(getattr(self.law, name), values)

    @property
    def undecided(self) -> tuple[str, ...]:
        """Unknowns that the runs leave open: E if it may be nothing, exponents at their bounds."""
        names = []
        if self.estimate("E").low < NOTHING * min(point.loss for point in self.points):
            names.append("E")
        for name, low, high in (("alpha", LOW[3], HIGH[3]), ("beta", LOW[4], HIGH[4])):
            one = self.estimate(name)
            if one.low < 1.01 * low or one.high > 0.99 * high:
                names.append(name)
        return tuple(names)

    @property
    def growth(self) -> Estimate:
        """The exponent of the best N as a power of C: beta / (alpha + beta)."""
        values = [one.beta / (one.alpha + one.beta) for one in self.resampled]
        return _estimate(self.law.beta / (self.law.alpha + self.law.beta), values)

    def loss(self, parameters: float, tokens: float) -> Estimate:
        """The loss of a run that has not been trained."""
        values = [one.loss(parameters, tokens) for one in self.resampled]
        return _estimate(self.law.loss(parameters, tokens), values)

    def best_parameters(self, flops: float) -> Estimate:
        """The N of the lowest loss for 6 N D FLOPs."""
        values = [one.best_parameters(flops) for one in self.resampled]
        return _estimate(self.law.best_parameters(flops), values)

    @property
    def error(self) -> float:
        """The root mean square of the residuals: a relative error of the loss."""
        return float(np.sqrt(np.mean(np.square(self.residuals))))

    def as_law(self) -> Law:
        """The fit beside published laws, for `scaling_laws`."""
        flops = [point.flops for point in self.points]
        source = f"{len(self.points)} runs of your own"
        return law_of_loss("your runs", source, self.law, (min(flops), max(flops)))


def _estimate(value: float, resampled: list[float]) -> Estimate:
    low, high = np.percentile(resampled, INTERVAL)
    return Estimate(float(value), float(low), float(high))


def fit_runs(folders: Sequence[Path], resamples: int = RESAMPLES) -> Fit:
    """Fits the law to the runs in these folders.

    Raises ConfigError with everything that keeps the runs from determining it.
    """
    points, measure = read_points(folders)
    return fit_points(points, measure, resamples)


def read_points(folders: Sequence[Path]) -> tuple[list[Point], str]:
    """The runs as points, and which loss they have: validation, if all were validated at the end.

    Raises ConfigError.
    """
    runs = read_runs([Path(folder) for folder in folders])
    folder_of = {}
    problems = []
    for run in runs:
        problem = _unusable(run)
        if run.folder in folder_of:
            problem = "is given twice"
        folder_of[run.folder] = run
        if problem:
            problems.append(f"{run.name}: {problem}")
    if problems:
        raise ConfigError(problems)
    for key in SAME_TEXT:
        values = {str(run.config.get(key, "")): run.name for run in runs}
        if len(values) > 1:
            (one, first), (other, second) = list(values.items())[:2]
            raise ConfigError(
                f"{key} = {one!r} in {first}, {other!r} in {second}: losses on other text do not "
                "compare; expected runs of one setting"
            )

    columns = set.intersection(*(_validated(run) for run in runs)) if runs else set()
    if columns:
        column = "validation/loss" if "validation/loss" in columns else min(columns)
        losses = [float(run.column(column).values[-1]) for run in runs]
        measure = column
    else:
        losses = [_last_training_loss(run) for run in runs]
        measure = "loss, mean of the last tenth of each run's steps"
    points = [
        Point(run.name, float(_parameters(run)), float(run.column("tokens").values[-1]), loss)
        for run, loss in zip(runs, losses, strict=True)
    ]
    return points, measure


def _unusable(run: Run) -> str:
    """Why a run cannot be used for the fit; empty if it can."""
    if not len(run.column("loss").steps) or not len(run.column("tokens").steps):
        return "found no loss in metrics.jsonl; expected the folder of a run"
    planned = run.config.get("training.steps")
    last = int(run.column("loss").steps[-1])
    if type(planned) is not int:
        return "found no training.steps in config.toml; expected the folder of a run"
    if last < planned:
        return f"stopped at step {last} of {planned}; expected a finished run: its rate has decayed"
    if run.config.get("lora.rank", 0) or run.config.get("checkpoint.initial_load", ""):
        return "began with trained weights; expected a run from the start"
    if not _parameters(run):
        return "found no start with a number of parameters in events.jsonl; expected one"
    return ""


def _parameters(run: Run) -> int:
    """The number of parameters that the run itself has reported; 0 if it has not."""
    for event in reversed(run.events):
        number = event.about.get("parameters")
        if event.name == "start" and type(number) is int and number > 0:
            return number
    return 0


def _validated(run: Run) -> set[str]:
    """The losses on validation text that the run has of its last step."""
    last = run.column("loss").steps[-1]
    return {
        name
        for name, column in run.columns.items()
        if name.startswith("validation/") and name.endswith("/loss") and column.steps[-1] == last
    }


def _last_training_loss(run: Run) -> float:
    column = run.column("loss")
    late = column.steps > 0.9 * column.steps[-1]
    return float(column.values[late].mean())


def fit_points(points: Sequence[Point], measure: str = "loss", resamples: int = RESAMPLES) -> Fit:
    """Fits the law to points. Raises ConfigError if they cannot determine it."""
    problems = undetermined(points)
    if problems:
        raise ConfigError(problems)
    problem = _Problem(points)
    weights = np.ones((1, len(points)))
    starts = _starts(problem)
    best = _solve(problem, weights, starts)

    rng = np.random.default_rng(SEED)
    counts = np.stack([_resample(points, rng) for _ in range(resamples)])
    resampled = _solve(problem, counts, np.concatenate([best, starts[:1]]))
    law = problem.law(best[0])
    residuals = [np.log(point.loss / law.loss(point.parameters, point.tokens)) for point in points]
    return Fit(
        points=tuple(points),
        measure=measure,
        law=law,
        resampled=tuple(problem.law(unknowns) for unknowns in resampled),
        residuals=tuple(float(one) for one in residuals),
    )


def undetermined(points: Sequence[Point]) -> list[str]:
    """Why points do not determine the five unknowns; empty if they may."""
    sizes = sorted({point.parameters for point in points})
    lengths = sorted({point.tokens for point in points})
    if len(points) < FEWEST_RUNS:
        return [
            f"{len(points)} runs: expected at least {FEWEST_RUNS}, because the law has five "
            "unknowns"
        ]
    problems = []
    for values, least, what in (
        (sizes, FEWEST_SIZES, "numbers of parameters"),
        (lengths, FEWEST_LENGTHS, "numbers of tokens"),
    ):
        found = f"{len(values)} different {what}, {short(values[0])} to {short(values[-1])}"
        if len(values) < least or values[-1] / values[0] < LEAST_RANGE:
            problems.append(
                f"the runs have {found}: expected at least {least}, the largest {LEAST_RANGE:g} "
                "times the smallest or more"
            )
    if problems:
        return problems
    n = np.log([point.parameters for point in points])
    d = np.log([point.tokens for point in points])
    if abs(float(np.corrcoef(n, d)[0, 1])) > MOST_ALIKE:
        return [
            "the tokens of the runs follow from their parameters, so the effects of the two cannot "
            "be separated: expected several numbers of tokens for each size"
        ]
    return []


def _resample(points: Sequence[Point], rng: np.random.Generator) -> np.ndarray:
    """How often each point is drawn, in a set that determines a fit."""
    while True:
        drawn = rng.integers(len(points), size=len(points))
        if not undetermined([points[i] for i in drawn]):
            return np.bincount(drawn, minlength=len(points)).astype(float)


class _Problem:
    """The runs as arrays, and the law as a function of the unknowns (batch, 5)."""

    def __init__(self, points: Sequence[Point]) -> None:
        log_n = np.log([point.parameters for point in points])
        log_d = np.log([point.tokens for point in points])
        self.center_n = float(log_n.mean())
        self.center_d = float(log_d.mean())
        self.n = log_n - self.center_n  # (runs,)
        self.d = log_d - self.center_d
        self.log_loss = np.log([point.loss for point in points])

    def law(self, unknowns: np.ndarray) -> LossLaw:
        """The law in its usual form."""
        e, a, b, alpha, beta = unknowns.tolist()
        return LossLaw(
            E=float(np.exp(e)),
            A=float(np.exp(a + alpha * self.center_n)),
            B=float(np.exp(b + beta * self.center_d)),
            alpha=alpha,
            beta=beta,
        )

    def residuals(self, unknowns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """log of fitted over measured loss (batch, runs), and its derivatives (batch, runs, 5)."""
        e, a, b, alpha, beta = (column[:, None] for column in unknowns.T)
        e = np.broadcast_to(e, (len(unknowns), len(self.n)))
        terms = np.stack([e, a - alpha * self.n, b - beta * self.d], axis=-1)  # (batch, runs, 3)
        log_sum = np.logaddexp.reduce(terms, axis=-1)
        shares = np.exp(terms - log_sum[..., None])
        of_alpha = -shares[..., 1] * self.n
        of_beta = -shares[..., 2] * self.d
        exponents = np.stack([of_alpha, of_beta], axis=-1)
        return log_sum - self.log_loss, np.concatenate([shares, exponents], axis=-1)


def _huber(residuals: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weighted sum over the runs, (batch,)."""
    size = np.abs(residuals)
    each = np.where(size <= DELTA, size**2 / 2, DELTA * (size - DELTA / 2))
    return np.asarray((weights * each).sum(axis=1))


def _starts(problem: _Problem) -> np.ndarray:
    """The NUM_STARTS best of a grid of exponents, (starts, 5)."""
    loss = np.exp(problem.log_loss)
    candidates = []
    for alpha in EXPONENTS:
        for beta in EXPONENTS:
            terms = [np.ones_like(loss), np.exp(-alpha * problem.n), np.exp(-beta * problem.d)]
            # Relative errors: each row divided by its loss
            rows = np.stack(terms, axis=1) / loss[:, None]
            factors = np.linalg.lstsq(rows, np.ones_like(loss), rcond=None)[0]
            # One that is not positive begins as a hundredth of the loss
            positive = np.maximum(factors, 0.01 * loss.mean())
            candidates.append([*np.log(positive), alpha, beta])
    unknowns = np.clip(np.array(candidates), LOW, HIGH)
    residuals, _ = problem.residuals(unknowns)
    scores = _huber(residuals, np.ones_like(residuals))
    return np.asarray(unknowns[np.argsort(scores)[:NUM_STARTS]])


def _solve(problem: _Problem, weights: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """For each row of `weights` (sets, runs) the best unknowns (sets, 5)."""
    num_sets = len(weights)
    num_starts = len(starts)
    unknowns = np.tile(starts, (num_sets, 1))  # (sets * starts, 5)
    unknowns, scores = _descend(problem, np.repeat(weights, num_starts, axis=0), unknowns)
    chosen = scores.reshape(num_sets, num_starts).argmin(axis=1)
    return np.asarray(unknowns[chosen + np.arange(num_sets) * num_starts])


def _descend(
    problem: _Problem, weights: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Levenberg and Marquardt's method on each row: a step is taken only if the loss falls.

    Returns the unknowns and their Huber losses. A row that no longer falls is left out.
    """
    unknowns = starts.copy()
    scores = _huber(problem.residuals(unknowns)[0], weights)
    damping = np.full(len(unknowns), 1e-2)
    active = np.arange(len(unknowns))
    for _ in range(NUM_STEPS):
        before = unknowns[active]
        of_runs = weights[active]
        tried = np.clip(before + _step(problem, of_runs, before, damping[active]), LOW, HIGH)
        tried_scores = _huber(problem.residuals(tried)[0], of_runs)
        fall = scores[active] - tried_scores
        better = fall > 0
        unknowns[active[better]] = tried[better]
        falls_on = ~better | (fall > LEAST_FALL * scores[active])
        scores[active[better]] = tried_scores[better]
        damping[active] *= np.where(better, 1 / 3, 4)
        active = active[falls_on & (damping[active] < MOST_DAMPING)]
        if not len(active):
            break
    return unknowns, scores


def _step(
    problem: _Problem, weights: np.ndarray, unknowns: np.ndarray, damping: np.ndarray
) -> np.ndarray:
    """Of least squares with the gradient of the Huber loss: (J' W J + damping) step = -J' W r."""
    residuals, slopes = problem.residuals(unknowns)
    robust = weights * DELTA / np.maximum(np.abs(residuals), DELTA)
    weighted = slopes * robust[..., None]
    normal = np.swapaxes(slopes, 1, 2) @ weighted  # (batch, 5, 5)
    gradient = np.swapaxes(weighted, 1, 2) @ residuals[..., None]
    diagonal = np.einsum("bii->bi", normal)
    normal += np.eye(5) * (damping[:, None] * (diagonal + 1e-9) + 1e-12)[:, :, None]
    return np.asarray(-np.linalg.solve(normal, gradient)[..., 0])


def fit_record(fit: Fit) -> dict[str, Any]:
    """The fit as plain data, for JSON."""
    return {
        "points": [dataclasses.asdict(point) for point in fit.points],
        "measure": fit.measure,
        "unknowns": {name: dataclasses.asdict(fit.estimate(name)) for name in UNKNOWNS},
        "growth": dataclasses.asdict(fit.growth),
        "error": fit.error,
        "undecided": list(fit.undecided),
    }


def fit_lines(fit: Fit) -> list[str]:
    """The fit as text of at most 80 columns."""
    sizes = [point.parameters for point in fit.points]
    tokens = [point.tokens for point in fit.points]
    flops = [point.flops for point in fit.points]
    lines = [
        "L(N, D) = E + A / N^alpha + B / D^beta, in nats per token",
        f"  {len(fit.points)} runs: {short(min(sizes))} to {short(max(sizes))} parameters, "
        f"{short(min(tokens))} to {short(max(tokens))} tokens",
        f"  of {fit.measure}",
        "",
        f"  {'':<8}{'value':>12}{'90 % of resamples':>28}",
    ]
    for name in UNKNOWNS:
        one = fit.estimate(name)
        between = f"{one.low:.4g} to {one.high:.4g}"
        remark = "  not determined" if name in fit.undecided else ""
        lines.append(f"  {name:<8}{one.value:>12.4g}{between:>28}{remark}")
    growth = fit.growth
    lines += [
        "",
        f"  the best N grows as C^{growth.value:.2f} ({growth.low:.2f} to {growth.high:.2f})",
        f"  error of the fitted losses: {100 * fit.error:.2f} % (root mean square)",
        f"  valid for {exponent(min(flops))} to {exponent(max(flops))} FLOPs (6 N D), on this text",
    ]
    return lines
