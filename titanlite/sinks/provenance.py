"""Where the numbers of a run come from: its settings, the version of the code, and the environment.

What it is: what the sinks attach to a run, so that runs in a dashboard can be compared. It has no
host or user name, no variables of the environment, and no paths but those in the configuration.
Passwords in URLs are left out.
What it costs: three calls of git and one of importlib, a few hundredths of a second.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.runtime.device import device_name, device_type

PACKAGE = Path(__file__).parents[1]
PASSWORD = re.compile(r"//[^/@\s\"]+@")
GIT_SECONDS = 10  # a checkout on a slow network file system gets no more


class Provenance(NamedTuple):
    name: str  # of the run
    toml: str  # its config.toml
    settings: dict[str, Any]  # section.key -> value
    facts: dict[str, str]  # code version and environment


def provenance(
    folder: Path, degrees: dict[str, int], settings: dict[str, dict[str, Any]]
) -> Provenance:
    """That of the run in `folder`.

    `settings`: section -> key -> value; `degrees`: of the layout.
    """
    flat = {}
    for section, keys in settings.items():
        for key, value in keys.items():
            flat[f"{section}.{key}"] = _clean(value)
    axes = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    layout = ", ".join(axes) or "one process"
    facts = code_version() | {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device_name(torch.device(device_type(settings["run"]["device"]))),
        "world_size": str(math.prod(degrees.values())),
        "layout": layout,
    }
    return Provenance(folder.name, _clean((folder / "config.toml").read_text("utf-8")), flat, facts)


def _clean(value: Any) -> Any:
    """A text without the user names and passwords of URLs; other values as they are."""
    if isinstance(value, str):
        return PASSWORD.sub("//***@", value)
    return value


def code_version(package: Path = PACKAGE) -> dict[str, str]:
    """The installed version; in a git checkout also the commit, and whether files have changed."""
    try:
        version = importlib.metadata.version("titanlite")
    except importlib.metadata.PackageNotFoundError:  # a clone that is not installed
        version = "unknown"
    installed = {"site-packages", "dist-packages"} & set(package.parts)
    if installed or _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        # Not a checkout of titanlite. An environment may be inside that of another project, whose
        # .git/config may name programs that git runs.
        return {"titanlite": version}
    commit = _git(package, "rev-parse", "HEAD")
    changed = "yes"
    if _git(package, "status", "--porcelain", "--untracked-files=no") == "":
        changed = "no"
    return {
        "titanlite": version,
        "git_commit": commit or "unknown",
        "git_changes": changed,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git in a folder; None if it fails or is not installed."""
    command = ["git", "-C", str(folder), *arguments]
    quiet = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # writes nothing, not even its index
    try:
        result = subprocess.run(
            command, env=quiet, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
