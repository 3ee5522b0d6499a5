"""How much an asynchronous save slows a training step, on a process that simulates rank 0 of many.

The saving thread and the training thread share Python's lock, so what the saving thread does in
Python can delay the launch of operations. The number of tensors, their layout and the messages of
the other ranks are those of the large model; the tensors are narrow, so that little time goes into
copying and writing bytes. The save is that of a run: a copy of the state, the plan, the files with
their hashes, the manifest and the renaming.

A step is a number of small operations that take `STEP_SECONDS` on a quiet machine, so the training
thread launches operations all the time: the worst case, since with a GPU it also waits. Steps
without and with a save that begins with the step alternate in the order A B B A.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from pretended import examples, pretended_report, state_of

from titanlite.model.flavors import LlamaConfig

# 8 sequences of 8,192 tokens at 2.4 TFLOP per token, on 64 GPUs that compute at 400 TFLOP/s each
STEP_SECONDS = 6.2
NARROW: dict[str, Any] = {"dim": 512, "num_heads": 64, "ffn_dim": 1664, "vocab_size": 4096}


def in_memory(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A state on the meta device, with zeros in CPU memory."""
    import torch
    from torch.distributed.tensor import DTensor

    def zeros(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return torch.zeros(value.shape, dtype=value.dtype)
        local = torch.zeros(value.to_local().shape, dtype=value.dtype)
        shape, stride = value.shape, value.stride()
        return DTensor.from_local(
            local, value.device_mesh, value.placements, shape=shape, stride=stride
        )

    return {
        part: {name: zeros(value) for name, value in values.items()}
        for part, values in state.items()
    }


def pretend_messages(state: dict[str, dict[str, Any]], ranks: int) -> None:
    """Lets rank 0 receive what other ranks would send in a save: their plans, then what they have
    written.
    """
    from titanlite.checkpoint import storage
    from titanlite.checkpoint.write_plan import Plan

    layouts = examples(state, Plan(state).table)
    boxes = [pretended_report(layouts, rank) for rank in range(1, ranks)]
    plans = [json.dumps((({}, own), "")) for own in boxes]
    written = [
        json.dumps(({box.file: ((1 << 40, "0" * 64), True) for _, _, box in own}, ""))
        for own in boxes
    ]

    def receive(value: Any, channel: Any) -> list[Any]:
        return [value, *map(json.loads, plans if isinstance(value[0], tuple) else written)]

    replaced: Any = storage
    replaced.gather_on_rank0, replaced.broadcast = receive, lambda value, channel: value


def clock() -> float:
    """Seconds, without those for which this thread was ready to run and other processes had the
    cores (Linux).
    """
    schedule = Path("/proc/thread-self/schedstat")
    waited = int(schedule.read_text().split()[1]) / 1e9 if schedule.exists() else 0.0
    return time.perf_counter() - waited


class Steps:
    """Steps of the training thread, each a number of operations, with or without a save."""

    def __init__(self, saver: Any, state: dict[str, dict[str, Any]], folder: Path) -> None:
        import torch

        self.saver, self.state, self.folder = saver, state, folder
        self.numbers, self.count, self.saves = torch.zeros(4), 1_000_000, 0

    def operations(self) -> float:
        """Seconds of this step's operations."""
        started = clock()
        for _ in range(self.count):
            self.numbers.add_(1)
        return clock() - started

    def run(self, saves: bool) -> dict[str, float]:
        """Seconds of one step, of its thread's waits, and CPU seconds of the save."""
        planner = self.saver._threads.submit(time.thread_time).result()
        started, own, of_all = clock(), time.thread_time(), time.process_time()
        if saves:
            self.saves += 1
            self.saver.save(lambda: self.state, self.write)
        self.operations()
        self.saver.wait_for_staging()
        seconds = clock() - started
        waits = seconds - (time.thread_time() - own)
        self.saver.wait()
        others = time.process_time() - of_all - (time.thread_time() - own)
        planner = self.saver._threads.submit(time.thread_time).result() - planner
        return {"seconds": seconds, "waits": waits, "others": others, "planner": planner}

    def write(self, state: Any, failure: Exception | None) -> None:
        from titanlite.checkpoint.manifest import RunMetadata
        from titanlite.checkpoint.storage import write_step

        write_step(self.folder, self.saves, state, {}, RunMetadata({}, {}, ""), failure)


def measure(llama: LlamaConfig, ranks: int, rounds: int) -> dict[str, Any]:
    """Medians of steps without and with a save, and of the CPU seconds of the threads that save."""
    import torch

    from titanlite.checkpoint.async_save import AsyncSaver

    torch.set_num_threads(1)
    state = in_memory(state_of(dataclasses.replace(llama, **NARROW), ranks, 0))
    pretend_messages(state, ranks)
    gc.collect()
    gc.freeze()
    gc.disable()  # as training has it between its own collections
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(AsyncSaver("async", 0, torch.device("cpu")), state, Path(folder))
        steps.run(True)  # fills caches
        steps.count = int(
            STEP_SECONDS / statistics.median(steps.operations() for _ in range(5)) * steps.count
        )
        for saves in [False, True, True, False] * rounds:
            found[saves].append(steps.run(saves))
    quiet, saving = (
        {key: statistics.median(one[key] for one in found[saves]) for key in found[saves][0]}
        for saves in (False, True)
    )
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
