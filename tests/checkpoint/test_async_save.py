"""Saving behind training: staging copies the step's state, and what fails is noticed by all."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from checkpoints import write_step
from runs import train_run
from safetensors.torch import load_file

from titanlite.checkpoint import async_save, manager, shard_file, storage
from titanlite.checkpoint.async_save import BUFFERS, AsyncSaver, Staging
from titanlite.checkpoint.folders import list_steps
from titanlite.checkpoint.manager import Checkpointer, Diverged
from titanlite.checkpoint.manifest import RunMetadata, read_manifest
from titanlite.checkpoint.step_files import verify_files
from titanlite.checkpoint.storage import SaveError
from titanlite.data.stream import TrainStream
from titanlite.distributed import signals

CPU = torch.device("cpu")


class Weight:
    """A Stateful object of one tensor, under a name of its own on each rank."""

    def __init__(self, weight):
        self.weight = weight

    def state_dict(self):
        return {f"weight.{dist.get_rank()}": self.weight}

    def load_state_dict(self, state):
        raise AssertionError("not called")


def change_after_staging(folder: Path, mode: str) -> float:
    """The state changes as soon as it may, and is written after that; returns how long training
    waited.
    """
    changed = threading.Event()
    weight = torch.full((100, 100), float(dist.get_rank()))
    saver = AsyncSaver(mode, 0, CPU)

    def write(state, failure):
        assert mode == "disabled" or changed.wait(10)
        write_step(folder, 1, state, {}, RunMetadata({}, {}, ""), failure)

    saver.save({"model": Weight(weight)}, write)
    saver.wait_for_staging()
    weight.fill_(7.0)
    changed.set()
    saver.wait()
    return saver.waited


@pytest.mark.parametrize("mode", [pytest.param("disabled", marks=pytest.mark.slow), "async"])
def test_what_is_saved_is_the_state_of_the_call(pool, tmp_path, mode):
    assert all(waited < 1 for waited in pool.run(2, change_after_staging, tmp_path, mode))
    for rank in range(2):
        saved = load_file(tmp_path / f"step-1/model-{rank:05}.safetensors")
        assert saved.keys() == {f"model.weight.{rank}"}
        assert torch.equal(saved[f"model.weight.{rank}"], torch.full((100, 100), float(rank)))


def train_with_failures(arguments: list[str], times: int, step: int) -> tuple[str, int]:
    """A run in which rank 1 finds the disk full, so many times, from the save of a step on.

    Returns how it ended, and how many steps were begun after the last failure.
    """
    write_file, write_checkpoint, read = (
        shard_file.write_file,
        Checkpointer._write,
        TrainStream.next_step,
    )
    failed, since = [], [0]

    def write(path, shard):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    def write_step(checkpointer, at, *rest):
        failing = dist.get_rank() == 1 and at >= step and len(failed) < times
        failed.extend([at] * failing)
        shard_file.write_file = write if failing else write_file
        try:
            return write_checkpoint(checkpointer, at, *rest)
        except SaveError:
            since[0] = 0
            raise

    def next_step(stream):
        since[0] += 1
        return read(stream)

    async_save.time.sleep = lambda seconds: None  # between the tries
    Checkpointer._write, TrainStream.next_step = write_step, next_step
    try:
        return str(train_run(arguments)), since[0]
    except SaveError as error:
        return f"SaveError: {error}", since[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_failed_save_is_tried_again(pool, arguments, tmp_path, mode):
    run = [
        *arguments,
        f"--checkpoint.async_mode={mode}",
        "--checkpoint.freq=2",
        "--checkpoint.keep=0",
    ]
    assert [outcome for outcome, _ in pool.run(2, train_with_failures, run, 2, 4)] == ["0", "0"]
    log = (tmp_path / "debug/log.txt").read_text()
    assert "step 4 could not be saved" in log
    assert "trying again in 2 s (2 of 2)" in log
    assert list_steps(tmp_path / "debug/checkpoints") == [2, 4, 6]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_save_that_fails_for_good_ends_the_run_on_all_processes(pool, arguments, tmp_path, mode):
    run = [
        *arguments,
        f"--checkpoint.async_mode={mode}",
        "--checkpoint.freq=2",
        "--training.steps=40",
    ]
    results = pool.run(2, train_with_failures, [*run, "--checkpoint.retries=1"], 99, 4)
    outcomes = {outcome for outcome, _ in results}
    assert len(outcomes) == 1
    assert outcomes.pop().startswith(f"SaveError: step 4 could not be saved in {tmp_path}")
    # Noticed in the step under way
    assert all(steps <= (1 if mode == "async" else 0) for _, steps in results)
    folder = tmp_path / "debug/checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-2"]
    assert not verify_files(folder / "step-2", read_manifest(folder / "step-2"))


def train_with_slow_writes(
    arguments: list[str], seconds: float
) -> tuple[int, list[tuple[float, float]]]:
    """Exit code, and begin and end of each save's writing."""
    original, times = shard_file.write_files, []

    def write_files(files):
        times.append([time.monotonic()])
        time.sleep(seconds)
        written = original(files)
        times[-1].append(time.monotonic())
        return written

    storage.write_files = write_files
    return train_run(arguments), times


