#!/usr/bin/env bash
# CTranslate2: a Llama with the RoPE scaling of Llama 3.1 converts without a message, and computes without it.
#
#   findings/ctranslate2_leaves_llama3_scaling_out.sh     needs Python 3.10 to 3.12, and packages from PyPI
#
# Its converter knows `rope_type = "llama3"`, and writes the factor and the two bounds. The logits of the
# converted model are those of the same weights without any scaling, already for 40 tokens; so every
# answer of a Llama 3.1, 3.2 or 3.3 differs a little, and no message says so.
#
# Seen with ctranslate2 4.8.5, transformers 5.24.0, torch 2.13.0, Python 3.11; the largest difference of
# 40 tokens' logits, relative to the largest logit:
#   from the model: 1.4e-02
#   from the same weights without scaling: 1.1e-06
# The script fails if that is no longer so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 ctranslate2==4.8.5 numpy==2.2.6 setuptools==80.9.0
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PY' 2> log || { cat log; exit 1; }
import ctranslate2
import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def build(rope):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=rope,
        max_position_embeddings=65536,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


build(SCALED).save_pretrained("model")
words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(96)}, unk_token="<2>"))
PreTrainedTokenizerFast(
    tokenizer_object=words, bos_token="<0>", eos_token="<1>", unk_token="<2>"
).save_pretrained("model")
ctranslate2.converters.TransformersConverter("model").convert("converted")
generator = ctranslate2.Generator("converted", compute_type="float32")
ids = torch.randint(3, 96, (40,)).tolist()
found = np.array(generator.forward_batch([ids]))[0]


def difference(model):
    right = model(torch.tensor([ids])).logits[0].detach().numpy()
    return abs(found - right).max() / abs(right).max()


from_scaled = difference(build(SCALED))
from_plain = difference(build(PLAIN))
print(f"from the model: {from_scaled:.1e}")
print(f"from the same weights without scaling: {from_plain:.1e}")
assert from_plain < 1e-4 < 5e-3 < from_scaled, "the behaviour has changed"
PY
