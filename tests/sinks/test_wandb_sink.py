"""W&B: the offline file of a run, and how an online run is resumed."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from runs import rows, train_run
from sink_readers import expected, read_wandb

from titanlite.config.schema import MetricsConfig
from titanlite.sinks.metric_names import Scalars
from titanlite.sinks.provenance import Provenance

# Slow to import
pytestmark = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")


@pytest.mark.slow
def test_a_run_is_read_back(pool, arguments, tmp_path):
    run, folder = [*arguments, "--metrics.sinks=wandb"], tmp_path / "debug"
    for steps in (4, 6):
        assert pool.run(1, train_run, [*run, f"--training.steps={steps}"]) == [0]
        found, config = read_wandb(folder)
        assert found == expected(rows(folder))
        assert config["training.steps"] == steps
        assert f"steps = {steps}\n" in config["config.toml"]
        assert config["layout"] == "one process"
        (report,) = folder.glob("wandb/offline-run-*/files/report.html")
        assert report.read_bytes() == (folder / "report.html").read_bytes()


class Server:
    """Stands for wandb.init and the run of a server that has steps up to 4."""

    def __init__(self) -> None:
        self.starting_step, self.options, self.finished = 5, {}, False

    def __call__(self, **options):
        self.options = options
        return self

    def finish(self, exit_code):
        self.finished = True


def test_an_online_run_continues_after_the_last_step_of_the_server(tmp_path, monkeypatch):
    """Not tried with a real server."""
    import wandb

    from titanlite.sinks import wandb_sink

    server = Server()
    library = SimpleNamespace(
        Settings=wandb.Settings, init=server, login=lambda prompt: True, teardown=lambda: None
    )
    monkeypatch.setattr(wandb_sink, "wandb", library)
    config = MetricsConfig(wandb_mode="online", project="p")
    sink = wandb_sink.WandbSink(config, tmp_path, "f" * 16, Provenance("debug", "", {}, {}))
    assert sink.open()["loss"] == 4
    wanted = {"mode": "online", "resume": "allow", "id": "f" * 16, "project": "p", "name": "debug"}
    assert wanted.items() <= server.options.items()
    library.login = lambda prompt: False
    with pytest.raises(ConnectionError, match="wandb login"):
        sink.open()
    assert server.finished  # before another one would begin


@pytest.mark.parametrize(
    ("key", "variable", "mode"),
    [
        ("auto", None, "offline"),
        ("auto", "online", "online"),
        ("auto", "dryrun", "offline"),
        ("offline", "online", "offline"),
        ("online", "offline", "online"),
    ],
)
def test_nothing_is_sent_unless_asked_for(tmp_path, monkeypatch, key, variable, mode):
    from titanlite.sinks.wandb_sink import WandbSink

    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    else:
        monkeypatch.delenv("WANDB_MODE")
    sink = WandbSink(
        MetricsConfig(wandb_mode=key), tmp_path, "f" * 16, Provenance("debug", "", {}, {})
    )
    assert sink.mode == mode


def test_the_command_line_and_the_host_are_not_in_the_files(tmp_path, monkeypatch):
    """Arguments may contain a password."""
    from titanlite.sinks.wandb_sink import WandbSink

    monkeypatch.setattr(
        "sys.argv", ["train.py", "--metrics.mlflow_uri=http://user:hidden-password@server"]
    )
    sink = WandbSink(MetricsConfig(), tmp_path, "f" * 16, Provenance("debug", "", {}, {}))
    sink.open()
    sink.send([Scalars(1, 1e9, {"loss": 2.0})])
    sink.close(False)
    content = b"".join(path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert b"loss" in content
    assert b"hidden-password" not in content
    host = socket.gethostname().encode()
    # As protobuf and as JSON write it: a short name may be among the bytes by chance
    assert bytes([len(host)]) + host not in content
    assert b'"' + host + b'"' not in content
