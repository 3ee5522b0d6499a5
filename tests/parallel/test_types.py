"""Types of a step (tests/support/typed_step.py), in a process of its own: once spmd_types is imported,
it watches every operation of a process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from titanlite.tools.faults.catalogue import FAULTS, FOUND_BY, find_fault
from titanlite.tools.faults.experiment import SMALL
from titanlite.tools.faults.expert_faults import MIXTURE
from titanlite.tools.verify.ladder import ladder, make_case

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("spmd_types") is None,
        reason="spmd_types is not installed: pip install spmd_types==0.3.1",
    ),
    pytest.mark.skipif(
        version("torch").startswith("2.11"),
        reason="the pretended group of torch 2.11 leaves the sizes of an exchange uninitialised",
    ),
]

PROGRAM = Path(__file__).parents[1] / "support/typed_step.py"
LAYOUTS = [
    "dp_shard=2",
    "dp_replicate=2",
    "cp=2",
    "tp=2",
    "cp=2,cp_method=ulysses",
    "dp_shard=2,loss.num_chunks=3",
    "dp_shard=2,data.document_mask",
    "dp_shard=2,lora.rank=4,lora.targets=wq wo w1 w2",
    "tp=2,model.qk_norm",
    "tp=2,loss.z_loss=0.01",
    "tp=2,loss.num_chunks=3",
    "tp=2,lora.rank=4,lora.targets=wq wo w1 w2",
    f"dp_shard=2,{MIXTURE}",
    f"dp_shard=2,ep=2,{MIXTURE}",
    f"cp=2,ep=2,{MIXTURE}",
    f"tp=2,{MIXTURE}",
]
REJECTED = sorted(FOUND_BY["types"])
# Not typed: compiled blocks, the product of float8, the masks of dropout, and the logits of an untied output that tp
# cuts where the loss reads them in fp32
UNTYPED = (
    "compile",
    "float8.enabled",
    "lora.dropout",
    "tp=2,model.embeddings=untied,optimizer.name=muon",
)


def problems(layouts: list[str], faults: list[str]) -> tuple[list[str], list[str]]:
    """The type errors of layouts, and of planted faults in the layout of each."""
    pairs = [(layout, "") for layout in layouts]
    pairs += [(find_fault(fault).layout, fault) for fault in faults]
    command = [sys.executable, str(PROGRAM), json.dumps(pairs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found[: len(layouts)], found[len(layouts) :]


def can_be_typed(layout: str) -> bool:
    """Whether a layout has one axis, which is not pp, and nothing is compiled."""
    parallel = make_case([*SMALL, "--model.num_layers=3"], layout, "cpu").config.parallel
    degrees = (parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp)
    one_axis = parallel.pp == 1 and sum(degree > 1 for degree in degrees) == 1
    return one_axis and not any(each in layout for each in UNTYPED)


def test_no_term_of_a_sum_is_used_as_the_whole():
    typed, rejected = problems(LAYOUTS, REJECTED)
    assert not any(typed), typed
    assert all(rejected), rejected


@pytest.mark.slow
def test_all_layouts_of_one_axis_and_all_faults():
    layouts = [layout for layout in ladder(2, False, "cpu") if can_be_typed(layout)]
    assert len(layouts) == 138
    faults = [fault.name for fault in FAULTS if fault.check in ("verify", "experts")]
    faults = [fault for fault in faults if can_be_typed(find_fault(fault).layout)]
    typed, rejected = problems(layouts, faults)
    assert not any(typed), typed
    found = [fault for fault, problem in zip(faults, rejected, strict=True) if problem]
    assert sorted(found) == REJECTED
