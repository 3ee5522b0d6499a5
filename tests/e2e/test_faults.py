"""The campaign: whatever dies whenever, a run goes on from its newest committed checkpoint as if
nothing had been.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from runs import curve, train_run

from titanlite.checkpoint import async_save, folders, shard_file, storage
from titanlite.checkpoint.folders import list_steps, step_folder
from titanlite.checkpoint.manifest import read_manifest
from titanlite.checkpoint.planner import PlacementSavePlanner
from titanlite.checkpoint.step_files import verify_files
from titanlite.tools.verify.pool import WorkerError

pytestmark = pytest.mark.slow

# Fault point -> the function it lies before, within or after, and whether rank 0 alone comes by
POINTS: dict[str, tuple[object, str, str, bool]] = {
    "planning": (PlacementSavePlanner, "create_local_plan", "after", False),
    "folder made": (storage.StepWriter, "prepare_global_plan", "after", True),
    "planned": (PlacementSavePlanner, "finish_plan", "before", False),
    "mid-shard": (shard_file, "write_file", "within", False),
    "shard end": (shard_file, "write_file", "after", False),
    "all written": (storage.StepWriter, "write_data", "after", False),
    "before the manifest": (storage.StepWriter, "finish", "before", True),
    "mid-commit": (storage, "write_synced", "after", True),
    "before the rename": (folders, "publish", "before", True),
    "after the rename": (folders, "publish", "after", True),
    "in retention": (folders.shutil, "rmtree", "within", True),
    "in async staging": (async_save, "_bytes", "after", False),
    "in async write": (storage, "write_files", "before", False),
}
CASES = [
    (point, victim, mode, step)
    for point in POINTS
    for victim in (0, 1)
    for mode in ("disabled", "async")
    for step in (
        2,
        4,
    )  # the first save of the run, and one that has a checkpoint before it to delete
    if not ("async" in point and mode == "disabled") and not ("retention" in point and step == 2)
]


def die(arguments: list[str], point: str, victim: int, step: int) -> int:
    """A run in which rank `victim` gets SIGKILL at that point of the save of that step."""
    owner, name, where, first_only = POINTS[point]
    original, save = getattr(owner, name), async_save.AsyncSaver.save
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    saving, struck = [0], []

    def save_and_note(self, get_state, write):
        self.wait()
        saving[0] = write.args[0]
        save(self, get_state, write)

    def faulty(*args, **kwargs):
        striker = (
            dist.get_rank() == (0 if first_only else victim) and saving[0] == step and not struck
        )
        if not striker or (name == "rmtree" and not str(args[0]).endswith(".deleted")):
            return original(*args, **kwargs)
        struck.append(point)
        if (
            where == "within" and name == "write_file"
        ):  # a process that dies within has done half of it
            tensors = list(args[1].tensors.items())
            original(args[0], args[1]._replace(tensors=dict(tensors[: len(tensors) // 2 + 1])))
            os.truncate(args[0], 4000)
        elif where == "within":
            next(Path(args[0]).iterdir()).unlink()
        result = original(*args, **kwargs) if where == "after" else None
        os.kill(pids[victim], signal.SIGKILL)
        time.sleep(0.1)  # here, where it was another's: that one is dead now
        return result if where == "after" else original(*args, **kwargs)

    async_save.AsyncSaver.save = save_and_note
    setattr(owner, name, faulty)
    return train_run(arguments)


def run_arguments(folder: Path, text_file: Path, mode: str) -> list[str]:
    small = [
        "--model.dim=32",
        "--model.num_layers=2",
        "--model.ffn_dim=64",
        "--training.seq_len=64",
    ]
    batch = [
        "--training.steps=6",
        "--training.global_batch_size=8",
        "--training.local_batch_size=2",
    ]
    saving = ["--checkpoint.freq=2", "--checkpoint.keep=1", f"--checkpoint.async_mode={mode}"]
    told = [
        "--validation.prompts=",
        "--metrics.log_freq=1",
        "--validation.freq=0",
        "--schedule.warmup_steps=2",
    ]
    return [
        "debug",
        f"--run.folder={folder}",
        f"--data.path={text_file}",
        *small,
        *batch,
        *saving,
        *told,
    ]


@pytest.fixture(scope="module")
def whole(pool, text_file, tmp_path_factory) -> dict:
    """The losses of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    assert pool.run(2, train_run, run_arguments(folder, text_file, "disabled")) == [0, 0]
    return curve(folder / "debug")


@pytest.mark.parametrize(("point", "victim", "mode", "step"), CASES)
def test_killed_at(pool, text_file, tmp_path, whole, point, victim, mode, step):
    run, folder = run_arguments(tmp_path, text_file, mode), tmp_path / "debug/checkpoints"
    with pytest.raises(WorkerError, match=r"died|[Cc]onnection|closed|gloo"):
        pool.run(2, die, run, point, victim, step)
    steps, before = list_steps(folder), [step - 2] if step > 2 else []
    if point in ("after the rename", "in retention"):
        assert steps[-1] == step
    elif POINTS[point][3] and victim == 1:  # rank 0 lives, and has all it needs to commit
        assert steps[-1:] in ([step], before)
    else:
        assert steps == before
    for there in steps:
        path = step_folder(folder, there)
        assert not verify_files(path, read_manifest(path))
    assert pool.run(2, train_run, run) == [0, 0]
    assert curve(tmp_path / "debug") == whole
    log = (tmp_path / "debug/log.txt").read_text()
    assert (
        f"resumed from {folder}/step-{steps[-1]} " if steps else "starting with new weights"
    ) in log
    # 6 is the last step: not proven
    assert sorted(path.name for path in folder.iterdir()) == ["step-4", "step-6"]


def test_there_are_enough_cases():
    assert len(CASES) >= 60
