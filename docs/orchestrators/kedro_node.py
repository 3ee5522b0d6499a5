"""A Kedro node that trains. With MLflow, the run of the training is nested in that of the pipeline.

conf/base/parameters.yml:

    training:
      config: debug
      processes: 2
      overrides:
        training: {steps: 100}
        metrics: {sinks: [mlflow]}
"""

from __future__ import annotations

from typing import Any

import mlflow

import titanlite


def train(parameters: dict[str, Any]) -> dict[str, Any]:
    """The node.

    Returns the run's folder and its last metrics; the catalog can store them as JSON.
    """
    with mlflow.start_run(run_name="pipeline", nested=mlflow.active_run() is not None):
        result = titanlite.launch(
            parameters["config"], parameters["overrides"], processes=parameters["processes"]
        )
        # 75: stopped after saving; the same pipeline run again continues the training
        if result.exit_code:
            raise RuntimeError(
                f"training ended with exit code {result.exit_code}; see {result.folder / 'log.txt'}"
            )
        mlflow.log_metric("final_loss", result.metrics["loss"])
    return {"folder": str(result.folder), **result.metrics}


def create_pipeline(**options: Any) -> Any:
    """What Kedro looks for in a module `pipeline` of a project."""
    from kedro.pipeline import node, pipeline

    return pipeline(
        [node(train, inputs="params:training", outputs="training_result", name="train")]
    )
