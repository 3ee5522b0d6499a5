"""Traces of a few steps with the PyTorch profiler.

What it is: every `freq` steps, after a warmup, `active_steps` steps are recorded on each process and written to
`traces/step-N-rank-R.json.gz`, for https://ui.perfetto.dev or chrome://tracing.
What it costs: nothing between recordings; a recorded step is slower.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from titanlite.config.schema import ProfilingConfig
from titanlite.distributed.watchdog import mark_phase
from titanlite.observe.metrics import Progress

logger = logging.getLogger("titanlite")


@contextlib.contextmanager
def profiler(config: ProfilingConfig, folder: Path, rank: int, progress: Progress) -> Iterator[Callable[[], None]]:
    """A context manager that yields a function to call after each step."""
    folder.mkdir(parents=True, exist_ok=True)

    def write(trace: profile) -> None:
        path = folder / f"step-{progress.step}-rank-{rank}.json.gz"
        trace.export_chrome_trace(str(path))
        logger.info("wrote trace %s", path)

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    waits = config.freq - config.warmup_steps - config.active_steps
    plan = schedule(wait=waits, warmup=config.warmup_steps, active=config.active_steps)
    with profile(activities=activities, schedule=plan, on_trace_ready=write, record_shapes=True) as trace:

        def step() -> None:
            mark_phase("profiling")
            trace.step()

        yield step
