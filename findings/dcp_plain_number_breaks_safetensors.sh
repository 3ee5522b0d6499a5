#!/usr/bin/env bash
# torch.distributed.checkpoint: a number in the state makes a safetensors file that nothing can read.
#
#   findings/dcp_plain_number_breaks_safetensors.sh     needs Python 3.10 to 3.13, and packages from PyPI
#
# The state of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict holds numbers beside
# tensors (lr, betas). HuggingFaceStorageWriter writes each of them as a zip archive of torch.save in
# front of the safetensors header, and dcp.save succeeds. The file then begins with "PK": neither
# HuggingFaceStorageReader nor the package safetensors opens it, so the tensors are lost too.
#
# Seen with torch 2.13.0, safetensors 0.8.0, Python 3.11:
#   saved: the file begins with b'PK\x03\x04'
#   dcp.load: header too large
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
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter("saved", save_distributed=True))
[path] = Path("saved").glob("*.safetensors")
start = path.read_bytes()[:4]
print(f"saved: the file begins with {start!r}")
error = ""
try:
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader("saved"))
except BaseException as failed:  # CheckpointException is no Exception
    error = str(failed)
known = "header too large" in error
print("dcp.load:", "header too large" if known else error or "succeeded")
assert start == b"PK\x03\x04" and known, "the behaviour has changed"
PY
