"""Which machine of the table a device is, by its name."""

from __future__ import annotations

import pytest

from titanlite.config.load import load_config
from titanlite.model.flavors import FLAVORS
from titanlite.tools.plan.check import comparison, machine_of


@pytest.mark.parametrize(
    ("device", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA GB200", "GB200-NVL72"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM2e", None),  # the PCIe card
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("CPU", None),
    ],
)
def test_a_device_is_found_by_the_words_of_its_name(device, machine):
    found = machine_of(device)
    assert (found.name if found else None) == machine


def test_prediction_and_measurement_stand_side_by_side():
    config = load_config(["llama3_8b", "--training.global_batch_size=8"])
    row = {"tps": 5000.0, "memory_gib": 60.0}
    line = comparison(config, FLAVORS["llama3_8b"], 8, "NVIDIA H100 80GB HBM3", row)
    assert line.startswith("plan: predicted ")
    assert "measured 60.0 GiB and 5,000 (" in line
    assert comparison(config, FLAVORS["llama3_8b"], 8, "CPU", row) == ""
