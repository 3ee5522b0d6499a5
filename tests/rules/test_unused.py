"""Settings that have no effect are named, with the reason."""

from __future__ import annotations

from messages import assert_mentions

from titanlite.config.load import load_config
from titanlite.config.schema import Config
from titanlite.model.flavors import FLAVORS
from titanlite.rules.degrees import AXES
from titanlite.rules.unused import unused_settings

LLAMA = FLAVORS["debug"]


def config(*arguments: str) -> Config:
    return load_config(["debug", *(f"--{argument}" for argument in arguments)])


def test_keys_of_techniques_that_are_not_used_are_named():
    given = config(
        "parallel.pp_split=layers.2",
        "parallel.cp_method=ulysses",
        "recompute.every=2",
        "parallel.prefetch=2",
        "lora.dropout=0.1",
    )
    found = unused_settings(given, LLAMA, dict.fromkeys(AXES, 1))
    expected = [
        ("parallel.pp_split = layers.2", "parallel.pp = 1"),
        ("parallel.cp_method = ulysses", "parallel.cp = 1"),
        ("recompute.every = 2", "recompute.mode = none"),
        ("parallel.prefetch = 2", "one process"),
        ("lora.dropout = 0.1", "lora.rank = 0"),
    ]
    for note, parts in zip(found, expected, strict=True):
        assert_mentions(note, *parts)
    for shape, keys in (
        ("cosine", ["decay_steps", "milestones"]),
        ("wsd", ["milestones"]),
        ("step", ["decay_steps"]),
    ):
        schedule = [
            f"schedule.name={shape}",
            "schedule.milestones=0.5 from step 9",
            "schedule.decay_steps=5",
        ]
        notes = " ".join(unused_settings(config(*schedule), LLAMA, dict.fromkeys(AXES, 1)))
        assert [
            key for key in ("decay_steps", "milestones") if f"schedule.{key} = " in notes
        ] == keys
    assert (
        unused_settings(
            config("recompute.mode=full", "recompute.every=2"), LLAMA, dict.fromkeys(AXES, 2)
        )
        == []
    )


def test_only_keys_that_were_set_are_reported():
    """A decay in steps makes the fraction 0."""
    for shape, option in (
        ("cosine", "schedule.decay_steps=5"),
        ("constant", "schedule.min_ratio=0.3"),
    ):
        (note,) = unused_settings(
            config(f"schedule.name={shape}", option), LLAMA, dict.fromkeys(AXES, 1)
        )
        assert_mentions(note, option.replace("=", " = "), "schedule.name")
    (note,) = unused_settings(config("ema.validate=false"), LLAMA, dict.fromkeys(AXES, 1))
    assert_mentions(note, "ema.validate = False", "ema.decay = 0")


def test_keys_of_stability_without_effect_are_reported():
    given = ["--stability.window=64", "--stability.max_skips=3", "--stability.max_rollbacks=9"]
    notes = unused_settings(
        load_config(["debug", *given, "--stability.action=skip"]), LLAMA, dict.fromkeys(AXES, 1)
    )
    assert [note for note in notes if "stability" in note] == [
        "stability.window = 64 has no effect: stability.threshold = 0",
        "stability.max_rollbacks = 9 has no effect: stability.action is not rollback",
    ]


def test_prompts_have_an_effect_without_validation():
    """They are also continued at the end of the run."""
    prompts = config("validation.freq=0", "validation.prompts=a", "validation.prompt_tokens=3")
    assert unused_settings(prompts, LLAMA, dict.fromkeys(AXES, 1)) == []
    tokens = config("validation.prompts=", "validation.prompt_tokens=3")
    (note,) = unused_settings(tokens, LLAMA, dict.fromkeys(AXES, 1))
    assert_mentions(note, "validation.prompt_tokens = 3", "validation.prompts is empty")
