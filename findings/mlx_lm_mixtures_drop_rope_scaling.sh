#!/usr/bin/env bash
# mlx-lm: Qwen3-MoE and Mixtral are computed without the RoPE scaling of their config.json.
#
#   findings/mlx_lm_mixtures_drop_rope_scaling.sh     needs Python 3.10 to 3.13 on Linux, and packages from PyPI
#
# Both models have the field `rope_scaling`, and build a plain RoPE; the dense Qwen3 uses it. So a
# mixture that is extended by yarn, as its model card says for long contexts, gives the logits of the
# unscaled model, without a message.
#
# Seen with mlx-lm 0.32.2, mlx 0.32.4 (CPU), Python 3.11; the largest difference that yarn with a factor
# of 4 makes in the logits of 40 tokens, relative to the largest logit:
#   qwen3: 5.7e-01
#   qwen3_moe: 0.0e+00
#   mixtral: 0.0e+00
# The script fails if that is no longer so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q mlx-lm==0.32.2 mlx==0.32.4 mlx-cpu==0.32.4 transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PY' 2> log || { cat log; exit 1; }
import importlib

import mlx.core as mx

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FIELDS = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def logits(name, scaling):
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    config = {"model_type": name, **FIELDS, "rope_scaling": scaling}
    model = module.Model(module.ModelArgs.from_dict(config))
    return model(mx.arange(40)[None] * 7 % 96)


found = {}
for name in ("qwen3", "qwen3_moe", "mixtral"):
    plain = logits(name, None)
    scaled = logits(name, YARN)
    found[name] = (mx.abs(scaled - plain).max() / mx.abs(plain).max()).item()
    print(f"{name}: {found[name]:.1e}")
assert found["qwen3"] > 0.1, "the behaviour has changed"
assert found["qwen3_moe"] == found["mixtral"] == 0, "the behaviour has changed"
PY
if grep -i "scal\|rope" log; then
    echo "the behaviour has changed: it says so"
    exit 1
fi
