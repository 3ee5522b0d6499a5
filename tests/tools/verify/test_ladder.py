"""The ladder of layouts: what it covers, how a layout is written, and the layouts that are drawn."""

from __future__ import annotations

import pytest

from titanlite.config.load import all_keys, load_config
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.tools.cli.verify_command import run as verify
from titanlite.tools.verify.draw import CHOICES, NEEDS, draw_layouts
from titanlite.tools.verify.ladder import Case, ladder, layouts, make_case, parse_layout

SMALL = ["debug", "--model.dim=32", "--model.ffn_dim=64", "--training.seq_len=32"]


def case(layout: str) -> tuple[Case, LlamaConfig]:
    made = make_case(SMALL, layout, "cpu")
    return made, resolve_flavor(made.config.model, 4112)


def test_the_ladder_has_each_axis_each_pair_and_the_triples():
    four = [set(degrees.items()) for degrees in layouts(4, quick=False)]
    assert len(four) == 1 + 5 + 5 + 10
    eight = [set(degrees.items()) for degrees in layouts(8, quick=False)]
    for triple in (
        ("dp_shard", "tp", "pp"),
        ("dp_shard", "cp", "tp"),
        ("dp_replicate", "dp_shard", "tp"),
        ("cp", "pp", "tp"),
    ):
        assert {(axis, 2) for axis in triple} in eight
    schedules = {
        text.partition("pp_schedule=")[2].partition(",")[0] for text in ladder(2, True, "cpu")
    }
    assert len(schedules - {""}) == 6  # and 1F1B, the default
    for processes in (1, 2, 3, 4, 8):
        for quick in (False, True):
            cases = [make_case(SMALL, text, "cpu") for text in ladder(processes, quick, "cpu")]
            assert len({case.name for case in cases}) == len(cases)
            assert max(case.processes for case in cases) <= processes


def test_a_cut_by_names_may_have_commas():
    pairs = parse_layout("pp=4,pp_split=layers.1,layers.2, output,tp=2")
    assert dict(pairs)["parallel.pp_split"] == "layers.1 layers.2 output"
    assert dict(pairs)["parallel.tp"] == "2"


def test_the_config_brings_model_and_optimizer_but_no_layout():
    made, llama = case("dp_shard=2")
    assert llama.dim == 32
    other = [
        "--parallel.tp=2",
        "--parallel.reduce_every_microbatch=false",
        "--recompute.mode=full",
        "--compile.enabled",
        "--training.batch_ramp=16 from step 9",
    ]
    assert make_case([*SMALL, *other], "dp_shard=2", "cpu").config == made.config
    assert load_config(SMALL).optimizer.lr == made.config.optimizer.lr
    assert (
        made.processes,
        made.config.training.global_batch_size,
        made.config.training.local_batch_size,
    ) == (2, 8, 4)


def drawn(count: int, seed: int, processes: int = 4, *arguments: str) -> list[str]:
    return draw_layouts(count, seed, processes, ["debug", *arguments], "cpu", "aot_eager", 4112)


def test_a_seed_draws_the_same_layouts_again():
    first = drawn(8, 1)
    assert first == drawn(8, 1)
    assert len(set(first)) == 8
    assert not set(first) & set(drawn(8, 2))
    assert drawn(4, 1) == first[:4]


def test_they_fit():
    assert all(make_case(["debug"], text, "cpu").processes <= 2 for text in drawn(10, 0, 2))
    # Nothing divides a model of one head but dp and pp
    assert not any("tp=" in text for text in drawn(10, 0, 4, "--model.num_heads=1"))
    assert drawn(3, 0, 4, "--training.seq_len=0") == []


def test_each_setting_is_there_where_it_has_an_effect():
    layouts = [dict(parse_layout(text)) for text in drawn(900, 3)]
    for key, values in CHOICES.items():
        full = key if "." in key else f"parallel.{key}"
        assert full in all_keys()
        found = {options[full] for options in layouts if full in options}
        assert found == set(values), key
    for key, needed in NEEDS.items():
        names = [name if "." in name else f"parallel.{name}" for name in (key, needed)]
        assert all(names[1] in options for options in layouts if names[0] in options)


@pytest.mark.slow
def test_drawn_layouts_equal_one_process():
    """`titanlite verify debug --draw 200` has more of them; docs/parallelism.md has its figures."""
    assert verify(["debug", "--draw", "12", "--draw-seed", "7"]) == 0
