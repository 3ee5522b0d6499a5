"""Where a benchmark's results go: benchmarks/results/<date>-<name>, as Markdown and as JSON, with what they hang on."""

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

ROOT = Path(__file__).resolve().parents[1]


def cpu() -> str:
    """The processor's name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def gpus() -> list[str]:
    """The names of the CUDA devices, where this process knows torch."""
    torch = sys.modules.get("torch")
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch else []


def p99(seconds: list[float]) -> float:
    """The 99th percentile: of fewer than 100 the largest."""
    ordered = sorted(seconds)
    return ordered[max(0, -(-99 * len(ordered) // 100) - 1)]


def write(name: str, title: str, body: list[str], results: Any) -> None:
    """Writes the lines of `body` as Markdown and `results` as JSON."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    changed = ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"]
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
    target.with_suffix(".json").write_text(json.dumps({**head, "results": results}, indent=1) + "\n")
    lines = [f"# {title}", "", *(f"- {key}: {value}" for key, value in head.items()), "", *body]
    target.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(f"wrote {target}.md and .json")
