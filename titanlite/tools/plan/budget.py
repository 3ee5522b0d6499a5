"""Computes FLOPs, time, GPU-hours and cost of a run, the size of its checkpoints, and when to save.

What it is: arithmetic. `run_flops` counts attention, as the MFU in metrics.jsonl does
(model/flops.py), and has 6 N D beside it. `run_budget` takes a speed: a measured or predicted
number of tokens per second, or one from an assumed MFU. `save_interval` weighs the time of saving
against the work that a failure loses:

    tau = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d, or M if d >= 2M

where tau is the training between two saves, d the time for which training waits for a save, and M
the mean time between failures of the whole run, which is that of a GPU over their number. With
failures at random (exponential), a run that would take T without saves and failures takes

    M (e^((tau + d) / M) - 1) T / tau

of which tau is the minimum, to 1 % up to d = M / 2.
Reference: PaLM (arXiv 2204.02311, appendix B) for FLOPs; Daly 2006 (Future Generation Computer
Systems 22-3). Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.config.schema import Config, LoraConfig
from titanlite.model.flavors import LlamaConfig, parameter_shapes
from titanlite.model.flops import (
    NO_ADAPTERS,
    flops_per_token,
    is_trained,
    num_adapter_parameters,
)
from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.amounts import duration, exponent, short

HOUR = 3600.0
# Hours of one GPU between two failures. Llama 3 405B (arXiv 2407.21783, section 3.3.4) had 419
# unexpected interruptions in 54 days on about 16,384 H100.
GPU_MTBF_HOURS = 54 * 24 * 16384 / 419
BYTES = {"float32": 4, "bfloat16": 2}
LABEL = 16  # columns of a line's name
LARGEST_EXPONENT = 700  # e to the power of 710 is larger than a double


@dataclass(frozen=True)
class RunFlops:
    """FLOPs of a run, recomputation not counted."""

    tokens: float
    six_nd: float
    total: float  # with attention, and without the embedding's lookup
    attention_share: float  # FLOPs of attention over 6 N D

    @property
    def per_token(self) -> float:
        return self.total / self.tokens


def run_flops(
    model: LlamaConfig,
    seq_len: int,
    tokens: float,
    lora: LoraConfig = NO_ADAPTERS,
    frozen: Sequence[str] = (),
) -> RunFlops:
    """The FLOPs of training on so many tokens in sequences of `seq_len`.

    `frozen`: the patterns of `training.frozen`.
    """
    per_token = flops_per_token(model, seq_len, lora, frozen)
    attention = per_token - flops_per_token(model, 0, lora, frozen)
    six_n = 6 * model.num_active_parameters
    return RunFlops(tokens, six_n * tokens, per_token * tokens, attention / six_n)


@dataclass(frozen=True)
class Budget:
    """Time and cost of a run on so many GPUs."""

    tokens: float
    flops: float
    gpus: int
    tokens_per_second: float  # of one GPU
    mfu: float | None  # a fraction; None if the GPU's peak is not known
    seconds: float
    price: float | None  # dollars per GPU-hour; None if it is not known

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.seconds / HOUR

    @property
    def cost(self) -> float | None:
        """Dollars; None if the price is not known."""
        return None if self.price is None else self.price * self.gpu_hours


def speed_from_mfu(flops_per_token: float, mfu: float, peak_tflops: float) -> float:
    """Tokens per second of a GPU of this peak. Raises ConfigError."""
    if not 0 < mfu <= 1:
        raise ConfigError(f"mfu = {mfu}: expected a fraction, as in 0.45 for 45 %")
    _positive(flops_per_token=flops_per_token, peak_tflops=peak_tflops)
    return mfu * peak_tflops * 1e12 / flops_per_token


def run_budget(
    flops_per_token: float,
    gpus: int,
    tokens_per_second: float,
    *,
    tokens: float | None = None,
    flops: float | None = None,
    seconds: float | None = None,
    price: float | None = None,
    peak_tflops: float | None = None,
) -> Budget:
    """The budget of a run whose length is given in tokens, in FLOPs or as a time.

    `tokens_per_second` is that of one GPU. Raises ConfigError.
    """
    lengths = {"tokens": tokens, "flops": flops, "seconds": seconds}
    given = [name for name, value in lengths.items() if value is not None]
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise ConfigError(f"length of the run: found {found}; expected one of {', '.join(lengths)}")
    _positive(
        flops_per_token=flops_per_token, gpus=gpus, tokens_per_second=tokens_per_second, **lengths
    )
    if price is not None and not 0 <= price < math.inf:
        raise ConfigError(f"price = {price}: expected dollars per GPU-hour, at least 0")

    of_all = gpus * tokens_per_second
    if flops is not None:
        tokens = flops / flops_per_token
    elif seconds is not None:
        tokens = seconds * of_all
    assert tokens is not None
    mfu = None
    if peak_tflops is not None:
        mfu = tokens_per_second * flops_per_token / (peak_tflops * 1e12)
        if mfu > 1:
            raise ConfigError(
                f"{tokens_per_second:g} tokens/s per GPU: need {100 * mfu:.0f} % of its peak of "
                f"{peak_tflops:g} TFLOP/s; expected at most {tokens_per_second / mfu:.0f}"
            )
    return Budget(
        tokens=tokens,
        flops=tokens * flops_per_token,
        gpus=gpus,
        tokens_per_second=tokens_per_second,
        mfu=mfu,
        seconds=tokens / of_all,
        price=price,
    )


def _positive(**numbers: float | None) -> None:
    """Raises ConfigError unless each number, if it is given, is above 0 and finite."""
    problems = [
        f"{name} = {value}: expected a number above 0"
        for name, value in numbers.items()
        if value is not None and not 0 < value < math.inf
    ]
    if problems:
        raise ConfigError(problems)


def checkpoint_bytes(model: LlamaConfig, config: Config) -> int:
    """The bytes of the tensors in a checkpoint of this model.

    Parameters in param_dtype, moments in state_dtype (Muon has one for the matrices of the blocks),
    AdamW's fp32 count of steps for each tensor, and the fp32 average of the weights. With adapters,
    those of the adapters alone. Not counted: some kilobytes of generators, positions and headers.
    """
    optimizer = config.optimizer
    weight = BYTES[config.training.param_dtype]
    moment = BYTES[optimizer.state_dtype]
    average = 4 if config.ema.decay > 0 else 0
    if config.lora.rank > 0:
        # Two matrices, a and b, for each adapted layer
        layers = sum(config.lora.adapts_layer(number) for number in range(model.num_layers))
        counts = 2 * 4 * layers * len(config.lora.target_names)
        each = weight + 2 * moment + average
        return each * num_adapter_parameters(model, config.lora) + counts

    total = 0
    for name, shape in parameter_shapes(model).items():
        numbers = math.prod(shape)
        total += weight * numbers
        if not is_trained(name, model, config.lora, config.training.frozen_patterns):
            continue
        total += average * numbers
        if optimizer.uses_muon(name, len(shape)):
            total += moment * numbers
        else:
            total += 2 * moment * numbers + 4
    return total


@dataclass(frozen=True)
class SaveInterval:
    """The best interval between saves, if failures are random and independent."""

    save_seconds: float  # for which training waits
    mtbf_seconds: float  # of the whole run
    interval_seconds: float  # of training between two saves

    def lost(self, interval: float) -> float:
        """Computes the time lost to saves and failures, as a fraction of the useful time.

        Infinite where the result exceeds a double.
        """
        mtbf = self.mtbf_seconds
        cycle = (interval + self.save_seconds) / mtbf
        if cycle > LARGEST_EXPONENT:
            return math.inf
        return math.expm1(cycle) * mtbf / interval - 1


def save_interval(
    save_seconds: float, gpus: int, gpu_mtbf_hours: float = GPU_MTBF_HOURS
) -> SaveInterval:
    """Computes the best interval between two saves. Raises ConfigError."""
    _positive(save_seconds=save_seconds, gpus=gpus, gpu_mtbf_hours=gpu_mtbf_hours)
    mtbf = gpu_mtbf_hours * HOUR / gpus
    if save_seconds >= 2 * mtbf:
        return SaveInterval(save_seconds, mtbf, mtbf)
    ratio = save_seconds / (2 * mtbf)
    first_order = math.sqrt(2 * save_seconds * mtbf)
    best = first_order * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds
    return SaveInterval(save_seconds, mtbf, best)


def flops_lines(flops: RunFlops, seq_len: int) -> list[str]:
    """The FLOPs as text of at most 80 columns."""
    share = f"{100 * flops.attention_share:.1f} %"
    return [
        _line("FLOPs", f"{exponent(flops.total)} with attention in sequences of {seq_len:,}"),
        _line("", f"6 N D with all trained: {exponent(flops.six_nd)}; attention is {share} of it"),
        _line("", f"{exponent(flops.per_token)} per token; recomputation is not counted"),
    ]


def budget_lines(budget: Budget) -> list[str]:
    """The budget as text of at most 80 columns."""
    mfu = "n/a" if budget.mfu is None else f"{100 * budget.mfu:.1f} %"
    cost = "n/a: the price is not known"
    if budget.cost is not None:
        cost = f"${budget.cost:,.0f} at ${budget.price:,.2f} per GPU-hour"
    speed = f"{budget.tokens_per_second:,.0f} tokens/s per GPU, MFU {mfu}"
    gpus = "GPU" if budget.gpus == 1 else "GPUs"
    return [
        _line("tokens", short(budget.tokens)),
        _line("speed", speed),
        _line("time", f"{duration(budget.seconds)} on {budget.gpus:,} {gpus}"),
        _line("GPU-hours", f"{budget.gpu_hours:,.0f}"),
        _line("cost", cost),
    ]


def save_lines(
    interval: SaveInterval,
    checkpoint: int,
    step_seconds: float | None = None,
    run_seconds: float | None = None,
) -> list[str]:
    """The checkpoint and when to save, as text of at most 80 columns.

    With `step_seconds`, the time of a training step, the interval is given in steps too.
    `run_seconds` is the time of the whole run.
    """
    best = interval.interval_seconds
    size = _line("checkpoint", f"{checkpoint / 1e9:,.2f} GB")
    saving = duration(interval.save_seconds)
    failing = f"failure every {duration(interval.mtbf_seconds)} at random"
    if interval.save_seconds > interval.mtbf_seconds:
        return [
            size,
            _line("save every", "n/a: failures come faster than saves, which stop"),
            _line("", f"training for {saving}, with a {failing}"),
        ]
    if run_seconds is not None and best > run_seconds:
        every = f"{duration(best)}, longer than the run: save at its end"
    else:
        steps = ""
        if step_seconds is not None:
            steps = f" = {max(1, round(best / step_seconds)):,} steps"
        lost = 100 * interval.lost(best)
        every = f"{duration(best)}{steps}; {lost:.1f} % of the time is lost"
    return [
        size,
        _line("save every", every),
        _line("", f"for saves that stop training for {saving}, and a"),
        _line("", failing),
    ]


def _line(name: str, value: str) -> str:
    return f"  {name:<{LABEL}}{value}"
