"""Counts descriptors and file operations of a run's processes, in real runs with a few processes.

Both grow linearly with the number of processes, so `fit` extrapolates to many. File operations are
calls of Python (stat, open, listdir, mkdir, rename, remove) on paths below the folders of text,
prepared data and run, which many nodes would share. Descriptors are the largest number that a
process has open at one time.

There are three runs: one saves once, one saves twice, and the first is resumed and saves once more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COUNTER = """
import collections, json, os, sys, threading, time
shared, results = os.environ["COUNTED"].split(":"), os.environ["COUNTS"]
counts, most = collections.Counter(), [0]

def note(name, *paths):
    if any(isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(tuple(shared)) for path in paths):
        counts[name] += 1

def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
        note(event, *arguments[:2])

def counting(name, function):
    def counted(path, *arguments, **options):
        note(name, path)
        return function(path, *arguments, **options)
    return counted

def watch():
    while True:
        most[0] = max(most[0], len(os.listdir("/proc/self/fd")))
        time.sleep(0.02)

def leave(code, leave=os._exit):
    with open(f"{results}/{os.environ['RANK']}", "w") as file:
        json.dump({"descriptors": most[0], "operations": sum(counts.values()), "by": counts}, file)
    leave(code)

if "RANK" in os.environ:
    sys.addaudithook(hook)
    os.stat, os.lstat, os._exit = counting("stat", os.stat), counting("lstat", os.lstat), leave
    threading.Thread(target=watch, daemon=True).start()
"""
OPTIONS = [
    "--run.device=cpu",
    "--checkpoint.async_mode=async",
    "--validation.prompts=",
    "--validation.freq=0",
]
OPTIONS += ["--checkpoint.freq=2", "--training.seq_len=32", "--training.local_batch_size=1"]
OPTIONS += ["--training.global_batch_size=8", "--data.pattern=*.txt"]
FILES = 20  # text files


def run(root: Path, folder: Path, processes: int, steps: int, name: str) -> list[dict[str, int]]:
    """Trains with the program at `root`; returns the counts of each rank."""
    results = folder / "counts"
    results.mkdir()
    (folder / "hooks").mkdir(exist_ok=True)
    (folder / "hooks/sitecustomize.py").write_text(COUNTER)
    counted = [str(folder / part) for part in ("text", "runs", "cache")]
    environment = os.environ | {
        "NGPU": str(processes),
        "OMP_NUM_THREADS": "1",
        "TITANLITE_CACHE": counted[2],
    }
    environment |= {"COUNTED": ":".join(counted), "COUNTS": str(results)}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder / "hooks"), str(root)])
    command = [
        sys.executable,
        "-m",
        "titanlite",
        "train",
        "debug",
        *OPTIONS,
        f"--data.path={folder / 'text'}",
    ]
    command += [
        f"--run.folder={folder / 'runs'}",
        f"--run.name={name}",
        f"--training.steps={steps}",
    ]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}:\n{done.stdout}\n{done.stderr}")
    found = [json.loads((results / str(rank)).read_text()) for rank in range(processes)]
    for path in results.iterdir():
        path.unlink()
    results.rmdir()
    return found


def count(root: Path, processes: int) -> dict[str, int]:
    """Counts descriptors of rank 0 and of the last rank, and file operations of all ranks in a
    start, a load and a save.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").mkdir()
        for i in range(FILES):
            (folder / f"text/{i}.txt").write_text("".join(f"{n} " for n in range(20_000 + i)))
        run(root, folder, processes, 2, "prepares")
        once, twice = (
            run(root, folder, processes, 2, "once"),
            run(root, folder, processes, 4, "twice"),
        )
        resumed = run(root, folder, processes, 4, "once")
    one, two, again = (
        sum(counts["operations"] for counts in ranks) for ranks in (once, twice, resumed)
    )
    return {
        "descriptors_0": max(ranks[0]["descriptors"] for ranks in (once, twice, resumed)),
        "descriptors": max(ranks[-1]["descriptors"] for ranks in (once, twice, resumed)),
        "operations_save": two - one,
        "operations_start": one - (two - one),
        "operations_load": again - one,
    }


def fit(found: dict[int, dict[str, int]], ranks: int) -> dict[str, float]:
    """Extrapolates the counts of three numbers of processes to so many ranks: by a line, if they
    lie on one to 5 %, otherwise by a parabola.
    """
    (a, first), (b, second), (c, third) = sorted(found.items())
    counts = {}
    for key in first:
        slope, later = (second[key] - first[key]) / (b - a), (third[key] - second[key]) / (c - b)
        straight = first[key] + (third[key] - first[key]) * (ranks - a) / (c - a)
        middle = first[key] + (third[key] - first[key]) * (b - a) / (c - a)
        bent = (
            first[key] + slope * (ranks - a) + (later - slope) / (c - a) * (ranks - a) * (ranks - b)
        )
        counts[key] = straight if abs(middle - second[key]) <= 0.05 * second[key] else bent
    return counts
