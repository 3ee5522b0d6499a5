"""Records a few steps with the PyTorch profiler.

What it is: on the schedule of [profiling], or when a file named PROFILE appears in the run's
folder, the processes in `profiling.ranks` record some steps, after warmup steps that are dropped.
Each writes into `traces/`, with N the last recorded step:

    step-N-rank-R.json.gz            the trace, for https://ui.perfetto.dev or chrome://tracing
    step-N-rank-R.txt                PyTorch's table of the slowest operators and kernels
    step-N-rank-R.collectives.json   the last collectives, where torch's flight recorder keeps them
    step-N-rank-R.memory.pickle      on CUDA, with `profiling.memory`: every allocation, for torch's
                                     memory viewer

What it costs: nothing between recordings; a recorded step is slower, and a trace has megabytes per
step.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from titanlite.config.schema import ProfilingConfig
from titanlite.distributed.torch_private import (
    dump_memory_history,
    flight_recorder,
    record_memory_history,
)
from titanlite.observe.metrics import Progress
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.phases import Phase, mark_phase

logger = logging.getLogger("titanlite")

ROWS = 25  # of PyTorch's table


class Profiler:
    """Records steps on this process if it is one of `profiling.ranks`."""

    def __init__(self, config: ProfilingConfig, folder: Path, progress: Progress) -> None:
        """`folder`: the run's folder. Raises ConfigError if `profiling.ranks` names no ranks."""
        self.config = config
        self.folder = folder / "traces"
        self.rank = dist.get_rank()
        self.progress = progress
        self.records = self.rank in parse_ranks(config.ranks, dist.get_world_size())
        self.memory = config.memory and torch.cuda.is_available()
        self._trace: profile | None = None  # set on the ranks that record
        self._remaining = 0  # steps until the recording ends; the same on all ranks

    def step(self, requested: bool, last: bool) -> None:
        """Starts, advances or ends a recording. All processes call it after each step, with the
        same request; `last`: no step follows, so no recording begins.
        """
        recording = self._remaining > 0
        if not (self.config.enabled or requested or recording):
            return
        mark_phase(Phase.PROFILE)
        if recording and requested:
            logger.info("PROFILE: a recording is in progress")
        elif requested and last:
            logger.info("PROFILE: no step follows that could be recorded")
        # Stop before starting: the step that ends a recording may begin the next
        if recording:
            if self._trace is not None:
                self._trace.step()
            self._remaining -= 1
            if self._remaining == 0:
                self.close()
        num_steps = self.config.warmup_steps + self.config.active_steps
        scheduled = self.config.enabled and (self.progress.step + num_steps) % self.config.freq == 0
        if self._remaining == 0 and not last and (requested or scheduled):
            self._start(num_steps)

    def _start(self, num_steps: int) -> None:
        """Starts recording `num_steps` steps, warmup included."""
        step = self.progress.step
        first = step + self.config.warmup_steps + 1
        end = step + num_steps
        logger.info("recording steps %d to %d on ranks %s", first, end, self.config.ranks)
        self._remaining = num_steps
        if not self.records:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._trace = profile(
            activities=activities,
            schedule=schedule(
                wait=0, warmup=self.config.warmup_steps, active=self.config.active_steps, repeat=1
            ),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        if self.memory:
            record_memory_history(max_entries=100_000)
        self._trace.start()

    def close(self) -> None:
        """Ends a recording, even an incomplete one, and writes its files."""
        if self._trace is not None:
            self._trace.stop()
            self._trace = None
            if self.memory:
                record_memory_history(enabled=None)
        self._remaining = 0

    def _write(self, trace: profile) -> None:
        """Writes the files of a recording. An error loses the recording, but not the run."""
        stem = self.folder / f"step-{self.progress.step}-rank-{self.rank}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(f"{stem}.json.gz")
            Path(f"{stem}.txt").write_text(summary(trace))
            Path(f"{stem}.collectives.json").write_text(flight_recorder())
            if self.memory:
                dump_memory_history(f"{stem}.memory.pickle")
        except Exception as error:  # disk or torch; other ranks wait for this one
            logger.warning("no trace of step %d: %s", self.progress.step, error)
            return
        logger.info("wrote the trace %s.json.gz, and a summary %s.txt", stem, stem.name)


def parse_ranks(text: str, world_size: int) -> set[int]:
    """Parses `profiling.ranks`: all, or numbers with commas between them.

    Raises ConfigError.
    """
    if text == "all":
        return set(range(world_size))
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) < world_size for word in words):
        allowed = f"all, or ranks from 0 to {world_size - 1} with commas between them"
        raise ConfigError(f"profiling.ranks = {text!r}: expected {allowed}")
    return {int(word) for word in words}


def summary(trace: profile) -> str:
    """Writes PyTorch's table: sums over the recorded steps."""
    averages = trace.key_averages()
    order = "self_cpu_time_total"
    if any(average.self_device_time_total > 0 for average in averages):
        order = "self_device_time_total"
    return averages.table(sort_by=order, row_limit=ROWS)
