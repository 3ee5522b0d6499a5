"""metrics.jsonl: its keys, its steps, memory columns, and how rarely a step reads from the device."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runs import rows, train_run

from titanlite.observe.memory import memory_columns, peak_memory_gib
from titanlite.observe.metrics import Metrics, Progress
from titanlite.observe.metrics_file import truncate_after


def test_contract_of_metrics_jsonl(pool, arguments, tmp_path):
    """Keys, units and steps of the rows: first, every log_freq-th, last."""
    assert pool.run(2, train_run, [*arguments, "--metrics.log_freq=4"]) == [0, 0]
    found = rows(tmp_path / "debug")
    steps = [row for row in found if "loss" in row]
    assert [row["step"] for row in steps] == [1, 4, 6]
    for row in steps:
        assert list(row)[:19] == [
            "step", "loss", "grad_norm", "lr", "tokens", "tps", "tps_global",
            "tflops", "mfu", "memory_gib", "data_percent", "seconds", "targets",
            "targets_per_second", "data_wait_percent",
            "samples", "samples_per_second", "perplexity", "epochs/numbers",
        ]  # fmt: skip
        assert ("step_seconds" in row) == (row["step"] > 1)  # the first step compiles
        assert list(row)[-1] == "time"
        assert row["tokens"] == row["step"] * 8 * 64
        assert row["tps_global"] == pytest.approx(2 * row["tps"])
        assert row["mfu"] is None
        assert 0.05 < row["memory_gib"] < 24
        assert row["data_percent"] > 0
        assert row["targets"] == 8 * 64
        assert row["targets_per_second"] == pytest.approx(row["tps_global"])
        assert row["samples"] == row["step"] * 8
        assert row["samples_per_second"] == pytest.approx(row["tps_global"] / 64)
        assert row["perplexity"] == math.exp(row["loss"])
        assert 100 * row["epochs/numbers"] == pytest.approx(row["data_percent"])
        assert time.time() - 60 < row["time"] < time.time()
        assert 0 < row["data_wait_percent"] < 100
    assert steps[0]["lr"] == pytest.approx(3e-3 / 2)
    assert steps[0]["seconds"] < steps[1]["seconds"] < steps[2]["seconds"]
    speed = (steps[2]["tokens"] - steps[1]["tokens"]) / (steps[2]["seconds"] - steps[1]["seconds"])
    assert steps[2]["tps_global"] == pytest.approx(speed)
    held_out = [row for row in found if "loss" not in row]
    assert [row["step"] for row in held_out] == [0, 3, 6]
    keys = ("loss", "bits_per_byte", "perplexity")
    assert {tuple(row) for row in held_out} == {
        ("step", *(f"validation/numbers/{key}" for key in keys), "time")
    }
    assert held_out[0]["validation/numbers/perplexity"] == math.exp(
        held_out[0]["validation/numbers/loss"]
    )


def test_what_json_has_no_number_for_is_null(monkeypatch):
    """Everything else keeps its digits, for example the finite norm of a step whose loss is a
    spike.
    """
    lines: list[str] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    row = {"step": 3, "loss": math.nan, "grad_norm": 0.1 + 0.2, "loss_z": -math.inf, "mfu": None}
    Metrics.write(SimpleNamespace(file=SimpleNamespace(append=lines.append)), row)
    (line,) = lines
    found = json.loads(line, parse_constant=pytest.fail)
    assert abs(found.pop("time") - time.time()) < 60
    assert found == {"step": 3, "loss": None, "grad_norm": 0.1 + 0.2, "loss_z": None, "mfu": None}


def test_lines_of_steps_that_were_not_saved_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": i, "loss": 1.5}) + "\n" for i in range(5)) + '{"step": 2, "lo'
    )
    truncate_after(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]
    truncate_after(path, -1)
    assert path.read_text() == ""
    path.write_bytes(
        b'{"step": 1}\n{"step": "x"}\n{"step": 2}\n{"step": 9}\n'
        + b"9" * (1 << 21)
        + b"\n"
        + b'{"step": 3}\n'
    )
    truncate_after(path, 5)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_progress_round_trips():
    progress, other = Progress(), Progress()
    progress.step, progress.seconds = 7, 1e9 + 0.123456
    progress.add_tokens(torch.tensor(2**40 + 1))
    other.load_state_dict(progress.state_dict())
    assert vars(other) == vars(progress)


def reads_of_a_run(arguments: list[str]) -> dict[int, int]:
    """step -> how often it read from a tensor: `.item()`, `.tolist()`, `bool()`; `.cpu()`,
    `.numpy()`, `.to("cpu")`.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    from titanlite.data.stream import TrainStream

    counts: dict[int, int] = {}

    def note() -> None:
        if counts:
            counts[max(counts)] += 1

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                note()
            return func(*args, **(kwargs or {}))

    def counted(name: str, counts_if) -> Any:
        """Patches a method that copies from a device where there is one: here it would give the
        tensor itself.
        """
        method = getattr(torch.Tensor, name)

        def patched(tensor, *args, **kwargs):
            if counts_if(*args, *kwargs.values()):
                note()
            return method(tensor, *args, **kwargs)

        return mock.patch.object(torch.Tensor, name, patched)

    original = TrainStream.next_step

    def next_step(stream):
        counts[len(counts) + 1] = 0
        return original(stream)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(TrainStream, "next_step", next_step))
        for name in ("cpu", "numpy"):
            stack.enter_context(counted(name, lambda *args: True))
        stack.enter_context(
            counted("to", lambda *args: "cpu" in [arg for arg in args if isinstance(arg, str)])
        )
        stack.enter_context(Reads())
        train_run(arguments)
    return counts


