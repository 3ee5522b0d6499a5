"""Every file operation of a command fails once, and the power fails at every moment: nothing
committed is lost.

The tests draw a sample of the cases. All of them, with their number:
ALL_FAULTS=1 ./run_tests.sh -m slow -s tests/e2e/test_io_faults.py
"""

from __future__ import annotations

import os

import pytest
from io_calls import preloaded

CALLS = (
    "train",
    "train in the background",
    "resume",
    "save",
    "prepare",
    "replace a file",
    "convert titanlite",
    "convert dcp",
    "convert hf",
    "convert torch",
    "convert safetensors",
)
POWER = CALLS[3:]  # a run makes the same calls as its saves
CASES = [*(("fail_calls", name) for name in CALLS), *(("fail_power", name) for name in POWER)]
SAMPLED = ("train in the background", "save", "prepare", "convert hf")
SAMPLE = [
    (function, name, 20 if function == "fail_power" else 3)
    for function, name in CASES
    if name in SAMPLED
]


@pytest.mark.slow
def test_a_sample_of_faults(tmp_path):
    """In one process, because importing torch takes longer than all cases."""
    results = preloaded("io_campaign", "fail_sample", str(tmp_path), SAMPLE)
    assert not [problem for result in results for problem in result["problems"]]
    assert all(result["cases"] for result in results)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "name"), CASES)
def test_faults(tmp_path, function, name):
    sample = 0 if os.environ.get("ALL_FAULTS") else 40
    result = preloaded("io_campaign", function, str(tmp_path), name, sample)
    print(
        f"\n{function}, {name}: {result['calls']} calls, {result['cases']} cases, "
        f"{result['seconds']:.0f} s"
    )
    assert not result["problems"], "\n".join(result["problems"][:10])
    assert result["cases"] >= (min(sample, result["calls"]) or result["calls"])


@pytest.mark.slow
def test_faults_hit_the_requested_call(tmp_path):
    """Otherwise the tests above would pass without any fault."""
    full, broken = "No space left on device", "Input/output error"
    expected = {"ENOSPC": full, "EIO": broken, "EINTR": "", "short": "", "full": full}
    assert preloaded("io_campaign", "strikes", str(tmp_path)) == expected
