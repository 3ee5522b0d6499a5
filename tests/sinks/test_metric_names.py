"""What the sinks need and name: libraries not installed; names, which docs/metrics.md has."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from runs import rows, train_run

from titanlite.runtime.errors import ConfigError
from titanlite.sinks.installed import require_installed
from titanlite.sinks.metric_names import TORCHTITAN, scalars
from titanlite.tools.cli.launch import launch


@pytest.fixture
def without_libraries(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("wandb", "mlflow") else find(name),
    )


def test_a_library_that_is_not_installed_is_named_with_the_command(without_libraries):
    with pytest.raises(ConfigError) as caught:
        require_installed(("wandb", "mlflow"))
    command = "pip install wandb mlflow"
    assert caught.value.problems == [
        f"metrics.sinks: {name} is not installed: {command}" for name in ("wandb", "mlflow")
    ]
    require_installed(())


def test_the_launcher_reports_it_with_other_mistakes(without_libraries, arguments):
    with pytest.raises(ConfigError) as caught:
        launch([*arguments, "--metrics.sinks=mlflow", "--parallel.tp=7"])
    assert any("mlflow is not installed" in problem for problem in caught.value.problems)
    assert any("parallel.tp" in problem for problem in caught.value.problems)


TEXT = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
TABLE = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \| [^|]*\| [^|]+ \|$", TEXT, re.MULTILINE)


def documented() -> dict[str, str]:
    """Column -> its name in the sinks, as the table says."""
    found = {}
    for columns, name in TABLE:
        for column in re.findall(r"`([^`]+)`", columns):
            found[column] = column if name == "the same" else name.strip("`")
    return found


def test_the_table_has_the_names_of_the_code():
    table = documented()
    assert TORCHTITAN.keys() <= table.keys()
    del table["step"], table["time"]
    assert {column: TORCHTITAN.get(column, column) for column in table} == table


def test_every_column_of_a_run_is_in_the_table(pool, arguments, tmp_path):
    assert pool.run(1, train_run, arguments) == [0]
    columns = {column for row in rows(tmp_path / "debug") for column in row}
    generic = {
        re.sub(
            r"^(validation|epochs)/numbers",
            lambda m: f"{m[1]}/<{'set' if m[1] == 'validation' else 'source'}>",
            c,
        )
        for c in columns
    }
    assert generic <= documented().keys()
    assert len(generic) > 20


def test_scalars():
    row = {"step": 3, "time": 1e9, "loss": 2.5, "mfu": None, "tokens": 7, "note": "x", "flag": True}
    assert scalars(row) == {"loss_metrics/global_avg_loss": 2.5, "n_tokens_seen": 7}
    single = {"step": 3, "validation/a/loss": 2.0, "validation/a/perplexity": 7.4}
    assert scalars(single)["validation_metrics/loss"] == 2.0
    several = {
        "step": 3,
        "validation/a/loss": 2.0,
        "validation/b/loss": 4.0,
        "validation/loss": 2.5,
    }
    assert scalars(several)["validation_metrics/loss"] == 2.5
    assert "validation_metrics/loss" not in scalars({"step": 3, "validation/a/ema_loss": 2.0})


@pytest.mark.slow
def test_names_for_mlflow():
    pytest.importorskip("mlflow")
    from titanlite.sinks.mlflow_sink import MlflowSink

    names = {
        name: MlflowSink.metric_name(name)
        for name in (*TORCHTITAN.values(), "validation/a.b-c/loss")
    }
    assert names["throughput(tps)"] == "throughput_tps"
    assert names["mfu(%)"] == "mfu_percent"
    assert names["memory/max_reserved(GiB)"] == "memory/max_reserved_GiB"
    assert names["time_metrics/data_loading(%)"] == "time_metrics/data_loading_percent"
    assert names["time_metrics/data_loading(s)"] == "time_metrics/data_loading_s"
    assert names["validation/a.b-c/loss"] == "validation/a.b-c/loss"
    assert len(set(names.values())) == len(names)
