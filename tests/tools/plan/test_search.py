"""The search for the best layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from titanlite.config.load import load_config
from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.rules.check import check_layout
from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.machines import MACHINES
from titanlite.tools.plan.search import (
    Candidate,
    Held,
    as_toml,
    evaluate,
    proposals,
    search,
    why_slower,
)

A100 = MACHINES["A100-80GB"]
H100 = MACHINES["H100"]


def model(*arguments: str) -> tuple[Config, LlamaConfig]:
    config = load_config([*arguments, "--training.local_batch_size=1"])
    return config, resolve_flavor(config.model, 32000)


def gpt_175b() -> tuple[Config, LlamaConfig]:
    """GPT-3's size; three matrices of the feed-forward have the parameters of its two."""
    config, llama = model("llama3_70b", "--training.global_batch_size=1536")
    llama = replace(
        llama,
        dim=12288,
        num_layers=96,
        num_heads=96,
        num_kv_heads=96,
        ffn_dim=32768,
        vocab_size=51200,
    )
    training = replace(config.training, seq_len=2048)
    return replace(config, training=training), llama


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_layouts_that_the_guides_pick_for_175b_are_refused(tp):
    """TP 1, 2, 4 and 8 with PP 1, whose weights and moments are whole on each replica."""
    config, llama = gpt_175b()
    assert llama.num_parameters / 1e9 == pytest.approx(175, rel=0.005)
    parallel = replace(config.parallel, pp=1, tp=tp, cp=1, dp_shard=1, dp_replicate=512 // tp)
    refused = evaluate(replace(config, parallel=parallel), llama, 512, A100)
    assert refused == "does not surely fit into the memory"


def test_no_two_layouts_have_one_name():
    config, llama = model("llama3_1b", "--training.global_batch_size=32")
    names = [candidate.name for candidate in search(config, llama, 8, A100, keep=1000).best]
    assert any("microbatch 2" in name for name in names)
    assert len(set(names)) == len(names)


def test_the_best_layouts_are_allowed_fit_and_are_in_order():
    config, llama = model("llama3_1b", "--training.global_batch_size=32")
    result = search(config, llama, 8, A100, keep=5)
    assert len(result.best) == 5
    assert result.tried > 20
    times = [candidate.time.total for candidate in result.best]
    assert times == sorted(times)
    for candidate in result.best:
        assert candidate.memory.total < A100.memory_bytes
        assert check_layout(candidate.config, llama, 8) == candidate.degrees
    assert "s slower: " in why_slower(result.best[1], result.best[0])


def test_tensor_parallel_stays_in_a_node():
    config, llama = model("llama3_8b", "--training.global_batch_size=64")
    four = replace(A100, gpus_per_node=4)
    degrees = {proposal.parallel.tp for proposal in proposals(config, llama, 32, four)}
    assert degrees == {1, 2, 4}


def test_ep_is_tried_where_it_divides_the_ranks_and_the_experts():
    config, llama = model("llama3_8b", "--model.flavor=qwen3_30b_a3b", "--parallel.ep=4")
    tried = [one.parallel for one in proposals(config, llama, 8, H100)]
    assert {one.ep for one in tried if one.dp_shard * one.cp == 8} == {1, 2, 4, 8}
    assert {one.ep for one in tried if one.dp_shard * one.cp == 1} == {1}
    held = Held(config, frozenset({"parallel.ep"}))
    assert {one.parallel.ep for one in proposals(config, llama, 8, H100, held)} == {4}
    dense, llama = model("llama3_8b")
    assert {one.parallel.ep for one in proposals(dense, llama, 8, H100)} == {1}


def test_the_winner_is_a_config(tmp_path):
    config, llama = model("llama3_1b", "--training.global_batch_size=8")
    best = search(config, llama, 4, A100, keep=1).best[0]
    file = tmp_path / "best.toml"
    file.write_text('base = "llama3_1b.toml"\n\n' + as_toml(best))
    (tmp_path / "llama3_1b.toml").write_text('[model]\nflavor = "llama3_1b"\n')
    loaded = load_config([str(file), "--training.global_batch_size=8"])
    assert loaded.parallel == best.config.parallel
    assert loaded.training.local_batch_size == best.config.training.local_batch_size
    assert loaded.recompute == best.config.recompute


def test_less_recomputation_is_taken_where_it_fits():
    config, llama = model("llama3_8b", "--training.global_batch_size=64")
    parallel = replace(config.parallel, dp_shard=64)
    roomy = evaluate(replace(config, parallel=parallel), llama, 64, A100)
    tight = evaluate(replace(config, parallel=parallel), llama, 64, replace(A100, memory_gib=30))
    assert isinstance(roomy, Candidate)
    assert isinstance(tight, Candidate)
    assert roomy.config.recompute.mode == "none"
    assert tight.config.recompute.mode != "none"
    assert tight.time.total > roomy.time.total


def test_a_mode_that_a_rule_excludes_leaves_the_others():
    """`recompute.offload` needs mode full."""
    config, llama = model("llama3_1b", "--training.global_batch_size=8")
    recompute = replace(config.recompute, mode="full", offload=True)
    found = evaluate(replace(config, recompute=recompute), llama, 8, A100)
    assert isinstance(found, Candidate)
    assert found.config.recompute.mode == "full"
    three = replace(config, parallel=replace(config.parallel, tp=3))
    assert evaluate(three, llama, 3, A100).startswith("a rule of ")


def test_what_belongs_to_another_layout_is_reset():
    config, llama = model("llama3_1b", "--training.global_batch_size=4")
    parallel = replace(
        config.parallel, pp_split="layers.3", async_tp=True, reshard_after_forward="2"
    )
    plain = search(config, llama, 4, A100)
    result = search(replace(config, parallel=parallel), llama, 4, A100)
    assert [one.keys for one in result.best] == [one.keys for one in plain.best]
    assert "async_tp = false" in as_toml(result.best[0])


def test_moments_go_to_cpu_memory_where_nothing_fits():
    """1.2B parameters: 20 GB of states, of which half are moments."""
    config, llama = model("llama3_1b", "--training.global_batch_size=1")
    small = replace(A100, memory_gib=19)
    result = search(config, llama, 1, small)
    assert all(one.config.parallel.optimizer_offload for one in result.best)
    assert "moments in CPU memory" in result.best[0].name
    assert result.refused["does not surely fit into the memory"] >= 1


def test_a_model_that_no_layout_holds_is_refused():
    config, llama = model("llama3_70b", "--training.global_batch_size=4")
    with pytest.raises(ConfigError, match="no layout of 2 A100-80GB trains this model"):
        search(config, llama, 2, A100)
