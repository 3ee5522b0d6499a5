#!/usr/bin/env bash
# torch: get_total_norm is up to 0.8 % off for ten million equal numbers, and fails on two meshes.
#
#   findings/torch_get_total_norm.sh     needs Python 3.10 to 3.13, and packages from PyPI
#
# torch.nn.utils.get_total_norm, which clip_grad_norm_ calls, adds the squares of a tensor in float32
# on a CPU. For 10^7 times 1 the sum is exact, and for other numbers rounding grows with the length,
# so the norm of the same gradient also depends on how it is cut. For DTensors on two device meshes,
# as of tensor parallel beside expert parallel, it raises an error, since it stacks their norms.
#
# Seen with torch 2.13.0, Python 3.11 on two cores; relative errors:
#   10^7 times 0.001: 1.0e-03
#   10^7 times 0.1: 7.8e-03
#   10^7 times 1.0: 2.3e-08
#   two meshes: All operands in aten.stack.default must have the same mesh
# The script fails if that is no longer so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PY'
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import get_total_norm

found = {}
for value in (0.001, 0.1, 1.0):
    numbers = torch.full((10**7,), value)
    right = numbers.double().norm().item()
    found[value] = abs(get_total_norm([numbers]).item() / right - 1)
    print(f"10^7 times {value}: {found[value]:.1e}")
assert found[1.0] < 1e-6 < 5e-4 < found[0.001] < found[0.1], "the behaviour has changed"

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
shards = []
for axis in ("tp", "ep"):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=(axis,))
    shards.append(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
message = "none"
try:
    get_total_norm(shards)
except RuntimeError as error:
    message = str(error).partition(",")[0]
print("two meshes:", message)
assert message.endswith("must have the same mesh"), "the behaviour has changed"
os._exit(0)
PY
