"""Reads back what the sinks wrote, with the libraries' own readers: metric -> (step, value) in the
order of the file.

No test and none of its runs contacts another machine: importing this sets the variables that make
sure of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.sinks.metric_names import scalars

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}
os.environ.update(OFFLINE)
Points = dict[str, list[tuple[int, float]]]


def expected(rows: list[dict[str, Any]]) -> Points:
    """What a sink should hold after these rows of metrics.jsonl."""
    found: Points = {}
    for row in rows:
        for name, value in scalars(row).items():
            found.setdefault(name, []).append((row["step"], value))
    return found


def read_tensorboard(folder: Path) -> tuple[Points, str]:
    """The scalars of all event files in the folder, and the texts."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    found, texts = dict[str, list[tuple[int, float]]](), ""
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for raw in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(raw)
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
                else:
                    texts += value.tensor.string_val[0].decode()
    return found, texts


def float32(points: Points) -> Points:
    """A number as TensorBoard rounds it."""
    return {
        name: [(step, struct.unpack("f", struct.pack("f", v))[0]) for step, v in pairs]
        for name, pairs in points.items()
    }


def read_wandb(folder: Path) -> tuple[Points, dict[str, Any]]:
    """The history of the only offline run in a run's folder, and its configuration."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found, config = dict[str, list[tuple[int, float]]](), dict[str, Any]()
    for content in _records(path.read_bytes()):
        record = Record.FromString(content)
        for item in record.run.config.update:
            config[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for name, value in items.items():
            if not name.startswith("_"):
                found.setdefault(name, []).append((items["_step"], value))
    return found, config


def _records(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, which W&B's files are after 7 bytes: blocks of 32 kB with parts
    of records.
    """
    # Checksum, length, and whether it is whole, first, middle or last
    block, header = 1 << 15, struct.Struct("<IHB")
    at, record = 7, b""
    while at + header.size <= len(content):
        if block - at % block < header.size:
            at += block - at % block  # the rest of a block is padding
            continue
        _, length, kind = header.unpack_from(content, at)
        at += header.size
        record += content[at : at + length]
        at += length
        if kind in (1, 4):
            yield record
            record = b""


def read_mlflow(uri: str, experiment: str = "titanlite") -> tuple[Points, Any]:
    """The metrics of the only run in an experiment, by step, and the run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    points = {
        name: [(m.step, m.value) for m in sorted(metrics, key=lambda m: (m.timestamp, m.step))]
        for name, metrics in history.items()
    }
    return points, run


def as_mlflow(points: Points) -> Points:
    """The same metrics under the names that MLflow allows."""
    from titanlite.sinks.mlflow_sink import MlflowSink

    return {MlflowSink.metric_name(name): pairs for name, pairs in points.items()}


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """The address of an MLflow server on the loopback interface, with its data in the folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = [
        "--backend-store-uri",
        f"sqlite:///{folder}/server.db",
        "--artifacts-destination",
        f"{folder}/artifacts",
    ]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *store], stdout=log, stderr=log, start_new_session=True, cwd=folder
        )
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and process.poll() is None:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    yield f"http://127.0.0.1:{port}"
                    return
                time.sleep(0.2)
            raise AssertionError((folder / "server.log").read_text())
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
