"""The threads that copy metrics.jsonl: order, failures, rollbacks, and the wait at the end."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
from messages import refused

from titanlite.config.schema import MetricsConfig
from titanlite.sinks import feed as sinks
from titanlite.sinks.feed import Feed, Sinks, read_run_id

SETTINGS = {"run": {"device": "cpu"}, "comm": {"timeout_seconds": 300}}


class Store:
    """A sink in memory, which keeps rows (a server) or begins anew when it is opened (a file)."""

    def __init__(self, keeps: bool = True) -> None:
        self.keeps, self.found, self.opened, self.closed = (
            keeps,
            list[tuple[int, str, float]](),
            0,
            False,
        )
        self.failures: list[int] = []  # how many of the next values are taken before send raises
        self.files: dict[str, str] = {}
        self.refuses: set[str] = set()
        self.hangs = threading.Event()
        self.hangs.set()

    def open(self):
        self.opened += 1
        self.found = self.found if self.keeps else []
        last = defaultdict(lambda: -1)
        for step, name, _ in self.found:
            last[name] = max(last[name], step)
        return last

    def metric_name(self, name):
        return name.replace("(", "_").replace(")", "")

    def send(self, rows):
        assert self.hangs.wait(20)
        room = self.failures.pop(0) if self.failures else -1
        for step, _, values in rows:
            for name, value in values.items():
                if room == 0:
                    raise ConnectionError("connection refused")
                room -= 1
                self.found.append((step, name, value))

    def attach(self, path, name):
        if name in self.refuses:
            raise OSError("no storage")
        self.files[name] = path.read_text()

    def close(self, failed):
        self.closed = True


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "config.toml").write_text('[metrics]\nmlflow_uri = "http://me:secret@host"\n')
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def messages():
    """The warnings and messages of the run."""
    logger, found = logging.getLogger("titanlite"), list[str]()

    class Handler(logging.Handler):
        def emit(self, record):
            found.append(record.getMessage())

    handler, level = Handler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def write(path: Path, *steps: int, attempt: int = 1) -> None:
    with path.open("a") as file:
        for step in steps:
            for columns in (
                {"loss": 10 * attempt + step, "tps": 1.5, "mfu": None},
                {"validation/x/loss": 0.5},
            ):
                file.write(json.dumps({"step": step} | columns | {"time": time.time()}) + "\n")


def expected(*steps: int, attempt: int = 1) -> list[tuple[int, str, float]]:
    names = (
        "loss_metrics/global_avg_loss",
        "throughput_tps",
        "validation/x/loss",
        "validation_metrics/loss",
    )
    return [
        (step, name, value)
        for step in steps
        for name, value in zip(names, (10 * attempt + step, 1.5, 0.5, 0.5), strict=True)
    ]


def feed_until_done(store: Store, path: Path) -> Feed:
    feed = Feed("store", store, path)
    feed.start()
    feed.stop(failed=False)
    feed.join(20)
    assert not feed.is_alive()
    return feed


def test_rows_arrive_while_they_are_written(path, monkeypatch):
    monkeypatch.setattr(sinks, "PERIOD", 0.01)
    store, feed = Store(), None
    feed = Feed("store", store, path)
    feed.start()  # before there is a file
    for step in range(5):
        write(path, step)
        deadline = time.monotonic() + 10
        while len(store.found) < 4 * (step + 1) and time.monotonic() < deadline:
            time.sleep(0.005)
    assert store.found == expected(*range(5))
    assert not store.closed
    feed.stop(failed=False)
    feed.join(10)
    assert store.closed
    assert feed.complete
    assert feed.unsent() == 0


def test_a_sink_that_fails_gets_what_is_missing_and_nothing_twice(path, monkeypatch, messages):
    """Failures within a row, between rows, and several in a row; they are reported once until it
    works again.
    """
    monkeypatch.setattr(sinks, "LONGEST_PAUSE", 0.01)
    store = Store()
    store.failures = [2, 0, 5]
    write(path, *range(4))
    feed = Feed("store", store, path)
    feed.start()
    deadline = time.monotonic() + 10
    while len(store.found) < 16 and time.monotonic() < deadline:
        time.sleep(0.005)
    feed.stop(failed=False)
    feed.join(10)
    assert store.found == expected(*range(4))
    assert store.opened == 4
    assert [text for text in messages if "ConnectionError: connection refused" in text] == messages[
        :1
    ]
    assert messages[1:] == ["metrics.sinks: store: works again"]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_resumed_run_continues_in_the_sink(path, keeps):
    """Step 3 was sent before a kill, and is trained again: a server keeps its first values, a file
    has the second.
    """
    store = Store(keeps)
    write(path, 1, 2, 3)
    feed_until_done(store, path)
    path.unlink()
    write(path, 1, 2)
    write(path, 3, 4, attempt=2)
    feed_until_done(store, path)
    assert store.found == expected(1, 2) + expected(3, attempt=1 if keeps else 2) + expected(
        4, attempt=2
    )


@pytest.mark.parametrize("keeps", [True, False])
def test_a_rollback_removes_rows_while_the_sink_is_open(path, keeps, monkeypatch):
    """The file is longer again when the thread looks at it."""
    monkeypatch.setattr(sinks, "PERIOD", 0.01)
    store = Store(keeps)
    write(path, 1, 2, 3)
    feed = Feed("store", store, path)
    feed.start()
    deadline = time.monotonic() + 10
    while feed.sent < path.stat().st_size and time.monotonic() < deadline:
        time.sleep(0.005)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))
    write(path, 2, 3, 4, attempt=2)
    feed.stop(failed=False)
    feed.join(10)
    middle = expected(2, 3, attempt=1 if keeps else 2)
    assert store.found == expected(1) + middle + expected(4, attempt=2)


def test_a_sink_that_hangs_ends_neither_the_steps_nor_the_end(path, monkeypatch, messages):
    store = Store()
    store.hangs.clear()
    monkeypatch.setattr(sinks, "build_sink", lambda *arguments: store)
    monkeypatch.setattr(sinks, "require_installed", lambda names: None)
    monkeypatch.setattr(sinks, "PATIENCE", 0.3)
    started = time.monotonic()
    with Sinks(MetricsConfig(sinks=("mlflow",)), path.parent, {"tp": 1}, SETTINGS):
        write(path, 1, 2)
        assert time.monotonic() < started + 5
    assert 0.3 < time.monotonic() - started < 5
    assert messages == [
        "metrics.sinks: mlflow: up to 4 rows of metrics.jsonl were not sent; "
        "the next start of this run sends them"
    ]
    store.hangs.set()


class SlowFeed(threading.Thread):
    """Takes two seconds; `numbers`: what it has sent after each tenth."""

    def __init__(self, numbers) -> None:
        super().__init__(daemon=True)
        self.numbers, self.sent, self.complete, self.sink_name = numbers, 0, False, "slow"
        self.attached = 0
        self.start()

    def stop(self, failed: bool) -> None: ...

    def unsent(self) -> int:
        return 1

    def run(self) -> None:
        for number in self.numbers:
            self.sent = number
            time.sleep(0.1)
        self.complete = True


def test_the_end_waits_for_a_sink_that_makes_progress(path, monkeypatch):
    monkeypatch.setattr(sinks, "PATIENCE", 1.0)
    many = Sinks(
        MetricsConfig(sinks=("mlflow",)), path.parent, {}, {"comm": {"timeout_seconds": 60}}
    )
    for sent, complete in ((range(10, 30), True), ([0] * 20, False)):
        feed = SlowFeed(sent)
        many.feeds = [feed]
        many.__exit__(None, None, None)
        assert feed.complete == complete


def test_a_failed_import_is_a_config_error(path, monkeypatch):
    def fail(*arguments):
        raise TypeError("Descriptors cannot be created directly")

    monkeypatch.setattr(sinks, "build_sink", fail)
    monkeypatch.setattr(sinks, "require_installed", lambda names: None)
    context = Sinks(MetricsConfig(sinks=("wandb",)), path.parent, {"tp": 1}, SETTINGS)
    with refused("metrics.sinks: wandb cannot be imported", "TypeError: Descriptors"), context:
        pass


def test_the_identifier_of_a_run_stays(tmp_path):
    first = read_run_id(tmp_path)
    assert len(first) == 16
    assert read_run_id(tmp_path) == first
    (tmp_path / "sinks_id").write_text("x/../../..")
    with refused(f"{tmp_path}/sinks_id", "16 hexadecimal digits"):
        read_run_id(tmp_path)


def test_the_files_of_a_run_are_attached_after_its_rows(path, messages):
    files = {
        "report.html": "<html>",
        "evaluations.jsonl": "{}\n",
        "traces/step-8-rank-0.json.gz": "trace",
        "traces/step-8-rank-0.txt": "summary",
    }
    others = {"traces/step-8-rank-0.memory.pickle": "", "events.jsonl": "", "log.txt": ""}
    for name, text in (files | others).items():
        target = path.parent / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)
    write(path, 1, 2)
    store = Store()
    store.refuses = {"evaluations.jsonl"}
    feed = feed_until_done(store, path)
    assert feed.complete
    assert store.closed
    assert store.found == expected(1, 2)
    assert store.files == {name: text for name, text in files.items() if name not in store.refuses}
    assert [text for text in messages if "evaluations.jsonl could not be attached" in text]
