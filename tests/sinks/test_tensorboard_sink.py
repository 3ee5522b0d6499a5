"""TensorBoard: what its reader finds after a run, and after a second start."""

from __future__ import annotations

import pytest
from runs import rows, train_run
from sink_readers import expected, float32, read_tensorboard

pytest.importorskip("tensorboard")


@pytest.mark.slow
def test_a_run_is_read_back(pool, arguments, tmp_path):
    """The second start writes the file anew."""
    run, folder = [*arguments, "--metrics.sinks=tensorboard"], tmp_path / "debug"
    for steps in (4, 6):
        assert pool.run(2, train_run, [*run, f"--training.steps={steps}"]) == [0, 0]
        found, texts = read_tensorboard(folder / "tensorboard")
        assert found == float32(expected(rows(folder)))
        assert [step for step, _ in found["loss_metrics/global_avg_loss"]] == list(
            range(1, steps + 1)
        )
        assert f"steps = {steps}" in texts
        assert "layout: dp_shard 2" in texts
        assert str(folder / "report.html") in texts
    assert len(list((folder / "tensorboard").iterdir())) == 1
