"""The shell commands that a page or the end of a run shows."""

from __future__ import annotations

import re


def commands(text: str) -> list[str]:
    """The lines of the shell blocks of a page, without comments; a continued line is one."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks = [block.replace(" \\\n ", "") for block in blocks]
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def printed_next(output: str) -> list[str]:
    """The commands that a run prints at its end: to generate, and to go on."""
    lines = output.partition("\nnext:\n")[2].splitlines()[:2]
    return [line.partition("    (")[0].strip() for line in lines]
