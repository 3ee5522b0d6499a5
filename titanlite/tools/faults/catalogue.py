"""Lists all planted faults and finds one by its name.

Add one here: write the patch and its `Fault` in the file of its subject; `titanlite break NAME`
prints what happens, and `python -m docs.fault_tables` adds it to docs/faults.md.
"""

from __future__ import annotations

from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import ConfigError
from titanlite.tools.faults.context_parallel_faults import CONTEXT_PARALLEL_FAULTS
from titanlite.tools.faults.data_parallel_faults import DATA_PARALLEL_FAULTS
from titanlite.tools.faults.expert_faults import EXPERT_FAULTS
from titanlite.tools.faults.fault import Fault
from titanlite.tools.faults.loss_faults import LOSS_FAULTS
from titanlite.tools.faults.pipeline_faults import PIPELINE_FAULTS
from titanlite.tools.faults.run_faults import RUN_FAULTS
from titanlite.tools.faults.tensor_parallel_faults import TENSOR_PARALLEL_FAULTS
from titanlite.tools.faults.update_faults import UPDATE_FAULTS

FAULTS = (
    *LOSS_FAULTS,
    *DATA_PARALLEL_FAULTS,
    *TENSOR_PARALLEL_FAULTS,
    *CONTEXT_PARALLEL_FAULTS,
    *PIPELINE_FAULTS,
    *UPDATE_FAULTS,
    *EXPERT_FAULTS,
    *RUN_FAULTS,
)
# Proof -> the faults that it finds, as its test shows. `values`: what a fault's `check` compares;
# `bits`: tests/e2e/test_bits.py; `types`: tests/parallel/test_types.py
FOUND_BY = {
    "values": frozenset(fault.name for fault in FAULTS),
    "bits": frozenset(
        {
            "accumulation-lost",
            "adapters-of-rank-0",
            "balance-per-rank",
            "clip-by-local-norm",
            "clip-per-stage",
            "data-begins-again",
            "data-counted-by-rank",
            "divided-by-microbatches",
            "gradients-averaged",
            "microbatch-means",
            "moments-lost",
            "muon-of-shards",
            "rank-means",
            "replicas-in-norm",
            "replicas-not-reduced",
            "weights-by-rank",
        }
    ),
    "types": frozenset(
        {
            "adapter-gradient",
            "balance-per-rank",
            "balance-without-tp",
            "chunked-loss",
            "count-of-part",
            "cp-key-gradient",
            "cp-not-summed",
            "expert-gradient",
            "logits-gathered",
            "norm-gradient",
            "partial-sums",
            "rank-means",
            "replicas-not-reduced",
            "router-gradient",
            "z-loss-of-part",
        }
    ),
}


def find_fault(name: str) -> Fault:
    """The fault of this name. Raises ConfigError for an unknown one."""
    for fault in FAULTS:
        if fault.name == name:
            return fault
    names = [fault.name for fault in FAULTS]
    raise ConfigError(
        f"no planted fault is called {name!r}{suggestion(name, names)}; "
        "titanlite break --list prints all names"
    )
