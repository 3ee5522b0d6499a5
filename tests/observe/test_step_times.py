"""Step times: phases add up to the time of a run, and delays are found where they were put."""

from __future__ import annotations

import itertools
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runs import rows, train_run

from titanlite.config.schema import MetricsConfig
from titanlite.observe import step_times
from titanlite.observe.step_times import BESIDE, PARTS, StepTimes, Window
from titanlite.runtime import phases
from titanlite.runtime.phases import Phase, mark_phase

CPU = torch.device("cpu")
RANK_WAITS = MetricsConfig(rank_waits=True)
TIMES = ["step_seconds", "step_seconds_p50", "step_seconds_p95", "step_seconds_max"]
TIMES += [*(f"time/{part}" for part in PARTS), "time/checkpoint", "time/validation"]


def test_a_window_counts_steps_and_what_is_beside_them():
    window = Window()
    for part, seconds in (("other", 1.0), ("data", 2.0), ("validation", 50.0)):
        window.add(part, seconds)
    for step in range(1, 20):
        window.begin_step()
        window.add("forward", float(step))
        window.add("communication", 0.5)
    found = window.columns()
    assert list(found) == TIMES
    assert window.steps[:2] == [4.5, 2.5], "what is before the first step belongs to it"
    assert found["step_seconds"] == pytest.approx((1 + 2 + sum(range(1, 20)) + 19 * 0.5) / 19)
    assert (found["step_seconds_p50"], found["step_seconds_p95"], found["step_seconds_max"]) == (
        10.5,
        19.5,
        19.5,
    )
    assert found["time/forward"] == 10
    assert found["time/validation"] == 50
    assert sum(found[f"time/{part}"] for part in PARTS) == pytest.approx(found["step_seconds"])
    assert window.work == pytest.approx(found["step_seconds"] - 0.5)


def test_steps_of_one_length_have_it_in_every_percentile():
    window = Window()
    window.begin_step()
    window.add("forward", 3.0)
    assert [window.columns()[name] for name in TIMES[:4]] == [3.0] * 4


LAYOUTS = {
    "one process": [],
    "dp2": ["--parallel.dp_shard=2"],
    "tp2": ["--parallel.tp=2"],
    "cp2": ["--parallel.cp=2"],
    "pp2": ["--parallel.pp=2"],
    "tp2, compiled": ["--parallel.tp=2", "--compile.enabled=true", "--compile.backend=aot_eager"],
    "dp2, chunked loss": ["--parallel.dp_shard=2", "--loss.num_chunks=2"],
}


SLOW = ("tp2", "cp2", "tp2, compiled")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=pytest.mark.slow if layout in SLOW else []) for layout in LAYOUTS],
)
def test_phases_add_up_to_the_time_of_the_run(pool, arguments, tmp_path, layout):
    """Compared with the columns `seconds` and `tps_global`, which another clock measures.

    It stands still in pauses.
    """
    more = [
        "--training.steps=13",
        "--metrics.log_freq=4",
        "--checkpoint.freq=5",
        "--validation.freq=6",
        "--metrics.rank_waits=true",
    ]
    more += LAYOUTS[layout]
    size = 2 if LAYOUTS[layout] else 1
    assert pool.run(size, train_run, [*arguments, *more], timeout=120) == [0] * size
    logged = [row for row in rows(tmp_path / "debug") if "loss" in row]
    assert not set(logged[0]) & set(TIMES), "the first step is not timed: it compiles"
    assert [row["step"] for row in logged] == [1, 4, 8, 12, 13]
    deviations = []
    for before, row in itertools.pairwise(logged):
        steps = row["step"] - before["step"]
        parts = sum(row[f"time/{part}"] for part in PARTS)
        assert parts == pytest.approx(row["step_seconds"], rel=1e-9)
        deviations.append(abs(parts * steps / (row["seconds"] - before["seconds"]) - 1))
        assert row["step_seconds_p50"] <= row["step_seconds_p95"] <= row["step_seconds_max"]
        assert row["step_seconds_max"] <= row["step_seconds"] * steps
        assert all(
            row[f"time/{part}"] > 0
            for part in ("data", "forward", "backward", "optimizer", "other")
        )
        assert (row["time/communication"] > 0) == (size > 1)
        assert (row["time/validation"] > 0) == (row["step"] in (8, 13)), "after steps 6 and 12"
        assert (row["time/checkpoint"] > 0) == (row["step"] in (8, 12))
    # All but one: a busy machine can stop the process between the readings of the two clocks
    assert sorted(deviations)[-2] < 0.02, deviations


def sleep_before(owner: Any, name: str, seconds: float) -> None:
    """Makes a function take so much longer, in this process."""
    function = getattr(owner, name)

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)

    mock.patch.object(owner, name, slow).start()


DELAYS = {"data": 0.25, "forward": 0.35, "backward": 0.45, "optimizer": 0.55}  # seconds per step
PAUSES = {"validation": 0.5, "checkpoint": 0.6}  # seconds per validation, per save
BUSY = 0.2  # what other processes of the machine may add per step; less than any delay


