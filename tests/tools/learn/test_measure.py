"""What a program of the course does, counted."""

import shutil

import pytest
import torch

from titanlite.tools.learn.exercise import COURSE
from titanlite.tools.learn.measure import ProgramError, as_number, measure

PROGRAM = """
import torch
import torch.distributed as dist
import common

def train():
    kept = torch.zeros(1000)
    optimizer = common.build_adamw([torch.nn.Parameter(torch.zeros(10))])
    for step in range(1, 5):
        common.read_step(step)
        large = torch.zeros(step * 100_000)
        dist.all_reduce(kept)
        gathered = torch.empty(2 * len(kept))
        dist.all_gather_single(gathered, kept)
        if dist.get_rank() == 0:
            dist.send(kept, 1)
        else:
            dist.recv(kept, 0)
        optimizer.param_groups[0]["params"][0].grad = torch.ones(10)
        common.update(optimizer, torch.tensor(float(step)), step)
        del large, gathered
    return [0.5]
"""


def test_collectives_bytes_and_memory_of_the_recorded_steps(pool, tmp_path):
    for name in ("common.py", "rows.txt"):
        shutil.copy(COURSE / "steps" / name, tmp_path / name)
    (tmp_path / "program.py").write_text(PROGRAM)
    first, second = pool.run(2, measure, str(tmp_path / "program.py"), (1, 2))
    assert first.losses == [0.5]
    assert first.norms == [1, 2, 3, 4]
    assert first.calls == {"all_reduce": 2, "all_gather": 2, "send": 2}
    assert first.bytes == {"all_reduce": 8000, "all_gather": 16000, "send": 8000}
    assert second.calls == {"all_reduce": 2, "all_gather": 2, "recv": 2}
    # `kept`, the parameter, its gradient and moments; and at most, the large tensor of step 2
    assert 4000 <= first.held < 16_000
    assert 800_000 < first.peak < 900_000, "that of step 4 is not recorded"


def test_a_loss_is_a_number_or_a_tensor_of_one():
    assert as_number(torch.tensor(0.5), "loss") == 0.5
    for value in (None, "x", torch.zeros(2)):
        with pytest.raises(ProgramError, match="loss: expected a number, found"):
            as_number(value, "loss")
