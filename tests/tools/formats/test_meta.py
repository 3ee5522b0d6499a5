"""Meta's folders: shards of any number of files, and params.json."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from model_builder import EVEN, assert_equal_bits, small_model

from titanlite.model.flavors import FLAVORS, LlamaConfig
from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats import meta
from titanlite.tools.formats.convert import Options, convert, load_full_state


def quiet(text: str) -> None:
    pass


def meta_shards(
    folder: Path, config: LlamaConfig, count: int, columns: bool
) -> dict[str, torch.Tensor]:
    """As Meta's model-parallel training saves it."""
    weights = dict(small_model(config=config).state_dict())
    for rank in range(count):
        own = {"rope.freqs": torch.ones(4)}
        for name, value in weights.items():
            by_columns = name.endswith(("wo.weight", "w2.weight")) or (
                columns and name.startswith("tok")
            )
            own[name] = (
                value if value.ndim == 1 else value.chunk(count, int(by_columns))[rank].clone()
            )
        torch.save(own, folder / f"consolidated.{rank:02}.pth")
    (folder / "params.json").write_text(json.dumps(meta.to_params(config)))
    return weights


@pytest.mark.parametrize("columns", [False, True], ids=["llama 3", "llama 2"])
def test_meta_shards_become_whole(tmp_path, columns):
    source = tmp_path / "meta"
    source.mkdir()
    weights = meta_shards(source, EVEN, 4, columns)
    full = convert(source, tmp_path / "ours", Options("titanlite"), log=quiet)
    assert_equal_bits(weights, full)
    assert full.model == EVEN
    first = torch.load(source / "consolidated.01.pth")
    turned = {
        name: value.T.contiguous().T if value.ndim > 1 else value for name, value in first.items()
    }
    torch.save(turned, source / "consolidated.01.pth")
    assert_equal_bits(weights, load_full_state(source))
    torch.save(
        {name: value.bfloat16() for name, value in first.items()}, source / "consolidated.01.pth"
    )
    with pytest.raises(ConfigError, match="its parts do not fit together"):
        load_full_state(source)
    torch.save(first, source / "consolidated.01.pth")
    (source / "consolidated.02.pth").unlink()
    with pytest.raises(
        ConfigError, match=r"consolidated\.03\.pth; expected consolidated\.00\.pth and on"
    ):
        load_full_state(source)


PARAMS = {  # as Meta has published them
    "llama3_8b": {
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "ffn_dim_multiplier": 1.3,
        "multiple_of": 1024,
    },
    "llama3_70b": {
        "dim": 8192,
        "n_layers": 80,
        "n_heads": 64,
        "ffn_dim_multiplier": 1.3,
        "multiple_of": 4096,
    },
    "llama3_1b": {
        "dim": 2048,
        "n_layers": 16,
        "n_heads": 32,
        "ffn_dim_multiplier": 1.5,
        "multiple_of": 256,
    },
    "llama3_3b": {
        "dim": 3072,
        "n_layers": 28,
        "n_heads": 24,
        "ffn_dim_multiplier": 1.0,
        "multiple_of": 256,
    },
}


@pytest.mark.parametrize(
    "flavor",
    [
        name
        for name, config in FLAVORS.items()  # without what Meta's has not
        if not config.qkv_bias and not config.qk_norm and not config.sliding_window
    ],
)
def test_params_tell_the_model(flavor):
    config = dataclasses.replace(FLAVORS[flavor], vocab_size=128256)
    found = meta.from_params(meta.to_params(config), 128256, config.tied_embeddings)
    assert found == config
    if published := PARAMS.get(flavor):
        more = {
            "n_kv_heads": 8,
            "norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "use_scaled_rope": bool(config.rope_scaling),
        }
        assert meta.from_params(published | more, 128256, config.tied_embeddings) == config


@pytest.mark.parametrize("names", ["Meta's", "torchtune's"])
def test_a_folder_of_torchtune(tmp_path, names):
    """Its MetaCheckpointer and its TorchTuneCheckpointer: one .bin file, and the small files of the
    folder that the run began with.
    """
    weights = dict(small_model(config=EVEN).state_dict())
    torch.save({"model": weights, "model_config": dataclasses.asdict(EVEN)}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "meta", Options("llama"), log=lambda text: None)
    folder = tmp_path / "epoch_0"
    folder.mkdir()
    saved = weights
    if names == "torchtune's":
        saved = {
            name.replace("attention.wq", "attn.q_proj")
            .replace("attention.wk", "attn.k_proj")
            .replace("attention.wv", "attn.v_proj")
            .replace("attention.wo", "attn.output_proj")
            .replace("attention_norm.weight", "sa_norm.scale")
            .replace("ffn_norm.weight", "mlp_norm.scale")
            .replace("feed_forward", "mlp"): w
            for name, w in weights.items()
        }
        saved["norm.scale"] = saved.pop("norm.weight")
    torch.save(saved, folder / "model-00001-of-00001.bin")
    (tmp_path / "meta/params.json").rename(folder / "params.json")
    found = load_full_state(folder)
    assert_equal_bits(dict(sorted(weights.items())), dict(sorted(found.items())))
    assert found.model == EVEN
