"""What is refused on Apple's GPUs, and a run on one, where there is one."""

from __future__ import annotations

import pytest
import torch
from messages import assert_mentions
from runs import rows, train_run

from titanlite.config.load import load_config
from titanlite.model.flavors import resolve_flavor
from titanlite.rules.apple import ALLOWED, apple_problems
from titanlite.rules.check import check_layout
from titanlite.rules.degrees import AXES
from titanlite.runtime.errors import ConfigError

REFUSED = {
    "training.compute_dtype": "bfloat16",
    "training.param_dtype": "bfloat16",
    "optimizer.state_dtype": "bfloat16",
    "optimizer.name": "muon",
    "optimizer.implementation": "foreach",
    "float8.enabled": "true",
    "compile.enabled": "true",
    "compile.loss": "true",
    "loss.num_chunks": "2",
    "recompute.mode": "memory_budget",
    "recompute.offload": "true",
    "parallel.cpu_offload": "true",
    "parallel.optimizer_offload": "true",
    "parallel.reshard_after_forward": "always",
    "stability.action": "skip",
    "stability.threshold": "10",
    "metrics.noise_scale_freq": "1",
    "metrics.layer_norms_freq": "1",
    "metrics.activations_freq": "1",
}


def problems(*options: str, processes: int = 1) -> list[str]:
    config = load_config(["debug", "--run.device=mps", *options])
    return list(
        apple_problems(
            config, resolve_flavor(config.model, 4112), dict.fromkeys(AXES, 1) | {"tp": processes}
        )
    )


@pytest.mark.parametrize("key", ALLOWED)
def test_what_is_not_supported_is_refused_by_name(key):
    """One key has a value that is refused; the defaults of the others are accepted."""
    (message,) = problems(f"--{key}={REFUSED[key]}")
    assert_mentions(message, f"{key} = {REFUSED[key]}", "run.device = mps", "expected")


def test_a_plain_run_is_accepted():
    assert not problems()


def test_several_processes_are_refused():
    (message,) = problems(processes=2)
    assert_mentions(message, "2 processes", "NGPU=1")


def test_the_rules_are_applied_only_on_that_device():
    options = ["debug", "--compile.loss=true"]
    for device, refused in (("cpu", False), ("mps", True)):
        config = load_config([*options, f"--run.device={device}"])
        found = []
        try:
            check_layout(config, resolve_flavor(config.model, 4112), 1)
        except ConfigError as error:
            found = error.problems
        assert bool(found) == refused


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU")
def test_the_losses_are_those_of_the_cpu(pool, arguments, tmp_path):
    """Both continue from one checkpoint, since devices draw different initial weights from a seed."""
    begin = [*arguments, "--run.device=cpu", "--checkpoint.freq=2"]
    assert pool.run(1, train_run, [*begin, "--training.steps=2", "--run.name=start"]) == [0]
    losses = {}
    for device in ("cpu", "mps"):
        more = [
            f"--run.device={device}",
            f"--run.name={device}",
            f"--checkpoint.initial_load={tmp_path / 'start'}",
        ]
        assert pool.run(1, train_run, [*arguments, *more, "--training.steps=8"]) == [0]
        losses[device] = [row["loss"] for row in rows(tmp_path / device) if "loss" in row]
    assert losses["mps"] == pytest.approx(losses["cpu"], abs=1e-3)
