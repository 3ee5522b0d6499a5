"""Workers: what goes wrong in one is reported, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from messages import refused
from preparing import TOKENIZER

from titanlite.runtime.interpreter import PACKAGES
from titanlite.tools.prepare import job as job_module
from titanlite.tools.prepare import workers
from titanlite.tools.prepare.job import Job, write_job
from titanlite.tools.prepare.plan_job import plan_job
from titanlite.tools.prepare.sources import Source, find
from titanlite.tools.prepare.workers import run_parts


@pytest.fixture
def job(tmp_path, monkeypatch) -> Job:
    monkeypatch.setattr(job_module, "PART", 13_000)
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / f"text/{i}.jsonl").write_text(f'{{"text": "row {i}"}}\n' * 300)
    (tmp_path / "work").mkdir()
    source = Source(str(tmp_path / "text"))
    job = plan_job([(source, find(source))], TOKENIZER)
    assert job.parts == 4
    write_job(job, tmp_path / "work")
    return job


def test_all_parts_are_made(tmp_path, job):
    parts = run_parts(job, tmp_path / "work", TOKENIZER, [0, 1, 2, 3], 2)
    assert sorted(parts) == [0, 1, 2, 3]
    assert len(list((tmp_path / "work").glob("part-*.json"))) == 4


def test_the_first_error_ends_all(tmp_path, job):
    (tmp_path / "text/5.jsonl").unlink()
    with refused(str(tmp_path / "text/5.jsonl"), "No such file"):
        list(run_parts(job, tmp_path / "work", TOKENIZER, [0, 1, 2, 3], 2))


def test_a_worker_that_is_killed_is_reported(tmp_path, job, monkeypatch):
    start = workers.start_worker

    def killed(work: Path) -> subprocess.Popen[str]:
        child = start(work)
        os.kill(child.pid, signal.SIGKILL)
        return child

    monkeypatch.setattr(workers, "start_worker", killed)
    with refused("signal 9", "same command"):
        list(run_parts(job, tmp_path / "work", TOKENIZER, [0, 1, 2, 3], 2))


@pytest.mark.slow
def test_a_worker_ends_with_the_process_that_started_it(tmp_path, job):
    code = (
        "import sys, time; from pathlib import Path; from titanlite.tools.prepare.workers "
        "import start_worker\n"
    )
    code += "child = start_worker(Path(sys.argv[1])); print(child.pid, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, str(tmp_path / "work")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PACKAGES) as process:
        worker = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        state = (
            Path(f"/proc/{worker}/stat").read_text().split()[2]
            if Path(f"/proc/{worker}/stat").exists()
            else "Z"
        )
        if state == "Z":
            return
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
