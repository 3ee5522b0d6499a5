"""The list of planted faults: each is complete, and leaves nothing patched."""

from __future__ import annotations

import contextlib
import inspect
import sys

import pytest

from docs.fault_tables import PAGE, description
from titanlite.runtime.errors import ConfigError
from titanlite.tools.faults import fault as fault_module
from titanlite.tools.faults.catalogue import FAULTS, find_fault
from titanlite.tools.faults.fault import CHECKS, Fault
from titanlite.tools.faults.quiz import STEPS
from titanlite.tools.verify.ladder import make_case


def test_there_are_enough_and_each_predicts_a_figure_of_its_check():
    assert len(FAULTS) >= 20
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert sum(bool(fault.threads) for fault in FAULTS) > len(FAULTS) / 2
    for fault in FAULTS:
        figures = CHECKS[fault.check]
        assert {fault.figure, *fault.unchanged} <= set(figures), fault.name
        assert fault.figure not in fault.unchanged, fault.name
        assert fault.step in STEPS.get((fault.check, fault.figure), (0, 1)), fault.name
        assert make_case(["debug"], fault.layout, "cpu").processes <= 2, fault.name


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
        assert f"\n| {' | '.join(description(fault))} | " in text, "run python docs/fault_tables.py"
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(FAULTS)


def test_an_unknown_name_is_answered_with_the_nearest():
    assert find_fault("rope-rows").figure == "logits"
    with pytest.raises(ConfigError, match="did you mean rope-rows"):
        find_fault("rope-row")
