"""Measures how much an asynchronous save slows a training step, on a process that pretends to be
rank 0 of many.

The saving thread and the training thread share Python's lock, so what the saving thread does in
Python can delay the launch of operations. The number of tensors, their layout and the messages of
the other ranks are those of the large model; the tensors are narrow, so that little time goes into
copying and writing bytes. The save is that of a run: a copy of the state, then `dcp.save` with the
planner and writer of the checkpoint manager. Only the three functions of torch.distributed by which
DCP exchanges objects are replaced: rank 0 gets the messages that the others would send.

A step is a number of small operations that take `STEP_SECONDS` on a quiet machine, so the training
thread launches operations all the time: the worst case, since with a GPU it also waits. Steps
without and with a save that begins with the step alternate in the order A B B A.
"""

from __future__ import annotations

import dataclasses
import gc
import pickle
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import step_io
import torch
import torch.distributed as dist
from pretended import Others, on_cpu, state_of
from torch.distributed.checkpoint.planner import SavePlan

from titanlite.checkpoint.async_save import AsyncSaver
from titanlite.checkpoint.planner import PlacementSavePlanner
from titanlite.checkpoint.state import State
from titanlite.model.flavors import LlamaConfig

# 8 sequences of 8,192 tokens at 2.4 TFLOP per token, on 64 GPUs that compute at 400 TFLOP/s each
STEP_SECONDS = 6.2
NARROW: dict[str, Any] = {"dim": 512, "num_heads": 64, "ffn_dim": 1664, "vocab_size": 4096}


def pretend_messages(others: Others) -> None:
    """Makes this process, as rank 0, receive the messages of other ranks in a save: their plans,
    then the results of their writes. Everything is pickled and unpickled as torch does it.
    """
    ranks = range(1, others.ranks)
    first = [pickle.dumps(SavePlan([], planner_data=others.report(rank))) for rank in ranks]
    later = [pickle.dumps(SavePlan([]))] * len(ranks)
    written = [pickle.dumps(others.written(rank)) for rank in ranks]

    def gather(obj: Any, object_gather_list: list[Any], **options: Any) -> None:
        messages = written
        if isinstance(obj, SavePlan):
            messages = later if obj.planner_data is None else first
        object_gather_list[:] = map(pickle.loads, [pickle.dumps(obj), *messages])

    def scatter(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any],
        **options: Any,
    ) -> None:
        messages = [pickle.dumps(value) for value in scatter_object_input_list]
        scatter_object_output_list[0] = pickle.loads(messages[0])

    def broadcast(object_list: list[Any], **options: Any) -> None:
        for value in object_list:
            pickle.dumps(value)

    replaced: Any = dist
    replaced.gather_object = gather
    replaced.scatter_object_list = scatter
    replaced.broadcast_object_list = broadcast


def clock() -> float:
    """Returns seconds, without the time in which this thread was ready to run but other processes
    had the cores (Linux).
    """
    schedule = Path("/proc/thread-self/schedstat")
    waited = 0.0
    if schedule.exists():
        waited = int(schedule.read_text().split()[1]) / 1e9
    return time.perf_counter() - waited


class Steps:
    """Runs steps of the training thread, each a number of operations, with or without a save."""

    def __init__(self, state: State, folder: Path) -> None:
        self.state = state
        self.folder = folder
        self.saver = AsyncSaver("async", 0, torch.device("cpu"))
        self.planner = PlacementSavePlanner()
        self.numbers = torch.zeros(4)
        self.count = 1_000_000  # operations per step
        self.saves = 0

    def operations(self) -> float:
        """Runs one step's operations; returns their seconds."""
        started = clock()
        for _ in range(self.count):
            self.numbers.add_(1)
        return clock() - started

    def run(self, saves: bool) -> dict[str, float]:
        """Runs one step; returns its seconds, those of its waits, and CPU seconds of the save."""
        thread = self.saver._threads  # the saving thread
        planner = thread.submit(time.thread_time).result()
        own = time.thread_time()
        of_all = time.process_time()
        started = clock()
        if saves:
            self.saves += 1
            self.saver.save(lambda: self.state, self.write)
        self.operations()
        self.saver.wait_for_staging()
        seconds = clock() - started
        waits = seconds - (time.thread_time() - own)
        self.saver.wait()
        others = time.process_time() - of_all - (time.thread_time() - own)
        planner = thread.submit(time.thread_time).result() - planner
        return {"seconds": seconds, "waits": waits, "others": others, "planner": planner}

    def write(self, state: State, failure: Exception | None) -> None:
        """Writes the copy of the state, in the saving thread."""
        assert failure is None, failure
        step_io.save(self.folder, self.saves, state, self.planner)


def measure(llama: LlamaConfig, ranks: int, rounds: int) -> dict[str, Any]:
    """Returns medians of steps without and with a save, and of the saving threads' CPU seconds."""
    torch.set_num_threads(1)
    narrow = dataclasses.replace(llama, **NARROW)
    state = on_cpu(state_of(narrow, ranks, 0), torch.zeros)
    pretend_messages(Others(state, ranks))
    gc.collect()
    gc.freeze()
    gc.disable()  # as training has it between its own collections
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(state, Path(folder))
        steps.run(True)  # the first save: later ones use its plan
        quick = statistics.median(steps.operations() for _ in range(5))
        steps.count = int(STEP_SECONDS / quick * steps.count)
        for saves in [False, True, True, False] * rounds:
            found[saves].append(steps.run(saves))
    quiet = medians(found[False])
    saving = medians(found[True])
    return {
        "ranks": ranks,
        "steps": 2 * rounds,
        "quiet_s": quiet["seconds"],
        "ratio": saving["seconds"] / quiet["seconds"],
        "waits_s": saving["waits"],
        "others_cpu_s": saving["others"],
        "cpu_s": saving["planner"],
        "all_steps": {"quiet": found[False], "saving": found[True]},
    }


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(step[key] for step in steps) for key in steps[0]}
