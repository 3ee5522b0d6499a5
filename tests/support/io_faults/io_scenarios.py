"""Commands that must survive a failing file operation or a power failure, and what must hold after
either.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch._dynamo  # a model on the meta device imports it: once here, not in each forked process
import torch.distributed as dist
from checkpoints import write_step
from io_calls import Outcome, forked
from model_builder import SMALL, small_model
from runs import curve

import train
from titanlite.checkpoint import async_save
from titanlite.checkpoint.folders import list_steps, step_folder
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import RunMetadata, read_manifest
from titanlite.checkpoint.state import ModelState
from titanlite.checkpoint.step_files import verify_files
from titanlite.checkpoint.storage import SaveError
from titanlite.config.schema import CheckpointConfig
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file
from titanlite.tools.cli.main import main
from titanlite.tools.formats.convert import load_full_state

MODEL = ["--model.dim=16", "--model.num_heads=2", "--model.num_kv_heads=1", "--model.num_layers=1"]
BATCH = [
    "--model.ffn_dim=16",
    "--training.seq_len=32",
    "--training.global_batch_size=2",
    "--metrics.log_freq=1",
]
REST = [
    "--schedule.name=constant",
    "--schedule.warmup_steps=2",
    "--validation.freq=0",
    "--validation.prompts=",
]
SAVES = [
    "--checkpoint.freq=2",
    "--checkpoint.keep=1",
    "--compile.enabled=false",
    "--training.local_batch_size=2",
]
LINES = [
    f"def add_{i}(x):\n    y = x + {i * i % 97}\n    return y * {i % 7}\n\n\n" for i in range(600)
]
EMPTY: dict = {
    section: {} for section in ("training", "optimizer", "stability", "schedule", "float8", "ema")
}  # a config
DATA = b'{"name": "none", "bytes": 0, "fingerprint": ""}'
RUN_FILES = ("log.txt", "metrics.jsonl", "events.jsonl", "config.toml", "report.html")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def unexpected(folder: Path, *expected: str) -> list[str]:
    found = sorted(names(folder))
    return (
        []
        if found == sorted(expected)
        else [f"in {folder.name}: {found}, expected {sorted(expected)}"]
    )


def damages(step: Path) -> list[str]:
    """What is wrong with a checkpoint."""
    try:
        return verify_files(step, read_manifest(step))
    except ConfigError as error:
        return error.problems


def lost_steps(folder: Path, output: str) -> list[str]:
    """Finds problems of a `checkpoints` folder: steps that are damaged, or that were reported and are not
    there.
    """
    steps, saved = (
        list_steps(folder),
        [int(step) for step in re.findall(r"saved \S+/step-(\d+):", output)],
    )
    found = [problem for step in steps for problem in damages(step_folder(folder, step))]
    return found + (
        [f"saved {saved}, there {steps}"] if max(saved, default=0) > max(steps, default=0) else []
    )


def text_file(folder: Path) -> Path:
    """Writes text to train on. Prepared data is kept in `folder` as well."""
    os.environ["TITANLITE_CACHE"] = str(folder / "cache")
    path = folder / "text.py"
    path.write_text("".join(LINES))
    return path


class Scenario:
    """A command that changes files below the folder `work`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder, folder / "work"
        self.report: Callable[[str], object] = print  # what is safe from now on

    def prepare(self) -> None:
        """Fills `work`, which is empty, before the command starts."""

    def run(self, again: bool = False) -> int:
        """Runs the command; returns its exit code. `again`: it runs once more, after it has failed."""
        raise NotImplementedError

    def lost(self, outcome: Outcome, kind: str) -> list[str]:
        """What is not as it must be after a failure of that kind."""
        raise NotImplementedError

    def unrecovered(self) -> list[str]:
        """What is not as it must be after the command was repeated."""
        raise NotImplementedError


