"""The command `titanlite verify`: its table, its JSON, and mistakes that are named."""

from __future__ import annotations

import json

import pytest
from messages import refused

from titanlite.tools.cli.verify_command import run as verify
from titanlite.tools.verify.campaign import FIGURES

SMALL = ["debug", "--model.dim=32", "--model.ffn_dim=64", "--training.seq_len=32"]


def test_the_command_prints_a_table_and_writes_json(tmp_path, capfd):
    found = tmp_path / "rows.json"
    layouts = ["--layout", "dp_shard=2", "--layout", "tp=2,recompute.mode=full"]
    assert verify([*SMALL, *layouts, "--json", str(found)]) == 0
    rows = json.loads(found.read_text())
    assert [row["layout"] for row in rows] == ["dp_shard=2", "tp=2,recompute.mode=full"]
    assert set(rows[0]) == {"layout", "processes", *FIGURES, "decisions", "seconds", "passed"}
    table = capfd.readouterr().out
    assert "2 of 2 layouts" in table
    assert table.count("passed") == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--layout", "dp_sahrd=2"],
            ("--layout dp_sahrd=2", "parallel.dp_sahrd", "did you mean dp_shard?"),
        ),
        (["--layout", "tp=4"], ("--layout tp=4", "parallel.tp = 4", "model.num_kv_heads = 2")),
        (["--layout", "tp=two"], ("--layout tp=two", "tp = two", "integer", "at least 1")),
        (["--layout", "dp_shard=0"], ("dp_shard = 0", "integer", "at least 1")),
        (["--layout", "dp_shard=-1"], ("dp_shard = -1", "integer", "at least 1")),
        (["--layout", "pp=2,pp_schedule=foo"], ('parallel.pp_schedule = "foo"', "GPipe")),
        (
            ["--training.seq_len=7", "--model.num_kv_heads=3"],
            ("model.num_kv_heads = 3", "model.num_heads = 4"),
        ),
        (["--processes", "-1"], ("--processes: -1", "at least 1", "at most 64")),
        (
            ["--json", "/nowhere/rows.json"],
            ("--json", "/nowhere/rows.json", "No such file"),
        ),
        (["--json", "/tmp"], ("--json /tmp", "Is a directory")),
        (["--draw", "-1"], ("--draw: -1", "at most 100000")),
        (["--draw", "3", "--quick"], ("--quick and --draw", "one of them")),
        (["--timeout", "0"], ("--timeout: 0", "at least 1")),
        (["--qiuck"], ("--qiuck", "did you mean --quick?")),
        (["--layout", "tp=2,tp=4"], ("parallel.tp", "twice")),
        (["--layout", ","], ("unknown key parallel.",)),
        (["--layout", "dp_shard=1000"], ("1000 processes", "at most 64")),
        (
            ["--loss.num_chunks=8", "--compile.loss", "--loss.z_loss=1e-4"],
            (
                "--loss.num_chunks and --compile.loss: replaced by each layout",
                "expected it in --layout",
            ),
        ),
        (["--training.compute_dtype", "bfloat16"], ("expected it in --layout",)),
        (["nonsense"], ("'nonsense'", "no such file")),
    ],
)
def test_mistakes_are_reported(arguments, expected):
    with refused(*expected):
        verify(["debug", *arguments] if arguments[0].startswith("--") else arguments)
