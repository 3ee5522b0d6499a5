"""`debug.cudnn_attention`: what torch may choose, and the mark in its caches of compiled code."""

from __future__ import annotations

import pytest
import torch
from runs import train_run


def train_and_report(arguments: list[str], cudnn: str) -> tuple[bool, str]:
    import torch.compiler.config as compiler_config

    run = [*arguments, f"--run.name={cudnn}", f"--debug.cudnn_attention={cudnn}"]
    assert train_run(run) == 0
    return torch.backends.cuda.cudnn_sdp_enabled(), compiler_config.cache_key_tag


@pytest.mark.slow
def test_the_choice_reaches_torch_and_its_caches(pool, arguments):
    ((with_cudnn, plain),) = pool.run(1, train_and_report, arguments, "true")
    ((without, marked),) = pool.run(1, train_and_report, arguments, "false")
    assert (with_cudnn, without) == (True, False)
    assert marked != plain
