"""torchtitan's names: read in both generations, written as asked, with the rows in its order."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from messages import refused
from model_builder import EXPORTED, SMALL, assert_equal_bits, make_file, small_model

from titanlite.model.flavors import LlamaConfig
from titanlite.tools.formats.convert import Options, convert, load_full_state
from titanlite.tools.formats.full_state import FullTensor
from titanlite.tools.formats.torchtitan_names import from_newer, to_torchtitan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROOT = Path(__file__).parents[3]
SLOW = pytest.mark.slow
# ours -> torchtitan's from 0.3 on
TABLE = {
    "tok_embeddings.weight": "tok_embeddings.weight",
    "layers.0.attention.wq.weight": "layers.0.attention.qkv_linear.wq.weight",
    "layers.11.attention.wk.weight": "layers.11.attention.qkv_linear.wk.weight",
    "layers.0.attention.wv.weight": "layers.0.attention.qkv_linear.wv.weight",
    "layers.0.attention.wv.bias": "layers.0.attention.qkv_linear.wv.bias",
    "layers.0.attention.wo.weight": "layers.0.attention.wo.weight",
    "layers.0.attention.q_norm.weight": "layers.0.attention.q_norm.weight",
    "layers.0.feed_forward.w1.weight": "layers.0.feed_forward.w1.weight",
    "layers.0.attention_norm.weight": "layers.0.attention_norm.weight",
    "layers.2.feed_forward.router.weight": "layers.2.moe.router.gate.weight",
    "layers.2.feed_forward.experts.w1.weight": "layers.2.moe.routed_experts.inner_experts.w1_EFD",
    "layers.2.feed_forward.experts.w2.weight": "layers.2.moe.routed_experts.inner_experts.w2_EDF",
    "layers.2.feed_forward.experts.w3.weight": "layers.2.moe.routed_experts.inner_experts.w3_EFD",
    "optimizer.state.layers.0.feed_forward.experts.w1.weight.exp_avg": (
        "optimizer.state.layers.0.moe.routed_experts.inner_experts.w1_EFD.exp_avg"
    ),
    "norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "optimizer.state.output.weight.exp_avg": "optimizer.state.lm_head.weight.exp_avg",
    "optimizer.state.layers.0.attention.wq.weight.step": (
        "optimizer.state.layers.0.attention.qkv_linear.wq.weight.step"
    ),
}
TIED = dataclasses.replace(SMALL, tied_embeddings=True)
NORMED = dataclasses.replace(SMALL, qk_norm=True, explicit_head_dim=16)
MIXTURE = dataclasses.replace(NORMED, num_experts=4, experts_per_token=2, expert_ffn_dim=24)
MODELS = {
    "llama 3.1": EXPORTED["llama 3.1"],
    "tied": TIED,
    "norms of q and k": NORMED,
    "experts": MIXTURE,
}
# What differs in the state dicts of torchtitan 0.3.0's models, as they list it
PARTS = {
    ".wq.": ".qkv_linear.wq.",
    ".wk.": ".qkv_linear.wk.",
    ".wv.": ".qkv_linear.wv.",
    "feed_forward.router": "moe.router.gate",
    "feed_forward.experts.w1.weight": "moe.routed_experts.inner_experts.w1_EFD",
    "feed_forward.experts.w2.weight": "moe.routed_experts.inner_experts.w2_EDF",
    "feed_forward.experts.w3.weight": "moe.routed_experts.inner_experts.w3_EFD",
}


def quiet(text: str) -> None:
    pass


def test_every_name_has_one_of_torchtitan():
    assert {name: to_torchtitan(name, "torchtitan-0.3") for name in TABLE} == TABLE
    assert {name: to_torchtitan(name, "torchtitan-0.2") for name in TABLE} == {n: n for n in TABLE}
    weights = small_model().state_dict()
    tensors = {
        TABLE.get(name, name): FullTensor(w.dtype, w.shape, ()) for name, w in weights.items()
    }
    assert list(from_newer(Path(), tensors)) == list(weights)


def theirs(config: LlamaConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of torchtitan 0.3's model with these weights."""
    named = {}
    for name, weight in weights.items():
        for ours, part in PARTS.items():
            name = name.replace(ours, part)
        named[name] = weight
    for i in range(config.num_layers if config.num_experts else 0):
        named[f"layers.{i}.moe.expert_bias_E"] = torch.zeros(config.num_experts)
    output = named.pop("output.weight", named["tok_embeddings.weight"])
    named["lm_head.weight"] = output
    if config.qk_norm:  # rows of each head: the even ones, then the odd ones
        width = config.head_dim
        for name in named:
            if any(part in name for part in (".wq.", ".wk.", "q_norm", "k_norm")):
                heads = named[name].split(width)
                named[name] = torch.cat([rows[i::2] for rows in heads for i in (0, 1)])
    return named