class Training(Scenario):
    """A run of three steps, which saves after 2 and 3; or `resumed` the next two, which also delete
    these saves.
    """

    def __init__(self, folder: Path, mode: str, retries: int, resumed: bool = False) -> None:
        super().__init__(folder)
        self.retries, self.resumed, self.steps = retries, resumed, 5 if resumed else 3
        options = [
            *MODEL,
            *BATCH,
            *REST,
            *SAVES,
            f"--checkpoint.async_mode={mode}",
            f"--checkpoint.retries={retries}",
        ]
        self.arguments = [
            "debug",
            *options,
            f"--data.path={text_file(folder)}",
            f"--run.folder={self.work}/out",
        ]
        self.out, self.checkpoints = self.work / "out/debug", self.work / "out/debug/checkpoints"
        if resumed:
            assert forked(lambda: self.train(3)).code == 0
            with (self.out / "metrics.jsonl").open("a") as file:  # as a killed run leaves it
                file.write('{"step": 4}\n{"step')
            (self.checkpoints / "step-4.tmp-01234567").mkdir()
            shutil.copytree(self.work, folder / "stopped")
        assert forked(lambda: self.train(7)).code == 0
        self.curve = curve(self.out)

    def prepare(self) -> None:
        if self.resumed:
            shutil.copytree(self.folder / "stopped", self.work, dirs_exist_ok=True)

    def train(self, steps: int) -> int:
        with mock.patch.object(async_save, "MAX_RETRY_SECONDS", 0):
            return train.run([*self.arguments, f"--training.steps={steps}"])

    def run(self, again: bool = False) -> int:
        return self.train(self.steps + 2 * again)

    def lost(self, outcome: Outcome, kind: str) -> list[str]:
        found = lost_steps(self.checkpoints, outcome.output)
        if outcome.code == 0:
            log, rows, steps = (
                (self.out / "log.txt").read_text(),
                curve(self.out),
                range(1, self.steps + 1),
            )
            found += (
                []
                if list_steps(self.checkpoints)[-1:] == [self.steps]
                else ["the last step was not saved"]
            )
            found += [
                f"log.txt: step {i} is not there once"
                for i in steps
                if len(re.findall(f"step {i}/", log)) != 1
            ]
            found += [f"metrics.jsonl: step {i}" for i in steps if rows.get(i) != self.curve[i]]
        elif self.retries and kind != "full" and re.search(r"step \d/", outcome.output):
            found.append("a single fault ended the run, with attempts left")
        return found

    def unrecovered(self) -> list[str]:
        last = range(self.steps + 1, self.steps + 3)
        found = unexpected(self.out, ".lock", ".proven", *RUN_FILES, "checkpoints")
        found += unexpected(self.checkpoints, *(f"step-{step}" for step in last)) + lost_steps(
            self.checkpoints, ""
        )
        same = curve(self.out) == {
            step: row for step, row in self.curve.items() if step <= last[-1]
        }
        return found + ([] if same else ["other losses than those of an undisturbed run"])


