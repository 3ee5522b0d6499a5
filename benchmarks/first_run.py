"""Checks a user's first runs: the first command trains, several processes agree, and a stopped run
resumes.

    python benchmarks/first_run.py

Runs ./run_train.sh as a user would, prints a table and writes it to benchmarks/results/ as Markdown
and JSON.
Needs the environment of run_train.sh. Takes ten minutes on two cores.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report

ROOT = report.ROOT
Curve = dict[int, tuple[float, float]]


def start(arguments: list[str], processes: int) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        [ROOT / "run_train.sh", *arguments],
        env={**os.environ, "PATH": path, "NGPU": str(processes)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(arguments: list[str], processes: int = 1, expected: int = 0) -> tuple[float, str]:
    """Runs a command that must end with an exit code; returns (seconds, output)."""
    started = time.monotonic()
    process = start(arguments, processes)
    output, _ = process.communicate()
    if process.returncode != expected:
        raise SystemExit(
            f"{arguments}: exit code {process.returncode}, expected {expected}\n{output}"
        )
    return time.monotonic() - started, output


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> Curve:
    """Reads step -> (loss, gradient norm)."""
    return {
        int(row["step"]): (row["loss"], row["grad_norm"]) for row in rows(folder) if "loss" in row
    }


def validation(folder: Path) -> dict[int, float]:
    return {
        int(r["step"]): v
        for r in rows(folder)
        for k, v in r.items()
        if k.startswith("validation") and "loss" in k
    }


def difference(a: Curve, b: Curve) -> tuple[float, float]:
    """Computes the largest relative differences of losses and of gradient norms; the steps must be
    equal.
    """
    assert sorted(a) == sorted(b), (sorted(a), sorted(b))
    loss, norm = ([abs(a[step][i] - b[step][i]) / abs(a[step][i]) for step in a] for i in (0, 1))
    return max(loss), max(norm)


def stop(arguments: list[str], folder: Path, number: signal.Signals, processes: int) -> int:
    """Sends a signal once step 10 is logged: SIGTERM to the launcher, SIGKILL to a worker.

    Returns the exit code.
    """
    process = start(arguments, processes)
    while process.poll() is None and (
        not (folder / "metrics.jsonl").exists() or max(curve(folder), default=0) < 10
    ):
        time.sleep(0.01)
    target = process.pid
    if number == signal.SIGKILL:
        listing = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
        ).stdout
        target = int(listing.split()[0])
    os.kill(target, number)
    process.communicate()
    return process.returncode


def train_fully(folder: Path) -> list[tuple[str, str]]:
    seconds, output = run(["debug", f"--run.folder={folder}"])
    found = validation(folder / "debug")
    first, last = found[0], found[max(found)]
    sample = output.partition("a sample")[2].partition("\n")[2].partition("\n\nnext")[0]
    print(sample)
    last_row = rows(folder / "debug")[-2]
    return [
        ("./run_train.sh, environment ready, whole command", f"{seconds:.0f} s"),
        ("of that in training steps", f"{last_row['seconds']:.0f} s"),
        (
            "validation loss at the start and at the end",
            f"{first:.3f} -> {last:.3f} (fell by {first - last:.2f} nats)",
        ),
    ]


def agree(folder: Path) -> list[tuple[str, str]]:
    base = [
        "debug",
        f"--run.folder={folder}",
        "--training.steps=20",
        "--metrics.log_freq=1",
        "--validation.prompts=",
    ]
    for processes in (1, 2, 4):
        run([*base, f"--run.name={processes}"], processes)
    lines = []
    for processes in (2, 4):
        loss, norm = difference(curve(folder / "1"), curve(folder / str(processes)))
        one, many = validation(folder / "1"), validation(folder / str(processes))
        held_out = max(abs(one[step] - many[step]) / one[step] for step in one)
        text = f"loss {loss:.1e}, gradient norm {norm:.1e}, validation loss {held_out:.1e}"
        lines.append(
            (f"debug, 20 steps, 1 and {processes} processes: largest relative difference", text)
        )
    return lines


def resume(folder: Path) -> list[tuple[str, str]]:
    base = [
        "debug",
        f"--run.folder={folder}",
        "--training.steps=20",
        "--metrics.log_freq=1",
        "--validation.prompts=",
    ]
    base += ["--validation.freq=0", "--checkpoint.freq=4"]
    lines = []
    for number in (signal.SIGTERM, signal.SIGKILL):
        for before, after in ((2, 2), (4, 1)):
            name = f"{number.name}-{before}-{after}"
            run([*base, f"--run.name=whole-{after}"], after)
            code = stop([*base, f"--run.name={name}"], folder / name, number, before)
            reached = max(curve(folder / name))
            run([*base, f"--run.name={name}"], after)
            loss, norm = difference(curve(folder / f"whole-{after}"), curve(folder / name))
            text = (
                f"exit code {code} after step {reached}; loss {loss:.1e}, gradient norm {norm:.1e}"
            )
            what = (
                f"{number.name} near step 10 of 20 with {before} processes, then {after}: "
                "against a run not stopped"
            )
            lines.append((what, text + (" (every bit the same)" if loss == norm == 0 else "")))
    return lines


def mistakes(folder: Path) -> list[tuple[str, str]]:
    typo, _ = run(["debug", f"--run.folder={folder}", "--training.stpes=5"], expected=2)
    usage, _ = run(["--help"])
    return [("a mistyped key: time to the error", f"{typo:.2f} s"), ("--help", f"{usage:.2f} s")]


def main() -> None:
    lines: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        for part in (mistakes, agree, resume, train_fully):
            for what, found in part(Path(name)):
                print(f"{what}: {found}", flush=True)
                lines.append((what, found))
    table = ["| what | found |", "|---|---|", *(f"| {what} | {found} |" for what, found in lines)]
    report.write("first_run", "First run", table, dict(lines))


if __name__ == "__main__":
    main()
