"""The report as one HTML file without any other: text, numbers, style, scripts and the library that
draws the charts.

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

import numpy as np

from titanlite.runtime.files import replace_file
from titanlite.tools.report.charts import axis, charts
from titanlite.tools.report.facts import EVENTS, differences, findings, table
from titanlite.tools.report.fit import Trend, trend
from titanlite.tools.report.run_data import Event, Run, Sample, read_run

logger = logging.getLogger("titanlite")
STATIC = Path(__file__).with_name("static")
NAME = "report.html"
SCRIPTS = ("uPlot.iife.min.js", "report.js")
STYLES = ("uPlot.min.css", "report.css")
MOST_EVENTS = 300  # of each run, on the page
MOST_SAMPLES = 12  # of each prompt
MOST_RUNS = 12


def contents(runs: list[Run], live: bool = False) -> dict[str, Any]:
    """What the page shows, as plain data. `live`: the page asks for newer data."""
    trends = trends_of(runs)
    tables = [dict(table(run)) for run in runs]
    names = list(dict.fromkeys(name for facts in tables for name in facts))
    return {
        "title": ", ".join(run.name for run in runs),
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "live": live,
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "axis": axis(run),
                "findings": findings(run, found),
                "events": [
                    {
                        "step": event.step,
                        "name": event.name,
                        "text": event.text,
                        "time": _clock(event.time),
                    }
                    for event in _chosen_events(run.events)
                ],
                "all_events": len(run.events),
                "samples": [vars(sample) for sample in _chosen_samples(run.samples)],
            }
            for run, found in zip(runs, trends, strict=True)
        ],
        "table": [[name, *(facts.get(name, "") for facts in tables)] for name in names],
        "charts": charts(runs, trends),
        "differences": differences(runs),
    }


def trends_of(runs: list[Run]) -> list[Trend]:
    """The trend of each run's loss."""
    warmups = (run.config.get("schedule.warmup_steps") for run in runs)
    curves = [(run.column("loss"), warmup) for run, warmup in zip(runs, warmups, strict=True)]
    return [
        trend(curve.steps, curve.values, warmup if type(warmup) is int else 0)
        for curve, warmup in curves
    ]


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def _chosen_events(events: list[Event]) -> list[Event]:
    """All that are rare, and evenly chosen ones of a kind that is frequent, such as saves."""
    kinds = sorted(
        {event.name for event in events},
        key=lambda name: EVENTS.index(name) if name in EVENTS else 99,
    )
    most = MOST_EVENTS // max(1, len(kinds))
    kept = set[int]()
    for kind in kinds:
        places = np.array([i for i, event in enumerate(events) if event.name == kind])
        kept |= set(
            places[
                np.unique(np.linspace(0, len(places) - 1, min(len(places), most)).astype(int))
            ].tolist()
        )
    return [event for i, event in enumerate(events) if i in kept]


def _chosen_samples(samples: list[Sample]) -> list[Sample]:
    """The first and the last of each prompt, and others evenly between them; of at most twelve
    prompts.
    """
    result = []
    for prompt in list(dict.fromkeys(sample.prompt for sample in samples))[:12]:
        of_it = [sample for sample in samples if sample.prompt == prompt]
        places = np.unique(
            np.linspace(0, len(of_it) - 1, min(len(of_it), MOST_SAMPLES)).astype(int)
        )
        result += [of_it[i] for i in places.tolist()]
    return result


def page(data: dict[str, Any]) -> str:
    """The HTML document."""
    scripts = [_file(name) for name in SCRIPTS]
    styles = [_file(name) for name in STYLES]
    # `</script` and `<!--` in a string would end or change the element: JSON can write `<` as an
    # escape instead
    numbers = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    policy = [
        "default-src 'none'",
        "script-src " + " ".join(_hash(script) for script in scripts),
        "style-src " + " ".join(_hash(style) for style in styles),
        "connect-src 'self'" if data["live"] else "connect-src 'none'",
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
    head, *rest = document.split("{{")
    return head + "".join(
        parts[name] + text for name, _, text in (piece.partition("}}") for piece in rest)
    )


def _file(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


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
