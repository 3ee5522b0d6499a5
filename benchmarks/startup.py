"""Measures the time from the command to the first step.

    python benchmarks/startup.py [--repeat 5]

Runs `./run_train.sh debug` in a new run folder until its first step is logged: warm (the text is
tokenised already), cold (it is not), and for comparison `import torch` in a separate process, in
turn. Reports medians. Takes a minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report

OPTIONS = [
    "--training.steps=1",
    "--checkpoint.freq=0",
    "--validation.freq=0",
    "--validation.prompts=",
]


def first_step(folder: Path, cache: Path) -> float:
    """Measures the seconds until the line of step 1."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = tempfile.mkdtemp(dir=folder)
    command = [
        str(report.ROOT / "run_train.sh"),
        "debug",
        f"--run.folder={run}",
        f"--data.cache={cache}",
        *OPTIONS,
    ]
    started = time.monotonic()
    with subprocess.Popen(
        command,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        seconds, lines = 0.0, []
        for line in process.stdout:
            lines.append(line)
            if "step 1/1" in line and not seconds:
                seconds = time.monotonic() - started
    if not seconds:
        raise SystemExit("".join(lines))
    return seconds


def import_torch() -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    found: dict[str, list[float]] = {
        "import torch": [],
        "first step, warm": [],
        "first step, cold": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first_step(folder, folder / "cache")
        for number in range(repeat):
            found["import torch"].append(import_torch())
            found["first step, warm"].append(first_step(folder, folder / "cache"))
            found["first step, cold"].append(first_step(folder, folder / f"cache-{number}"))
    base = statistics.median(found["import torch"])
    body = ["| | median | over `import torch` |", "|---|---|---|"]
    for what, seconds in found.items():
        body.append(
            f"| {what} | {statistics.median(seconds):.2f} s | "
            f"{statistics.median(seconds) - base:+.2f} s |"
        )
    print("\n".join(body))
    report.write("startup", "From the command to the first step", body, found)


if __name__ == "__main__":
    main()
