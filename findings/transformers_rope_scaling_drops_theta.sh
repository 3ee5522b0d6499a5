#!/usr/bin/env bash
# transformers: a config.json with rope_scaling beside rope_parameters loses the theta of the latter.
#
#   findings/transformers_rope_scaling_drops_theta.sh     needs Python 3.10 to 3.13, and packages from PyPI
#
# transformers 5 writes `rope_parameters` with theta in it. It also reads the older `rope_scaling`, and
# where both are there, the older one replaces the newer one whole. A tool of the change-over that adds
# `rope_scaling` for older readers thereby sets theta back to 10,000, without a message. A theta beside
# the two entries is used.
#
# Seen with transformers 5.23.0, Python 3.11:
#   rope_parameters alone: theta 500000.0
#   with rope_scaling: theta 10000.0
# The script fails if that is no longer so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY' 2> log || { cat log; exit 1; }
import json
from pathlib import Path

from transformers import AutoConfig


def read(**fields):
    Path("config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    return AutoConfig.from_pretrained(".").rope_parameters


linear = {"rope_type": "linear", "factor": 2.0}
new = {**linear, "rope_theta": 500000.0}
alone = read(rope_parameters=new)["rope_theta"]
both = read(rope_parameters=new, rope_scaling=linear)["rope_theta"]
print("rope_parameters alone: theta", alone)
print("with rope_scaling: theta", both)
assert (alone, both) == (500000.0, 10000.0), "the behaviour has changed"
PY
