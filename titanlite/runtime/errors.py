"""Errors for users' mistakes, and the exit codes that tell a launcher why a process ended.

What it is: `ConfigError`, which every part of titanlite raises for wrong input, the exit codes of a
training process, and the names of the environment variables between the launcher and its processes.
Imports no torch.
"""

from __future__ import annotations

import re

# Exit codes: wrong input; stopped by a signal after saving; ended because another rank did; ended
# by the watchdog
EXIT_CONFIG = 2
EXIT_STOPPED = 75
EXIT_LOST = 76
EXIT_HUNG = 124

# Environment variables of processes that the launcher started: the prepared data; the launcher's
# process id; on rank 0 also a listening socket
LAUNCHED = "TITANLITE_LAUNCHED"
LAUNCHER = "TITANLITE_LAUNCHER"
LISTENER = "TITANLITE_LISTENER"


# Characters shown of a problem: more than a message of ours has that names two of the longest paths
LONGEST = 10_000
# Characters shown of a text of a file or a command line
SHOWN = 200
# A word that is part of no path, whose names have at most 255 bytes, and of no list: such a text
LONG_WORD = re.compile(r"[^\s/,=:;'\"]{256,}")
# Control characters but tab and newline, what changes the direction or the line, and halves of
# characters, which cannot be written
CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Escapes a text to one line: names from files could move the cursor or forge a message."""
    if text.isprintable():  # the common case, without a loop over characters
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def for_terminal(text: str) -> str:
    """Escapes the characters of a text that could control a terminal.

    Unlike `printable` it keeps tabs, newlines, and spaces and marks of any script.
    """
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shortened(text: str, most: int = SHOWN) -> str:
    """Cuts a text of a file or a command line after `most` characters, and marks the cut."""
    if len(text) <= most:
        return text
    return text[:most] + "..."


class ConfigError(ValueError):
    """The user's input is wrong.

    It contains every problem found, one line each. Long words and very long lines are cut, so a
    message can quote what it found.
    """

    def __init__(self, problems: str | list[str]) -> None:
        if isinstance(problems, str):
            problems = [problems]
        self.problems: list[str] = []
        for problem in problems:
            problem = LONG_WORD.sub(lambda word: shortened(word[0]), problem)
            line = printable(problem[:LONGEST])
            if len(problem) > LONGEST or len(line) > LONGEST:
                line = line[:LONGEST] + "..."
            self.problems.append(line)
        super().__init__("\n".join(self.problems))


def reason_of(error: Exception) -> str:
    """Describes what is wrong with a file, from the error that its values caused: a few words,
    without those of Python about its own types. A ConfigError keeps its whole text.
    """
    if isinstance(error, ConfigError):
        return "; ".join(error.problems)
    text = shortened(str(error))
    if isinstance(error, OSError):
        return error.strerror or text
    if isinstance(error, KeyError):
        return f"it has no {text}"
    if isinstance(error, (TypeError, AttributeError)):
        return "a value of another type than expected"
    if isinstance(error, IndexError):
        return "a list that is too short"
    if isinstance(error, ArithmeticError):
        return "a number that is not possible there"
    return text


class JoinError(RuntimeError):
    """Other nodes did not start in time, or cannot be reached."""


class StorageError(RuntimeError):
    """Rank 0 could not read or write a file of the run; a full or failing disk may have recovered
    at a restart.
    """
