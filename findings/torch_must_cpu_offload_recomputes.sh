#!/usr/bin/env bash
# torch: CheckpointPolicy.MUST_CPU_OFFLOAD recomputes in eager mode, without a message.
#
#   findings/torch_must_cpu_offload_recomputes.sh     needs Python 3.10 to 3.13, and packages from PyPI
#
# Selective activation checkpointing (create_selective_checkpoint_contexts) takes a policy for each
# operator. In eager mode MUST_SAVE keeps an operator's result, and MUST_CPU_OFFLOAD, whose name says
# that it is kept in CPU memory, treats it as MUST_RECOMPUTE does: the operator runs again in the
# backward, and nothing is moved.
#
# Seen with torch 2.13.0, Python 3.11; matrix products in forward and backward of one product:
#   MUST_SAVE: 3
#   MUST_RECOMPUTE: 4
#   MUST_CPU_OFFLOAD: 4
# The script fails if that is no longer so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

PRODUCT = torch.ops.aten.mm.default


class Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is PRODUCT
        return func(*args, **(kwargs or {}))


def products(policy):
    def choose(context, func, *args, **kwargs):
        return policy if func is PRODUCT else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(8, 8, requires_grad=True)
    weight = torch.randn(8, 8, requires_grad=True)
    with Products() as mode:
        out = checkpoint(
            lambda x: torch.mm(x, weight).sin(),
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(choose),
        )
        out.sum().backward()
    return mode.count


found = {}
for name in ("MUST_SAVE", "MUST_RECOMPUTE", "MUST_CPU_OFFLOAD"):
    found[name] = products(CheckpointPolicy[name])
    print(f"{name}: {found[name]}")
assert list(found.values()) == [3, 4, 4], "the behaviour has changed"
PY
