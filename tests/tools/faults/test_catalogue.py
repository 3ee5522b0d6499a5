"""The planted faults: each is complete and leaves nothing patched; and the dialogue about one."""

from __future__ import annotations

import contextlib
import inspect
import sys
from pathlib import Path

import pytest

from docs.fault_tables import PAGE, description, summary
from titanlite.runtime.errors import ConfigError
from titanlite.tools.faults import fault as fault_module
from titanlite.tools.faults.catalogue import FAULTS, FOUND_BY, find_fault
from titanlite.tools.faults.experiment import Measured, Outcome
from titanlite.tools.faults.fault import CHECKS, Fault
from titanlite.tools.faults.quiz import run_fault
from titanlite.tools.verify.ladder import make_case

ROOT = Path(__file__).parents[3]


def test_there_are_enough_and_each_predicts_a_figure_of_its_check():
    assert len(FAULTS) >= 20
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert sum(bool(fault.threads) for fault in FAULTS) > len(FAULTS) / 2
    for fault in FAULTS:
        figures = CHECKS[fault.check]
        assert {fault.figure, *fault.unchanged} <= set(figures), fault.name
        assert fault.figure not in fault.unchanged, fault.name
        assert make_case(["debug"], fault.layout, "cpu").processes <= 4, fault.name


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_nothing_is_patched_afterwards(monkeypatch, fault: Fault):
    patched: list[tuple[object, str, object]] = []
    real = fault_module.replaced

    @contextlib.contextmanager
    def noted(owner, name, value):
        patched.append((owner, name, inspect.getattr_static(owner, name)))
        with real(owner, name, value):
            yield

    monkeypatch.setattr(sys.modules[fault.plant.__module__], "replaced", noted)
    with contextlib.suppress(ZeroDivisionError), fault.plant():
        assert patched
        for owner, name, original in patched:
            assert inspect.getattr_static(owner, name) is not original
        raise ZeroDivisionError  # as if the run had failed
    for owner, name, original in patched:
        assert inspect.getattr_static(owner, name) is original


def test_the_page_has_each_fault_with_its_prediction():
    text = PAGE.read_text()
    for fault in FAULTS:
        assert f"\n| {' | '.join(description(fault))} | " in text, "run python -m docs.fault_tables"
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(FAULTS)
    assert f"<!-- faults of all -->\n{summary(text)}<!-- end of all -->\n" in text
    readme = (ROOT / "README.md").read_text()
    assert f"[{len(FAULTS)} planted](docs/faults.md)" in readme
    assert ", ".join(f"{proof} find {len(names)}" for proof, names in FOUND_BY.items()) in readme


def test_an_unknown_name_is_answered_with_the_nearest():
    assert find_fault("rope-rows").figure == "logits"
    with pytest.raises(ConfigError, match="did you mean rope-rows"):
        find_fault("rope-row")


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
        (["speed", " LOSS"], "You predicted another one: loss."),
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


def test_the_patch_and_the_layout_are_shown_without_a_question(capsys):
    run_fault(find_fault("data-counted-by-rank"), Given(RESUMED, RESUMED), None)
    output = capsys.readouterr().out
    assert "self.samples // self.data_size" in output
    assert "layout: dp_shard=2 until step 3; then resumed on one process" in output
    assert "Which figure" not in output
    assert "off first: loss at step 4 (2.0e-03)\n" in output
