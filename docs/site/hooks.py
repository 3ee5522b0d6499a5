"""A hook of mkdocs: the lines of source pages can be linked to.

What it is: mkdocs checks anchors in what it has parsed, and the highlighter adds those of lines
later; this adds them to what is known.
Why it is here: the check stays on for all other anchors.
"""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, page: Any, **rest: object) -> str:
    if page.present_anchor_ids is not None:
        page.present_anchor_ids = {*page.present_anchor_ids, *re.findall(r'id="(L-0-\d+)"', html)}
    return html
