"""The batch-size ramp: which samples each step has, against a loop that counts them; and what is
refused.
"""

from __future__ import annotations

import itertools

import pytest
from messages import assert_mentions

from titanlite.config.batch_sizes import (
    first_sample,
    first_steps,
    samples_after,
    segments,
    steps_for,
    steps_for_tokens,
)
from titanlite.config.load import load_config
from titanlite.config.schema import PhaseConfig, TrainingConfig
from titanlite.config.to_toml import to_toml
from titanlite.runtime.errors import ConfigError

S = 10  # tokens of a sequence


def ramp(text: str, size: int = 4) -> TrainingConfig:
    return TrainingConfig(seq_len=S, global_batch_size=size, local_batch_size=1, batch_ramp=text)


def sizes(training: TrainingConfig, steps: int) -> list[int]:
    """The number of samples of each step."""
    used = [samples_after(training, 0, step) for step in range(steps + 1)]
    return [after - before for before, after in itertools.pairwise(used)]


def counted(entries: list[tuple[int, int, int]], steps: int) -> list[int]:
    """The same by a loop: entries are (size, step or 0, tokens or 0), 4 before them."""
    found, used = [], 0
    for step in range(1, steps + 1):
        size = 4
        for value, from_step, tokens in entries:
            if (from_step and step >= from_step) or (tokens and used * S >= tokens):
                size = value
        found.append(size)
        used += size
    return found


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("", []),
        ("8 from step 5", [(8, 5, 0)]),
        ("8 from step 5, 16 from step 6, 12 from step 20", [(8, 5, 0), (16, 6, 0), (12, 20, 0)]),
        ("8 from 1 tokens", [(8, 0, 1)]),
        ("8 from 400 tokens", [(8, 0, 400)]),
        ("8 from 401 tokens,16  from  1_000 tokens", [(8, 0, 401), (16, 0, 1000)]),
        ("8 from 4e2 tokens, 32 from step 15", [(8, 0, 400), (32, 15, 0)]),
        ("8 by 1 from 400 tokens", [(5, 0, 100), (6, 0, 200), (7, 0, 300), (8, 0, 400)]),
        ("16 by 4 from step 10", [(8, 4, 0), (12, 7, 0), (16, 10, 0)]),
        ("8 from step 5, 32 by 8 from step 11", [(8, 5, 0), (16, 7, 0), (24, 9, 0), (32, 11, 0)]),
        # Steps that skip sizes
        ("8 by 1 from 60 tokens", [(5, 0, 15), (6, 0, 30), (7, 0, 45), (8, 0, 60)]),
    ],
)
def test_sizes_are_those_that_a_loop_counts(text, entries):
    training, expected = ramp(text), counted(entries, 40)
    assert sizes(training, 40) == expected
    used = [0, *itertools.accumulate(expected)]
    for step in range(41):
        assert steps_for(training, used[step]) == step
        for more in range(40 - step):
            assert samples_after(training, used[step], more) == used[step + more]
    for samples in range(1, used[-1]):
        step = steps_for(training, samples)
        assert used[step - 1] < samples <= used[step]
        assert (
            steps_for_tokens(training, samples * S)
            == steps_for_tokens(training, samples * S - S + 1)
            == step
        )
    for step in range(1, 40):
        assert first_sample(PhaseConfig(from_step=step), training) == used[step - 1]
    assert first_sample(PhaseConfig(from_tokens=101), training) == 11


@pytest.mark.parametrize("used", range(0, 100, 7))
def test_after_steps_of_other_sizes_tokens_count_as_before(used):
    """As when a run resumes with a ramp that it did not have: the state is the number of samples
    alone.
    """
    training = ramp("8 from 310 tokens, 16 by 4 from 700 tokens")
    for _ in range(20):
        size = [4, 8, 12, 16][
            sum(used * S >= tokens for tokens in (310, 510, 700))
        ]  # 12 from the middle of 320 and 700
        assert samples_after(training, used, 1) == used + size
        used += size


def test_the_ramp_of_gpt3():
    """32k to 3.2M tokens over the first 4 billion tokens, of sequences of 2,048 tokens."""
    training = TrainingConfig(
        seq_len=2048,
        global_batch_size=16,
        local_batch_size=1,
        batch_ramp="1568 by 16 from 4e9 tokens",
    )
    parts = segments(training)
    assert [part.size for part in parts] == list(range(16, 1569, 16))
    for number, part in enumerate(parts):
        late = part.sample * 2048 - 4e9 * number / 97  # by less than a step
        assert 0 <= late < parts[max(0, number - 1)].size * 2048


RAMP = [
    "debug",
    "--training.seq_len=10",
    "--training.global_batch_size=4",
    "--training.local_batch_size=2",
]


