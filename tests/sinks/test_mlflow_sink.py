"""MLflow: the local file of a run, and servers that refuse connections or do not answer."""

from __future__ import annotations

import itertools
import logging
import socket
import time
from importlib.util import find_spec

import pytest
from runs import rows, train_run
from sink_readers import as_mlflow, expected, read_mlflow

# Slow to import
pytestmark = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")


@pytest.mark.slow
def test_a_run_is_read_back_from_the_local_file(pool, arguments, tmp_path):
    run, folder = [*arguments, "--metrics.sinks=mlflow"], tmp_path / "debug"
    for steps in (4, 6):
        assert pool.run(1, patient_run, [*run, f"--training.steps={steps}"]) == [0]
        found, stored = read_mlflow(f"sqlite:///{tmp_path}/mlflow.db")
        assert found == as_mlflow(expected(rows(folder)))
        assert stored.info.status == "FINISHED"
    assert stored.data.params["training.steps"] == "4"  # a parameter stays; the file is the newest
    assert "steps = 6\n" in next((tmp_path / "mlruns").rglob("config.toml")).read_text()
    assert stored.data.tags["layout"] == "one process"
    (report,) = (tmp_path / "mlruns").rglob("report.html")
    assert report.read_bytes() == (folder / "report.html").read_bytes()


def patient_run(arguments: list[str]) -> int:
    """The tables of the file are made at the first start, which takes some seconds."""
    from titanlite.sinks import feed as sinks

    sinks.PATIENCE = 60.0
    return train_run(arguments)


def impatient_run(arguments: list[str]) -> tuple[int, list[str], float]:
    """Exit code, warnings, and the seconds of the longest step but the first."""
    from titanlite.data.stream import TrainStream
    from titanlite.sinks import feed as sinks

    warnings, begun = list[str](), list[float]()
    next_step = TrainStream.next_step

    class Handler(logging.Handler):
        def emit(self, record):
            warnings.append(record.getMessage())

    def timed(stream):
        begun.append(time.monotonic())
        return next_step(stream)

    def start(self):
        logging.getLogger("titanlite").addHandler(Handler(logging.WARNING))
        return original(self)

    original = sinks.Sinks.start_feeds
    sinks.Sinks.start_feeds, sinks.PATIENCE, TrainStream.next_step = start, 1.0, timed
    code = train_run(arguments)
    return code, warnings, max(b - a for a, b in itertools.pairwise(begun[1:]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "accepts",
    [
        pytest.param(False, marks=pytest.mark.slow, id="refuses"),
        pytest.param(True, id="never answers"),
    ],
)
def test_a_server_that_fails_delays_no_step(pool, arguments, tmp_path, accepts):
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        if not accepts:
            server.close()
        run = [
            *arguments,
            "--metrics.sinks=mlflow",
            f"--metrics.mlflow_uri={uri}",
            "--training.steps=60",
        ]
        started = time.monotonic()
        ((code, warnings, longest),) = pool.run(1, impatient_run, run)
    assert code == 0
    assert time.monotonic() - started < 40
    assert longest < 2
    found = rows(tmp_path / "debug")
    assert [row["step"] for row in found if "loss" in row] == list(range(1, 61))
    assert warnings[-1] == (
        f"metrics.sinks: mlflow: up to {len(found)} rows of metrics.jsonl were not sent; "
        "the next start of this run sends them"
    )
    assert any("training continues" in text for text in warnings) or accepts
