#!/usr/bin/env bash
# DTensor: a parameter that FSDP2 shards over tensor parallel has an axis that is cut, and
# `is_shard()` of its placement is false.
#
#   findings/dtensor_is_shard_is_false_under_fsdp.sh     needs Python 3.10 to 3.13, and packages from PyPI
#
# fully_shard gives a bias or weight whose rows tensor parallel has cut already the placements
# (_StridedShard(0), Shard(0)). Since pytorch#167887 _StridedShard does not derive from Shard, so
# neither isinstance(placement, Shard) nor the public method is_shard() sees the first axis, and
# is_replicate() is false as well. Code that sums over the axes with is_shard() leaves that axis out
# without an error. The attribute `dim` shows that the axis is cut.
#
# Seen with torch 2.13.0, Python 3.11 (the same with 2.11.0 and 2.14.1):
#   placements: (_StridedShard(dim=0, sf=2), Shard(dim=0))
#   is_shard: [False, True]  is_replicate: [False, False]  dim: [0, 0]
#   global 8 numbers, on this rank 2; by is_shard they are cut over 2 ranks, in truth over 4
# The script fails if that is no longer so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PY'
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("fake", rank=0, world_size=4)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
layer = nn.Linear(4, 8)
parallelize_module(layer, mesh["tp"], ColwiseParallel())
fully_shard(layer, mesh=mesh["dp"])
bias = layer.bias
placements = bias.placements
print("placements:", placements)
is_shard = [placement.is_shard() for placement in placements]
is_replicate = [placement.is_replicate() for placement in placements]
print("is_shard:", is_shard, " is_replicate:", is_replicate, " dim:", [p.dim for p in placements])
by_method = math.prod(bias.device_mesh.size(i) for i, cut in enumerate(is_shard) if cut)
local = bias.to_local().numel()
print(f"global {bias.numel()} numbers, on this rank {local}; by is_shard they are cut over {by_method} "
      f"ranks, in truth over {bias.numel() // local}")
assert is_shard == [False, True] and is_replicate == [False, False], "the behaviour has changed"
assert (by_method, bias.numel() // local) == (2, 4), "the behaviour has changed"
PY
