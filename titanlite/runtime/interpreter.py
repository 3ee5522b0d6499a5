"""Keeps our Python processes from importing modules from the current folder, and opens standard
streams that are closed.

What it is: Python puts the current folder first in sys.path for `python -m` and `python -c`, and so
for the processes that multiprocessing starts. An empty entry in PYTHONPATH means the current folder
too, and `export PYTHONPATH=$PYTHONPATH:/x` makes one where the variable was empty. Here the folder
is taken out of the first process of a command, and out of every process that it starts.
Why it is here: users enter folders of data from elsewhere. A file tiktoken.py there would run when
a process imports a module of that name.
What it costs: nothing.

From Python 3.11 on, processes that libraries start inherit PYTHONSAFEPATH. Python 3.10 does not
know it, so `python` and `in_root_folder` do the same by hand, with all versions.

This file imports only what Python has loaded when it starts: the current folder may still be in
sys.path.
"""

import os
import site
import sys

TYPE_CHECKING = False  # `typing` is not loaded yet
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeVar

    T = TypeVar("T")

HAS_SAFE_PATH = sys.version_info >= (3, 11)
# The folder that contains `titanlite`
PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def leave_out_current_folder() -> None:
    """Takes the current folder out of this process's sys.path, unless PYTHONPATH names it, and out
    of its children's.

    Each process that runs a command of ours calls it once. A program that only imports titanlite
    keeps its sys.path.
    """
    variable = os.environ.get("PYTHONPATH", "")
    named = _named(variable)
    try:
        current = ("", os.getcwd())
    except FileNotFoundError:  # the current folder was deleted
        current = ("", "")
    if not getattr(sys.flags, "safe_path", sys.flags.isolated) and sys.path[0] in (
        *current,
        f"{PACKAGES}/titanlite",
    ):
        del sys.path[0]  # from `python -m`, `python -c`, or the path of __main__.py
    if variable and "" in variable.split(os.pathsep) and current[1] not in named:
        sys.path[:] = [entry for entry in sys.path if entry not in current]
    os.environ["PYTHONSAFEPATH"] = "1"
    if variable:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)


def open_closed_streams() -> None:
    """Opens /dev/null for each standard stream that is closed (`>&-`), here and for children.

    Python has None there, and the next file that the process opened would get the stream's number:
    what libraries and children print would go into it. Each process that runs a command of ours
    calls it once.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest number that is free: the stream's own, as those below it are open
            stream = open(os.devnull, mode, errors="backslashreplace")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def environment(inherited: "Mapping[str, str]" = os.environ) -> dict[str, str]:
    """Builds the environment of a Python process that imports titanlite."""
    named = _named(inherited.get("PYTHONPATH", ""))
    # a clone that is not installed
    if PACKAGES not in (*named, *site.getsitepackages(), site.getusersitepackages()):
        named.insert(0, PACKAGES)
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(named)}


def _named(variable: str) -> list[str]:
    """Lists the folders in PYTHONPATH as absolute paths, without empty entries."""
    return [os.path.abspath(entry) for entry in variable.split(os.pathsep) if entry]


def without_package(name: str) -> str:
    """Writes the error for an interpreter that lacks a package that titanlite needs."""
    expected = "expected Python 3.10 or later with the packages of requirements.txt"
    return f"{sys.executable}: it has no package {name}; {expected}"


def python(code: str, *arguments: object) -> list[str]:
    """Builds the command that runs code in a new interpreter, with a clean sys.path."""
    return [
        sys.executable,
        "-c",
        f"import sys; sys.path[:] = filter(None, sys.path); {code}",
        *map(str, arguments),
    ]


def call(function: "Callable[..., object]", *arguments: object) -> list[str]:
    """Builds the command that calls a module's function with these arguments, as text, and exits
    with what it returns.
    """
    name = function.__name__
    return python(
        f"from {function.__module__} import {name}; sys.exit({name}(*sys.argv[1:]))", *arguments
    )


def isolated(
    function: "Callable[..., object]", folders: "Iterable[str]", *arguments: object
) -> list[str]:
    """Builds the command that calls a module's function with these arguments, as text, in an
    interpreter that finds modules of Python, of this package and in `folders` only.
    """
    name = function.__name__
    code = (
        f"import sys; sys.path += {[PACKAGES, *folders]!r}; "
        f"from {function.__module__} import {name}; {name}(*sys.argv[1:])"
    )
    return [sys.executable, "-I", "-S", "-B", "-c", code, *map(str, arguments)]


def in_root_folder(function: "Callable[[], T]") -> "T":
    """Calls a function while / is the current folder, and returns its result.

    Processes that it starts have / as their current folder, where nobody puts modules.
    """
    # O_PATH: the folder need not be readable
    before = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
    os.chdir("/")
    try:
        return function()
    finally:
        os.fchdir(before)
        os.close(before)
