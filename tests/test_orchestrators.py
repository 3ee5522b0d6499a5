"""The examples of docs/orchestrators.md: run where the tool is installed, otherwise compared with
its schema.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from launches import environment

EXAMPLES = Path(__file__).resolve().parents[1] / "docs/orchestrators"


def parameters(arguments: list[str], **more: Any) -> dict[str, Any]:
    """As the examples get them."""
    overrides = dict(word.removeprefix("--").split("=", 1) for word in arguments[1:])
    return {"config": "debug", "processes": 2, "overrides": overrides | more}


# Kedro


@pytest.fixture
def tracking(tmp_path, monkeypatch):
    """MLflow in a local file; without a server, it keeps attached files in the working folder."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/tracking.db")
    yield mlflow
    mlflow.set_tracking_uri(None)


def runs_of(mlflow: Any) -> dict[str, Any]:
    """Name -> run."""
    return {run.info.run_name: run for run in mlflow.MlflowClient().search_runs(["0"])}


@pytest.mark.slow
@pytest.mark.parametrize("kedro", [False, True])
def test_the_kedro_node_trains_in_a_nested_run(arguments, tmp_path, tracking, kedro):
    from docs.orchestrators import kedro_node

    given = parameters(arguments, **{"metrics.sinks": ["mlflow"]})
    if kedro:
        runner, io = pytest.importorskip("kedro.runner"), pytest.importorskip("kedro.io")
        catalog = io.DataCatalog({"params:training": io.MemoryDataset(given)})
        found = runner.SequentialRunner().run(kedro_node.create_pipeline(), catalog)[
            "training_result"
        ]
        result = found if isinstance(found, dict) else found.load()
    else:
        result = kedro_node.train(given)
    assert result["folder"] == str(tmp_path / "debug")
    runs = runs_of(tracking)
    assert runs["debug"].data.tags["mlflow.parentRunId"] == runs["pipeline"].info.run_id
    assert runs["pipeline"].data.metrics == {"final_loss": result["loss"]}
    sent = runs["debug"].data.metrics["loss_metrics/global_avg_loss"]
    assert sent == result["loss"]


@pytest.mark.slow
def test_a_node_that_fails_is_a_failure(arguments, tmp_path, tracking):
    from docs.orchestrators import kedro_node

    (tmp_path / "debug").mkdir()
    (tmp_path / "debug/checkpoints").touch()  # where a folder should be
    with pytest.raises(RuntimeError, match=r"exit code [12]; see .*log\.txt"):
        kedro_node.train(parameters(arguments))
    assert runs_of(tracking)["pipeline"].info.status == "FAILED"


# Ray


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_ray_trains_on_its_local_cluster(arguments, tmp_path, nodes):
    ray = pytest.importorskip("ray")
    from docs.orchestrators import ray_train

    ray.init(
        num_cpus=3, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}}
    )
    try:
        found = ray_train.run(
            parameters(arguments) | {"processes": 1}, nodes, str(tmp_path / "ray")
        )
    finally:
        ray.shutdown()
    assert found.return_value["step"] == 6
    assert f"CPU x {nodes}" in (tmp_path / "debug/log.txt").read_text()


# Kubernetes


def manifest() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())


def check(value: Any, kind: str, models: Any, where: str) -> None:
    """Raises AssertionError if a value of a manifest is not of the type that the client's models
    declare.
    """
    if kind.startswith("list["):
        assert isinstance(value, list), where
        for number, entry in enumerate(value):
            check(entry, kind[5:-1], models, f"{where}[{number}]")
    elif kind.startswith("dict("):
        assert isinstance(value, dict), where
        for name, entry in value.items():
            check(entry, kind[5:-1].split(", ")[1], models, f"{where}.{name}")
    elif kind in ("str", "int", "bool"):
        assert type(value).__name__ == kind, where
    elif kind != "object":
        model = getattr(models, kind)
        names = {key: name for name, key in model.attribute_map.items()}
        assert isinstance(value, dict), where
        for key, entry in value.items():
            assert key in names, f"{where}.{key}: allowed are {sorted(names)}"
            check(entry, model.openapi_types[names[key]], models, f"{where}.{key}")
        # Raises ValueError if a required one is missing
        model(**{names[key]: entry for key, entry in value.items()})


def test_the_manifest_is_that_of_a_pytorchjob():
    models = pytest.importorskip("kubeflow.training.models")
    check(manifest(), "KubeflowOrgV1PyTorchJob", models, "")
    wrong = manifest()
    wrong["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["imag"] = (
        "x"
    )
    with pytest.raises(AssertionError, match="imag: allowed"):
        check(wrong, "KubeflowOrgV1PyTorchJob", models, "")


LAUNCHER = """#!/bin/bash
echo "$NNODES $NODE_RANK $MASTER_ADDR ${RANK:-none} $@"
trap 'exit 75' TERM
for i in {1..1200}; do [ -n "$CODE" ] && exit $CODE; touch started; sleep 0.05; done
"""


@pytest.fixture
def pod(tmp_path):
    """The script of a pod, with a launcher that ends with the exit code CODE, or waits for SIGTERM."""
    replicas = manifest()["spec"]["pytorchReplicaSpecs"]
    container = replicas["Master"]["template"]["spec"]["containers"][0]
    assert replicas["Worker"]["template"] == replicas["Master"]["template"]
    (tmp_path / "titanlite").write_text(LAUNCHER)
    (tmp_path / "titanlite").chmod(0o755)
    given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    given |= {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "titanlite-master-0",
        "POD_IP": "10.0.0.7",
    }

    def start(**variables: str) -> subprocess.Popen:
        path = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.Popen(
            [*container["command"], *container["args"]],
            env=environment(**given) | {"PATH": path} | variables,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.mark.parametrize(
    ("code", "expected"), [(0, 0), (2, 2), (1, 138), (75, 138), (124, 138), (137, 138)]
)
def test_exit_codes_of_a_pod(pod, code, expected):
    """128 and more start the pod again."""
    process = pod(CODE=str(code))
    output, _ = process.communicate(timeout=60)
    assert output.startswith("2 1 titanlite-master-0 none train llama3_8b ")
    assert process.returncode == expected


def test_the_first_pod_listens_at_its_address(pod):
    process = pod(CODE="0", RANK="0")
    assert process.communicate(timeout=60)[0].startswith("2 0 10.0.0.7 none ")


def test_a_pod_that_is_deleted_waits_for_the_run(pod, tmp_path):
    process = pod()
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 138  # of 75
