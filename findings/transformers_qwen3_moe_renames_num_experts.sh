#!/usr/bin/env bash
# transformers: a Qwen3-MoE that transformers 5 saves has another number of experts for transformers 4.
#
#   findings/transformers_qwen3_moe_renames_num_experts.sh     needs Python 3.10 to 3.13, and packages from PyPI
#
# The released config.json of a Qwen3-MoE has `num_experts`. transformers 5 reads that name and `num_local_experts`,
# and writes the second only. transformers 4, and any reader of the released files, finds no `num_experts`, and takes
# the default of the class, 128, without a message.
#
# Seen with transformers 5.23.0 and 4.57.3, Python 3.11:
#   saved by 5: {'num_local_experts': 4}
#   read by 4: 128 experts
# The script fails if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
for version in 5.23.0 4.57.3; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install -q "transformers==$version"
done
cd "$folder"
"$folder/5.23.0/bin/python" - <<'PY' 2> log || { cat log; exit 1; }
import json
from pathlib import Path

from transformers import Qwen3MoeConfig

Qwen3MoeConfig(num_experts=4).save_pretrained(".")
fields = json.loads(Path("config.json").read_text())
found = {name: value for name, value in fields.items() if name.endswith("_experts")}
print("saved by 5:", found)
assert found == {"num_local_experts": 4}, "the behaviour has changed"
PY
"$folder/4.57.3/bin/python" - <<'PY' 2> log || { cat log; exit 1; }
from transformers import AutoConfig

number = AutoConfig.from_pretrained(".").num_experts
print("read by 4:", number, "experts")
assert number == 128, "the behaviour has changed"
PY
