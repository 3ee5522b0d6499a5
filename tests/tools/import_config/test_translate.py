"""Fields by their rows, and the TOML that they become."""

from __future__ import annotations

import pytest
from messages import refused

from titanlite.config.load import load_config
from titanlite.tools.import_config.draft import REQUIRED
from titanlite.tools.import_config.table import Format, Row, leave, must
from titanlite.tools.import_config.translate import to_toml, translate

STEPS = Row("steps", "training.steps", 1000)
RATE = Row("rate", "optimizer.lr", 3e-4)


def form(*rows: Row) -> Format:
    return Format("x", "X", "1.0", rows)


def test_values_are_copied_and_what_is_not_taken_over_is_named():
    rows = form(
        STEPS,
        RATE,
        Row("kind", "schedule.name", "up", values={"up": "constant", "down": "linear"}),
        *leave("not built", "off=false on=0.1 flag=false|true"),
        Row("always", "", 0.5, "never here", same=(0,)),
    )
    entries = {"steps": 1e4, "rate": "1e-3", "kind": "down", "off": False, "on": 2, "flag": True}
    draft = translate(entries, rows)
    assert {name: setting.value for name, setting in draft.settings.items()} == {
        "training.steps": 10_000,
        "optimizer.lr": 1e-3,
        "schedule.name": "linear",
    }
    # A default of the program that is not neutral here is named although the file is silent
    assert draft.left == ["on = 2: not built", "default of always = 0.5: never here"]


@pytest.mark.parametrize(
    ("entries", "parts"),
    [
        ({"strange": 3}, ["strange = 3: not known here as a field of X 1.0"]),
        ({"step": 3}, ["step = 3", "did you mean steps?"]),
        ({"degree": 8}, ["degree = 8: one alone; expected 1"]),
        ({"steps": "many"}, ["steps = many: training.steps: expected an integer"]),
        ({"steps": None}, ["steps = None: training.steps: expected an integer"]),
        (
            {"rate": "$RATE"},
            ["rate = $RATE: a variable that the file does not set once, to a plain word"],
        ),
        ({"kind": "sideways"}, ["kind = sideways: schedule.name: expected one of up"]),
        ({"tp": "auto"}, ["tp = auto: another file has the value"]),
        ({"tokens": 9, "steps": 5}, ["training.steps and training.tokens: expected only one"]),
        ({"local": 3}, ["training.local_batch_size", "3"]),
        ({"degree": 8, "kind": "sideways"}, ["degree = 8", "kind = sideways"]),
    ],
)
def test_what_cannot_be_expressed_makes_no_file(entries, parts):
    rows = form(
        STEPS,
        RATE,
        Row("kind", "schedule.name", "up", values={"up": "constant"}),
        Row("tokens", "training.tokens"),
        Row("local", "training.local_batch_size"),
        Row("tp", "parallel.tp", 1),
        *must("one alone", "degree=1"),
    )
    with refused(*parts):
        translate(entries, rows)


def test_a_field_that_the_program_needs_is_missing():
    with refused("needed: missing; the program needs it too"):
        translate({"rate": 1}, form(RATE, Row("needed", "training.steps", REQUIRED)))


def test_a_value_of_another_file_or_of_the_shell_is_to_be_decided_where_it_may_be():
    rows = form(RATE, Row("folder", "run.folder"), Row("steps", "training.steps"))
    draft = translate({"rate": "auto", "folder": "$OUT/x"}, rows)
    assert draft.settings == {}
    assert draft.decisions[:2] == [
        "optimizer.lr: rate = auto, so another file has it",
        "run.folder: folder = $OUT/x there, which is not resolved",
    ]
    needed = ["model.flavor", "training.seq_len", "data.path", "data.tokenizer"]
    assert [text.partition(":")[0] for text in draft.decisions[2:]] == needed


def test_the_toml_loads_whatever_stands_in_its_comments(tmp_path):
    bad = Row("bad", "", None, "no\x00\x1b[2J\u2028line\n[run]\nseed = 7", same=(None,))
    rows = form(Row("a", "run.folder"), bad, Row("steps", "training.steps", 1000), RATE)
    draft = translate({"a": 'x"\n\u00e9', "bad": True, "rate": 0.5}, rows)
    groups = [{"pattern": "*norm.weight", "weight_decay": 0.0}]
    draft.set("optimizer.groups", groups, "rate")
    text = to_toml(draft, "file\nname", rows)
    (tmp_path / "a.toml").write_text(text)
    config = load_config([str(tmp_path / "a.toml")])
    assert (config.run.folder, config.run.seed) == ('x"\n\u00e9', 42)
    assert [(group.pattern, group.weight_decay) for group in config.optimizer.groups] == [
        ("*norm.weight", 0.0)
    ]
    # Only what differs from our defaults is written
    assert "lr = 0.5  # rate\n" in text
    assert "steps" not in text.replace("# ", "")
