"""Libraries of sinks that are not installed."""

from __future__ import annotations

import importlib.util

import pytest

from titanlite.runtime.errors import ConfigError
from titanlite.sinks.installed import require_installed
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
