"""`titanlite eject`: copies train.py and the configs into a folder, for a user to change.

What it is: the start of a project whose training loop differs from ours. The copied train.py
imports everything else from titanlite. `titanlite train` keeps running the package's own train.py;
the copy is run by python or torchrun.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from titanlite.config.load import flavors, program_folder
from titanlite.runtime import interpreter
from titanlite.runtime.errors import ConfigError

NEXT = """copied train.py and {count} configs to {folder}. To train with them:
  cd {quoted}
  {python} train.py train_configs/debug.toml
  {python} -m torch.distributed.run --nproc-per-node 2 train.py train_configs/debug.toml"""


def run(argv: list[str]) -> int:
    """Copies the files and prints the commands that run them.

    Raises ConfigError if a file is there already.
    """
    parser = argparse.ArgumentParser(
        prog="titanlite eject",
        description="Copy train.py and the configs into a folder, to change them there.",
    )
    parser.add_argument("folder", type=Path, help="where to; it is made if it does not exist")
    folder: Path = parser.parse_args(argv).folder
    names = [Path("train.py"), *(Path("train_configs", f"{flavor}.toml") for flavor in flavors())]
    existing = [name for name in names if os.path.lexists(folder / name)]
    if existing:
        more = f" (and {len(existing) - 1} more)" if existing[1:] else ""
        raise ConfigError(
            f"{folder / existing[0]}{more} exists already; delete it first or name another folder"
        )
    try:
        (folder / "train_configs").mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(program_folder() / name, folder / name)
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror or error}; expected a folder to write to"
        ) from None
    print(
        NEXT.format(
            count=len(names) - 1,
            folder=folder,
            quoted=shlex.quote(str(folder)),
            python=_python(folder),
        )
    )
    return 0


def _python(folder: Path) -> str:
    """How a shell in `folder` calls an interpreter that finds titanlite: a clone need not be
    installed.
    """
    name = next(
        (name for name in ("python", "python3") if shutil.which(name) == sys.executable),
        sys.executable,
    )
    found = subprocess.run(interpreter.python("import titanlite"), cwd=folder, capture_output=True)
    path = "" if found.returncode == 0 else f"PYTHONPATH={shlex.quote(interpreter.PACKAGES)} "
    return path + shlex.quote(name)
