#!/usr/bin/env bash
# torch.distributed.checkpoint: consolidation writes 0 in place of tensors without dimensions.
#
#   findings/dcp_consolidation_zeroes_scalars.sh        needs Python 3.10 to 3.13, and packages from PyPI
#
# HuggingFaceStorageWriter(save_distributed=True, enable_consolidation=True) saves the shards and makes
# one file of them. A value of shape () is right in the shard and 0 in that file; dcp.save succeeds and
# warns of nothing. AdamW's step counts have this shape: who loads an optimizer's state from the
# consolidated file restarts the bias correction. consolidate_safetensors_files does the same.
# The right value is kept if it has one dimension.
#
# Seen with torch 2.13.0, safetensors 0.8.0, Python 3.11:
#   shard: step 7.0, one dimension 7.0
#   consolidated: step 0.0, one dimension 7.0
# The script fails if that is no longer so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 safetensors==0.8.0 numpy==2.2.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PY'
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

state = {"step": torch.tensor(7.0), "one_dimension": torch.tensor([7.0])}
writer = dcp.HuggingFaceStorageWriter("saved", save_distributed=True, enable_consolidation=True)
dcp.save(state, storage_writer=writer)
[shard] = Path("saved/sharded").glob("*.safetensors")
[whole] = Path("saved").glob("*.safetensors")
found = {}
for kind, path in (("shard", shard), ("consolidated", whole)):
    values = load_file(path)
    found[kind] = (values["step"].item(), values["one_dimension"].item())
    print(f"{kind}: step {found[kind][0]}, one dimension {found[kind][1]}")
assert found == {"shard": (7.0, 7.0), "consolidated": (0.0, 7.0)}, "the behaviour has changed"
PY
