"""Reads a Hugging Face folder without the names of `huggingface.py`, to compare conversions.

What it is: the weights that the second Llama asks for by titanlite's names, from the folder's
tensors as they lie there: rows of wq and wk in Hugging Face's order, and each expert of a mixture
by itself, or all experts in the two tensors in which transformers 5 has them in memory.
Why it is here: if a name is exchanged for another one of the same shape, such as gate for up or one
expert for another, what is read and written again has the same bits.
Reference: transformers 5, `conversion_mapping.py`
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from titanlite.tools.formats.safetensors_files import read_folder
from titanlite.tools.formats.second_llama import Rounded, Weights

ENDS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_A_LAYER = (  # replaced one after the other
    ("attention_norm.", "input_layernorm."),
    ("ffn_norm.", "post_attention_layernorm."),
    ("attention.w", "self_attn."),
    ("attention.", "self_attn."),
    ("feed_forward.w1.", "mlp.gate_proj."),
    ("feed_forward.w2.", "mlp.down_proj."),
    ("feed_forward.w3.", "mlp.up_proj."),
)
OF_AN_EXPERT = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # a Mixtral has w1, w2, w3


class FolderWeights(Weights):
    """The weights in a Hugging Face folder, by titanlite's names."""

    def __init__(self, folder: Path, rounded: Rounded = lambda tensor, rows: rows) -> None:
        super().__init__(read_folder(folder), rounded)
        for ours, theirs in ENDS.items():
            if theirs in self.tensors:
                self.tensors[ours] = self.tensors[theirs]

    def __call__(self, name: str) -> Tensor:
        if name in ENDS:
            return super().__call__(name)
        _, layer, within = name.split(".", 2)
        start = f"model.layers.{layer}."
        if within == "feed_forward.router.weight":
            mixtral = f"{start}block_sparse_moe.gate.weight"
            return super().__call__(
                mixtral if mixtral in self.tensors else f"{start}mlp.gate.weight"
            )
        for ours, theirs in IN_A_LAYER:
            within = within.replace(ours, theirs, 1)
        for letter in "qkvo":
            within = within.replace(f"self_attn.{letter}.", f"self_attn.{letter}_proj.")
        return super().__call__(start + within)

    def one(self, name: str, number: int) -> Tensor:
        _, layer, _, _, matrix, _ = name.split(".")  # layers.3.feed_forward.experts.w1.weight
        mixtral = f"model.layers.{layer}.block_sparse_moe.experts.{number}.{matrix}.weight"
        if mixtral in self.tensors:
            return super().__call__(mixtral)
        start = f"model.layers.{layer}.mlp.experts."
        if f"{start}gate_up_proj" not in self.tensors:
            return super().__call__(f"{start}{number}.{OF_AN_EXPERT[matrix]}.weight")
        if matrix == "w2":
            return super().one(f"{start}down_proj", number)
        gate, up = super().one(f"{start}gate_up_proj", number).chunk(2)
        return gate if matrix == "w1" else up
