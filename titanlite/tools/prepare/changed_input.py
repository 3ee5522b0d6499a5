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
    """Whether the jobs differ, but only in the files of the input or in their versions."""
    if was == now:
        return False
    was_with_new_files = dataclasses.replace(was, files=now.files)
    automatic = was.parts == number_of_parts(was.bytes) and now.parts == number_of_parts(now.bytes)
    if automatic:  # the number of parts follows from the size of the files
        was_with_new_files = dataclasses.replace(was_with_new_files, parts=now.parts)
    return was_with_new_files == now


def keep_unchanged(was: Job, now: Job, work: Path) -> int:
    """Removes what depends on changed input from the working folder. Returns how many parts stay.

    The caller holds the folder alone, and then writes the new job. Until then this can be repeated.
    """
    unchanged = set()
    for part in range(min(was.parts, now.parts)):
        if list(was.pieces(part)) == list(now.pieces(part)):
            unchanged.add(part)
    compares_documents = now.duplicates.remove != "none"
    # In this order, a record is removed before the files that it stands for
    for path in sorted(work.iterdir(), key=lambda path: (path.suffix != ".json", path.name)):
        name = re.match(r"([a-z]+)-(\d+)\.", path.name)
        if name is None:
            stale = path.name == "manifest.json"
        else:
            depends_on_all_parts = compares_documents and name[1] not in FIRST_PASS
            stale = int(name[2]) not in unchanged or depends_on_all_parts
        if stale:
            path.unlink()
    return len(unchanged)