class Held:
    """A state of two tensors that hold a number."""

    def __init__(self, number: int = 0) -> None:
        self.tensors = {
            "a": torch.full((3, 5), float(number)),
            "b": torch.full((40,), float(number)),
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = state


class Saving(Scenario):
    """Three saves, each of which deletes the one before: as a run does it, but of a few bytes and
    without a run.
    """

    def run(self, again: bool = False) -> int:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        config = CheckpointConfig(keep=1, retries=0, freq=1)
        facts = SimpleNamespace(
            config=EMPTY,
            files={"model.json": b'{"vocab_size": 8}', "data.json": DATA},
            vocab_size=8,
            metadata=lambda validation_loss: RunMetadata({}, EMPTY, "", validation_loss),
        )
        guard = SimpleNamespace(set_rollbacks=lambda count: None)
        state = Held()
        manager = Checkpointer(
            config, self.work / "run", {"model": state}, facts, torch.device("cpu"), guard
        )
        manager.load()
        assert torch.equal(state.tensors["b"], Held(manager.newest.step).tensors["b"])
        for step in range(manager.newest.step + 1, 6 if again else 4):
            state.tensors = Held(step).tensors
            try:
                manager.save(step, None, wait=False)
                manager.prove(1.0)
            except SaveError as error:
                print(f"error: {error}")
                return 1
            self.report(f"saved x/step-{step}:")
        return 0

    def lost(self, outcome: Outcome, kind: str) -> list[str]:
        return lost_steps(self.work / "run/checkpoints", outcome.output)

    def unrecovered(self) -> list[str]:
        return unexpected(self.work / "run/checkpoints", "step-5") + lost_steps(
            self.work / "run/checkpoints", ""
        )


class Preparing(Scenario):
    """`titanlite prepare` into a new cache."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.text, self.cache = text_file(folder), self.work / "new/cache"
        assert forked(self.run).code == 0
        self.whole = self.state()

    def run(self, again: bool = False) -> int:
        return main(["prepare", "debug", f"--data.path={self.text}", f"--data.cache={self.cache}"])

    def state(self) -> dict[str, bytes]:
        files = [path for path in self.cache.glob("text-*/*") if "verified.json" not in path.name]
        return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files}

    def lost(self, outcome: Outcome, kind: str) -> list[str]:
        allowed = [self.whole] + ([{}] if outcome.code else [])
        return (
            []
            if self.state() in allowed
            else ["the data is neither absent nor whole, or was reported and is gone"]
        )

    def unrecovered(self) -> list[str]:
        (name,) = {path.split("/")[0] for path in self.whole}
        found = [] if self.state() == self.whole else ["the data is not whole"]
        found += unexpected(
            self.cache, name, *(lock for lock in [f".{name}.lock"] if (self.cache / lock).exists())
        )
        return found + unexpected(
            self.cache / name, "verified.json", *(path.split("/")[1] for path in self.whole)
        )


class Converting(Scenario):
    """`titanlite convert` to a new target in a new folder."""

    def __init__(self, folder: Path, to: str, suffix: str = "") -> None:
        super().__init__(folder)
        self.to = to
        self.target, self.source = self.work / f"new/folder/target{suffix}", folder / "source"
        config = dataclasses.replace(SMALL, num_layers=1)
        state = {"model": ModelState([small_model(config=config)]).state_dict()}
        facts = RunMetadata({}, {"training": {"seq_len": 16}}, "")
        write_step(
            self.source / "checkpoints", 7, state, {"model.json": config.to_json().encode()}, facts
        )
        self.whole = load_full_state(self.source)

    def run(self, again: bool = False) -> int:
        exists = again and self.state() == "new"
        code = main(["convert", str(self.source), str(self.target), "--to", self.to, "--no-verify"])
        if exists:  # it must be refused, with code 2
            return code - 2
        return code

    def state(self) -> str:
        """What is at the target."""
        if not self.target.exists():
            return "nothing"
        try:
            found = load_full_state(self.target)
            same = list(found) == list(self.whole) and found.model == self.whole.model
            same &= all(torch.equal(found[name], self.whole[name]) for name in self.whole)
            same &= self.to != "titanlite" or not damages(self.target)
            return "new" if same else "damaged"
        except ConfigError as error:
            return f"damaged: {error}"

    def lost(self, outcome: Outcome, kind: str) -> list[str]:
        state = self.state()
        allowed = ["new"] + (["nothing"] if outcome.code else [])
        return [] if state in allowed else [f"at the target: {state}"]

    def unrecovered(self) -> list[str]:
        return unexpected(self.target.parent, self.target.name) + (
            [] if self.state() == "new" else [self.state()]
        )


class Replacing(Scenario):
    """A small file that gets another content, such as config.toml."""

    def prepare(self) -> None:
        (self.work / "file").write_bytes(b"old" * 9)

    def run(self, again: bool = False) -> int:
        try:
            replace_file(self.work / "file", b"new" * 5)
        except OSError as error:
            print(f"error: {error}")
            return 1
        return 0

    def lost(self, outcome: Outcome, kind: str) -> list[str]:
        allowed = [b"new" * 5] + ([b"old" * 9] if outcome.code else [])
        content = (self.work / "file").read_bytes()
        return [] if content in allowed else [f"the file holds {content!r}"]

    def unrecovered(self) -> list[str]:
        return unexpected(self.work, "file") + self.lost(Outcome(0, "", None), "")


SCENARIOS: dict[str, Callable[[Path], Scenario]] = {
    "train": lambda folder: Training(folder, "disabled", 0),
    "train in the background": lambda folder: Training(folder, "async", 2),
    "resume": lambda folder: Training(folder, "async", 2, resumed=True),
    "save": Saving,
    "prepare": Preparing,
    "replace a file": Replacing,
    "convert titanlite": lambda folder: Converting(folder, "titanlite"),
    "convert dcp": lambda folder: Converting(folder, "dcp"),
    "convert hf": lambda folder: Converting(folder, "hf"),
    "convert torch": lambda folder: Converting(folder, "torch", ".pt"),
    "convert safetensors": lambda folder: Converting(folder, "safetensors", ".safetensors"),
}
