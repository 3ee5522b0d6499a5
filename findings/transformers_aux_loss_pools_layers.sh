#!/usr/bin/env bash
# transformers: the auxiliary loss takes layers that use one expert each for a balanced mixture.
#
#   findings/transformers_aux_loss_pools_layers.sh     needs Python 3.10 to 3.13, and packages from PyPI
#
# Experts of different layers have nothing in common, and the paper that the docstring names balances
# each layer. `load_balancing_loss_func` adds the counts and the probabilities of expert number i over
# all layers, and computes one loss of the sums. Two layers that each send every token to one expert,
# and not to the same number, have the loss of a balanced mixture, 1.
#
# Seen with transformers 5.24.0, torch 2.13.0, Python 3.11; two experts, of which a token uses one:
#   a layer that uses expert 0: 2.0
#   a layer that uses expert 1: 2.0
#   both: 1.0
# The script fails if that is no longer so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy==2.2.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PY' 2> log || { cat log; exit 1; }
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

first = torch.tensor([[9.0, -9.0]]).repeat(8, 1)  # router logits of eight tokens
second = first.flip(1)
layers = {
    "a layer that uses expert 0": (first,),
    "a layer that uses expert 1": (second,),
    "both": (first, second),
}
found = []
for name, logits in layers.items():
    found.append(round(load_balancing_loss_func(logits, num_experts=2, top_k=1).item(), 3))
    print(f"{name}: {found[-1]}")
assert found == [2.0, 2.0, 1.0], "the behaviour has changed"
PY
