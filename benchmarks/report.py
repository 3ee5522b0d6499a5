"""Writes the results of a benchmark to benchmarks/results/<date>-<name>, as Markdown and JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

NO_MEMORY = "out of memory"
OUTPUT_KEPT = 6000  # characters kept of a failed process's output
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # who imports this finds titanlite, which need not be installed


def cpu() -> str:
    """Returns the processor's name and number of cores."""
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in info.read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def gpus() -> list[str]:
    """Lists the names of the CUDA devices."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def p99(seconds: list[float]) -> float:
    """Computes the 99th percentile; with fewer than 100 values, the largest."""
    ordered = sorted(seconds)
    return ordered[max(0, -(-99 * len(ordered) // 100) - 1)]


def child(command: list[str]) -> dict[str, Any]:
    """Runs a process and parses its last line as JSON; if it fails, returns
    {"failed": reason, "output": its end}, so that other cases continue.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
    return {
        "failed": NO_MEMORY
        if "OutOfMemory" in done.stderr
        else f"exit code {done.returncode}: {last[:200]}",
        "output": done.stderr[-OUTPUT_KEPT:],
    }


def failure(*found: dict[str, Any]) -> str | None:
    """Describes the first of these that failed."""
    return next((one["failed"] for one in found if "failed" in one), None)


def exit_code(results: dict[str, Any]) -> None:
    """Exits with 1 if something failed for another reason than memory: benchmarks/gpu.sh then tries
    it again.
    """
    if any(one.get("failed", NO_MEMORY) != NO_MEMORY for one in results.values()):
        raise SystemExit(1)


def write(name: str, title: str, body: list[str], results: Any) -> None:
    """Writes the lines of `body` as Markdown and `results` as JSON."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    changed = [
        "git",
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ".",
        ":!benchmarks/results",
    ]
    if subprocess.run(changed, cwd=ROOT, capture_output=True, text=True).stdout:
        commit = f"{commit.strip()} and changes"
    head = {
        "date": datetime.date.today().isoformat(),
        "machine": ", ".join([cpu(), *gpus()]),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": commit.strip(),
    }
    target = ROOT / "benchmarks/results" / f"{head['date']}-{name}"
    target.with_suffix(".json").write_text(
        json.dumps({**head, "results": results}, indent=1) + "\n"
    )
    lines = [f"# {title}", "", *(f"- {key}: {value}" for key, value in head.items()), "", *body]
    target.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(f"wrote {target}.md and .json")
