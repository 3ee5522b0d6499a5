#!/usr/bin/env bash
# transformers: a GGUF file of a Llama 3.1 loads without its RoPE scaling, and without a message.
#
#   findings/transformers_gguf_drops_llama3_scaling.sh     needs Python 3.10 to 3.13, and packages from PyPI
#
# llama.cpp's converter writes the scaling as a tensor, `rope_freqs.weight`, with a divisor for each
# frequency. `from_pretrained(..., gguf_file=...)` skips this tensor, and the config gets the default
# RoPE. The logits are those of the same weights without scaling, already for 60 tokens.
#
# Seen with transformers 5.24.0, gguf 0.19.0, torch 2.13.0, Python 3.11; the largest difference of 60
# tokens' logits, relative to the largest logit:
#   RoPE of the loaded model: {'rope_theta': 500000.0, 'rope_type': 'default'}
#   from the model: 2.7e-02
#   from the same weights without scaling: 0.0e+00
#   no message about the scaling
# The script fails if that is no longer so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0 numpy==2.2.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PY' 2> log || { cat log; exit 1; }
import math

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

THETA = 500000.0
HEADS = {"q_proj": 4, "k_proj": 2}
WIDTH = 64
PLAIN = {"rope_type": "default", "rope_theta": THETA}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
BLOCK = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def build(rope):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=HEADS["q_proj"],
        num_key_value_heads=HEADS["k_proj"],
        rope_parameters=rope,
        max_position_embeddings=131072,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def divisors():
    """As Llama 3.1's own code scales frequencies: by their wavelengths."""
    found = []
    for i in range(0, WIDTH, 2):
        turns = 8192 / (2 * math.pi * THETA ** (i / WIDTH))
        share = min(1.0, max(0.0, (turns - 1.0) / (4.0 - 1.0)))
        found.append(1 / ((1 - share) / 8.0 + share))
    return np.array(found, np.float32)


model = build(SCALED)
writer = gguf.GGUFWriter("model.gguf", "llama")
writer.add_block_count(2)
writer.add_context_length(131072)
writer.add_embedding_length(256)
writer.add_feed_forward_length(128)
writer.add_head_count(HEADS["q_proj"])
writer.add_head_count_kv(HEADS["k_proj"])
writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
writer.add_rope_freq_base(THETA)
writer.add_rope_dimension_count(WIDTH)
writer.add_vocab_size(96)
writer.add_tokenizer_model("none")
writer.add_tensor("rope_freqs.weight", divisors())
for name, tensor in model.state_dict().items():
    values = tensor.numpy()
    stored = ENDS.get(name)
    if stored is None:
        _, _, layer, *_, module, _ = name.split(".")
        stored = f"blk.{layer}.{BLOCK[module]}.weight"
        if module in HEADS:  # GGUF has the two numbers of a pair one after the other
            halves = values.reshape(HEADS[module], 2, WIDTH // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
    writer.add_tensor(stored, values)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

loaded = AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf", dtype=torch.float32)
tokens = torch.arange(60)[None] * 7 % 96
found = loaded(tokens).logits


def difference(rope):
    right = build(rope)(tokens).logits
    return float((found - right).abs().max() / right.abs().max())


from_scaled = difference(SCALED)
from_plain = difference(PLAIN)
print("RoPE of the loaded model:", loaded.config.rope_parameters)
print(f"from the model: {from_scaled:.1e}")
print(f"from the same weights without scaling: {from_plain:.1e}")
assert from_plain < 1e-5 < 5e-3 < from_scaled, "the behaviour has changed"
PY
if grep -i "scal\|rope" log; then
    echo "the behaviour has changed: it says so"
    exit 1
fi
echo "no message about the scaling"
