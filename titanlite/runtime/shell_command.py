"""How a shell calls this Python and titanlite, for messages that print commands.

What it is: the commands work as they are printed, also where titanlite is a clone that is not
installed and where the current folder holds modules of the same names.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from titanlite.runtime import interpreter


def python_command(folder: Path) -> str:
    """Writes how a shell in `folder` calls this interpreter."""
    for name in ("python3", "python"):
        if shutil.which(name) == sys.executable:
            return name
    path = Path(sys.executable)
    if path.is_relative_to(folder):
        path = path.relative_to(folder)
    return shlex.quote(str(path))


def package_variable() -> str:
    """Writes the assignment before a command that makes Python find titanlite; empty if it is
    installed.
    """
    # -I: not by the variables of this process, which its shell need not have
    found = subprocess.run([sys.executable, "-I", "-c", "import titanlite"], capture_output=True)
    if found.returncode == 0:
        return ""
    return f"PYTHONPATH={shlex.quote(interpreter.PACKAGES)} "


def titanlite_command(folder: Path) -> str:
    """Writes how a shell in `folder` calls titanlite without importing modules from that folder,
    which may hold data.
    """
    if shutil.which("titanlite"):
        return "titanlite"
    python = python_command(folder)
    if str(folder) == interpreter.PACKAGES:  # a clone
        return f"{python} -m titanlite"
    safe_path = " -P" if interpreter.HAS_SAFE_PATH else ""
    return f"{package_variable()}{python}{safe_path} -m titanlite"
