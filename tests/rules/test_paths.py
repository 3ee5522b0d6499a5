"""The weights that a run begins with are looked for before anything is built."""

from __future__ import annotations

import pytest
from messages import refused

from titanlite.config.schema import CheckpointConfig, Config, LoraConfig, RunConfig
from titanlite.rules.paths import require_initial_load


def config_of(folder: object, path: str, rank: int) -> Config:
    return Config(
        run=RunConfig(name="a", folder=str(folder)),
        checkpoint=CheckpointConfig(initial_load=path),
        lora=LoraConfig(rank=rank),
    )


def test_adapters_need_the_weights_that_they_are_added_to(tmp_path):
    with refused("lora.rank = 4", "checkpoint.initial_load"):
        require_initial_load(config_of(tmp_path, "", 4))


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("saved", [False, True])
def test_a_path_must_exist_until_a_checkpoint_has_the_weights(tmp_path, saved, rank):
    if saved:
        (tmp_path / "a/checkpoints/step-3").mkdir(parents=True)
    require_initial_load(config_of(tmp_path, str(tmp_path), rank))
    missing = config_of(tmp_path, str(tmp_path / "none"), rank)
    if saved and rank == 0:
        require_initial_load(missing)
    else:
        with refused("checkpoint.initial_load", "no such file or folder"):
            require_initial_load(missing)
