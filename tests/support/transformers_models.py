"""Random models of transformers, with the sizes of a test."""

from __future__ import annotations

from typing import Any

import torch

TOKENS = torch.randint(131, (2, 100), generator=torch.Generator().manual_seed(1))
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4}


def make(fields: dict[str, Any]) -> Any:
    """A random model of transformers."""
    fields = {
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": 131,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-4,
        "tie_word_embeddings": False,
        "initializer_range": 0.06,  # attention looks about, and rounding is not blown up
        **fields,
    }
    fields["rope_parameters"] = {
        "rope_theta": 20000.0,
        "rope_type": "default",
        **fields.get("rope_parameters", {}),
    }
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():  # which are constant in a new model
        if name.endswith(("norm.weight", ".bias")):
            torch.nn.init.normal_(parameter, float(name.endswith("norm.weight")), 0.1)
    return model