def delayed_run(arguments: list[str], delays: dict[int, dict[str, float]]) -> int:
    """`delays`: rank -> phase -> seconds."""
    from titanlite.checkpoint.manager import Checkpointer
    from titanlite.data import stream
    from titanlite.model.llama import Llama
    from titanlite.optim.schedule import Schedule
    from titanlite.parallel.stages import Stages

    places = {
        "data": (stream, "read_batch"),
        "forward": (Llama, "forward"),
        "backward": (torch.Tensor, "backward"),
    }
    places |= {"optimizer": (Schedule, "set_lr"), "validation": (Stages, "evaluate")}
    places |= {"checkpoint": (Checkpointer, "files")}
    for phase, seconds in delays.get(dist.get_rank(), {}).items():
        sleep_before(*places[phase], seconds)
    return train_run(arguments)


ONE_BATCH = ["--training.global_batch_size=2", "--training.local_batch_size=2"]


@pytest.mark.slow
def test_each_phase_gets_its_own_time(pool, arguments, tmp_path):
    """Delays of known length in every phase: each column has its own, and nothing of the others."""
    more = [
        *ONE_BATCH,
        "--metrics.log_freq=4",
        "--training.steps=8",
        "--checkpoint.freq=5",
        "--validation.freq=6",
    ]
    more += ["--validation.samples=2"]
    plain = [*arguments, *more, "--run.name=plain"]
    assert pool.run(1, train_run, plain) == [0]
    assert pool.run(1, delayed_run, [*arguments, *more], {0: DELAYS | PAUSES}) == [0]
    fast, slow = (
        next(row for row in rows(tmp_path / name) if row["step"] == 8)
        for name in ("plain", "debug")
    )
    for phase, seconds in DELAYS.items():
        assert seconds <= slow[f"time/{phase}"] <= seconds + fast[f"time/{phase}"] + BUSY, phase
    assert slow["time/other"] < BUSY
    for phase, seconds in PAUSES.items():
        assert seconds <= slow[f"time/{phase}"] <= seconds + fast[f"time/{phase}"] + 2 * BUSY, phase
    assert slow["step_seconds"] < sum(DELAYS.values()) + fast["step_seconds"] + BUSY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "rank", "phase"),
    [
        ("dp2", 0, "optimizer"),
        ("pp2", 1, "forward"),
        pytest.param("dp2", 1, "forward", marks=pytest.mark.slow),
        pytest.param("dp2", 1, "data", marks=pytest.mark.slow),
        pytest.param("tp2", 1, "forward", marks=pytest.mark.slow),
        pytest.param("tp2, compiled", 1, "optimizer", marks=pytest.mark.slow),
        pytest.param("cp2", 0, "forward", marks=pytest.mark.slow),
    ],
)
def test_a_slow_rank_is_named(pool, arguments, tmp_path, layout, rank, phase):
    """The others wait for it; their waits are communication, not work."""
    delay = 0.2  # much more than what other processes of the machine delay
    batch = ["--training.global_batch_size=4", "--training.local_batch_size=2"]
    more = [
        *batch,
        "--metrics.log_freq=2",
        "--training.steps=7",
        "--validation.freq=0",
        "--metrics.rank_waits=true",
        *LAYOUTS[layout],
    ]
    assert pool.run(2, delayed_run, [*arguments, *more], {rank: {phase: delay}}, timeout=120) == [
        0,
        0,
    ]
    logged = [row for row in rows(tmp_path / "debug") if "step_seconds" in row]
    assert [row["slowest_rank"] for row in logged] == [rank] * 4
    for row in logged:
        assert row["slowest_rank_seconds"] >= delay
        assert row["slowest_rank_seconds"] > row["fastest_rank_seconds"] + delay / 2
        own = row["slowest_rank_seconds"] if rank == 0 else row["fastest_rank_seconds"]
        assert own == pytest.approx(row["step_seconds"] - row["time/communication"], rel=1e-9)
        if rank == 0:
            assert row[f"time/{phase}"] >= delay
        else:
            assert row["time/communication"] >= delay / 2


def test_without_the_key_nothing_is_recorded(pool, arguments, tmp_path):
    assert pool.run(2, train_run, [*arguments, "--metrics.step_times=false"]) == [0, 0]
    columns = {name for row in rows(tmp_path / "debug") for name in row}
    assert not columns & {*TIMES, "slowest_rank", "host_memory_gib"}


def test_without_waits_phases_contain_them(pool, arguments, tmp_path):
    """The phases add up to the step, and no rank is called slow for waiting less than another."""
    assert pool.run(2, train_run, arguments) == [0, 0]
    row = [row for row in rows(tmp_path / "debug") if "loss" in row][-1]
    parts = [part for part in PARTS if part != "communication"]
    assert sum(row[f"time/{part}"] for part in parts) == pytest.approx(row["step_seconds"])
    assert not set(row) & {"time/communication", "slowest_rank", "fastest_rank_seconds"}
    assert row["memory_max_rank"] in (0, 1)


