"""The remaining time: with a simulated clock, runs of known length."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from titanlite.config.batch_sizes import samples_after
from titanlite.config.schema import (
    CheckpointConfig,
    Config,
    MetricsConfig,
    TrainingConfig,
    ValidationConfig,
)
from titanlite.model.flavors import FLAVORS
from titanlite.observe import metrics as metrics_module
from titanlite.observe.eta import Eta
from titanlite.observe.metrics import Metrics, Progress


class Times(NamedTuple):
    """Seconds of what a simulated run does."""

    sample: float = 0.02  # of training
    compiling: float = 40.0  # in the first step
    validation: float = 12.0
    compiling_validation: float = 25.0  # in the first evaluation
    save: float = 4.0
    set_up: float = 0.0  # that a step takes besides its samples


def simulated(
    folder: Path,
    training: TrainingConfig,
    validation: ValidationConfig,
    checkpoint: CheckpointConfig,
    times: Times,
) -> tuple[list[tuple[int, float, float]], float]:
    """For each logged step: step, time and expected end; and the time of the end.

    Calls Metrics as train.py does.
    """
    now, shown, progress = [1000.0], list[dict[str, Any]](), Progress()
    data: Any = SimpleNamespace(samples=0, epochs={"text": 0.1}, take_seconds=lambda: 0.0)
    data.samples_after = lambda steps: samples_after(training, data.samples, steps)
    llama = FLAVORS["debug"].__class__(**{**vars(FLAVORS["debug"]), "vocab_size": 4112})
    config = Config(
        training=training,
        validation=validation,
        checkpoint=checkpoint,
        metrics=MetricsConfig(step_times=False),
    )
    saved_at = now[0]

    def validate() -> None:
        if not run.compiling:
            run.compiling = times.compiling_validation
            now[0] += run.compiling
        now[0] += times.validation

    with (
        mock.patch.object(
            metrics_module, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0])
        ),
        mock.patch.object(
            metrics_module.logger, "info", lambda text, extra: shown.append(extra["row"])
        ),
    ):
        run = Metrics(config, llama, folder, torch.device("cpu"), progress)
        now[0] += 0.3  # the rest of the set-up
        if validation.freq:
            with run.paused():
                validate()
        run.start()
        found, zero = [], torch.zeros(())
        while progress.step < training.steps:
            progress.step += 1
            step, before = progress.step, data.samples
            data.samples = data.samples_after(1)
            now[0] += (
                times.set_up
                + (data.samples - before) * times.sample
                + times.compiling * (step == 1)
            )
            run.count_step((data.samples - before) * training.seq_len, zero)
            last = step == training.steps
            if run.due(last):
                run.log(zero, zero, zero, 0.1, data)
                found.append((step, now[0], now[0] + shown[-1]["eta"]))
            validates = validation.freq > 0 and (last or step % validation.freq == 0)
            saves = last or (checkpoint.freq > 0 and step % checkpoint.freq == 0)
            saves = saves or 0 < checkpoint.freq_minutes * 60 <= now[0] - saved_at
            if saves or validates:
                with run.paused():
                    if validates:
                        validate()
                    if saves:
                        now[0] += times.save
                        saved_at = now[0]
    return [(step, time - 1000, end - 1000) for step, time, end in found], now[0] - 1000


TRAINING = TrainingConfig(steps=1000, seq_len=128, global_batch_size=32, local_batch_size=4)
RAMP = TrainingConfig(
    steps=1000, seq_len=128, global_batch_size=16, local_batch_size=4, batch_ramp="48 from step 301"
)
NEVER = ValidationConfig()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "validation", "checkpoint", "times"),
    [
        (TRAINING, NEVER, CheckpointConfig(freq=0), Times()),
        (TRAINING, ValidationConfig(freq=100), CheckpointConfig(freq=0), Times()),
        (TRAINING, ValidationConfig(freq=100), CheckpointConfig(freq=500), Times()),
        # Validations take a third
        (TRAINING, ValidationConfig(freq=50), CheckpointConfig(freq=20), Times()),
        (TRAINING, NEVER, CheckpointConfig(freq=10), Times(save=2.0)),
        (TRAINING, NEVER, CheckpointConfig(freq=0, freq_minutes=1), Times(save=9.0, compiling=0)),
        (RAMP, ValidationConfig(freq=100), CheckpointConfig(freq=200), Times()),
    ],
    ids=["plain", "validation", "validation and saves", "often", "saves", "by the minute", "ramp"],
)
def test_within_a_tenth_after_the_first_minute(
    pool, tmp_path, training, validation, checkpoint, times
):
    """The estimate is within a tenth of the real time, and at the end within one save: nothing is
    known of the first save before it.
    """
    ((found, end),) = pool.run(1, simulated, tmp_path, training, validation, checkpoint, times)
    begin = found[0][1] - times.compiling
    late = [entry for entry in found if entry[1] > begin + times.compiling + 60]
    if checkpoint.freq_minutes:  # how long a save takes is known after the first one
        late = [entry for entry in late if entry[1] > begin + 75]
    assert len(late) > 50
    for step, time, expected in late:
        assert expected - time == pytest.approx(end - time, rel=0.1, abs=times.save + 0.1), step
    assert found[-1][0] == training.steps  # the last line is before the last validation and save
    assert end - found[-1][1] == pytest.approx(
        times.save + times.validation * bool(validation.freq)
    )


def estimate(**sections: Any) -> Eta:
    return Eta(
        100,
        ValidationConfig(**sections.get("validation", {})),
        CheckpointConfig(**sections["checkpoint"]),
    )


def test_the_first_window_counts_until_there_is_another():
    eta = estimate(checkpoint={"freq": 0})
    eta.add_window(30.0, 1000)
    assert eta.remaining(1, 10_000) == 300
    eta.add_window(1.0, 1000)
    assert eta.remaining(2, 10_000) == 10
    eta.add_window(3.0, 1000)
    assert eta.remaining(3, 10_000) == 20


def test_the_speed_is_that_of_the_last_minutes():
    eta = estimate(checkpoint={"freq": 0})
    for seconds in [1.0, *[100.0] * 5, *[10.0] * 40]:
        eta.add_window(seconds, 1000)
    assert eta.remaining(46, 5000) == pytest.approx(50)


def test_pauses_still_to_come():
    """Every 10 steps a validation, every 25 a save; both at 50 and after the last."""
    eta = estimate(validation={"freq": 10}, checkpoint={"freq": 25})
    eta.add_window(1.0, 100, [(0, 9.0)], compiling=6.0)  # the first evaluation compiles
    assert eta.remaining(100, 0) == 3
    assert eta.remaining(91, 0) == 3
    assert eta.remaining(90, 0) == 6  # the validation after this step is to come
    eta.add_window(1.0, 100, [(25, 2.0)])
    assert eta.remaining(90, 0) == 3 + 5
    assert eta.remaining(1, 0) == 8 * 3 + 2 * 2 + 5 + 5
    eta.add_window(1.0, 100, [(50, 7.0)])
    assert eta.remaining(90, 0) == 3 + 7
    # The last one was not by steps: a rollback, or on request
    eta.add_window(1.0, 100, [(60, 5.0), (63, 1000.0)])
    assert eta.remaining(90, 0) == 4 + 7


def test_pauses_that_have_not_occurred_alone():
    eta = estimate(validation={"freq": 10}, checkpoint={"freq": 10})
    eta.add_window(1.0, 100, [(0, 3.0)])
    eta.add_window(1.0, 100, [(10, 5.0)])
    assert eta.remaining(100, 0) == 5
    # A run that was resumed after step 10
    eta = estimate(validation={"freq": 20}, checkpoint={"freq": 10})
    eta.add_window(1.0, 100, [(20, 5.0)])
    assert eta.remaining(95, 0) == 5


def test_the_step_that_compiles_is_no_estimate():
    """Step 1 takes 60 s of compiling and 1 s; each later one of 100 steps 1 s."""
    off = (ValidationConfig(freq=0), CheckpointConfig(freq=0))
    eta = Eta(100, *off, compiles=True)
    eta.add_window(61.0, 10)
    assert eta.remaining(1, 990) is None
    eta.add_window(9.0, 90)
    assert eta.remaining(10, 900) == pytest.approx(90.0)
    only = Eta(1, *off, compiles=True)
    only.add_window(61.0, 10)
    assert only.remaining(1, 0) == 0
    plain = Eta(100, *off)
    plain.add_window(1.0, 10)
    assert plain.remaining(1, 990) == pytest.approx(99.0)
