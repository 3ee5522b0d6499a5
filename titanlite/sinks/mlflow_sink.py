"""MLflow: a run on a tracking server, or in the file mlflow.db beside the run folders.

What it is: the client of MLflow. At the start and after each failure it asks the server for the
last step of each metric, and sends what is missing. So the server has every step once, whatever was
lost or sent twice. MLflow cannot delete values: a step that is trained again after a kill or a
rollback keeps its first values.
What it costs: one request per second at most, with up to a thousand values.

The run is found by a tag, not by MLflow's id, which would be lost if the process ended before the
id was recorded. If MLFLOW_RUN_ID names a run of this server, as under `titanlite.launch` within
a run of MLflow, it is the parent: the run is created in its experiment, and MLflow shows it below
its parent.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import defaultdict
from pathlib import Path

# mlflow reads these when it is imported: it then sends no usage statistics to its makers, and does
# not repeat a failed request silently for minutes, because feed.py repeats and reports it. Values
# that the user has set are kept.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from titanlite.config.schema import MetricsConfig
from titanlite.sinks.metric_names import Scalars
from titanlite.sinks.provenance import Provenance

logger = logging.getLogger("titanlite")
# MLflow's limits: metrics and parameters per request, and characters per parameter
MOST = 1000
MOST_PARAMETERS = 100
LONGEST = 6000
TAG = "titanlite.run"
PARENT = "mlflow.parentRunId"


class MlflowSink:
    """The run with the tag `titanlite.run` = `run_id` in an experiment."""

    def __init__(
        self, config: MetricsConfig, folder: Path, run_id: str, origin: Provenance
    ) -> None:
        local = f"sqlite:///{folder.parent.absolute() / 'mlflow.db'}"
        self.uri = config.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or local
        self.experiment = config.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "titanlite"
        self.artifacts: str | None = None  # the server decides
        if self.uri == local:
            self.artifacts = (folder.parent.absolute() / "mlruns").as_uri()
        self.tag = run_id
        self.origin = origin

    def open(self) -> defaultdict[str, int]:
        """Finds or creates the run. Returns the last step of each metric that it has."""
        self.client = MlflowClient(self.uri)
        parent = self._parent()
        tags = {TAG: self.tag}
        if parent is not None:
            experiment = parent.info.experiment_id
            tags[PARENT] = parent.info.run_id
        else:
            experiment = self._experiment()
        query = f"tags.`{TAG}` = '{self.tag}'"
        runs = self.client.search_runs([experiment], query, max_results=1)
        if runs:
            run = runs[0]
            self.run: str = run.info.run_id
            self.client.update_run(self.run, status="RUNNING")
            if parent is not None:  # the run may have had another parent before
                self.client.set_tag(self.run, PARENT, parent.info.run_id)
        else:
            run = self.client.create_run(experiment, run_name=self.origin.name, tags=tags)
            self.run = run.info.run_id
        self._attach(run.data.params)
        last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        return defaultdict(lambda: -1, last_steps)

    def _parent(self) -> Run | None:
        """Finds the run that MLFLOW_RUN_ID names; None without one or if this server lacks it."""
        name = os.environ.get("MLFLOW_RUN_ID")
        if not name:
            return None
        try:
            return self.client.get_run(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning(
                "metrics.sinks: mlflow: %s has no run %s, which MLFLOW_RUN_ID names", self.uri, name
            )
            return None

    def _experiment(self) -> str:
        """Returns the id of the experiment; creates it if there is none of this name."""
        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment is not None:
            return str(experiment.experiment_id)
        # A server decides where files are stored; without one, MLflow would store them in the
        # working folder.
        return str(self.client.create_experiment(self.experiment, artifact_location=self.artifacts))

    def _attach(self, known: dict[str, str]) -> None:
        """Attaches settings, code version and environment.

        A parameter cannot change later; the file config.toml can.
        """
        parameters = []
        for name, value in self.origin.settings.items():
            text = value
            if not isinstance(value, str):
                text = json.dumps(value)
            if name not in known and text:
                parameters.append(Param(name, text[:LONGEST]))
        for start in range(0, len(parameters), MOST_PARAMETERS):
            self.client.log_batch(self.run, params=parameters[start : start + MOST_PARAMETERS])
        tags = self.origin.facts | {
            "mlflow.source.git.commit": self.origin.facts.get("git_commit", "")
        }
        self.client.log_batch(
            self.run, tags=[RunTag(name, value) for name, value in tags.items() if value]
        )
        try:
            self.client.log_text(self.run, self.origin.toml, "config.toml")
        except Exception as error:  # a server may have no file storage; metrics need none
            logger.warning("metrics.sinks: mlflow: config.toml could not be attached: %s", error)

    @staticmethod
    def metric_name(name: str) -> str:
        """Replaces brackets and percent signs, which MLflow refuses, as in throughput_tps."""
        return re.sub(r"[^\w./ -]+", "_", name.replace("%", "percent")).strip("_")

    def send(self, rows: list[Scalars]) -> None:
        """Sends the values; a request has as many whole rows as fit, or a part of a long row."""
        metrics = [
            Metric(name, value, round(1000 * time), step)  # timestamps are milliseconds
            for step, time, values in rows
            for name, value in values.items()
        ]
        for start in range(0, len(metrics), MOST):
            self.client.log_batch(self.run, metrics=metrics[start : start + MOST])

    def attach(self, path: Path, name: str) -> None:
        """Stores a file of the run beside config.toml, with its folder."""
        folder = name.rpartition("/")[0]
        self.client.log_artifact(self.run, str(path), folder or None)

    def close(self, failed: bool) -> None:
        """Ends the run on the server; the next start of this run opens it again."""
        status = "FINISHED"
        if failed:
            status = "FAILED"
        self.client.set_terminated(self.run, status)
