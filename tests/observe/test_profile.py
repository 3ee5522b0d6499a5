"""Traces of the profiler."""

from __future__ import annotations

import gzip
import json

from runs import train_run


def test_traces_are_written_for_each_rank(pool, arguments, tmp_path):
    profiling = [
        "--profiling.enabled",
        "--profiling.freq=3",
        "--profiling.warmup_steps=1",
        "--profiling.active_steps=1",
    ]
    assert pool.run(2, train_run, [*arguments, *profiling]) == [0, 0]
    traces = sorted(path.name for path in (tmp_path / "debug/traces").iterdir())
    assert traces == [f"step-{step}-rank-{rank}.json.gz" for step in (3, 6) for rank in (0, 1)]
    with gzip.open(tmp_path / "debug/traces" / traces[0]) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names