MEASURES = ["--ema.decay=0.9", "--metrics.noise_scale_freq=1"]
MEASURES += ["--metrics.layer_norms_freq=4", "--metrics.activations_freq=4"]


@pytest.mark.parametrize("more", [[], MEASURES], ids=["", "measured"])
def test_a_step_that_is_not_logged_reads_nothing(pool, arguments, more):
    """Loss and norm are read in logged steps alone.

    The requests of several ranks are read from CPU tensors.
    """
    quiet = [
        "--metrics.log_freq=4",
        "--validation.freq=0",
        "--checkpoint.freq=0",
        "--training.steps=9",
    ]
    counts = pool.run(1, reads_of_a_run, [*arguments, *quiet, *more])[0]
    unlogged = {step: count for step, count in counts.items() if step not in (1, 4, 8, 9)}
    assert set(unlogged.values()) == {0}, counts
    assert counts[4] >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_the_host_memory_is_that_of_this_process():
    before = memory_columns(torch.device("cpu"))
    assert set(before) == {"host_memory_gib"}
    kept = torch.ones(2**27, dtype=torch.uint8)
    added = memory_columns(torch.device("cpu"))["host_memory_gib"] - before["host_memory_gib"]
    assert added == pytest.approx(1 / 8, abs=0.03)
    assert kept[-1] == 1


@pytest.mark.parametrize("package", [True, False])
def test_the_columns_of_a_gpu(monkeypatch, package):
    def utilization(device):
        if not package:
            raise ModuleNotFoundError(
                "nvidia-ml-py does not seem to be installed or it can't be imported."
            )
        return 93

    stats = {
        "allocated_bytes.all.peak": 3 * 2**30,
        "reserved_bytes.all.peak": 2**32,
        "num_alloc_retries": 2,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    found = memory_columns(torch.device("cuda", 0))
    found.pop("host_memory_gib", None)
    expected = {"memory_allocated_gib": 3.0, "memory_reserved_gib": 4.0, "memory_retries": 2}
    assert found == expected | ({"gpu_utilisation": 93} if package else {})


def test_the_peak_is_not_below_what_is_resident():
    device = torch.device("cpu")
    assert peak_memory_gib(device) >= 0.99 * memory_columns(device).get("host_memory_gib", 0.0)
