"""Writes the report as one HTML file with its data, style and scripts.

What it is: `contents` collects what the page shows as plain data; `page` puts it, as JSON, and the
files of `static/` into one document. The script there builds tables and charts from the data, with
`textContent` only. Names, settings and samples come from files that others may have written, so the
data cannot end its element (`<` is escaped), and a content security policy allows these very
scripts and styles, by their hashes, and no request. The charts are drawn by uPlot, an unchanged
copy of one version (`static/uplot.json` has its origin and hashes).
What it costs: 85 kB, and at most about 600 kB of points; 4 s for 100,000 rows, most of it for
reading them.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import time
from pathlib import Path
from typing import Any

from titanlite.runtime.files import replace_file
from titanlite.tools.report.charts import axis, charts
from titanlite.tools.report.facts import differences, findings, table
from titanlite.tools.report.run_data import Event, Run, Sample, read_run
from titanlite.tools.report.thin import evenly

logger = logging.getLogger("titanlite")
STATIC = Path(__file__).with_name("static")
NAME = "report.html"
SCRIPTS = ("uPlot.iife.min.js", "report.js")
STYLES = ("uPlot.min.css", "report.css")
MOST_EVENTS = 300  # of each run, on the page
MOST_SAMPLES = 12  # of each prompt
MOST_PROMPTS = 12
MOST_RUNS = 12


def contents(runs: list[Run]) -> dict[str, Any]:
    """The content of the page as plain data."""
    tables = [dict(table(run)) for run in runs]
    names = list(dict.fromkeys(name for facts in tables for name in facts))
    return {
        "title": ", ".join(run.name for run in runs),
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "runs": [_run(run) for run in runs],
        "table": [[name, *(facts.get(name, "") for facts in tables)] for name in names],
        "charts": charts(runs),
        "differences": differences(runs),
    }


def _run(run: Run) -> dict[str, Any]:
    events = [
        {"step": event.step, "name": event.name, "text": event.text, "time": _clock(event.time)}
        for event in _chosen_events(run.events)
    ]
    return {
        "name": run.name,
        "folder": str(run.folder),
        "axis": axis(run),
        "findings": findings(run),
        "events": events,
        "all_events": len(run.events),
        "samples": [vars(sample) for sample in _chosen_samples(run.samples)],
    }


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def _chosen_events(events: list[Event]) -> list[Event]:
    """All events of a rare kind, and evenly chosen ones of a frequent kind, such as saves."""
    kinds = {event.name for event in events}
    most = MOST_EVENTS // max(1, len(kinds))
    chosen = set[int]()
    for kind in kinds:
        indices = [i for i, event in enumerate(events) if event.name == kind]
        chosen |= {indices[i] for i in evenly(len(indices), most)}
    return [events[i] for i in sorted(chosen)]


def _chosen_samples(samples: list[Sample]) -> list[Sample]:
    """The first and the last sample of each prompt, and others evenly between them."""
    by_prompt: dict[str, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt, []).append(sample)
    result = []
    for same in list(by_prompt.values())[:MOST_PROMPTS]:
        result += [same[i] for i in evenly(len(same), MOST_SAMPLES)]
    return result


def page(data: dict[str, Any]) -> str:
    """The HTML document."""
    scripts = [_file(name) for name in SCRIPTS]
    styles = [_file(name) for name in STYLES]
    # `</script` and `<!--` in a string would end or change the element; JSON can escape `<`
    numbers = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    policy = [
        "default-src 'none'",
        "script-src " + " ".join(_hash(script) for script in scripts),
        "style-src " + " ".join(_hash(style) for style in styles),
        "connect-src 'none'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    parts = {
        "title": html.escape(data["title"]),
        "policy": html.escape("; ".join(policy)),
        "styles": "\n".join(f"<style>{style}</style>" for style in styles),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
        "data": numbers,
    }
    document = _file("report.html")
    head, *pieces = document.split("{{")
    filled = [head]
    for piece in pieces:
        name, _, text = piece.partition("}}")
        filled += [parts[name], text]
    return "".join(filled)


def _file(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def write_report(folder: Path) -> None:
    """Writes report.html into a run's folder and logs where it is.

    A failure is a warning: the run itself is done.
    """
    try:
        path = folder / NAME
        replace_file(path, page(contents([read_run(folder)])).encode())
        logger.info("report: %s", path)
    except Exception as error:
        logger.warning("no report was written: %s", error)
