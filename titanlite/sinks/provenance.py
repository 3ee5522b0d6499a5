"""The provenance of a run's numbers: its settings, the version of the code, the environment.

What it is: what the sinks attach to a run, so that runs in a dashboard can be compared. It has no
host or user name, no variables of the environment, and no paths but those in the configuration.
Passwords in URLs are left out.
What it costs: three calls of git, a few hundredths of a second.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.runtime.device import device_name, device_type
from titanlite.runtime.version import __version__

PACKAGE = Path(__file__).parents[1]
PASSWORD = re.compile(r"//[^/@\s\"]+@")
GIT_SECONDS = 10  # time-out for git, for example on a slow network file system


class Provenance(NamedTuple):
    name: str  # the run's name
    toml: str  # content of its config.toml
    settings: dict[str, Any]  # section.key -> value
    facts: dict[str, str]  # code version and environment


def provenance(
    folder: Path, degrees: dict[str, int], settings: dict[str, dict[str, Any]]
) -> Provenance:
    """Collects the provenance of the run in `folder`.

    `settings`: section -> key -> value; `degrees`: those of the layout, with ep.
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
        # ep divides ranks of the other axes once more
        "world_size": str(math.prod(degrees.values()) // degrees.get("ep", 1)),
        "layout": layout,
    }
    return Provenance(folder.name, _clean((folder / "config.toml").read_text("utf-8")), flat, facts)


def _clean(value: Any) -> Any:
    """Removes user names and passwords of URLs from a text; returns other values unchanged."""
    if isinstance(value, str):
        return PASSWORD.sub("//***@", value)
    return value


def code_version(package: Path = PACKAGE) -> dict[str, str]:
    """Finds the version; in a git checkout also the commit, and whether files changed."""
    installed = {"site-packages", "dist-packages"} & set(package.parts)
    if installed or _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        # Not a checkout of titanlite. The package may lie inside another project's checkout, whose
        # .git/config may name programs that git would run.
        return {"titanlite": __version__}
    commit = _git(package, "rev-parse", "HEAD")
    changed = "yes"
    if _git(package, "status", "--porcelain", "--untracked-files=no") == "":
        changed = "no"
    return {
        "titanlite": __version__,
        "git_commit": commit or "unknown",
        "git_changes": changed,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """Returns the output of git in a folder; None if it fails or is not installed."""
    command = ["git", "-C", str(folder), *arguments]
    quiet = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # git then writes nothing, not even its index
    try:
        result = subprocess.run(
            command, env=quiet, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
