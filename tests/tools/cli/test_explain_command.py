"""The command: its options, its mistakes, and what it prints and writes."""

from __future__ import annotations

import json

import pytest
from page_in_node import run_page

from titanlite.tools.cli.main import main

SMALL = [
    "debug",
    "--layout=pp=2,tp=2",
    "--model.dim=32",
    "--model.num_layers=2",
    "--model.ffn_dim=64",
    "--model.vocab_size=128",
    "--training.seq_len=16",
    "--training.global_batch_size=2",
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rnak=1"], "unknown option --rnak=1; did you mean --rank?"),
        (["--layout=dp_shrad=2"], "unknown key parallel.dp_shrad"),
        (["--rank=4", "--processes=2", "--layout=dp_shard=2"], "--rank 4: expected one of 2 ranks"),
        (["--layout=tp=3"], "parallel.tp = 3 does not divide"),
        (
            ["--compile.enabled=true", "--recompute.mode=memory_budget"],
            "memory_budget: the compiler chooses what is computed again",
        ),
        (["--html=no/such/folder/step.html"], "no folder no/such/folder"),
        (["--rank=-1"], "argument --rank: -1: expected at least 0"),
        (["--float8.enabled"], "are traced on a GPU only"),
    ],
)
def test_mistakes(arguments, message, capsys):
    assert main(["explain", "debug", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_text_json_and_page(tmp_path, capsys):
    path = tmp_path / "step.html"
    assert main(["explain", *SMALL, f"--html={path}"]) == 0
    printed = capsys.readouterr().out
    assert "Collectives in order" in printed
    assert "parallel.tp = 4 does not divide" in printed  # what doubling would need
    assert main(["explain", *SMALL, "--json", "--pretend"]) == 0
    pretended = json.loads(capsys.readouterr().out)
    assert [lane["rank"] for lane in pretended["lanes"]] == [0, 2]
    assert not pretended["real"]
    messages = {
        (event["kind"], *event["ranks"], event["place"]["role"], event["place"]["phase"])
        for lane in pretended["lanes"]
        for event in lane["events"]
        if event["axis"] == "pp" and event["place"]["phase"] in ("forward", "backward")
    }
    assert messages == {
        (kind, *ends)
        for kind in ("send", "recv")
        for ends in ((0, 2, "activations", "forward"), (2, 0, "gradients", "backward"))
    }
    run_page(path.read_text(), num_lanes=4)
