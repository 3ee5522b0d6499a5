#!/usr/bin/env bash
# torch: F.scaled_mm calls another operator than torch._scaled_mm, so a policy for the old one recomputes.
#
#   findings/torch_scaled_mm_is_two_operators.sh     needs Python 3.10 to 3.13, and packages from PyPI
#
# The public F.scaled_mm replaces torch._scaled_mm and calls aten._scaled_mm_v2. A list of operators to
# save in selective activation checkpointing that names aten._scaled_mm, and any other code that counts
# or matches it, does not see the new one: after a change to F.scaled_mm the most expensive products
# are recomputed in each backward, without a message.
#
# Seen with torch 2.13.0, Python 3.11:
#   torch._scaled_mm: aten._scaled_mm.default
#   F.scaled_mm: aten._scaled_mm_v2.default
# The script fails if that is no longer so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


a = torch.randn(16, 32).to(torch.float8_e4m3fn)
b = torch.randn(16, 32).to(torch.float8_e4m3fn).T
one = torch.ones(())
with Names() as old:
    first = torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
print("torch._scaled_mm:", *old.names)
tensorwise = F.ScalingType.TensorWise
with Names() as new:
    second = F.scaled_mm(a, b, one, tensorwise, one, tensorwise, output_dtype=torch.bfloat16)
print("F.scaled_mm:", *new.names)
assert torch.equal(first, second), "the behaviour has changed"
assert old.names == ["aten._scaled_mm.default"], "the behaviour has changed"
assert new.names == ["aten._scaled_mm_v2.default"], "the behaviour has changed"
PY
