"""Fixtures that the tests of parallelism share."""

from __future__ import annotations

import pytest
import torch

from titanlite.parallel.compile import missing_for_inductor


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that there is one, and looks anew for what the compiler needs."""

    def pretend(capability: tuple[int, int] = (9, 0), triton: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr("titanlite.parallel.compile.has_triton_package", lambda: triton)
        missing_for_inductor.cache_clear()

    yield pretend
    missing_for_inductor.cache_clear()
