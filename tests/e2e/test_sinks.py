"""Runs that are killed and resumed, or that roll back: every step is once and in order in all
sinks.
"""

from __future__ import annotations

import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from runs import rows, train_run
from sink_readers import (
    as_mlflow,
    expected,
    float32,
    mlflow_server,
    read_mlflow,
    read_tensorboard,
    read_wandb,
)

from titanlite.tools.verify.pool import WorkerError

MISSING = [name for name in ("tensorboard", "wandb", "mlflow") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}"),
]

# The same in a step that is trained again from the same state; the others are speeds and times
REPEATED = (
    "loss_metrics/global_avg_loss",
    "perplexity",
    "grad_norm",
    "lr",
    "n_tokens_seen",
    "samples",
    "targets",
)


def train_and_die(arguments: list[str], step: int, sent: int) -> int:
    """A run whose process gets SIGKILL when it begins the step after `step`, once the sinks have
    step `sent`.
    """
    from titanlite.data.stream import TrainStream
    from titanlite.sinks import feed as sinks

    feeds, original, start = list[sinks.Feed](), TrainStream.next_step, sinks.Feed.start

    def started(feed):
        feeds.append(feed)
        start(feed)

    def next_step(stream):
        now = stream.samples // 8
        if now == sent:  # every row so far has arrived
            deadline, size = time.monotonic() + 60, os.path.getsize(feeds[0].path)
            while min(feed.sent for feed in feeds) < size and time.monotonic() < deadline:
                time.sleep(0.01)
            sinks.PERIOD = 60.0  # the rows after it are not sent any more
            time.sleep(0.1)
        if now == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(stream)

    sinks.PERIOD, sinks.PATIENCE = 0.02, 60.0
    sinks.Feed.start, TrainStream.next_step = started, next_step
    return train_run(arguments)


def check(folder: Path, uri: str, again: set[int]) -> None:
    """All sinks have the rows of metrics.jsonl; in MLflow the steps `again` keep their first speeds
    and times.
    """
    wanted = expected(rows(folder))
    losses = [step for step, _ in wanted["loss_metrics/global_avg_loss"]]
    assert losses == list(range(1, losses[-1] + 1))
    assert read_tensorboard(folder / "tensorboard")[0] == float32(wanted)
    assert read_wandb(folder)[0] == wanted
    found, run = read_mlflow(uri)
    wanted = as_mlflow(wanted)
    assert run.info.status == "FINISHED"
    assert found.keys() == wanted.keys()
    for name, pairs in wanted.items():
        steps, needed = [step for step, _ in found[name]], [step for step, _ in pairs]
        assert steps == sorted(set(steps)), name
        # A resumed process has step times from its second logged step on; MLflow keeps those of the
        # first attempt.
        extra = (
            again if name.startswith(("time", "memory", "host_memory", "step_seconds")) else set()
        )
        assert set(needed) <= set(steps) <= set(needed) | extra, name
        kept = set() if name in REPEATED or name.startswith(("validation", "epochs")) else again
        values = [(step, value) for step, value in found[name] if step not in kept]
        assert values == [(step, value) for step, value in pairs if step not in kept], name
    kept = {
        step
        for (step, value), (_, new) in zip(found["seconds"], wanted["seconds"], strict=True)
        if value != new
    }
    assert kept == again


def test_a_run_that_is_killed_and_resumed_twice(pool, arguments, tmp_path):
    """Killed at 8 and 12 with a checkpoint at 5 and 10; the last rows before each kill were not
    sent.
    """
    folder = tmp_path / "debug"
    run = [
        *arguments,
        "--training.steps=14",
        "--checkpoint.freq=5",
        "--metrics.sinks=tensorboard,wandb,mlflow",
    ]
    with mlflow_server(tmp_path) as uri:
        run.append(f"--metrics.mlflow_uri={uri}")
        for step, sent in ((8, 7), (12, 11)):
            with pytest.raises(WorkerError, match="died"):
                pool.run(1, train_and_die, run, step, sent, timeout=150)
            assert rows(folder)[-1]["step"] == step
            assert max(last for last, _ in read_mlflow(uri)[0]["n_tokens_seen"]) == sent
        assert pool.run(1, train_and_die, run, 99, 99, timeout=150) == [0]
        assert "resumed from" in (folder / "log.txt").read_text()
        check(folder, uri, again={6, 7, 11})
        params = read_mlflow(uri)[1].data.params
    assert params["training.steps"] == "14"


def roll_back(arguments: list[str]) -> int:
    """A run whose fifth step is not finite, with sinks that have all steps before it when it is
    judged.
    """
    from titanlite.optim.stability import Guard
    from titanlite.sinks import feed as sinks

    feeds, judge, start, done = list[sinks.Feed](), Guard.judge, sinks.Feed.start, list[int]()

    def started(feed):
        feeds.append(feed)
        start(feed)

    def judged(guard, step, samples, loss, grad_norm, num_targets):
        if step == 5 and not done:
            done.append(step)
            deadline, size = time.monotonic() + 60, os.path.getsize(feeds[0].path)
            while min(feed.sent for feed in feeds) < size and time.monotonic() < deadline:
                time.sleep(0.01)
            loss = loss * float("nan")
        judge(guard, step, samples, loss, grad_norm, num_targets)

    sinks.PERIOD, sinks.PATIENCE = 0.02, 60.0
    sinks.Feed.start, Guard.judge = started, judged
    return train_run(arguments)


def test_a_run_that_rolls_back(pool, arguments, tmp_path):
    """From step 5 to the checkpoint of step 3: step 4 is trained twice, and MLflow keeps its first
    time.
    """
    folder = tmp_path / "debug"
    run = [*arguments, "--checkpoint.freq=3", "--stability.action=rollback", "--validation.freq=0"]
    with mlflow_server(tmp_path) as uri:
        run += ["--metrics.sinks=tensorboard,wandb,mlflow", f"--metrics.mlflow_uri={uri}"]
        assert pool.run(1, roll_back, run, timeout=150) == [0]
        assert "rolled back to step 3," in (folder / "log.txt").read_text()
        wanted, found = expected(rows(folder)), read_mlflow(uri)[0]
        assert read_tensorboard(folder / "tensorboard")[0] == float32(wanted)
        assert read_wandb(folder)[0] == wanted
    assert found["loss_metrics/global_avg_loss"] == wanted["loss_metrics/global_avg_loss"]
    assert [step for step, _ in found["seconds"]] == list(range(1, 7))
    pairs = zip(found["seconds"], wanted["seconds"], strict=True)
    assert [step for (step, value), (_, new) in pairs if value != new] == [4]
    assert found["rollbacks"][-1] == (6, 1)
