"""The model of a checkpoint as keys of a config."""

from __future__ import annotations

import dataclasses
import json

import pytest
from chats import MARKED
from messages import refused, run_refused
from model_builder import EXPORTED, make_file
from runs import curve, train_run

from titanlite.config.load import load_config
from titanlite.config.schema import ModelConfig
from titanlite.model.flavors import FLAVORS, RopeScaling, resolve_flavor
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.formats.adopt import adopt_checkpoint, keys_of
from titanlite.tools.formats.convert import Options, convert


@pytest.mark.parametrize("flavor", [name for name in FLAVORS if FLAVORS[name].vocab_size])
def test_keys_give_the_model_back(tmp_path, flavor):
    model = FLAVORS[flavor]
    section = ModelConfig(flavor="from_checkpoint", **keys_of(model, tmp_path))
    assert resolve_flavor(section, 100) == model


def test_a_window_in_some_layers(tmp_path):
    model = dataclasses.replace(
        FLAVORS["qwen3_0.6b"], sliding_window=4096, window_layers="0-5, 8-27"
    )
    section = ModelConfig(flavor="from_checkpoint", **keys_of(model, tmp_path))
    assert resolve_flavor(section, 100) == model


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scalings(tmp_path, kind):
    scaling = RopeScaling(3.0, kind=kind, original_context=2048 if kind == "yarn" else 8192)
    model = dataclasses.replace(FLAVORS["qwen3_0.6b"], rope_scaling=scaling)
    section = ModelConfig(flavor="from_checkpoint", **keys_of(model, tmp_path))
    assert resolve_flavor(section, 100) == model


def test_what_no_key_says_is_refused(tmp_path):
    scaling = RopeScaling(4.0, kind="yarn", beta_fast=16.0)
    model = dataclasses.replace(FLAVORS["qwen3_0.6b"], rope_scaling=scaling)
    with refused(str(tmp_path), "beta_fast = 16"):
        keys_of(model, tmp_path)


def run_adopted(arguments: list[str]) -> int:
    """train.py as a command does, with the model of the checkpoint."""
    import train
    from titanlite.config.load import load_config

    return train.main(train.adopt_model(load_config(arguments)))


def test_a_run_adopts_model_and_tokenizer(pool, whole_run, arguments, tmp_path):
    """And resumes by its own config.toml."""
    base = tmp_path / "base"
    convert(whole_run(), base, Options(to="hf"))
    # Others' files, which are kept through the run; the run adds the end of its own documents
    generation = {"eos_token_id": [7, 9], "do_sample": True, "temperature": 0.6}
    (base / "generation_config.json").write_text(json.dumps(generation))
    (base / "chat_template.jinja").write_text(MARKED)
    own = [word for word in arguments if not word.startswith("--model.")]
    run = [*own, "--model.flavor=from_checkpoint", f"--checkpoint.initial_load={base}"]
    assert pool.run(2, run_adopted, run) == [0, 0]
    losses = [loss for loss, _ in curve(tmp_path / "debug").values()]
    assert losses[0] < 8, "it is trained already"
    recorded = (tmp_path / "debug/config.toml").read_text()
    assert "dim = 32" in recorded
    assert str(base) in recorded
    assert Tokenizer(base).size == Tokenizer().size
    convert(tmp_path / "debug", tmp_path / "back", Options(to="hf"))
    back = json.loads((tmp_path / "back/generation_config.json").read_text())
    assert back == generation | {"eos_token_id": [7, 9, Tokenizer().eos]}
    assert (tmp_path / "back/chat_template.jinja").read_text() == MARKED
    recorded_run = [str(tmp_path / "debug/config.toml"), "--training.steps=8"]
    assert pool.run(1, train_run, recorded_run) == [0]

    with run_refused("model.num_layers = 3", "2 in"):
        pool.run(1, run_adopted, [*run, "--run.name=other", "--model.num_layers=3"])
    with run_refused("from_checkpoint", "checkpoint.initial_load"):
        pool.run(1, run_adopted, [*own, "--model.flavor=from_checkpoint", "--run.name=none"])


@pytest.mark.slow
def test_a_run_adopts_a_mixture_in_any_layout(pool, arguments, tmp_path):
    model = dataclasses.replace(
        EXPORTED["debug"], num_experts=4, experts_per_token=2, expert_ffn_dim=24
    )
    make_file(tmp_path / "a.pt", model)
    convert(tmp_path / "a.pt", tmp_path / "base", Options(to="hf"))
    own = [word for word in arguments if not word.startswith("--model.")]
    own += ["--model.flavor=from_checkpoint", f"--checkpoint.initial_load={tmp_path / 'base'}"]
    assert pool.run(1, run_adopted, [*own, "--run.name=one"]) == [0]
    layout = ["--parallel.dp_shard=2", "--parallel.ep=2", "--run.name=two"]
    assert pool.run(2, run_adopted, [*own, *layout]) == [0, 0]
    expected = [loss for loss, _ in curve(tmp_path / "one").values()]
    found = [loss for loss, _ in curve(tmp_path / "two").values()]
    assert found == pytest.approx(expected, rel=1e-5)
    assert "num_experts = 4" in (tmp_path / "two/config.toml").read_text()


def test_weights_of_another_shape_are_refused_before_a_model_is_built(tmp_path):
    """config.json says 2^23 ids: the embedding alone would have 8 GB."""
    make_file(tmp_path / "x.pt", EXPORTED["untied"])
    convert(tmp_path / "x.pt", tmp_path / "hf", Options(to="hf"), log=lambda text: None)
    path = tmp_path / "hf/config.json"
    fields = json.loads(path.read_text())
    rows = fields["vocab_size"]
    command = ["--model.flavor=from_checkpoint"]
    command += [f"--checkpoint.initial_load={tmp_path / 'hf'}"]
    for change, words in (
        ({"vocab_size": 1 << 23}, ["'tok_embeddings.weight' is", str(rows), str(1 << 23)]),
        ({"num_hidden_layers": 10_000}, ["describes 10000 layers, and holds fewer"]),
    ):
        path.write_text(json.dumps(fields | change))
        with refused(*words):
            adopt_checkpoint(load_config(command))
