"""Which word was probably meant, and where a mistake is."""

from __future__ import annotations

import pytest

from titanlite.config.keys import all_keys
from titanlite.config.mistakes import (
    OTHER_TRAINERS,
    hub_advice,
    suggestion,
    unknown_config,
    unknown_key,
    where,
    wrong_value,
)

TEXT = """
[training]
steps = 3

[[data.sources]]
path = "a"
[[data.sources]]
"path" = "b"
"""


@pytest.mark.parametrize(
    ("word", "allowed", "expected"),
    [
        ("cosin", ["cosine", "linear"], "; did you mean cosine?"),
        ("lr", ["steps", "folder"], ""),
        ("", [], ""),
        ("ab", ["ac", "ad"], ""),
        ("layer_a", ["layer_b", "layer_c"], "; did you mean layer_b or layer_c?"),
        ("x" * 100_000, ["x" * 150], "; did you mean " + "x" * 150 + "?"),
    ],
)
def test_the_most_similar_words_are_suggested(word, allowed, expected):
    assert suggestion(word, allowed) == expected


@pytest.mark.parametrize(
    ("section", "name", "line"),
    [
        ("training", "steps", 3),
        ("training", "", 2),
        ("training", "other", 2),
        ("data.sources[2]", "path", 8),
        ("data.sources[1]", "path", 6),
        ("run", "name", 0),
    ],
)
def test_the_line_of_a_key_is_found(tmp_path, section, name, line):
    path = tmp_path / "a.toml"
    assert where(path, TEXT, section, name) == (f"{path}:{line}" if line else str(path))


def test_an_unknown_key_is_looked_for_in_all_sections():
    keys = ["optimizer.lr", "training.steps", "schedule.name", "run.name"]
    assert unknown_key("training.lr", keys).endswith("did you mean optimizer.lr?")
    assert unknown_key("name", keys).endswith("did you mean schedule.name or run.name?")
    assert unknown_key("schedul.name", keys).endswith("did you mean schedule.name?")
    assert "set one of its keys, training.steps" in unknown_key("training", keys)


@pytest.mark.parametrize("word", OTHER_TRAINERS)
def test_a_word_of_another_trainer_leads_to_our_keys(word):
    meant = unknown_key(f"training.{word}", all_keys()).partition("did you mean ")[2]
    assert set(meant.removesuffix("?").split(" or ")) <= set(all_keys())
    hyphens = word.replace("_", "-")
    assert unknown_key(f"training.{hyphens}", all_keys()).endswith(f"; did you mean {meant}")


def test_a_wrong_value_and_a_wrong_config_say_what_is_allowed():
    assert wrong_value("a.b", "ture", "true or false", ("true", "false")).endswith(
        "did you mean true?"
    )
    sizes = ("alpha_8b", "beta_8b_v1", "alpha_70b")
    assert wrong_value("a.b", "8B", "a size", sizes).endswith(
        "did you mean alpha_8b or beta_8b_v1?"
    )
    assert wrong_value("a.b", "0b", "a size", sizes).endswith("expected a size")
    assert wrong_value("a.b", 3, "a string", ()) == "a.b = 3: expected a string"
    assert "did you mean debug?" in unknown_config("debu", ["debug", "other"])


def test_a_name_of_a_model_gets_the_command_that_downloads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    advice = hub_advice("Qwen/Qwen2.5-0.5B")
    assert "nothing is downloaded" in advice
    assert "`hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B`" in advice
    assert hub_advice(str(tmp_path / "Qwen/Qwen2.5-0.5B")) == advice
    (tmp_path / "outputs").mkdir()
    others = ("outputs/debugg", "/data/model", "./model", "a/b/c", "model", "hf:a/b", "a b/c", "")
    assert not any(map(hub_advice, others))
