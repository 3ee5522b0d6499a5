"""Questions whose answers the planner computes."""

import functools

import pytest

from titanlite.runtime.errors import ConfigError
from titanlite.tools.learn.problems import (
    PROBLEMS,
    answer,
    check_answers,
    open_answers,
    plan_of,
)
from titanlite.tools.plan.plan import Plan

FIVE_AXES = [
    "--parallel.pp=8",
    "--parallel.tp=8",
    "--parallel.cp=2",
    "--parallel.dp_shard=2",
    "--parallel.dp_replicate=2",
    "--training.local_batch_size=32",
    "--parallel.pp_microbatch_size=1",
    "--recompute.mode=full",
]


@functools.cache
def right_answer(lesson: str, number: int, question: str) -> str | float:
    """The right answer to a question of a lesson's problem with this number."""
    return answer(plan(lesson, number), question)


@functools.cache
def plan(lesson: str, number: int) -> Plan:
    problem = PROBLEMS[lesson][number]
    return plan_of(problem.arguments, problem.gpus)


@pytest.mark.parametrize("lesson", PROBLEMS)
def test_right_answers_pass_and_wrong_ones_are_refused(lesson, tmp_path):
    path = tmp_path / "answers.toml"
    path.write_text(open_answers(lesson))
    passed, lines = check_answers(lesson, path)
    assert not passed
    assert not any(line.startswith("right") for line in lines)
    values = [
        (problem.name, question, right_answer(lesson, number, question))
        for number, problem in enumerate(PROBLEMS[lesson])
        for question in problem.questions
    ]

    def written(change) -> str:
        texts = []
        for problem in PROBLEMS[lesson]:
            texts.append(f"[{problem.name}]")
            for name, question, value in values:
                if name == problem.name:
                    texts.append(f"{question} = {change(value)!r}")
        return "\n".join(texts)

    path.write_text(written(lambda value: value))
    assert check_answers(lesson, path)[0]
    # A word for its opposite; a number off by a fifth and by 2
    other = {"yes": "no", "no": "yes"}
    path.write_text(written(lambda value: other.get(value) or value * 1.2 + 2))
    passed, lines = check_answers(lesson, path)
    assert not passed
    assert sum("hint:" in line for line in lines) == len(values)


def test_the_problems_have_different_answers():
    """Otherwise all could be answered with one word."""
    for question in ("fits", "compute_bound"):
        lesson = "recompute" if question == "fits" else "planning"
        words = {
            answer(plan_of(problem.arguments, problem.gpus), question)
            for problem in PROBLEMS[lesson]
        }
        assert words == {"yes", "no"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"--parallel.cp=2": "", "--parallel.dp_shard=2": "--parallel.dp_shard=4"},
            "of one rank: cp",
        ),
        ({"--recompute.mode=full": "--recompute.mode=none"}, "does not fit"),
        ({"--training.local_batch_size=32": "--training.local_batch_size=8"}, "more microbatches"),
        ({"--parallel.tp=8": "--parallel.tp=7"}, "titanlite refuses it"),
    ],
)
def test_a_layout_of_five_axes(changes, said, tmp_path):
    path = tmp_path / "answers.toml"
    path.write_text(f"layout = {FIVE_AXES}")
    assert check_answers("five_axes", path)[0]
    layout = [word for word in (changes.get(key, key) for key in FIVE_AXES) if word]
    path.write_text(f"layout = {layout}")
    passed, lines = check_answers("five_axes", path)
    assert not passed
    assert said in "\n".join(lines)


@pytest.mark.parametrize("text", ["layout = 3", "layout = [1]", "= 1", "", b"\xff"])
def test_other_contents_are_refused(text, tmp_path):
    path = tmp_path / "answers.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError):
        check_answers("five_axes", path)
    with pytest.raises(ConfigError):
        check_answers("planning", path)
