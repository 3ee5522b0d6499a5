"""`titanlite eject`: copies train.py and the configs into a folder, for a user to change.

What it is: the start of a project whose training loop differs from ours. The copied train.py
imports everything else from titanlite. `titanlite train` keeps running the package's own train.py;
the copy is run by python or torchrun.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from titanlite.config.load import flavors, program_folder
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import write_new_files
from titanlite.runtime.shell_command import package_variable, python_command
from titanlite.tools.cli.options import StrictParser

NEXT = """copied train.py and {count} configs to {folder}. To train with them:
  cd {quoted}
  {python} train.py train_configs/debug.toml
  {python} -m torch.distributed.run --nproc-per-node 2 train.py train_configs/debug.toml"""


def run(argv: list[str]) -> int:
    """Copies the files and prints the commands that run them.

    Raises ConfigError if a file is there already.
    """
    parser = StrictParser(
        prog="titanlite eject",
        description="Copy train.py and the configs into a folder, to change them there.",
    )
    parser.add_argument("folder", type=Path, help="where to; it is made if it does not exist")
    folder: Path = parser.parse_args(argv).folder
    names = [Path("train.py"), *(Path("train_configs", f"{flavor}.toml") for flavor in flavors())]
    existing = [name for name in names if os.path.lexists(folder / name)]
    if existing:
        listed = str(folder / existing[0])
        if len(existing) > 1:
            listed += f" (and {len(existing) - 1} more)"
        raise ConfigError(f"{listed} exists already; delete it first or name another folder")
    try:
        contents = {str(name): (program_folder() / name).read_bytes() for name in names}
        write_new_files(folder, contents)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror or error}; expected a folder to write to"
        ) from None
    quoted = shlex.quote(str(folder))
    num_configs = len(names) - 1
    python = f"{package_variable()}{python_command(folder.absolute())}"
    print(NEXT.format(count=num_configs, folder=folder, quoted=quoted, python=python))
    return 0
