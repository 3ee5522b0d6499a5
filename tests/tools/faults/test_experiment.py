"""Each planted fault changes what its text predicts, and the healthy program nothing."""

from __future__ import annotations

import math

import pytest

from docs.fault_tables import PAGE, printed_in
from titanlite.tools.faults.catalogue import FAULTS
from titanlite.tools.faults.experiment import Experiments, in_order
from titanlite.tools.faults.fault import CHECKS, Fault
from titanlite.tools.verify.compare import Differences
from titanlite.tools.verify.ladder import make_case

FAST = ("rank-means", "rope-rows")
SHOWN = printed_in(PAGE.read_text())


@pytest.fixture(scope="module")
def experiments(pool, tmp_path_factory) -> Experiments:
    return Experiments(pool, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=[] if fault.name in FAST else pytest.mark.slow)
        for fault in FAULTS
    ],
)
def test_a_fault_is_caught_where_its_text_says(experiments, fault: Fault):
    healthy = experiments.run(fault, planted=False)
    assert healthy.first_off() is None, healthy
    broken = experiments.run(fault, planted=True)
    first = broken.first_off()
    assert first is not None
    assert (first.figure, first.step) == (fault.figure, fault.step), broken.measured
    # Far from the tolerance, so that another machine's rounding predicts the same
    assert not first.difference < 1.5 * first.tolerance
    for measured in broken.measured:
        if measured.figure in fault.unchanged:
            assert not measured.is_off, measured
    for figure in CHECKS[fault.check]:
        shown = float(SHOWN[fault.name][figure].strip("*"))
        assert same_magnitude(broken.largest(figure), shown), figure


def same_magnitude(measured: float, shown: float) -> bool:
    """Whether the documents show what was measured, to a factor of 10; below 1e-5 anything is
    rounding.
    """
    if not math.isfinite(measured) or not math.isfinite(shown):
        return str(measured) == str(shown)
    return 0.1 < max(measured, 1e-5) / max(shown, 1e-5) < 10


def test_figures_are_in_the_order_in_which_a_step_computes_them():
    case = make_case(["debug"], "dp_shard=2", "cpu")
    ranks = [
        Differences(loss=[0.0, 1.0], grad_norm=[2.0, 3.0], gradient=4.0, parameters=5.0),
        Differences(loss=[0.5, math.nan], grad_norm=[1.0, 1.0], gradient=6.0, parameters=1.0),
    ]
    measured = in_order(case, ranks)
    assert [(each.figure, each.step) for each in measured] == [
        ("loss", 1),
        ("gradient", 1),
        ("grad_norm", 1),
        ("loss", 2),
        ("grad_norm", 2),
        ("parameters", 2),
    ]
    differences = [each.difference for each in measured]
    assert differences[:3] == [0.5, 6.0, 2.0]
    assert math.isnan(differences[3])
    assert all(each.is_off for each in measured)
