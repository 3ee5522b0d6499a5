#!/usr/bin/env bash
# torch: F.grouped_mm takes float32 in eager mode, and under torch.compile bfloat16 only.
#
#   findings/torch_grouped_mm_fp32_under_compile.sh     needs Python 3.10 to 3.13, and packages from PyPI
#
# The operator computes float32 on a CPU. Its function for tensors without data, by which torch.compile
# finds shapes, refuses every type but bfloat16; so a mixture of experts that trains in float32 cannot
# be compiled, whatever the backend.
#
# Seen with torch 2.13.0, Python 3.11:
#   torch.bfloat16: eager works, compiled works
#   torch.float32: eager works, compiled fails: Expected inputs of BF16 type
# The script fails if that is no longer so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PY' 2> log || { cat log; exit 1; }
import torch
import torch.nn.functional as F

REASON = "Expected inputs of BF16 type"
ends = torch.tensor([8, 16], dtype=torch.int32)  # of the rows of each of two experts


def product(rows, weights):
    return F.grouped_mm(rows, weights, offs=ends)


found = {}
for dtype in (torch.bfloat16, torch.float32):
    rows = torch.randn(16, 32, dtype=dtype)
    weights = torch.randn(2, 32, 16, dtype=dtype)
    product(rows, weights)
    found[dtype] = "works"
    try:
        torch.compile(product, backend="eager")(rows, weights)
    except RuntimeError as error:
        found[dtype] = f"fails: {REASON}" if REASON in str(error) else str(error)
    print(f"{dtype}: eager works, compiled {found[dtype]}")
assert list(found.values()) == ["works", f"fails: {REASON}"], "the behaviour has changed"
PY