@pytest.mark.slow
def test_one_save_at_a_time_and_the_end_waits_for_the_last(pool, arguments, tmp_path):
    run = [
        *arguments,
        "--checkpoint.async_mode=async",
        "--checkpoint.freq=1",
        "--checkpoint.keep=0",
    ]
    (code, times), _ = pool.run(2, train_with_slow_writes, run, 0.3)
    assert code == 0
    assert len(times) == 6
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))
    assert list_steps(tmp_path / "debug/checkpoints") == [1, 2, 3, 4, 5, 6]


def train_and_ask(arguments: list[str], folder: Path) -> int:
    """A run in which somebody makes the file SAVE while it is at step 3."""

    original, steps = TrainStream.next_step, iter(range(1, 1000))

    def next_step(stream):
        if next(steps) == 3 and dist.get_rank() == 0:
            (folder / "SAVE").touch()
        return original(stream)

    TrainStream.next_step = next_step
    signals.LOOK_EVERY = 0.0  # these steps take milliseconds
    return train_run(arguments)


@pytest.mark.slow
def test_a_file_named_save_asks_for_a_checkpoint(pool, arguments, tmp_path):
    assert pool.run(2, train_and_ask, arguments, tmp_path / "debug") == [0, 0]
    assert list_steps(tmp_path / "debug/checkpoints") == [3, 6]
    assert not (tmp_path / "debug/SAVE").exists()


