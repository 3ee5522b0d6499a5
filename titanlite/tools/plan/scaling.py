"""Scaling laws: which model size and how many tokens make the best use of a number of FLOPs.

What it is: published answers beside each other, as a range. Each law says which N (parameters)
reaches the lowest loss for C = 6 N D FLOPs, where D is the number of tokens. In log(C) and log(N)
it is a straight line, or a table's rows with straight lines between them, extrapolated with the
first or last slope. So a law is a list of points (C, N), and one interpolation finds C, N and D
from any one of them.

    rule                N = sqrt(C / 120), which is D = 20 N
    approach 1, 2       the rows of the paper's tables 3 and A3 (it prints no coefficients)
    approach 3          L(N, D) = E + A / N^alpha + B / D^beta, which for C = 6 N D is lowest at
                        N = G (C / 6)^(beta / (alpha + beta)),
                        G = (alpha A / (beta B))^(1 / (alpha + beta))
    Kaplan et al.       N = 1.3e9 (C / PF-day)^0.73

Why it is here: a single number hides that the laws disagree. At 5.76e23 FLOPs approach 3 as it is
printed has half the parameters of the others: its exponents were rounded, and its fit had not
converged.
The laws are those of the text, tokenizer, architecture and learning-rate schedule of their authors,
and of runs far smaller than most that are planned with them.
Reference: Hoffmann et al. 2022 (arXiv 2203.15556), Besiroglu et al. 2024 (arXiv 2404.10102),
Kaplan et al. 2020 (arXiv 2001.08361). Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.amounts import exponent, short

TOKENS_PER_PARAMETER = 20
PF_DAY = 1e15 * 86400
WIDTH = 80
TOO_FAR = 1000  # times outside a law's runs: its loss would be a number without meaning


@dataclass(frozen=True)
class LossLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats per token."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    def best_parameters(self, flops: float) -> float:
        """The N of the lowest loss for 6 N D FLOPs."""
        both = self.alpha + self.beta
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / both)
        return float(scale * (flops / 6) ** (self.beta / both))


@dataclass(frozen=True)
class Law:
    """The best N for a number of FLOPs, by one source."""

    name: str
    source: str
    points: tuple[tuple[float, float], ...]  # (C, N), ascending; at least two
    fitted: tuple[float, float]  # smallest and largest C of the runs that it was fitted to
    loss_law: LossLaw | None = None  # if the source has one

    def extrapolates(self, flops: float) -> float:
        """The factor by which so many FLOPs are outside the runs of the law; 1 within them."""
        low, high = self.fitted
        return max(1.0, flops / high, low / flops)


def law_of_loss(name: str, source: str, loss: LossLaw, fitted: tuple[float, float]) -> Law:
    """A law from its loss: two points, since the best N is a power of C."""
    ends = (1e15, 1e27)
    points = tuple((flops, loss.best_parameters(flops)) for flops in ends)
    return Law(name, source, points, fitted, loss)


# C of the paper's IsoFLOP profiles, with 70M to 16B parameters and 5B to 500B tokens
CHINCHILLA_RUNS = (6e18, 3e21)
CHINCHILLA = "arXiv 2203.15556"
# N of the rows of the tables 3 and A3, and their FLOPs by approach 1 and 2
SIZES = (0.4e9, 1e9, 10e9, 67e9, 175e9, 280e9, 520e9, 1e12, 10e12)
TABLE_3 = (1.92e19, 1.21e20, 1.23e22, 5.76e23, 3.85e24, 9.90e24, 3.43e25, 1.27e26, 1.30e28)
TABLE_A3 = (1.84e19, 1.20e20, 1.32e22, 6.88e23, 4.54e24, 1.18e25, 4.19e25, 1.59e26, 1.75e28)

# As printed (equation 10); with all digits, from the paper's TeX source, which Besiroglu et al.
# quote; and their fit to 240 of the paper's runs, whose losses they read from its figure 4
PRINTED = LossLaw(1.69, 406.4, 410.7, 0.34, 0.28)
UNROUNDED = LossLaw(1.6934, 406.4, 410.7, 0.3392, 0.2849)
CORRECTED = LossLaw(1.8172, 482.01, 2085.43, 0.3478, 0.3658)

RULE = Law(
    "20 tokens per parameter",
    f"{CHINCHILLA}, its own choice",
    ((1.2e18, 1e8), (1.2e26, 1e12)),
    CHINCHILLA_RUNS,
)
KAPLAN = Law(
    "Kaplan et al.",
    "arXiv 2001.08361, table 6",
    ((PF_DAY, 1.3e9), (1e6 * PF_DAY, 1.3e9 * 1e6**0.73)),
    (6 * 768 * 22e6, 6 * 1.5e9 * 23e9),  # its smallest and largest model and text
)
LAWS = (
    RULE,
    Law(
        "Chinchilla, approach 1",
        f"{CHINCHILLA}, table 3",
        tuple(zip(TABLE_3, SIZES, strict=True)),
        CHINCHILLA_RUNS,
    ),
    Law(
        "Chinchilla, approach 2",
        f"{CHINCHILLA}, table A3",
        tuple(zip(TABLE_A3, SIZES, strict=True)),
        CHINCHILLA_RUNS,
    ),
    law_of_loss("Chinchilla, approach 3", f"{CHINCHILLA}, eq. 10", PRINTED, CHINCHILLA_RUNS),
    law_of_loss("approach 3, all digits", f"{CHINCHILLA}, TeX", UNROUNDED, CHINCHILLA_RUNS),
    law_of_loss("approach 3, fitted again", "arXiv 2404.10102", CORRECTED, CHINCHILLA_RUNS),
    KAPLAN,
)


@dataclass(frozen=True)
class Optimum:
    """The run that a law recommends."""

    law: Law
    flops: float
    parameters: float
    tokens: float
    loss: float | None  # as the law itself predicts it
    extrapolated: float  # factor by which C is outside the runs of the law; 1 within them


@dataclass(frozen=True)
class Prediction:
    """The loss of a run by a law that has one."""

    law: Law
    loss: float


@dataclass(frozen=True)
class Scaling:
    """The answers of the laws, for a run or for one of its numbers."""

    given: tuple[str, ...]  # of flops, parameters, tokens
    flops: float | None  # 6 N D; None if neither it nor both others were given
    parameters: float | None
    tokens: float | None
    optima: tuple[Optimum, ...]  # for the FLOPs, else for the number that was given
    over_training: float | None  # tokens / (20 N)
    predictions: tuple[Prediction, ...]  # of the run, if N and D are known

    def spread(self) -> tuple[Optimum, Optimum]:
        """The optima with the fewest and the most parameters; for a given N, the fewest and the
        most tokens. Kaplan's law is left out, since later work contradicts it.
        """
        compared = [optimum for optimum in self.optima if optimum.law is not KAPLAN]
        by_tokens = self.given == ("parameters",)
        compared.sort(key=lambda one: one.tokens if by_tokens else one.parameters)
        return compared[0], compared[-1]


def scaling_laws(
    *,
    flops: float | None = None,
    parameters: float | None = None,
    tokens: float | None = None,
) -> Scaling:
    """Asks all laws about one or two of the three numbers; C = 6 N D gives the third.

    Raises ConfigError.
    """
    numbers = {"flops": flops, "parameters": parameters, "tokens": tokens}
    given = tuple(name for name, value in numbers.items() if value is not None)
    if not 1 <= len(given) <= 2:
        found = ", ".join(given) or "none"
        raise ConfigError(f"scaling laws of {found}: expected one or two of {', '.join(numbers)}")
    for name in given:
        value = numbers[name]
        if value is None or not 0 < value < math.inf:
            raise ConfigError(f"{name} = {value}: expected a number above 0")

    if parameters is not None and tokens is not None:
        flops = 6 * parameters * tokens
    elif flops is not None and parameters is not None:
        tokens = flops / (6 * parameters)
    elif flops is not None and tokens is not None:
        parameters = flops / (6 * tokens)

    if flops is not None:
        optima = [_optimum(law, flops) for law in LAWS]
    elif parameters is not None:
        optima = [_optimum(law, _flops_of_parameters(law, parameters)) for law in LAWS]
    else:
        assert tokens is not None
        optima = [_optimum(law, _flops_of_tokens(law, tokens)) for law in LAWS]

    over_training = None
    predictions = []
    if parameters is not None and tokens is not None:
        over_training = tokens / (TOKENS_PER_PARAMETER * parameters)
        for law in LAWS:
            if law.loss_law is not None:
                predictions.append(Prediction(law, law.loss_law.loss(parameters, tokens)))
    return Scaling(
        given, flops, parameters, tokens, tuple(optima), over_training, tuple(predictions)
    )


def _optimum(law: Law, flops: float) -> Optimum:
    parameters = _interpolate(flops, law.points)
    tokens = flops / (6 * parameters)
    loss = law.loss_law.loss(parameters, tokens) if law.loss_law else None
    return Optimum(law, flops, parameters, tokens, loss, law.extrapolates(flops))


def _flops_of_parameters(law: Law, parameters: float) -> float:
    return _interpolate(parameters, [(size, flops) for flops, size in law.points])


def _flops_of_tokens(law: Law, tokens: float) -> float:
    return _interpolate(tokens, [(flops / (6 * size), flops) for flops, size in law.points])


def _interpolate(x: float, points: Sequence[tuple[float, float]]) -> float:
    """y at x, on straight lines between the logarithms of the points, extrapolated at the ends."""
    upper = 1
    while upper < len(points) - 1 and points[upper][0] < x:
        upper += 1
    x0, y0 = points[upper - 1]
    x1, y1 = points[upper]
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    return y0 * (x / x0) ** slope


def scaling_lines(scaling: Scaling) -> list[str]:
    """The answer as text of at most 80 columns."""
    lines = [_title(scaling), ""]
    head = f"  {'law':<26}{'parameters':>11}{'tokens':>9}{'tokens/par.':>13}{'FLOPs':>10}"
    lines.append(f"{head}{'loss':>8}")
    for one in scaling.optima:
        known = one.loss is not None and one.extrapolated <= TOO_FAR
        loss = f"{one.loss:.3f}" if known else "n/a"
        ratio = f"{one.tokens / one.parameters:.3g}"
        row = f"  {one.law.name:<26}{short(one.parameters):>11}{short(one.tokens):>9}{ratio:>13}"
        lines.append(f"{row}{exponent(one.flops):>10}{loss:>8}")
    lines += ["", _range(scaling)]
    if scaling.over_training is not None:
        lines += _run_lines(scaling)
    return lines + _validity(scaling)


def _title(scaling: Scaling) -> str:
    if scaling.flops is not None:
        return f"What {exponent(scaling.flops)} FLOPs (6 N D) are best spent on, by law:"
    if scaling.parameters is not None:
        return f"With how many tokens {short(scaling.parameters)} parameters are best, by law:"
    assert scaling.tokens is not None
    return f"How many parameters {short(scaling.tokens)} tokens are best spent on, by law:"


def _range(scaling: Scaling) -> str:
    low, high = scaling.spread()
    if scaling.given == ("parameters",):
        text = f"{short(low.tokens)} to {short(high.tokens)} tokens"
    else:
        text = f"{short(low.parameters)} to {short(high.parameters)} parameters"
    return f"  range: {text} (without Kaplan et al.)"


def _run_lines(scaling: Scaling) -> list[str]:
    assert scaling.parameters is not None
    assert scaling.tokens is not None
    assert scaling.over_training is not None
    parameters = short(scaling.parameters)
    tokens = short(scaling.tokens)
    lines = [
        f"  this run: {parameters} parameters, {tokens} tokens: {scaling.over_training:.3g} times "
        f"{TOKENS_PER_PARAMETER} per parameter"
    ]
    assert scaling.flops is not None
    furthest = max((one.law.extrapolates(scaling.flops) for one in scaling.predictions), default=1)
    if furthest > TOO_FAR:
        lines.append(
            f"  no predicted loss: the run is {short(furthest)} times outside the runs of the laws"
        )
    elif scaling.predictions:
        losses = [one.loss for one in scaling.predictions]
        lines.append(
            f"  predicted loss: {min(losses):.3f} to {max(losses):.3f} nats per token, on the text "
            "of its law"
        )
    return lines


def _validity(scaling: Scaling) -> list[str]:
    """Lines with the range of runs behind each law, and how far this run is outside it."""
    groups: dict[tuple[float, float], list[Optimum]] = {}
    for optimum in scaling.optima:
        groups.setdefault(optimum.law.fitted, []).append(optimum)
    lines = []
    for (low, high), optima in groups.items():
        sources = list(dict.fromkeys(one.law.source.partition(",")[0] for one in optima))
        furthest = max(one.extrapolated for one in optima)
        text = f"  {' and '.join(sources)}: runs of {low:.1e} to {high:.1e} FLOPs"
        lines.append(text.replace("e+", "e"))
        if furthest > 1:
            lines.append(f"    EXTRAPOLATED: {short(furthest)} times outside these")
    return lines
