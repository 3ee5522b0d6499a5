"""On a CUDA device: the allocator's peak is that of the plan. Skipped without one."""

from __future__ import annotations

import pytest
import torch

from titanlite.config.load import load_config
from titanlite.config.schema import Config
from titanlite.distributed.mesh import Mesh
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.model.llama import Llama
from titanlite.observe.memory import peak_memory_gib
from titanlite.parallel.parallelize import build_model_parts
from titanlite.parallel.step import build_step_parts
from titanlite.rules.check import check_layout
from titanlite.tools.plan.advice import GIB
from titanlite.tools.plan.machines import MACHINES
from titanlite.tools.plan.plan import make_plan, with_dtype
from titanlite.tools.plan.trace import take_step
from titanlite.tools.verify.pool import Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Name of a device -> its row in the planner's table
DEVICES = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}
CASES = [
    ["llama3_1b", "--recompute.mode=none", "--training.local_batch_size=2"],
    ["llama3_1b", "--recompute.mode=none", "--training.local_batch_size=4"],
    ["llama3_1b", "--recompute.mode=full", "--training.local_batch_size=4"],
    ["llama3_1b", "--compile.enabled=false", "--training.local_batch_size=2"],
    ["llama3_3b", "--recompute.mode=selective", "--training.local_batch_size=1"],
    ["llama3_1b", "--training.param_dtype=bfloat16", "--optimizer.state_dtype=bfloat16"],
]


def peak(config: Config, llama: LlamaConfig, degrees: dict[str, int], compiled: bool) -> float:
    """GiB that the allocator has reserved after three steps."""
    device = torch.device("cuda")
    mesh = Mesh("cuda", degrees, 600)
    with torch.device("meta"):
        model = Llama(llama, config.training.seq_len)
    parts = build_model_parts(model, config, mesh, device, compiled)
    step_parts = build_step_parts(parts, config, mesh, device, compiled)
    for _ in range(3):
        take_step(config, step_parts)
    return peak_memory_gib(device)


@pytest.mark.parametrize("options", CASES, ids=" ".join)
def test_the_peak_is_within_a_tenth_of_the_plan(options):
    device = torch.cuda.get_device_name()
    if device not in DEVICES:
        pytest.skip(f"{device}: none of {', '.join(DEVICES)}")
    machine = MACHINES[DEVICES[device]]
    config = load_config([*options, "--training.seq_len=4096", "--training.global_batch_size=4"])
    config = with_dtype(config, machine)
    llama = resolve_flavor(config.model, 0)
    degrees = check_layout(config, llama, 1)
    plan = make_plan(config, llama, 1, machine)
    pool = Pool(["titanlite.tools.plan.trace"], device="cuda")
    (measured,) = pool.run(1, peak, config, llama, degrees, plan.compiled, timeout=600)
    need = plan.worst
    assert 0.9 * need.low / GIB <= measured <= 1.1 * need.high / GIB
