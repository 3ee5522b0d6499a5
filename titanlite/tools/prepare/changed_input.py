"""Which finished parts of an interrupted job are kept if its input has changed.

What it is: a part depends on the pieces of files that it reads, and on the versions of these files.
Where both jobs give it the same pieces, its results stay; everything else in the working folder is
removed, and made again. The search for duplicates depends on all parts, and so do all shards after
it.
Why it is here: a row was repaired, or a file was added, and the command is repeated.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from titanlite.tools.prepare.job import Job, number_of_parts

# What the names of files begin with that do not depend on other parts
FIRST_PASS = ("read", "signatures", "passed")


def only_input_differs(was: Job, now: Job) -> bool:
    """Whether the two jobs are the same work on other versions of the input, or on other files of
    it.
    """
    automatic = was.parts == number_of_parts(was.bytes) and now.parts == number_of_parts(now.bytes)
    parts = now.parts if automatic else was.parts
    return was != now and dataclasses.replace(was, files=now.files, parts=parts) == now


def keep_unchanged(was: Job, now: Job, work: Path) -> int:
    """Removes from the working folder what depends on changed input. Returns the number of parts
    that stay.

    The caller holds the folder alone, and then writes the new job. Until then this can be repeated.
    """
    common = range(min(was.parts, now.parts))
    stays = {part for part in common if list(was.pieces(part)) == list(now.pieces(part))}
    compared = now.duplicates.remove != "none"
    # In this order, a record is removed before the files that it stands for
    for path in sorted(work.iterdir(), key=lambda path: (path.suffix != ".json", path.name)):
        name = re.match(r"([a-z]+)-(\d+)\.", path.name)
        stale = path.name == "manifest.json" or (name and int(name[2]) not in stays)
        if stale or (name and compared and name[1] not in FIRST_PASS):
            path.unlink()
    return len(stays)