class Device:
    """A pretended GPU: it is at `now` when the host reads, and passes an event when `now` is its
    time or later.
    """

    def __init__(self) -> None:
        self.queued = self.now = 0.0
        self.made, self.current = 0, "computation"

    def install(self, monkeypatch) -> None:
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                device.made += 1

            def record(self, stream: str) -> None:
                assert stream == "computation"
                self.at = device.queued

            def query(self) -> bool:
                return self.at <= device.now

            def synchronize(self) -> None:
                device.now = max(device.now, self.at)

            def elapsed_time(self, other: Any) -> float:
                assert self.query()
                assert other.query()
                return (other.at - self.at) * 1000

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda of: device.current)
        monkeypatch.setattr(dist, "get_world_size", lambda: 1)
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(phases, "listeners", [])
        monkeypatch.setattr(step_times, "memory_columns", lambda of: {})
        monkeypatch.setattr(step_times, "peak_memory_gib", lambda of: 1.5)

    def computes(self, seconds: float) -> None:
        self.queued += seconds


def test_on_a_gpu_times_are_those_of_the_device(monkeypatch):
    """The host runs ahead.

    Times come from events, which are read when the device has passed them, and used again.
    """
    gpu = Device()
    gpu.install(monkeypatch)
    times = StepTimes(RANK_WAITS, torch.device("cuda", 0))
    found = []
    for _ in range(3):
        mark_phase(Phase.START_TIMING)
        found.append(times.columns())
        for _ in range(4):
            for phase, seconds in (
                (Phase.READ_DATA, 0.25),
                (Phase.FORWARD_BACKWARD, 1),
                (Phase.BACKWARD, 2),
                (Phase.UPDATE, 4),
            ):
                mark_phase(phase)
                gpu.computes(seconds)
                if phase is Phase.BACKWARD:
                    assert times.begin_wait()
                    assert not times.begin_wait(), "a wait within a wait is one wait"
                    gpu.computes(0.5)
                    times.end_wait()
                    gpu.current = "all-gather"
                    assert not times.begin_wait(), (
                        "FSDP waits in its own stream, beside the computation"
                    )
                    gpu.current = "computation"
    assert found[0] == {}
    for row in found[1:]:
        assert row["step_seconds"] == row["step_seconds_max"] == 7.75
        parts = {
            "data": 0.25,
            "forward": 1,
            "backward": 2,
            "communication": 0.5,
            "optimizer": 4,
            "other": 0,
        }
        assert {part: row[f"time/{part}"] for part in PARTS} == parts
        assert (row["memory_max_gib"], row["memory_max_rank"]) == (1.5, 0)
    assert gpu.made <= 4 * 6 + 3, "events are used again"


def test_marks_that_the_device_has_passed_are_added_up_before_they_are_many(monkeypatch):
    """Logged every 100,000 steps, a run keeps few of them, without waiting for the device."""
    gpu = Device()
    gpu.install(monkeypatch)
    monkeypatch.setattr(step_times, "MOST_MARKS", 100)
    times = StepTimes(RANK_WAITS, torch.device("cuda", 0))
    mark_phase(Phase.START_TIMING)
    assert times.columns() == {}  # the first window
    for step in range(1000):
        mark_phase(Phase.READ_DATA)
        gpu.computes(1)
        mark_phase(Phase.UPDATE)
        gpu.computes(2)
        gpu.now = 3.0 * max(0, step - 20)  # the host is 20 steps ahead
    assert gpu.now == 3.0 * 979
    mark_phase(Phase.START_TIMING)
    row = times.columns()
    assert (row["step_seconds"], row["time/data"], row["time/optimizer"]) == (3, 1, 2)
    assert gpu.made < 200


def test_waits_of_other_threads_and_of_pauses_are_not_communication(monkeypatch):
    from threading import Thread

    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(phases, "listeners", [])
    times = StepTimes(RANK_WAITS, CPU)
    answers = []
    for phase in (Phase.BACKWARD, Phase.VALIDATE, Phase.SAVE):
        mark_phase(phase)
        thread = Thread(target=lambda: answers.append(times.begin_wait()))
        thread.start()
        thread.join()
        answers.append(times.begin_wait())
        if answers[-1]:
            times.end_wait()
    assert answers == [False, True, False, False, False, False]
    assert BESIDE == ("validation", "checkpoint", "pause")


def test_the_cost_of_a_mark_is_small(monkeypatch):
    """A bound that only a mistake reaches: measured are 0.5 microseconds. Of CPU time, since the
    machine may stop for longer than that.
    """
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(phases, "listeners", [])
    StepTimes(RANK_WAITS, CPU)
    started = time.thread_time()
    for _ in range(10_000):
        mark_phase(Phase.UPDATE)
    assert (time.thread_time() - started) / 10_000 < 50e-6