def test_budgets_count_the_tokens_of_the_steps(tmp_path):
    more = [
        "--training.batch_ramp=8 from step 11",
        "--training.tokens=2_000",
        "--schedule.warmup_tokens=430",
    ]
    more += ["--schedule.name=wsd", "--schedule.decay_tokens=170"]
    config = load_config([*RAMP, *more])
    assert config.training.steps == 10 + 20  # 400 tokens, then 80 a step
    assert config.schedule.warmup_steps == 11
    assert (config.schedule.decay_steps, config.schedule.decay_fraction) == (3, 0)
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert load_config([str(tmp_path / "resolved.toml")]) == config
    whole = load_config([*RAMP, *more, "--schedule.decay_tokens=160"])
    assert whole.schedule.decay_steps == 2
    everything = load_config([*RAMP, *more, "--schedule.decay_tokens=9000"])
    assert everything.schedule.decay_steps == 30
    steps = load_config(
        [*RAMP, *more[:2], "--schedule.name=step", "--schedule.milestones=0.5 from 410 tokens"]
    )
    assert steps.schedule.milestones == "0.5 from step 12"  # step 11 begins with 400 tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", ("training.batch_ramp = '8'", "found '8'", "32 from step 101")),
        ("8 from step 5 16 from step 9", ("found '8 from step 5 16 from step 9'",)),
        ("8 from step 5,", ("found ''",)),
        ("8 from step 1", ("'8 from step 1' is not after the first step", "step 2 or later")),
        ("8 from 0 tokens", ("'8 from 0 tokens' is not after the first step",)),
        ("8 from step 2.5", ("found '8 from step 2.5'",)),
        ("8 from step 1_", ("found '8 from step 1_'",)),
        ("8 from 9e99 tokens", ("found '8 from 9e99 tokens'",)),
        ("0 from step 5", ("size 0", "whole numbers")),
        ("2.5 from step 5", ("size 2.5", "whole numbers")),
        ("8 by 0 from step 5", ("found '8 by 0 from step 5'",)),
        ("8 by 3 from step 5", ("increment of 3", "from 4 to 8", "divisor")),
        ("2 by 2 from step 5", ("increment of 2", "from 4 to 2")),
        (
            "8 from step 5, 16 from step 5",
            ("size 16 does not begin after size 8", "step 5", "in order"),
        ),
        ("8 from step 5, 16 from step 3", ("size 16 does not begin after size 8",)),
        (
            "8 from 100 tokens, 16 from 110 tokens",
            ("size 16 does not begin after size 8", "step 4"),
        ),
        ("4_000_000_000_000 by 2 from 4e15 tokens", ("more than 10000 sizes", "increment")),
        ("7 from step 5", ("the size 7", "multiple of training.local_batch_size = 2", "6 or 8")),
        ("7 from step 5, 9 from step 6", ("the size 7 (and 1 later sizes)",)),
        ("8 by 1 from step 9", ("the size 5 (and 1 later sizes)",)),
    ],
)
def test_mistakes(text, expected):
    with pytest.raises(ConfigError) as caught:
        load_config([*RAMP, f"--training.batch_ramp={text}"])
    (problem,) = caught.value.problems
    assert_mentions(problem, "training.batch_ramp", *expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("schedule.milestones = ''", "0.316 from step 8001")),
        ("0.3 by 0.1 from step 9", ("found '0.3 by 0.1 from step 9'",)),
        ("0.3 from step 9, 0.4 from step 10", ("lower rates",)),
        ("0.3 from step 9, 0.2 from step 9", ("later steps",)),
        ("0.3 from step 9, 0.05 from step 10", ("schedule.min_ratio = 0.1 to 1",)),
        ("1.5 from step 9", ("schedule.min_ratio = 0.1 to 1",)),
    ],
)
def test_mistakes_in_milestones(text, expected):
    with pytest.raises(ConfigError) as caught:
        load_config(["debug", "--schedule.name=step", f"--schedule.milestones={text}"])
    (problem,) = caught.value.problems
    assert_mentions(problem, "schedule.milestones", *expected)


def test_keys_of_the_decay_replace_each_other(tmp_path):
    (tmp_path / "base.toml").write_text('[schedule]\nname = "wsd"\ndecay_steps = 50\n')
    base = str(tmp_path / "base.toml")
    assert load_config([base]).schedule.decay_steps == 50
    later = load_config([base, "--schedule.decay_fraction=0.2"]).schedule
    assert (later.decay_steps, later.decay_fraction) == (0, 0.2)
    with pytest.raises(
        ConfigError, match=r"schedule.decay_fraction and schedule.decay_steps: expected only one"
    ):
        load_config(["debug", "--schedule.decay_fraction=0.2", "--schedule.decay_steps=5"])


def test_the_steps_in_which_another_size_begins():
    assert first_steps(ramp("")) == {1}
    assert first_steps(ramp("8 from step 5, 16 by 4 from step 11")) == {1, 5, 8, 11}
