"""Other programs compute the logits of a model that titanlite exported, and save it as their own.

    python benchmarks/interop_probes.py PROGRAM FOLDER

`interop.py` runs this file in an environment of each program; nothing here imports titanlite.
FOLDER holds tokens.pt (S,), model.json, and the exports: hf, dcp, peft. A probe writes
logits.pt (S, V), and the model as the program saves it to back.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch


def torchtitan(folder: Path) -> None:
    """The model of torchtitan 0.3, filled by dcp.load of its own names."""
    # The package of its command line, and kernels in triton, which is not installed on a CPU
    for absent in ("tyro", "torchtitan.distributed.minimal_async_ep.kernels"):
        sys.modules[absent] = MagicMock(name=absent)
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    # Its experts cast to bfloat16, whatever the weights are: here they compute in fp32
    torch.Tensor.bfloat16 = torch.Tensor.float  # type: ignore[method-assign]
    shape = json.loads((folder / "model.json").read_text())
    model, adapter = _torchtitan_model(shape)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
    model.load_state_dict(state)
    dcp.save({**state, "train_state": {"step": 3}}, checkpoint_id=folder / "back", no_dist=True)
    in_hf = {name: w.contiguous() for name, w in adapter.to_hf(dict(state)).items()}
    save_file(in_hf, folder / "to_hf.safetensors")
    tokens = torch.load(folder / "tokens.pt")
    with torch.no_grad():
        torch.save(model(tokens[None], None)[0], folder / "logits.pt")


def _torchtitan_model(shape: dict[str, Any]) -> tuple[Any, Any]:
    """torchtitan's model of this shape, not initialised, and its state-dict adapter."""
    from torchtitan.models import llama3, qwen3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    head_dim = shape["explicit_head_dim"] or shape["dim"] // shape["num_heads"]
    fields = {"dim": head_dim, "max_seq_len": 512, "theta": shape["rope_theta"]}
    scaling = shape["rope_scaling"]
    if scaling:
        fields["scaling"] = "llama"
        fields["scaling_factor"] = scaling["factor"]
        fields["low_freq_factor"] = scaling["low_freq_factor"]
        fields["high_freq_factor"] = scaling["high_freq_factor"]
        fields["original_max_position_embeddings"] = scaling["original_context"]
    sizes = {
        "n_layers": shape["num_layers"],
        "dim": shape["dim"],
        "n_heads": shape["num_heads"],
        "n_kv_heads": shape["num_kv_heads"],
        "attn_backend": "flex",
    }
    dense = {"hidden_dim": shape["ffn_dim"]}
    experts = {
        "moe_hidden_dim": shape["expert_ffn_dim"],
        "num_experts": shape["num_experts"],
        "top_k": shape["experts_per_token"],
        "moe_comm_backend": "standard",
    }
    if shape["num_experts"]:
        config = qwen3._debugmodel_moe("flex")
        rope = CosSinRoPE.Config(**fields)
        config.layers = qwen3._build_qwen3_moe_layers(
            **sizes, **experts, head_dim=head_dim, rope=rope
        )
    elif shape["qk_norm"]:
        config = qwen3._debugmodel("flex")
        rope = CosSinRoPE.Config(**fields)
        config.layers = qwen3._build_qwen3_layers(**sizes, **dense, head_dim=head_dim, rope=rope)
    else:
        config = llama3._debugmodel("flex")
        rope = ComplexRoPE.Config(**fields)
        config.layers = llama3._build_llama3_layers(**sizes, **dense, rope=rope)
    norms = [config.norm]
    for layer in config.layers:
        # Its own choice, flex attention, needs a compiler
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        norms += [layer.attention_norm, layer.ffn_norm]
        if shape["qk_norm"]:
            norms.append(layer.attention.qk_norm)
    for norm in norms:
        norm.eps = shape["norm_eps"]
    config.dim = shape["dim"]
    config.vocab_size = shape["vocab_size"]
    config.norm.normalized_shape = shape["dim"]
    config.enable_weight_tying = shape["tied_embeddings"]
    config.tok_embeddings.num_embeddings = shape["vocab_size"]
    config.tok_embeddings.embedding_dim = shape["dim"]
    config.lm_head.in_features = shape["dim"]
    config.lm_head.out_features = shape["vocab_size"]
    adapter_class = Qwen3StateDictAdapter if shape["qk_norm"] else Llama3StateDictAdapter
    return config.build(), adapter_class(config, None)


