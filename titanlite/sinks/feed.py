"""Copies metrics.jsonl to TensorBoard, W&B and MLflow while the run trains.

What it is: for each sink a thread of rank 0 that follows metrics.jsonl, as `tail -f` does, and
sends its rows. The file is the queue: nothing is kept in memory, training never waits, and unsent
rows are in the file. When a sink is opened, at the start and after each failure, it reports the
last step that it has of each metric, and gets the rows after it. So it gets every step once and in
order, even rows that were unsent when the run was killed.
A failing sink is reported once, then tried again after 1, 2, 4, ... up to 60 seconds. The end of
the run waits for rows that are still being sent, not for a sink without progress; what is left is
sent by the next start of the same run. After the last row a sink gets the run's files: the report,
the traces and what `titanlite evaluate` has recorded by then.
What it costs: the imports before the first step, a look at the file every second, and time of the
interpreter that trains: 2 ms per row for TensorBoard, 0.5 ms for W&B, 17 ms for MLflow with a local
file (docs/metrics.md).
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Protocol

from titanlite.config.schema import MetricsConfig
from titanlite.distributed.agreement import broadcast_from_rank0
from titanlite.observe.metrics_file import EVALUATIONS, RUN_ID, RowReader
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded, replace_file
from titanlite.runtime.phases import Phase, mark_phase
from titanlite.sinks.installed import require_installed
from titanlite.sinks.metric_names import Scalars, scalars
from titanlite.sinks.provenance import provenance

logger = logging.getLogger("titanlite")
PATIENCE = 15.0  # seconds without progress after which the end of the run waits no longer
# Seconds between two reads of the file, and at most between two attempts
PERIOD = 1.0
REPORT = "report.html"  # written by `tools/report` when a run ends
LONGEST_PAUSE = 60.0


class Sink(Protocol):
    """The methods that a thread calls on a sink.

    Every method may raise; `open` is then called again, without `close`.
    """

    def open(self) -> defaultdict[str, int]:
        """Opens the sink; returns the last step that it has of each metric."""

    def metric_name(self, name: str) -> str:
        """Converts a metric's name to one that the sink allows."""

    def send(self, rows: list[Scalars]) -> None: ...

    def attach(self, path: Path, name: str) -> None:
        """Adds a file of the run, under its name in the run's folder."""

    def close(self, failed: bool) -> None: ...


def artifacts(folder: Path) -> list[Path]:
    """Lists the files of a run that its sinks get at its end; not the memory of traces, which has
    hundreds of megabytes.
    """
    traces = [path for path in folder.glob("traces/step-*") if path.suffix in (".gz", ".txt")]
    candidates = [folder / REPORT, folder / EVALUATIONS, *sorted(traces)]
    return [path for path in candidates if path.is_file()]


