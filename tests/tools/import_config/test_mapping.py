"""Drafts of a config, and the TOML that they become."""

from __future__ import annotations

import pytest

from titanlite.config.load import load_config
from titanlite.tools.import_config.mapping import (
    Draft,
    Format,
    Row,
    as_number,
    markdown,
    nothing,
    to_toml,
    translate,
)


def form(*rows: Row) -> Format:
    return Format("x", "X", rows, lambda entries: {})


def test_values_are_copied_and_what_cannot_be_is_said():
    rows = (
        Row("steps", "training.steps"),
        Row("rate", "optimizer.lr"),
        Row("kind", "schedule.name"),
        Row("off.* on", "", "not built"),
        Row("always", "", "so it is", nothing),
    )
    entries = {
        "steps": 1e4, "rate": "1e-3", "kind": "spiral", "off.a": False, "off.b": 2, "on": None,
        "always": True, "strange": 3, "strange_but_off": False, "auto_key": "auto",
    }  # fmt: skip
    draft = translate(entries, form(*rows))
    assert {name: setting.value for name, setting in draft.settings.items()} == {
        "training.steps": 10_000,
        "optimizer.lr": 1e-3,
    }
    kind, off, strange = draft.lacks
    assert kind.startswith("kind = spiral: schedule.name = 'spiral': expected one of cosine")
    assert off == "off.b = 2: not built"
    assert strange == "strange = 3: not known to the importer"
    assert draft.decisions[0].startswith("auto_key: auto there")


@pytest.mark.parametrize(
    ("entries", "kept", "left_out"),
    [
        ({"steps": 5, "tokens": 9}, "training.tokens", "training.steps"),
        ({"local": 3}, "", "training.local_batch_size"),
        ({"name": "a/b"}, "", "run.name"),
    ],
)
def test_settings_that_do_not_fit_together_are_left_out(entries, kept, left_out):
    rows = (
        Row("steps", "training.steps"),
        Row("tokens", "training.tokens"),
        Row("local", "training.local_batch_size"),
        Row("name", "run.name"),
    )
    draft = translate(entries, form(*rows))
    assert list(draft.settings) == ([kept] if kept else [])
    assert left_out.partition(".")[2].partition("_")[0] in draft.lacks[-1]


def test_the_toml_loads_whatever_stands_in_its_comments(tmp_path):
    rows = (Row("a", "run.folder"), Row("bad", "", "no\x00\x1b[2J\u2028line\n[run]\nseed = 7"))
    draft = translate({"a": 'x"\n\u00e9', "bad": True, "b\n[run]\nseed": 7}, form(*rows))
    text = to_toml(draft, "file\nname", form(*rows))
    (tmp_path / "a.toml").write_text(text)
    config = load_config([str(tmp_path / "a.toml")])
    assert (config.run.folder, config.run.seed) == ('x"\n\u00e9', 42)


def test_only_what_differs_from_our_defaults_is_written(tmp_path):
    rows = (Row("steps", "training.steps"), Row("rate", "optimizer.lr"))
    draft = translate({"steps": 1000, "rate": 0.5}, form(*rows))
    text = to_toml(draft, "f", form(*rows))
    assert "steps" not in text.replace("# ", "")
    assert "lr = 0.5  # rate\n" in text


def test_a_default_of_the_trainer_counts_where_the_config_is_silent_or_null():
    rows = (Row("rate", "optimizer.lr"), Row("folder", "run.folder"), Row("seed", "run.seed"))
    silent = Format("x", "X", rows, lambda entries: {"rate": 0.5, "seed": 7})
    draft = translate({"rate": None, "folder": "007", "seed": 8}, silent)
    assert [(s.key, s.value, s.origin) for s in draft.changed()] == [
        ("run.folder", "007", "folder"),
        ("run.seed", 8, "seed"),
        ("optimizer.lr", 0.5, "default of rate"),
    ]


def test_numbers_in_text():
    assert [as_number(text) for text in ("7", "1e-5", "x", True)] == [7, 1e-5, "x", True]
    draft = Draft({"a": "2.5", "b": True, "c": "no"})
    assert [draft.number(name) for name in "abcd"] == [2.5, 0, 0, 0]
    assert [draft.on(name) for name in "abcd"] == [True, True, False, False]


def test_the_table_of_the_documents():
    row = Row("a b.*", "training.steps", "a note")
    assert markdown(form(row)).splitlines()[2] == "| `a`, `b.*` | `training.steps` | a note |"
