"""The names of metrics in TensorBoard, W&B and MLflow: torchtitan's where it has one, else the
column of metrics.jsonl.

Why it is here: dashboards that were made for torchtitan show these runs too. metrics.jsonl keeps
its short names. The table of all columns is in docs/metrics.md, and a test compares it with this
one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Column of metrics.jsonl -> the name in torchtitan/components/metrics.py and in its train.py
TORCHTITAN = {
    "loss": "loss_metrics/global_avg_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens": "n_tokens_seen",
    "tps": "throughput(tps)",
    "tflops": "tflops",
    "mfu": "mfu(%)",
    "memory_gib": "memory/max_reserved(GiB)",
    "memory_retries": "memory/num_alloc_retries",
    "data_wait_percent": "time_metrics/data_loading(%)",
    "step_seconds": "time_metrics/end_to_end(s)",
    "time/data": "time_metrics/data_loading(s)",
    "validation/loss": "validation_metrics/loss",
}


class Scalars(NamedTuple):
    """A row for a sink."""

    step: int
    time: float  # Unix seconds when the row was written
    values: dict[str, float]


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """Collects the numbers of a row of metrics.jsonl by their names in the sinks.

    Null, which stands for NaN, is left out.
    """
    losses = [
        row[name] for name in row if name.startswith("validation/") and name.endswith("/loss")
    ]
    if len(losses) == 1:
        # With a single source, its loss; with several, the row has the mean
        row = {**row, "validation/loss": losses[0]}
    return {
        TORCHTITAN.get(name, name): value
        for name, value in row.items()
        if name not in ("step", "time")
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    }