class Feed(threading.Thread):
    """Copies the rows of a metrics file to one sink until it is stopped."""

    def __init__(self, name: str, sink: Sink, path: Path) -> None:
        super().__init__(name=f"sink {name}", daemon=True)  # does not keep the process alive
        self.sink_name = name
        self.sink = sink
        self.path = path
        self.reader: RowReader | None = None  # None: open the sink first
        self.sent = 0  # bytes of the file whose rows the sink has
        self.attached = 0  # files of the run that the sink has
        self.complete = False
        self._last: defaultdict[str, int] = defaultdict(int)
        self._stopping = threading.Event()
        self._run_failed = False
        self._failures = 0

    def stop(self, failed: bool) -> None:
        """Makes the thread end after the rows that are in the file; `failed`: the run ends with an
        error.
        """
        self._run_failed = failed
        self._stopping.set()

    def run(self) -> None:
        while True:
            # Read before the rows: all that were written until then are sent in this round
            stopping = self._stopping.is_set()
            pause = PERIOD
            try:
                self._copy()
                if self._failures:
                    logger.info("metrics.sinks: %s: works again", self.sink_name)
                    self._failures = 0
                if stopping:
                    self._attach()
                    self.sink.close(self._run_failed)
                    self.complete = True
            except (Exception, SystemExit) as error:
                self.reader = None
                pause = min(LONGEST_PAUSE, 2.0**self._failures)
                self._report(error)
            if stopping:
                return
            self._stopping.wait(pause)

    def _copy(self) -> None:
        """Sends the rows that were appended; opens the sink first, if necessary."""
        while True:
            if self.reader is None:
                self._last = self.sink.open()
                self.reader = RowReader(self.path)
            rows = self.reader.read()
            if rows is None:  # a rollback has removed rows that were sent
                self.sink.close(False)
                self.reader = None
                continue
            new = [scalars for scalars in map(self._new, rows) if scalars.values]
            if new:
                self.sink.send(new)
            self.sent = self.reader.position
            if not rows:
                return

    def _attach(self) -> None:
        """Adds the run's files. A sink that refuses one, as a server without storage does, still
        has the rows.
        """
        folder = self.path.parent
        for path in artifacts(folder):
            try:
                self.sink.attach(path, str(path.relative_to(folder)))
                self.attached += 1
            except Exception as error:
                text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                logger.warning(
                    f"metrics.sinks: {self.sink_name}: {path.name} could not be attached: {text}"
                )

    def _new(self, row: dict[str, Any]) -> Scalars:
        """Selects the values of a row that are newer than the sink's last step of their metric."""
        step = row["step"]
        values = {}
        for name, value in scalars(row).items():
            name = self.sink.metric_name(name)
            if step > self._last[name]:
                self._last[name] = step
                values[name] = value
        return Scalars(step, row.get("time", time.time()), values)

    def _report(self, error: BaseException) -> None:
        """Warns of the first of several failures in a row."""
        self._failures += 1
        if self._failures == 1:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            logger.warning(
                f"metrics.sinks: {self.sink_name}: {text}; "
                "training continues, the rows are sent later"
            )

    def unsent(self) -> int:
        """Counts the rows of the file that the sink may lack; 0 if the file cannot be read."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.sent)
                return sum(1 for _ in file)
        except OSError:
            return 0


class Sinks:
    """A context that all ranks enter and leave together; inside it, rank 0 copies metrics.jsonl.
    Without `metrics.sinks` it does nothing.
    """

    def __init__(
        self,
        config: MetricsConfig,
        folder: Path,
        degrees: dict[str, int],
        settings: dict[str, dict[str, Any]],
    ) -> None:
        """`folder`: the run's folder, with config.toml; `degrees`: the layout's; `settings`:
        section -> key -> value.
        """
        self.config = config
        self.folder = folder
        self.degrees = degrees
        self.settings = settings
        # Half of the watchdog's time-out, so that it does not take the last wait for a hang.
        self.patience = settings["comm"]["timeout_seconds"] / 2
        self.feeds: list[Feed] = []

    def __enter__(self) -> Sinks:
        """Starts the threads. Raises ConfigError, on all ranks, if the library of a sink is not
        installed or cannot be imported.
        """
        if self.config.sinks:
            mark_phase(Phase.IMPORT_SINKS)
            broadcast_from_rank0(self.start_feeds)
        return self

    def start_feeds(self) -> None:
        require_installed(self.config.sinks)
        try:
            origin = provenance(self.folder, self.degrees, self.settings)
        except Exception as error:  # only on this rank, while others wait
            raise ConfigError(f"metrics.sinks: {self.folder / 'config.toml'}: {error}") from None
        for name in self.config.sinks:
            try:
                sink = build_sink(name, self.config, self.folder, read_run_id(self.folder), origin)
            except ConfigError:
                raise
            except Exception as error:
                # For example an import fails because the versions of two packages do not fit
                text = f"{type(error).__name__}: {error}"
                raise ConfigError(f"metrics.sinks: {name} cannot be imported: {text}") from None
            self.feeds.append(Feed(name, sink, self.folder / "metrics.jsonl"))
        for feed in self.feeds:
            feed.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Waits until the rows are sent: for PATIENCE seconds without progress, and at most
        `patience` seconds.
        """
        if not self.config.sinks:
            return
        mark_phase(Phase.CLOSE_SINKS)
        for feed in self.feeds:
            feed.stop(failed=error is not None)
        now = time.monotonic()
        end = now + self.patience
        progressed = now
        sent = 0
        while any(feed.is_alive() for feed in self.feeds) and now < min(end, progressed + PATIENCE):
            count = sum(feed.sent + feed.attached for feed in self.feeds)
            if count != sent:
                sent = count
                progressed = now
            time.sleep(0.05)
            now = time.monotonic()
        for feed in self.feeds:
            if not feed.complete:
                logger.warning(
                    f"metrics.sinks: {feed.sink_name}: up to {feed.unsent()} rows of metrics.jsonl "
                    "were not sent; the next start of this run sends them"
                )


def read_run_id(folder: Path) -> str:
    """Reads the run's identifier in W&B and MLflow; creates it at the run's first start.

    Raises ConfigError.
    """
    path = folder / RUN_ID
    if not path.exists():
        replace_file(path, secrets.token_hex(8).encode())
    run_id = read_bounded(path, 100).decode("ascii", "replace").strip()
    # The id becomes a part of names of folders that are deleted, so it must be harmless
    if not re.fullmatch("[0-9a-f]{16}", run_id):
        raise ConfigError(
            f"{path}: expected 16 hexadecimal digits; delete it to begin new runs in W&B and MLflow"
        )
    return run_id


def build_sink(name: str, config: MetricsConfig, folder: Path, run_id: str, origin: Any) -> Sink:
    """Builds the sink of this name.

    Its library is imported here, in the main thread, because an import slows other threads down.
    """
    if name == "tensorboard":
        from titanlite.sinks.tensorboard_sink import TensorBoardSink

        return TensorBoardSink(folder / "tensorboard", origin)
    if name == "wandb":
        from titanlite.sinks.wandb_sink import WandbSink

        return WandbSink(config, folder, run_id, origin)
    from titanlite.sinks.mlflow_sink import MlflowSink

    return MlflowSink(config, folder, run_id, origin)
