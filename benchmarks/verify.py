"""Measures the results and times of `titanlite verify`.

    python benchmarks/verify.py

Runs the quick ladder, the whole ladder of four processes, and products of three axes on eight
processes; then the test that counts the parameters of the large flavors. Takes ten minutes on two
cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report

EIGHT = [
    "dp_shard=2,tp=2,pp=2",
    "dp_shard=2,cp=2,tp=2",
    "dp_replicate=2,dp_shard=2,tp=2",
    "cp=2,pp=2,tp=2",
]
PARTS = {
    "titanlite verify --quick": ["--quick"],
    "titanlite verify": [],
    "titanlite verify " + " ".join(f"--layout {layout}" for layout in EIGHT): [
        word for layout in EIGHT for word in ("--layout", layout)
    ],
}
LARGE = ["-m", "pytest", "-q", "-m", "slow or not slow", "--durations=0", "tests/e2e/test_large.py"]


def verify(options: list[str], folder: Path) -> tuple[str, list[dict[str, Any]], float]:
    """Runs verify; returns the printed table, its rows, and the seconds of the command."""
    path = folder / "rows.json"
    started = time.monotonic()
    command = [sys.executable, "-m", "titanlite", "verify", *options, "--json", str(path)]
    done = subprocess.run(command, cwd=report.ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr, sep="\n", flush=True)
    return done.stdout.strip(), json.loads(path.read_text()), time.monotonic() - started


def main() -> None:
    body: list[str] = []
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for title, options in PARTS.items():
            table, rows, seconds = verify(options, Path(name))
            body += [f"## `{title}`: {seconds:.0f} s", "", "```", table, "```", ""]
            results[title] = {"seconds": seconds, "rows": rows}
    large = subprocess.run(
        [sys.executable, *LARGE], cwd=report.ROOT, capture_output=True, text=True
    ).stdout.strip()
    print(large)
    body += ["## `python " + " ".join(LARGE) + "`", "", "```", large, "```"]
    report.write("verify", "Every layout against one process", body, results)


if __name__ == "__main__":
    main()
