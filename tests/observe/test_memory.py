"""Memory columns: those of this machine, and those of a pretended GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from titanlite.observe.memory import memory_columns, peak_memory_gib


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_the_host_memory_is_that_of_this_process():
    before = memory_columns(torch.device("cpu"))
    assert set(before) == {"host_memory_gib"}
    kept = torch.ones(2**27, dtype=torch.uint8)
    added = memory_columns(torch.device("cpu"))["host_memory_gib"] - before["host_memory_gib"]
    assert added == pytest.approx(1 / 8, abs=0.03)
    assert kept[-1] == 1


@pytest.mark.parametrize("package", [True, False])
def test_the_columns_of_a_gpu(monkeypatch, package):
    def utilization(device):
        if not package:
            raise ModuleNotFoundError(
                "nvidia-ml-py does not seem to be installed or it can't be imported."
            )
        return 93

    stats = {
        "allocated_bytes.all.peak": 3 * 2**30,
        "reserved_bytes.all.peak": 2**32,
        "num_alloc_retries": 2,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    found = memory_columns(torch.device("cuda", 0))
    found.pop("host_memory_gib", None)
    expected = {"memory_allocated_gib": 3.0, "memory_reserved_gib": 4.0, "memory_retries": 2}
    assert found == expected | ({"gpu_utilisation": 93} if package else {})


def test_the_peak_is_not_below_what_is_resident():
    device = torch.device("cpu")
    assert peak_memory_gib(device) >= 0.99 * memory_columns(device).get("host_memory_gib", 0.0)