class Clock:
    """Rank 0's clock goes on ten seconds at each look, and rank 1's stands still."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 10 * (dist.get_rank() == 0)
        return self.now


def train_with_a_clock(arguments: list[str]) -> int:
    manager.time = Clock()
    return train_run(arguments)


@pytest.mark.slow
def test_minutes_are_counted_by_one_clock(pool, arguments, tmp_path):
    run = [*arguments, "--checkpoint.freq_minutes=1", "--training.steps=20", "--validation.freq=0"]
    assert pool.run(2, train_with_a_clock, [*run, "--checkpoint.keep=0"]) == [0, 0]
    steps = list_steps(tmp_path / "debug/checkpoints")
    assert len(steps) >= 3
    assert all(4 <= later - earlier <= 7 for earlier, later in itertools.pairwise(steps[:-1]))


@pytest.mark.parametrize("fails", [False, True])
def test_what_follows_a_save_happens_only_if_it_succeeds(fails):
    called = []

    def write(state, failure):
        if fails:
            raise SaveError("the disk is full")

    saver = AsyncSaver("async", 0, CPU)
    saver.save({}, write)
    saver.after_save(lambda: called.append("after"))
    with pytest.raises(SaveError) if fails else contextlib.nullcontext():
        saver.wait()
    saver.after_save(lambda: called.append("later"))
    saver.wait()
    assert called == (["later"] if fails else ["after", "later"])


def fail_to_stage(folder: Path, mode: str) -> str:
    """Rank 1 has no memory for the copy."""

    def copy(state, also_host, ready):
        raise MemoryError("no memory left")

    def write(state, failure):
        write_step(folder, 1, state, {}, RunMetadata({}, {}, ""), failure)

    saver = AsyncSaver(mode, 0, CPU)
    if dist.get_rank() == 1:
        saver.staging = SimpleNamespace(copy=copy)
    with pytest.raises(SaveError) as caught:
        saver.save({"model": Weight(torch.ones(10))}, write)
        saver.wait_for_staging()
        saver.wait()
    return str(caught.value)


@pytest.mark.parametrize(("mode", "is_staged"), [("disabled", False), ("async", True)])
def test_a_save_without_staging_passes_the_stateful_objects(mode, is_staged):
    passed = []
    part = SimpleNamespace(state_dict=lambda: {"w": torch.ones(2)}, load_state_dict=None)
    saver = AsyncSaver(mode, 0, CPU)
    saver.save({"model": part}, lambda state, failure: passed.append(state["model"]))
    saver.wait()
    if is_staged:
        assert torch.equal(passed[0]["w"], torch.ones(2))
    else:
        assert passed == [part]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_keeps_one_process_from_staging_is_told_to_all(pool, tmp_path, mode):
    outcomes = pool.run(2, fail_to_stage, tmp_path, mode)
    assert outcomes == [f"step 1 could not be saved in {tmp_path}: rank 1: no memory left"] * 2
    assert not list(tmp_path.iterdir())


def diverge_while_saving(arguments: list[str]) -> str:
    """The save of step 1 takes longer than the steps until the norm is not finite."""
    write_files = storage.write_files
    storage.write_files = lambda files: (time.sleep(1), write_files(files))[1]
    try:
        return str(train_run(arguments))
    except Diverged as error:
        return str(error)


def test_divergence_waits_for_the_save_under_way(pool, arguments, tmp_path):
    run = [
        *arguments,
        "--optimizer.lr=1e30",
        "--training.max_norm=0",
        "--checkpoint.async_mode=async",
    ]
    outcomes = pool.run(
        2, diverge_while_saving, [*run, "--checkpoint.freq=1", "--validation.freq=0"]
    )
    assert all("training has diverged" in outcome for outcome in outcomes)
    assert list_steps(tmp_path / "debug/checkpoints")
    assert not list((tmp_path / "debug/checkpoints").glob("*.tmp-*"))


@pytest.mark.parametrize("keep", [False, True])
def test_memory_is_kept_only_on_request(keep):
    weight, copier = torch.arange(6.0).view(2, 3), Staging(CPU, keep)
    first = copier.copy({"model": {"w": weight}}, True, None)["model"]["w"]
    assert torch.equal(first, weight)
    weight += 1
    second = copier.copy({"model": {"w": weight}}, True, None)["model"]["w"]
    assert torch.equal(second, weight)
    assert (first.data_ptr() == second.data_ptr()) == keep


def test_what_is_on_the_host_is_copied_only_on_request():
    weight = torch.ones(3)
    assert Staging(CPU, False).copy({"model": {"w": weight}}, False, None)["model"]["w"] is weight


def test_a_tensor_with_gaps_is_refused():
    """Bytes in memory order would be those of another tensor."""
    with pytest.raises(RuntimeError, match="view"):
        Staging(CPU, False).copy({"model": {"w": torch.ones(4, 4).t()[:3]}}, True, None)


@pytest.fixture
def gpu(monkeypatch):
    """Tensors count as those of a GPU, and what is copied without blocking arrives when its stream
    is synchronised.

    Returns the streams.
    """
    streams, current, copy = [], threading.local(), torch.Tensor.copy_

    class Stream:
        def __init__(self, device):
            self.device, self.thread, self.pending, self.waited = (
                device,
                threading.get_ident(),
                [],
                None,
            )
            streams.append(self)

        def wait_event(self, event):
            self.waited = event

        def synchronize(self):
            assert threading.get_ident() == self.thread, "each thread has its own stream"
            time.sleep(0.001)
            for target, source in self.pending:
                copy(target, source)
            self.pending.clear()

    @contextlib.contextmanager
    def use(stream):
        current.stream = stream
        yield
        current.stream = None

    def copy_later(target, source, non_blocking=False):
        assert non_blocking
        assert current.stream.waited == "ready", "the state may not be complete yet"
        current.stream.pending.append((target, source))

    monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(async_save, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(
        async_save, "_pinned", lambda size: torch.full((size,), 255, dtype=torch.uint8)
    )
    monkeypatch.setattr(async_save, "PIECE", 1000)
    return streams


def test_pieces_go_through_a_few_buffers(gpu):
    """Sizes that the pieces do not divide, a scalar, nothing at all, another dtype; two times."""
    copier = Staging(torch.device("cuda", 1), True)
    state = {
        "model": {
            "a": torch.randn(123, 45),
            "b": torch.randn(1000).bfloat16(),
            "none": torch.zeros(0, 4),
        },
        "optimizer": {"a.step": torch.tensor(7.0), "a.exp_avg": torch.randn(999)},
    }
    for _ in range(2):
        copies = copier.copy(state, True, "ready")
        for part, values in state.items():
            for name, value in values.items():
                assert torch.equal(copies[part][name], value), name
                assert copies[part][name].data_ptr() != value.data_ptr() or not value.numel()
                value += 1
    assert 1 <= len(gpu) <= BUFFERS
    assert {stream.device for stream in gpu} == {torch.device("cuda", 1)}


def test_a_copy_that_fails_is_an_error(gpu, monkeypatch):
    def no_memory(size):
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(async_save, "_pinned", no_memory)
    with pytest.raises(RuntimeError, match="no pinned memory"):
        Staging(torch.device("cuda"), False).copy({"model": {"a": torch.ones(5)}}, True, "ready")
