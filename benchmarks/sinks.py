"""Measures what sinks cost the training process: importing them, opening them, and each row.

    python benchmarks/sinks.py [--rows 300]

For each sink, in a separate process and a new folder, with no network: rows of a usual number of
columns are appended to metrics.jsonl one by one, and the CPU time of the process is measured until
each is sent. MLflow writes into a local file; with a server, a row is an HTTP request. The machine
may be busy: CPU time depends little on it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report

COLUMNS = 19  # columns of a logged step of the debug config


def measure(name: str, rows: int) -> dict[str, Any]:
    """Measures CPU seconds of the import, of opening the sink, and per row."""
    os.environ |= {"WANDB_MODE": "offline", "LOG_RANK": "none"}
    import torch  # noqa: F401, a run has imported it earlier

    from titanlite.config.schema import MetricsConfig
    from titanlite.sinks.feed import Feed, build_sink
    from titanlite.sinks.provenance import Provenance

    origin = Provenance("debug", "[run]\n", {"training.steps": rows}, {"python": "3"})
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "debug")
        folder.mkdir()
        wall, started = time.monotonic(), time.process_time()
        sink = build_sink(name, MetricsConfig(), folder, "0" * 16, origin)
        found = {"import_wall": time.monotonic() - wall, "import": time.process_time() - started}
        feed = Feed(name, sink, folder / "metrics.jsonl")
        started = time.process_time()
        feed._copy()
        found["open"] = time.process_time() - started
        started = time.process_time()
        for step in range(rows):
            row = {"step": step, "time": 1.8e9 + step} | {
                f"column_{i}": step / (i + 1) for i in range(COLUMNS)
            }
            with feed.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            feed._copy()
        found["row"] = (time.process_time() - started) / rows
        sink.close(False)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--child", help="used by the benchmark itself")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.rows)))
        return
    results: dict[str, Any] = {}
    lines = [
        "| CPU time in the training process | import | first opening | each row |",
        "|---|---|---|---|",
    ]
    for name in ("tensorboard", "wandb", "mlflow"):
        one = report.child([sys.executable, __file__, "--child", name, "--rows", str(args.rows)])
        results[name] = one
        cells = (
            one.get("failed")
            or f"{one['import']:.1f} s | {one['open']:.2f} s | {1000 * one['row']:.2f} ms"
        )
        lines.append(f"| {name} | {cells} |")
    print("\n".join(lines))
    report.write("sinks", "What the sinks cost the process that trains", lines, results)


if __name__ == "__main__":
    main()
