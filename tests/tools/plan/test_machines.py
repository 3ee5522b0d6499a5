"""The table of machines, and the readers of a user's machine and prices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fuzz_samples import Reader, given

from titanlite.model.flops import PEAK_TFLOPS, peak_tflops
from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.counts import Collective
from titanlite.tools.plan.machines import (
    MACHINES,
    find_machine,
    price_of,
    read_machine,
    read_prices,
)
from titanlite.tools.plan.step_time import Rates, collective_seconds


@pytest.mark.parametrize("name", MACHINES)
def test_each_machine_is_plausible_and_has_a_source(name):
    machine = MACHINES[name]
    assert machine.source
    assert machine.network_bandwidth < machine.link_bandwidth < machine.memory_bandwidth
    assert machine.float32_tflops < machine.peak_tflops
    assert machine.float8_tflops == 0 or 1.9 < machine.float8_tflops / machine.peak_tflops < 2.1


def test_peaks_are_those_of_the_mfu():
    for name, machine in MACHINES.items():
        peak = peak_tflops(name.replace("-", " "))
        assert peak in (None, machine.peak_tflops)
    assert PEAK_TFLOPS["A10G"] == MACHINES["A10G"].peak_tflops == 70.0


def test_numbers_of_the_guides():
    """NVLink of an A100 is 300 GB/s one way, HDR 25."""
    assert find_machine("a100-80gb").link_bandwidth == 300.0
    assert find_machine("A100-80GB").network_bandwidth == 25.0
    assert find_machine("V100-32GB").half_dtype == "float16"


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown GPU 'H10'; did you mean H100\?.*allowed: A100"):
        find_machine("H10")


def test_a_machine_of_the_user(tmp_path):
    file = tmp_path / "lab.toml"
    file.write_text('base = "h100"\ngpus_per_node = 4\nnetwork_bandwidth = 12\n')
    machine = find_machine(str(file))
    assert machine.base == "H100"
    assert price_of(machine, {"h100": 2.0}) == 2.0
    assert price_of(machine, {"h100": 2.0, "lab": 1.0}) == 1.0
    assert machine.name == "lab"
    assert machine.gpus_per_node == 4
    assert machine.network_bandwidth == 12.0
    assert machine.peak_tflops == 989.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory_gb = 80", "unknown key memory_gb; did you mean memory_gib"),
        ("gpus_per_node = 1.5", "gpus_per_node = 1.5: expected a whole number"),
        ("memory_gib = 0", "memory_gib = 0: expected a number above 0"),
        ("memory_gib = nan", "expected a number above 0"),
        ("memory_gib = true", "memory_gib = True: expected a number"),
        ("half_dtype = 'fp8'", "expected bfloat16 or float16"),
        ("memory_gib = 10", "expected peak_tflops, memory_bandwidth"),
        ("base = 'other.toml'", "expected one of A100-40GB"),
        ("base = 'H1000'", "did you mean H100"),
        ("memory_gib = [", "lab.toml: "),
    ],
)
def test_a_wrong_machine_is_refused(tmp_path, text, message):
    file = tmp_path / "lab.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_machine(file)


def test_a_price_that_is_not_known_is_none(tmp_path):
    h100 = MACHINES["H100"]
    prices = read_prices(None, h100)
    assert price_of(MACHINES["A100-80GB"], prices) == 1.99
    assert price_of(MACHINES["MI300X"], prices) is None
    file = tmp_path / "prices.toml"
    file.write_text("mi300x = 2\nh100 = 1.5\n")
    prices = read_prices(file, h100)
    assert price_of(MACHINES["MI300X"], prices) == 2.0
    assert price_of(h100, prices) == 1.5
    file.write_text("H100 = 0\n")
    with pytest.raises(ConfigError, match="H100 = 0: expected dollars"):
        read_prices(file, h100)


def test_prices_are_of_known_machines(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text("lab = 1\n")
    lab = replace(MACHINES["H100"], name="lab", base="H100")
    assert price_of(lab, read_prices(file, lab)) == 1.0
    with pytest.raises(ConfigError, match=r"unknown GPU lab; allowed: H100, A100-40GB"):
        read_prices(file, MACHINES["H100"])
    file.write_text("H10 = 1\n")
    with pytest.raises(ConfigError, match=r"unknown GPU H10; did you mean H100\?; allowed: lab,"):
        read_prices(file, lab)


def use_machine(folder: Path, data: bytes) -> None:
    (folder / "machine.toml").write_bytes(data)
    machine = read_machine(folder / "machine.toml")
    assert machine.memory_bytes > 0
    collective = Collective("tp", "all_reduce", 2, 1, 10)
    degrees = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}
    assert collective_seconds(collective, degrees, machine, Rates()) >= 0


def use_prices(folder: Path, data: bytes) -> None:
    (folder / "prices.toml").write_bytes(data)
    lab = replace(MACHINES["H100"], name="lab")
    assert all(price > 0 for price in read_prices(folder / "prices.toml", lab).values())


MACHINE = b'base = "H100"\ngpus_per_node = 4\nnetwork_bandwidth = 12.5\nhalf_dtype = "float16"\n'
FUZZED = {
    "machine": Reader("text", given(MACHINE), use_machine),
    "prices": Reader("text", given(b"H100 = 2.5\nlab = 1\n"), use_prices),
}
