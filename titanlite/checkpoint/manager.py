"""When to save, what to keep, and what to go on from.

What it is: the policy over `storage.py`. A run whose folder holds a checkpoint goes on from the newest; a config
that contradicts that checkpoint is an error that names the keys. Nothing is saved that is not finite, so keeping
the newest few never throws the last good one away.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlite.checkpoint.storage import delete_step, list_steps, read_step, size_gb, step_folder, sweep, write_step
from titanlite.config import Checkpoint, ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger("titanlite")


class Checkpointer:
    """Saves and loads `states`, a name -> Stateful mapping, in `<run folder>/checkpoints`."""

    def __init__(self, config: Checkpoint, folder: Path, states: dict[str, Any], extra_files: dict[str, bytes]) -> None:
        """`extra_files` (name -> content) go into each checkpoint, config.toml, model.json and data.json among them."""
        self.config, self.folder, self.states, self.extra_files = config, folder / "checkpoints", states, extra_files
        self.newest = 0

    def load(self) -> None:
        """Goes on from the newest checkpoint, if there is one.

        Raises ConfigError where the folder is used and must not be, or holds another run.
        """
        used = [path for path in (self.folder, self.folder.parent / "metrics.jsonl") if path.exists()]
        if self.config.load == "never" and used:
            raise ConfigError(
                f"checkpoint.load = never, but {used[0]} exists; choose another run.name or delete the run's folder"
            )
        if dist.get_rank() == 0:
            sweep(self.folder)
        newest = [max(list_steps(self.folder), default=0)]
        dist.broadcast_object_list(newest)  # on a network file system not all processes see a new folder at once
        self.newest = newest[0]
        if not self.newest:
            logger.info("no checkpoint in %s: starting with new weights", self.folder)
            return
        path = step_folder(self.folder, self.newest)
        if problems := _contradictions(path, self.extra_files):
            raise ConfigError([f"{path} was written by another run: {problem}" for problem in problems])
        started = time.monotonic()
        state = {name: part.state_dict() for name, part in self.states.items()}
        read_step(path, state)
        for name, part in self.states.items():
            part.load_state_dict(state[name])
        logger.info("resumed from %s in %.1f s", path, time.monotonic() - started)

    def due(self, step: int, last: bool) -> bool:
        """Whether `maybe_save` would save after this step."""
        return step != self.newest and (last or (self.config.freq > 0 and step % self.config.freq == 0))

    def maybe_save(self, step: int, last: bool) -> None:
        """Saves when it is due, then deletes what is beyond `keep`. All processes call it together."""
        if not self.due(step, last):
            return
        started = time.monotonic()
        path = write_step(self.folder, step, self.states, self.extra_files)
        self.newest = step
        if dist.get_rank() == 0:
            seconds, size = time.monotonic() - started, size_gb(path)
            logger.info(f"saved {path}: {size:.3f} GB in {seconds:.2f} s, {size / seconds:.2f} GB/s")
            steps = list_steps(self.folder)
            for old in steps[: -self.config.keep] if self.config.keep else []:
                delete_step(self.folder, old)
        dist.barrier()  # who goes on may end the run, and with it the process that is still deleting


def _contradictions(path: Path, current: dict[str, bytes]) -> list[str]:
    """What may not change within a run: the model's shape, the data and the order it is read in."""
    try:
        saved = {name: (path / name).read_bytes().decode() for name in ("config.toml", "model.json", "data.json")}
        was = _identity(saved)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: {error!r}; the checkpoint is not whole") from None
    now = _identity({name: current[name].decode() for name in saved})
    return [f"{key} was {was.get(key)} and is {now[key]}" for key in now if was.get(key) != now[key]]


def _identity(files: dict[str, str]) -> dict[str, Any]:
    """Key -> value of what makes a run that run."""
    config, data = tomllib.loads(files["config.toml"]), json.loads(files["data.json"])
    identity = {f"model.{name}": value for name, value in json.loads(files["model.json"]).items()}
    identity["training.seq_len"] = config["training"]["seq_len"]
    identity["run.seed"] = config["run"]["seed"]
    text = f"{data['name']}, {data['bytes']} bytes, fingerprint {data['fingerprint'][:8]}"
    identity["the data (data.path, data.pattern, data.tokenizer, the Python version)"] = text
    return identity
