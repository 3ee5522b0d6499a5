"""Weights & Biases, offline unless online is asked for.

What it is: a run with the same identifier after each resume. Offline, its folder is below `wandb/`
in the run's folder; it is written anew from metrics.jsonl at each start of the run, so there is one
folder, which has every step once, and `wandb sync` uploads it. Online, the server reports the last
step that it has, and gets the rows after it. It cannot delete rows: a step that is trained again
after a kill or a rollback keeps its first values.
What it costs: a process of W&B's, which writes, uploads, and measures the machine every few
seconds.

W&B gets no source code, difference to a commit, console output, command line, list of packages or
host name.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

# W&B would report errors in its own code; it reads this when it is imported
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb

from titanlite.config.schema import MetricsConfig
from titanlite.sinks.metric_names import Scalars
from titanlite.sinks.provenance import Provenance

OLDER_MODES = {"dryrun": "offline", "run": "online"}  # W&B's former names


class WandbSink:
    """Writes to the run `run_id` of a project."""

    def __init__(
        self, config: MetricsConfig, folder: Path, run_id: str, origin: Provenance
    ) -> None:
        mode = config.wandb_mode
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE", "offline")
        self.mode: Any = OLDER_MODES.get(mode, mode)
        self.project = config.project or os.environ.get("WANDB_PROJECT", "titanlite")
        self.folder = folder
        self.run_id = run_id
        self.origin = origin
        self.run: Any = None

    def open(self) -> defaultdict[str, int]:
        """Starts or resumes the run. Returns the last step that W&B has."""
        if self.run is not None:  # from an earlier attempt, whose sending has failed
            self.close(False)
        if self.mode == "offline":
            for path in self.folder.glob(f"wandb/offline-run-*-{self.run_id}"):
                shutil.rmtree(path)
        elif self.mode == "online" and not wandb.login(prompt=False):
            raise ConnectionError("no API key: run `wandb login`, or set WANDB_API_KEY")
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_meta=True,  # omits the command line, which may contain a password, and paths
            x_save_requirements=False,
            host=self.origin.name,
            init_timeout=60,
        )
        resume: Any = None
        if self.mode != "offline":
            resume = "allow"
        self.run = wandb.init(
            id=self.run_id,
            name=self.origin.name,
            project=self.project,
            dir=str(self.folder),
            mode=self.mode,
            resume=resume,
            reinit="create_new",
            config=self.origin.settings | self.origin.facts | {"config.toml": self.origin.toml},
            settings=settings,
        )
        first_step = 0
        if self.mode != "offline":
            first_step = self.run.starting_step
        return defaultdict(lambda: first_step - 1)

    @staticmethod
    def metric_name(name: str) -> str:
        return name

    def send(self, rows: list[Scalars]) -> None:
        """Passes the values to W&B's process. Rows of the same step become one."""
        for step, time, values in rows:
            self.run.log({**values, "_timestamp": time}, step=step)

    def attach(self, path: Path, name: str) -> None:
        """Adds a file to the run's files, which W&B uploads, or `wandb sync` later."""
        base = str(path).removesuffix(name)
        self.run.save(str(path), base_path=base, policy="now")

    def close(self, failed: bool) -> None:
        """Ends the run, and waits until it is uploaded or its file is complete."""
        # Forget the run first: if finishing fails, the next attempt starts a new one
        ending = self.run
        self.run = None
        ending.finish(exit_code=int(failed))
        wandb.teardown()  # finish() returns before W&B's process has written the file's end
