"""`debug.deterministic`: two runs write the same numbers; what it sets, and what the environment
may set.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from runs import curve, train_run

from titanlite.checkpoint.manifest import read_manifest

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def run_and_report(arguments: list[str]) -> tuple[bool, bool, str]:
    import torch._inductor.config as inductor_config

    assert train_run(arguments) == 0
    return (
        torch.are_deterministic_algorithms_enabled(),
        inductor_config.deterministic,
        os.environ[WORKSPACE],
    )


@pytest.mark.parametrize(
    ("processes", "more"),
    [
        (1, []),
        pytest.param(
            2,
            ["parallel.dp_shard=2", "compile.enabled", "compile.backend=aot_eager"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_runs_are_equal_bit_for_bit(pool, arguments, tmp_path, processes, more):
    arguments = [
        *arguments,
        "--training.steps=3",
        "--debug.deterministic",
        *(f"--{option}" for option in more),
    ]
    for name in ("a", "b"):
        found = pool.run(processes, run_and_report, [*arguments, f"--run.name={name}"])
        assert found == [(True, True, ":4096:8")] * processes
    assert curve(tmp_path / "a") == curve(tmp_path / "b")
    states = [
        torch.cat([tensor.flatten().double() for tensor in load(tmp_path / name)])
        for name in ("a", "b")
    ]
    assert torch.equal(*states)


def load(folder: Path) -> list[torch.Tensor]:
    """All parameters and moments of the last checkpoint."""
    from checkpoints import read_step

    path = folder / "checkpoints/step-3"
    manifest = read_manifest(path)
    names = [name for name in manifest.tensors if name.startswith(("model.", "optimizer."))]
    tensors = {name: torch.empty(manifest.tensors[name].shape) for name in names}
    tree: dict = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        tree.setdefault(part, {})[rest] = tensor
    read_step(path, manifest, tree)
    return list(tensors.values())


def test_a_workspace_for_which_cublas_is_reproducible_is_kept(monkeypatch):
    from titanlite.runtime.deterministic import use_deterministic_operators

    monkeypatch.delenv(WORKSPACE, raising=False)  # and restored afterwards
    try:
        for given, used in (("", ":4096:8"), (":16:8", ":16:8"), (":0:0", ":4096:8")):
            monkeypatch.setenv(WORKSPACE, given)
            use_deterministic_operators()
            assert os.environ[WORKSPACE] == used
    finally:
        torch.use_deterministic_algorithms(False)
