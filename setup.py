"""Puts train.py and train_configs/ into a wheel, as titanlite/program/.

What it is: one build step on top of pyproject.toml, which has everything else.
Why it is here: `titanlite train` starts train.py. In a clone it is beside the package, where a
reader looks for it; an installed package can only find it inside itself. Copied at build time,
there is one train.py in the repository.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithProgram(build_py):
    """`build_py` that also copies the program. An editable install uses the files of the clone."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, "titanlite", "program")
        shutil.rmtree(folder, ignore_errors=True)  # an earlier build's
        for path in (ROOT / "train.py", *(ROOT / "train_configs").glob("*.toml")):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


setup(cmdclass={"build_py": BuildWithProgram})