def transformers(folder: Path) -> None:
    """AutoModelForCausalLM of Hugging Face's folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    _save_logits(folder, model)
    model.save_pretrained(folder / "back")


def peft(folder: Path) -> None:
    """Adapters of PEFT on Hugging Face's folder; titanlite reads them with --adapter."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if model.config.model_type != "qwen3_moe":
        targets.append("down_proj")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    adapted = get_peft_model(model, config)
    _save_logits(folder, adapted)
    adapted.save_pretrained(str(folder / "back"))


def _save_logits(folder: Path, model: Any) -> None:
    """Saves the logits of a model whose forward is that of transformers."""
    tokens = torch.load(folder / "tokens.pt")
    with torch.no_grad():
        torch.save(model.eval()(tokens[None]).logits[0], folder / "logits.pt")


def litgpt(folder: Path) -> None:
    """litgpt's GPT after its conversion, which it also reverses."""
    from litgpt import GPT, Config
    from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
    from litgpt.scripts.convert_lit_checkpoint import convert_lit_checkpoint
    from litgpt.utils import save_config

    shape = json.loads((folder / "model.json").read_text())
    lit = folder / "lit"
    shutil.copytree(folder / "hf", lit)
    convert_hf_checkpoint(lit, model_name="Llama-3.2-1B")  # a name that it knows; sizes follow
    scaling = shape["rope_scaling"]
    adjustments = None
    if scaling:
        adjustments = {
            "factor": scaling["factor"],
            "low_freq_factor": scaling["low_freq_factor"],
            "high_freq_factor": scaling["high_freq_factor"],
            "original_max_seq_len": scaling["original_context"],
        }
    config = Config(
        name="Llama-3.2-1B",
        block_size=512,
        vocab_size=shape["vocab_size"],
        padded_vocab_size=shape["vocab_size"],
        n_layer=shape["num_layers"],
        n_head=shape["num_heads"],
        n_query_groups=shape["num_kv_heads"],
        n_embd=shape["dim"],
        intermediate_size=shape["ffn_dim"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=shape["norm_eps"],
        mlp_class_name="LLaMAMLP",
        rope_base=shape["rope_theta"],
        rope_adjustments=adjustments,
    )
    save_config(config, lit)
    model = GPT(config)
    model.load_state_dict(torch.load(lit / "lit_model.pth", weights_only=True))
    tokens = torch.load(folder / "tokens.pt")
    with torch.no_grad():
        torch.save(model(tokens[None])[0], folder / "logits.pt")
    convert_lit_checkpoint(lit, folder / "back")
    shutil.copy(lit / "config.json", folder / "back")


def ctranslate2(folder: Path) -> None:
    """CTranslate2's engine after its conversion of Hugging Face's folder."""
    import ctranslate2 as program
    import numpy as np

    program.converters.TransformersConverter(str(folder / "hf")).convert(str(folder / "ct2"))
    generator = program.Generator(str(folder / "ct2"), device="cpu", compute_type="float32")
    tokens = torch.load(folder / "tokens.pt").tolist()
    logits = np.array(generator.forward_batch([tokens]))[0]
    torch.save(torch.from_numpy(logits), folder / "logits.pt")


def mlx_lm(folder: Path) -> None:
    """mlx-lm on MLX's CPU backend."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    model, _ = load_model(folder / "hf")
    logits = model(mx.array(torch.load(folder / "tokens.pt").tolist())[None])[0]
    torch.save(torch.from_numpy(np.array(logits.astype(mx.float32))), folder / "logits.pt")


PROBES = {
    function.__name__: function
    for function in (transformers, peft, litgpt, torchtitan, ctranslate2, mlx_lm)
}


if __name__ == "__main__":
    PROBES[sys.argv[1]](Path(sys.argv[2]))
