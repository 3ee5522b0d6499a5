"""Writes an explanation as one HTML file, to step through by keyboard.

What it is: the files of `static/` in one document, with the data as inert JSON. Ranks are lanes,
collectives are buttons; the chosen one is explained below, with its tensor on all ranks of its
group before and after.
What it costs: as many bytes as the JSON has. A policy forbids requests, and all scripts and styles
but these two, by their hashes. Names come from files, so the script only ever sets text.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import re
from pathlib import Path

from titanlite.tools.explain.events import Explanation

STATIC = Path(__file__).with_name("static")


def page(explanation: Explanation) -> str:
    """The HTML document of an explanation."""
    script = (STATIC / "explain.js").read_text()
    style = (STATIC / "explain.css").read_text()
    # `</script` and `<!--` in a string would end or change the element; JSON can escape `<`
    data = json.dumps(dataclasses.asdict(explanation), separators=(",", ":"), allow_nan=False)
    parts = {
        "policy": html.escape(
            f"default-src 'none'; img-src data:; script-src {_hash(script)}; "
            f"style-src {_hash(style)}; style-src-attr 'unsafe-inline'; base-uri 'none'; "
            "form-action 'none'"
        ),
        "title": html.escape(f"One step of {explanation.title}"),
        "style": style,
        "data": data.replace("<", "\\u003c"),
        "script": script,
    }
    template = (STATIC / "explain.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