@pytest.mark.parametrize(
    "config",
    [SMALL, pytest.param(TIED, marks=SLOW), NORMED, MIXTURE],
    ids=["llama", "tied", "qwen3", "experts"],
)
def test_a_folder_has_what_torchtitan_loads(tmp_path, config):
    make_file(tmp_path / "model.pt", config)
    weights = dict(load_full_state(tmp_path / "model.pt"))
    expected = theirs(config, weights)
    back = convert(tmp_path / "model.pt", tmp_path / "dcp", Options("dcp"), log=quiet)
    assert_equal_bits(weights, back)
    state = {name: torch.zeros_like(w) for name, w in expected.items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)  # an absent name is an error
    assert_equal_bits(expected, state)
    # What torchtitan saves has no description, and other entries beside the model
    dcp.save({**expected, "train_state": {"step": 3}}, checkpoint_id=tmp_path / "run", no_dist=True)
    (tmp_path / "model.json").write_text(config.to_json())
    options = Options("safetensors", model=str(tmp_path / "model.json"))
    assert_equal_bits(weights, convert(tmp_path / "run", tmp_path / "b", options, log=quiet))
    torch.save({"model": expected}, tmp_path / "run.pt")
    assert_equal_bits(weights, convert(tmp_path / "run.pt", tmp_path / "c", options, log=quiet))


@pytest.mark.parametrize("config", [pytest.param(SMALL, marks=SLOW), TIED], ids=["llama", "tied"])
def test_the_names_of_torchtitan_0_2(tmp_path, config):
    make_file(tmp_path / "model.pt", config)
    weights = dict(load_full_state(tmp_path / "model.pt"))
    options = Options("dcp", names="torchtitan-0.2")
    assert_equal_bits(weights, convert(tmp_path / "model.pt", tmp_path / "dcp", options, log=quiet))
    expected = {"output.weight": weights["tok_embeddings.weight"], **weights}
    state = {name: torch.zeros_like(w) for name, w in expected.items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_equal_bits(expected, state)


def test_moments_go_with_their_parameters(tmp_path):
    weights = dict(small_model(config=NORMED).state_dict())
    moments = {f"optimizer.state.{name}.exp_avg": w.square() for name, w in weights.items()}
    tree = {"model": weights, "training": moments, "model_config": dataclasses.asdict(NORMED)}
    torch.save(tree, tmp_path / "model.pt")
    back = convert(tmp_path / "model.pt", tmp_path / "a", Options("dcp", full=True), log=quiet)
    assert {name: tensor.shape for name, tensor in back.others.items()} == {
        name: tuple(moment.shape) for name, moment in moments.items()
    }
    name = "layers.1.attention.qkv_linear.wq.weight"
    saved = {f"optimizer.state.{name}.exp_avg": torch.zeros(64, 32), name: torch.zeros(64, 32)}
    dcp.load(saved, checkpoint_id=tmp_path / "a", no_dist=True)
    moment, weight = saved.values()
    assert torch.equal(moment, weight.square())


def test_what_the_names_cannot_say_is_refused(tmp_path, caplog):
    make_file(tmp_path / "qwen.pt", NORMED)
    with refused("--names torchtitan-0.2", "norms of q and k", "allowed: torchtitan-0.3"):
        options = Options("dcp", names="torchtitan-0.2")
        convert(tmp_path / "qwen.pt", tmp_path / "a", options, log=quiet)
    with refused("--names torchtitan-0.4; did you mean torchtitan-0.3 or torchtitan-0.2?"):
        options = Options("dcp", names="torchtitan-0.4")
        convert(tmp_path / "qwen.pt", tmp_path / "a", options, log=quiet)
    with refused("--names torchtitan-0.2", "allowed: none with hf"):
        options = Options("hf", names="torchtitan-0.2")
        convert(tmp_path / "qwen.pt", tmp_path / "a", options, log=quiet)
    weights = dict(small_model().state_dict())
    weights["layers.0.attention.qkv_linear.wq.weight"] = weights["layers.0.attention.wq.weight"]
    torch.save(weights, tmp_path / "both.pt")
    with refused("has 'layers.0.attention.wq.weight' twice"):
        load_full_state(tmp_path / "both.pt")
    assert not caplog.records
    torch.save(dict(small_model(config=NORMED).state_dict()), tmp_path / "plain.pt")
    load_full_state(tmp_path / "plain.pt")
    assert "torchtitan 0.2 has another order under the same names" in caplog.text


def test_what_the_names_of_a_mixture_cannot_say_is_refused(tmp_path):
    make_file(tmp_path / "mixture.pt", MIXTURE)
    with refused("--names torchtitan-0.2", "the model has experts", "allowed: torchtitan-0.3"):
        options = Options("dcp", names="torchtitan-0.2")
        convert(tmp_path / "mixture.pt", tmp_path / "a", options, log=quiet)
    trained = theirs(MIXTURE, dict(small_model(config=MIXTURE).state_dict()))
    trained["layers.1.moe.expert_bias_E"] = torch.tensor([0.0, 0.001, 0.0, -0.001])
    torch.save(trained, tmp_path / "trained.pt")
    with refused("'layers.1.moe.expert_bias_E' is not zero", "expected zeros"):
        load_full_state(tmp_path / "trained.pt")
    torch.save({"layers.0.moe.experts.w1": torch.zeros(4, 24, 32)}, tmp_path / "older.pt")
    with refused("a tensor named 'layers.0.moe.experts.w1'"):
        load_full_state(tmp_path / "older.pt")
