"""Draws the pictures of the documents from recorded models, placements and steps.

    python -m docs.pictures            # writes docs/images/*.svg; half a minute
    python -m docs.pictures --check    # says which would change, and fails if one would

What it is: the list of pictures. Each is recorded by processes of a pool (`recorded.py`) and drawn
by a function that has no other source.
Why it is here: tests/test_pictures.py compares the files byte by byte with what this draws, so
a picture cannot show what the program no longer does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from docs.pictures.draw import PICTURES
from titanlite.tools.verify.pool import Pool

IMAGES = Path(__file__).parents[1] / "images"


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the pictures of the documents.")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    pool = Pool(["titanlite.tools.plan.trace"], quiet=True)
    changed = []
    for name, draw in PICTURES.items():
        path = IMAGES / f"{name}.svg"
        picture = draw(pool)
        if not path.exists() or path.read_text() != picture:
            changed.append(name)
        if not options.check:
            path.write_text(picture)
    print("changed: " + (", ".join(changed) or "none"))
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
