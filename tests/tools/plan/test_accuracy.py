"""The errors that a plan prints, of its own GPU and kind of layout, and the machine of a device."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from titanlite.tools.cli import plan_command
from titanlite.tools.plan.accuracy import MIN_ROWS, Error, Fitted, kind_of
from titanlite.tools.plan.fitted import FITTED
from titanlite.tools.plan.machines import MACHINES

DEGREES = {"pp": 1, "dp_replicate": 1, "dp_shard": 8, "cp": 1, "tp": 1}


def printed(capsys, *arguments: str) -> str:
    assert plan_command.run([*arguments, "--estimate"]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("more", "kind"),
    [({}, "data parallel"), ({"tp": 2}, "tp or cp"), ({"cp": 2}, "tp or cp"), ({"pp": 2}, "pp")],
)
def test_the_kind_of_a_layout(more, kind):
    assert kind_of({**DEGREES, **more}) == kind


def test_a_kind_with_few_rows_has_the_error_of_all():
    everything = Error(0.1, 0.2, 50)
    kinds = {"pp": Error(0.3, 0.4, MIN_ROWS), "tp or cp": Error(0.5, 0.6, MIN_ROWS - 1)}
    fitted = Fitted((0.6, 0.3, 0.7, 1.0), 100, everything, kinds, 0.4, everything)
    assert fitted.error_of("pp") == ("layouts with pp", kinds["pp"])
    assert fitted.error_of("tp or cp") == ("all layouts", everything)
    assert fitted.error_of("data parallel") == ("all layouts", everything)
    assert not fitted.constant_is_better
    assert replace(fitted, constant_error=Error(0.05, 0.1, 50)).constant_is_better


def test_the_table_is_of_machines_and_of_rows_that_were_not_fitted():
    assert FITTED.keys() <= MACHINES.keys()
    for fitted in FITTED.values():
        assert all(0.1 < rate <= 1.0 for rate in fitted.rates[:3])
        assert fitted.error.rows == fitted.constant_error.rows == fitted.rows // 2
        assert sum(error.rows for error in fitted.by_kind.values()) == fitted.error.rows
        for error in (fitted.error, *fitted.by_kind.values()):
            assert 0 < error.median <= error.p90


def test_each_plan_prints_the_error_of_its_own_layout(capsys):
    fitted = FITTED["A100-80GB"]
    arguments = ["llama3_8b", "--gpus=8", "--gpu=A100-80GB"]
    for more, kind in (("--parallel.tp=1", "data parallel"), ("--parallel.tp=8", "tp or cp")):
        error = fitted.by_kind[kind]
        text = printed(capsys, *arguments, more)
        assert (
            f"off by {100 * error.median:.0f} % in the median, 9 of 10 by at most "
            f"{100 * error.p90:.0f} %: {error.rows} measurements of layouts with {kind}"
        ) in text
    contents = json.loads(printed(capsys, *arguments, "--json"))
    assert contents["time_error"]["rows"] == fitted.by_kind["data parallel"].rows


def test_where_a_constant_is_better_it_is_named(capsys):
    name = next(name for name, fitted in FITTED.items() if fitted.constant_is_better)
    text = printed(capsys, "llama3_8b", "--gpus=8", f"--gpu={name}")
    assert f"a constant MFU of {100 * FITTED[name].constant_mfu:.0f} % is closer here" in text


def test_without_rates_no_speed_and_no_cost_are_printed(capsys):
    assert "B200" not in FITTED
    text = printed(capsys, "llama3_8b", "--gpus=8", "--gpu=B200", "--tokens=1T")
    assert "no rate for B200: too few measurements" in text
    assert "tokens/s" not in text
    assert "The run: no rate for B200; give --mfu or --tokens-per-second" in text
    text = printed(capsys, "llama3_8b", "--gpus=8", "--gpu=B200", "--tokens=1T", "--mfu=0.4")
    assert "MFU 40.0 %" in text
