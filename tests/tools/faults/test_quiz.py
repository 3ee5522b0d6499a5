"""The dialogue about a fault, with an experiment whose outcome is given."""

from __future__ import annotations

import pytest

from titanlite.tools.faults.catalogue import find_fault
from titanlite.tools.faults.experiment import Measured, Outcome
from titanlite.tools.faults.quiz import run_fault

RIGHT = Outcome(
    [
        Measured("loss", 1, 1e-8, 1e-5),
        Measured("gradient", 1, 1e-7, 1e-5),
        Measured("grad_norm", 1, 1e-8, 1e-5),
        Measured("loss", 2, 1e-8, 1e-5),
        Measured("grad_norm", 2, 1e-8, 1e-5),
        Measured("parameters", 2, 1e-8, 1e-5),
    ]
)
WRONG = Outcome(
    [
        Measured("loss", 1, 1e-8, 1e-5),
        Measured("gradient", 1, float("inf"), 1e-5),
        Measured("grad_norm", 1, 1e-8, 1e-5),
        Measured("loss", 2, 2e-4, 1e-5),
        Measured("grad_norm", 2, 1e-8, 1e-5),
        Measured("parameters", 2, float("nan"), 1e-5),
    ]
)


RESUMED = Outcome([Measured("validation", 0, 0.0, 1e-5), Measured("loss", 4, 2e-3, 1e-5)])


class Given:
    def __init__(self, broken=WRONG, healthy=RIGHT):
        self.outcomes = {True: broken, False: healthy}

    def run(self, fault, planted):
        return self.outcomes[planted]


@pytest.mark.parametrize(
    ("answers", "judgement"),
    [
        (["gradient"], "Your prediction is right."),
        (["speed", " LOSS", "0", "six", "1"], "was another one: loss, from step 1."),
        (["parameters"], "was another one: parameters."),
    ],
)
def test_a_prediction_is_asked_for_before_it_runs_and_judged(capsys, answers, judgement):
    rest = iter(answers)
    asked = []

    def ask(question):
        asked.append(question)
        assert "off first" not in capsys.readouterr().out.replace("figure is off first", "")
        return next(rest)

    run_fault(find_fault("tied-embedding"), Given(), ask)
    assert len(asked) == len(answers)
    output = capsys.readouterr().out
    assert judgement in output
    assert "off first: gradient at step 1 (inf); also, there or later: loss, parameters" in output
    assert "pytorch/torchtitan#3764" in output
    lines = output.splitlines()
    (healthy,) = [line.split() for line in lines if line.startswith("healthy")]
    (broken,) = [line.split() for line in lines if line.startswith("with the fault")]
    assert healthy == ["healthy", "1.0e-08", "1.0e-07", "1.0e-08", "1.0e-08"]
    assert broken == ["with", "the", "fault", "2.0e-04", "inf", "1.0e-08", "NaN"]
    (second,) = [line.split() for line in lines if line.startswith("  step 2")]
    assert second == ["step", "2", "2.0e-04*", "1.0e-08", "NaN*"]


@pytest.mark.parametrize(
    ("answers", "judgement"),
    [
        (["validation", "1", "0"], "Your prediction is right."),
        (["validation", "3"], "The figure is the one that you predicted; the step is not 3."),
    ],
)
def test_a_run_is_validated_only_before_it_and_after_some_steps(capsys, answers, judgement):
    broken = Outcome([Measured("validation", 0, 1.0, 1e-5), Measured("loss", 1, 0.0, 1e-5)])
    rest = iter(answers)
    run_fault(find_fault("validation-count"), Given(broken, broken), lambda question: next(rest))
    assert not list(rest)
    assert judgement in capsys.readouterr().out


def test_the_patch_and_the_layout_are_shown_without_a_question(capsys):
    run_fault(find_fault("data-counted-by-rank"), Given(RESUMED, RESUMED), None)
    output = capsys.readouterr().out
    assert "self.samples // self.data_size" in output
    assert "layout: dp_shard=2 until step 3; then resumed on one process" in output
    assert "Which figure" not in output
    assert "off first: loss at step 4 (2.0e-03)\n" in output
