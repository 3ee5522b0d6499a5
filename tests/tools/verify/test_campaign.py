"""The campaign of `titanlite verify`: its verdicts, a layout that hangs, and (slow, minutes) a
third of the ladder.
"""

from __future__ import annotations

import json
import random
import time

import pytest
from messages import assert_mentions

from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.tools.cli.verify_command import run as verify
from titanlite.tools.verify.campaign import FIGURES, judge
from titanlite.tools.verify.compare import measure
from titanlite.tools.verify.ladder import Case, experts, ladder, make_case, reason_not_fitting

SMALL = ["debug", "--model.dim=32", "--model.ffn_dim=64", "--training.seq_len=32"]


def case(layout: str, arguments: list[str] = SMALL) -> tuple[Case, LlamaConfig]:
    made = make_case(arguments, layout, "cpu")
    return made, resolve_flavor(made.config.model, 4112)


def test_what_is_no_number_fails():
    made, _ = case("dp_shard=2")
    good = dict.fromkeys(FIGURES, 0.0)
    assert judge(made, good, 1.0)["passed"]
    for name in FIGURES:
        assert not judge(made, {**good, name: float("nan")}, 1.0)["passed"]
        assert not judge(made, {**good, name: float("inf")}, 1.0)["passed"]
        assert not judge(made, {**good, name: 1.1e-5}, 1.0)["passed"]


def break_tp(config, llama, path):
    """A layout that hangs if it has tp."""
    if config.parallel.tp > 1:
        time.sleep(60)
    return measure(config, llama, path)


@pytest.mark.slow  # the time-out of a call: test_pool.py
def test_a_layout_that_hangs_is_a_failure_not_the_end(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr("titanlite.tools.verify.compare.measure", break_tp)
    arguments = [word for layout in ("tp=2", "dp_shard=2") for word in ("--layout", layout)]
    assert (
        verify([*SMALL, *arguments, "--timeout", "8", "--json", str(tmp_path / "rows.json")]) == 1
    )
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["passed"] for row in rows] == [False, True]
    assert rows[0]["loss"] is None
    output = capfd.readouterr()
    assert_mentions(output.out, "1 of 2 layouts", "FAILED: tp=2")
    assert_mentions(output.err, "did not answer within 8")


@pytest.mark.slow
def test_a_third_of_the_ladder_of_four_processes():
    """Drawn with a seed; `titanlite verify debug` runs all of them."""
    texts = [
        text for text in ladder(4, False, "cpu") if not reason_not_fitting(*case(text, ["debug"]))
    ]
    drawn = random.Random(0).sample(texts, len(texts) // 3)
    assert len(drawn) > 50
    assert verify(["debug", *(word for text in drawn for word in ("--layout", text))]) == 0


@pytest.mark.slow
def test_eight_processes():
    of_four = experts(4, False, "aot_eager")
    of_eight = [text for text in experts(8, False, "aot_eager") if text not in of_four]
    layouts = [
        "dp_shard=2,tp=2,pp=2",
        "dp_shard=2,cp=2,tp=2",
        "dp_replicate=2,dp_shard=2,tp=2",
        "cp=2,pp=2,tp=2",
        *of_eight,
    ]
    assert len(layouts) == 6
    assert verify(["debug", *(word for layout in layouts for word in ("--layout", layout))]) == 0
