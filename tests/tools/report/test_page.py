"""The page: one file without requests, small, and with hostile names and samples as text."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from report_runs import CONFIG, HOSTILE, losses, write_lines, write_run

from titanlite.tools.report.page import MOST_EVENTS, MOST_RUNS, STATIC, contents, page, write_report
from titanlite.tools.report.run_data import read_run


class Elements(HTMLParser):
    """Start tags with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self.texts.append([tag, ""])

    def handle_data(self, text):
        if self.lasttag in ("script", "style") and self.cdata_elem:
            self.texts[-1][1] += text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "a")


def data_of(text: str) -> dict:
    (found,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL
    )
    return json.loads(found)


def test_nothing_is_loaded(folder):
    elements = Elements(page(contents([read_run(folder)])))
    for tag, attributes in elements.tags:
        for name in ("src", "srcset", "href", "action", "data", "poster"):
            value = attributes.get(name) or ""
            assert value.startswith(("#", "data:")) or not value, (tag, attributes)
    assert not any(tag in ("iframe", "object", "embed", "base", "img") for tag, _ in elements.tags)
    for kind, text in elements.texts:
        assert kind != "style" or not re.search(r"@import|url\(", text)


def test_the_policy_allows_these_scripts_and_styles_and_no_request(folder):
    elements = Elements(page(contents([read_run(folder)])))
    (policy,) = [
        a["content"] for tag, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    codes = [text for kind, text in elements.texts if kind == "script" and not text.startswith("{")]
    for rule, texts in (
        ("script-src", codes),
        ("style-src", [t for kind, t in elements.texts if kind == "style"]),
    ):
        hashes = [
            f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'"
            for t in texts
        ]
        assert rules[rule].split() == hashes
        assert len(hashes) == 2


def test_hostile_names_settings_events_and_samples_are_text(tmp_path):
    config = CONFIG.replace('"debug"', json.dumps(HOSTILE))
    folder = write_run(tmp_path / HOSTILE.replace("/", "_"), config=config)
    write_lines(folder / "samples.jsonl", [{"step": 1, "prompt": HOSTILE, "text": HOSTILE}])
    write_lines(
        folder / "events.jsonl", [{"time": 1, "step": 1, "event": HOSTILE, "text": HOSTILE}]
    )
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3000, f"validation/{HOSTILE}/loss": 1.0}) + "\n")
    text = page(contents([read_run(folder)]))
    elements = Elements(text)
    assert not any(tag == "img" for tag, _ in elements.tags)
    assert [tag for tag, _ in elements.tags].count("script") == 3
    data = data_of(text)
    (sample,) = data["runs"][0]["samples"]
    assert sample["text"] == HOSTILE
    assert ["model", HOSTILE] in data["table"]


def test_every_chart_has_values(folder):
    data = contents([read_run(folder)])
    titles = [chart["title"] for chart in data["charts"]]
    assert {
        "Loss", "Validation, bits per "
                "byte", "Learning rate", "Gradient norm", "Throughput", "Model FLOPs utilisation",
        "Time of a "
        "step", "Time of a step by part", "Memory", "Gradient noise scale", "Passes over the text",
        "Gradient norm of each layer",
    } <= set(titles)  # fmt: skip
    assert len(set(titles)) == len(titles)
    for chart in data["charts"]:
        for series in chart["series"]:
            assert len(series["x"]) == len(series["y"]) > 0


@pytest.mark.slow
def test_the_loss_of_a_million_rows_is_less_than_a_megabyte_and_has_its_spike(
    tmp_path, monkeypatch
):
    run = read_run(write_run(tmp_path / "a"))
    steps = np.arange(1, 1_000_001)
    for name in [*run.columns]:
        if not name.startswith(("validation/", "gradient_norm/")):
            run.columns[name].steps, run.columns[name].values = steps, losses(steps)
    run.columns["loss"].values[654_321] = 9.5
    text = page(contents([run]))
    assert len(text.encode()) < 1_000_000
    (loss,) = [chart for chart in data_of(text)["charts"] if chart["title"] == "Loss"]
    assert 9.5 in loss["series"][0]["y"]


@pytest.mark.slow
def test_many_runs_stay_small(tmp_path, folder):
    runs = [read_run(folder) for _ in range(MOST_RUNS)]
    assert len(page(contents(runs)).encode()) < 1_000_000


def test_of_many_events_the_rare_ones_are_shown(tmp_path):
    saves = [{"time": i, "step": i, "event": "save", "text": "saved"} for i in range(5000)]
    write_lines(
        tmp_path / "events.jsonl",
        [*saves, {"time": 9, "step": 77, "event": "rollback", "text": "back"}],
    )
    (run,) = contents([read_run(tmp_path)])["runs"]
    assert len(run["events"]) <= MOST_EVENTS
    assert [event["step"] for event in run["events"] if event["name"] == "rollback"] == [77]
    assert run["all_events"] == 5001


def test_an_empty_folder_is_a_page_too(tmp_path):
    data = data_of(page(contents([read_run(tmp_path)])))
    assert data["charts"] == []
    assert "Too few logged losses" in data["runs"][0]["findings"][0]


def test_uplot_is_the_pinned_one():
    pin = json.loads((STATIC / "uplot.json").read_text())
    assert pin["license"] == "MIT"
    assert "Leon Sorokin" in (STATIC / "uPlot.LICENSE").read_text()
    for name, digest in pin["sha256"].items():
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest, name
    assert pin["version"] in (STATIC / "uPlot.iife.min.js").read_text()[:300]


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    messages: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = messages.append
    monkeypatch.setattr(logging.getLogger("titanlite"), "handlers", [handler])
    (tmp_path / "report.html").mkdir()
    write_report(tmp_path)
    assert [record.levelname for record in messages] == ["WARNING"]
    assert "no report was written" in messages[0].getMessage()
