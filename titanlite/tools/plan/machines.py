"""Machines: what a GPU computes, holds and sends, and how many are in a node.

What it is: a table of common machines, each with the sources of its numbers, the reader of a user's
own (TOML), and prices per GPU-hour. The peak of bf16 products is that of `model/flops.py`. Imports
no torch.
Why it is here: memory and step time depend on these numbers. They are the peaks of data sheets;
`step_time.py` has the fractions that programs reach.

Units: memory in GiB that a program can allocate, which is less than the name of the GPU says, since
the driver keeps a part; TFLOP/s without sparsity; bandwidths in 10^9 bytes per second, of a GPU
and one direction; latencies in microseconds. A node here is the group of GPUs that the fast links
connect: 72 of an NVL72.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.mistakes import suggestion
from titanlite.model.flops import PEAK_TFLOPS
from titanlite.runtime.documents import read_toml
from titanlite.runtime.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """A kind of GPU in its node."""

    name: str
    memory_gib: float
    peak_tflops: float  # of bfloat16 products; of float16 where there is no bfloat16
    float32_tflops: float
    float8_tflops: float  # 0: has none
    memory_bandwidth: float
    link_bandwidth: float  # to the other GPUs of the node
    gpus_per_node: int
    network_bandwidth: float  # to other nodes
    link_latency_us: float = 10.0  # of a step of a collective, with its launch
    network_latency_us: float = 25.0
    half_dtype: str = "bfloat16"
    generation: str = ""  # of the GPU, which says how fast attention kernels are
    source: str = ""
    base: str = ""  # for a user's machine: the one in the table whose rates and price it takes

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)


# In the order of help texts. Memory: torch.cuda.get_device_properties of such devices.
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            "A100-40GB",
            memory_gib=39.4,
            peak_tflops=PEAK_TFLOPS["A100"],
            float32_tflops=19.5,
            float8_tflops=0.0,
            memory_bandwidth=1555.0,
            link_bandwidth=300.0,
            gpus_per_node=8,
            network_bandwidth=25.0,
            generation="ampere",
            source="NVIDIA A100 data sheet (SXM, 40 GB); DGX A100: a 200 Gb/s HDR port per GPU",
        ),
        Machine(
            "A100-80GB",
            memory_gib=79.2,
            peak_tflops=PEAK_TFLOPS["A100"],
            float32_tflops=19.5,
            float8_tflops=0.0,
            memory_bandwidth=2039.0,
            link_bandwidth=300.0,
            gpus_per_node=8,
            network_bandwidth=25.0,
            generation="ampere",
            source="NVIDIA A100 data sheet (SXM, 80 GB); DGX A100: a 200 Gb/s HDR port per GPU",
        ),
        Machine(
            "H100",
            memory_gib=79.1,
            peak_tflops=PEAK_TFLOPS["H100"],
            float32_tflops=66.9,
            float8_tflops=1979.0,
            memory_bandwidth=3352.0,
            link_bandwidth=450.0,
            gpus_per_node=8,
            network_bandwidth=50.0,
            generation="hopper",
            source="NVIDIA H100 data sheet (SXM, 80 GB HBM3, 700 W); DGX H100: 400 Gb/s per GPU",
        ),
        Machine(
            "H100-96GB-500W",
            memory_gib=95.0,
            peak_tflops=PEAK_TFLOPS["H100"],
            float32_tflops=66.9,
            float8_tflops=1979.0,
            memory_bandwidth=2400.0,
            link_bandwidth=450.0,
            gpus_per_node=8,
            network_bandwidth=50.0,
            generation="hopper",
            source="torchtitan's benchmarks: H100 with 96 GB HBM2e, limited to 500 W, in Grand "
            "Teton; 400 Gb/s per GPU",
        ),
        Machine(
            "H200",
            memory_gib=139.7,
            peak_tflops=PEAK_TFLOPS["H200"],
            float32_tflops=66.9,
            float8_tflops=1979.0,
            memory_bandwidth=4800.0,
            link_bandwidth=450.0,
            gpus_per_node=8,
            network_bandwidth=50.0,
            generation="hopper",
            source="NVIDIA H200 data sheet (SXM); DGX H200: 400 Gb/s per GPU",
        ),
        Machine(
            "B200",
            memory_gib=178.3,
            peak_tflops=PEAK_TFLOPS["B200"],
            float32_tflops=75.0,
            float8_tflops=4500.0,
            memory_bandwidth=8000.0,
            link_bandwidth=900.0,
            gpus_per_node=8,
            network_bandwidth=50.0,
            generation="blackwell",
            source="NVIDIA DGX B200 data sheet (eighths of it); 178 GiB usable in torchtitan's "
            "fork PR 19; 400 Gb/s per GPU",
        ),
        Machine(
            "GB200-NVL72",
            memory_gib=184.0,
            peak_tflops=PEAK_TFLOPS["GB200"],
            float32_tflops=80.0,
            float8_tflops=5000.0,
            memory_bandwidth=8000.0,
            link_bandwidth=900.0,
            gpus_per_node=72,
            network_bandwidth=50.0,
            generation="blackwell",
            source="NVIDIA GB200 NVL72 data sheet (72nds of it); 400 Gb/s per GPU",
        ),
        Machine(
            "GB300-NVL72",
            memory_gib=268.0,
            peak_tflops=PEAK_TFLOPS["GB300"],
            float32_tflops=80.0,
            float8_tflops=5000.0,
            memory_bandwidth=8000.0,
            link_bandwidth=900.0,
            gpus_per_node=72,
            network_bandwidth=100.0,
            generation="blackwell",
            source="NVIDIA GB300 NVL72 data sheet (72nds of it); 800 Gb/s per GPU",
        ),
        Machine(
            "MI300X",
            memory_gib=191.5,
            peak_tflops=PEAK_TFLOPS["MI300X"],
            float32_tflops=163.4,
            float8_tflops=2614.9,
            memory_bandwidth=5300.0,
            link_bandwidth=448.0,
            gpus_per_node=8,
            network_bandwidth=50.0,
            source="AMD MI300X data sheet: 7 Infinity Fabric links of 64 GB/s each way; 400 Gb/s "
            "per GPU",
        ),
        Machine(
            "L40S",
            memory_gib=44.4,
            peak_tflops=PEAK_TFLOPS["L40S"],
            float32_tflops=91.6,
            float8_tflops=733.0,
            memory_bandwidth=864.0,
            link_bandwidth=25.0,
            gpus_per_node=8,
            network_bandwidth=6.25,
            source="NVIDIA L40S data sheet; PCIe 4 x16; AWS g6e.48xlarge: 400 Gb/s for 8",
        ),
        Machine(
            "A6000",
            memory_gib=47.5,
            peak_tflops=PEAK_TFLOPS["A6000"],
            float32_tflops=38.7,
            float8_tflops=0.0,
            memory_bandwidth=768.0,
            link_bandwidth=25.0,
            gpus_per_node=8,
            network_bandwidth=12.5,
            generation="ampere",
            source="NVIDIA RTX A6000 data sheet; PCIe 4 x16",
        ),
        Machine(
            "RTX-4090",
            memory_gib=23.5,
            peak_tflops=165.2,
            float32_tflops=82.6,
            float8_tflops=330.3,
            memory_bandwidth=1008.0,
            link_bandwidth=12.0,
            gpus_per_node=8,
            network_bandwidth=1.25,
            source="NVIDIA Ada architecture paper (fp32 accumulation); PCIe 4 x16 without "
            "peer-to-peer, through the CPU's memory; 10 Gb/s Ethernet per GPU assumed",
        ),
        Machine(
            "V100-32GB",
            memory_gib=31.7,
            peak_tflops=125.0,
            float32_tflops=15.7,
            float8_tflops=0.0,
            memory_bandwidth=900.0,
            link_bandwidth=150.0,
            gpus_per_node=8,
            network_bandwidth=6.25,
            half_dtype="float16",
            source="NVIDIA V100 data sheet (SXM2); DGX-1: four 100 Gb/s EDR ports for 8",
        ),
        Machine(
            "A10G",
            memory_gib=22.0,
            peak_tflops=PEAK_TFLOPS["A10G"],
            float32_tflops=35.0,
            float8_tflops=0.0,
            memory_bandwidth=600.0,
            link_bandwidth=12.0,
            gpus_per_node=8,
            network_bandwidth=1.56,
            generation="ampere",
            source="NVIDIA A10G data sheet; PCIe 4 x16 through the CPU; AWS g5.48xlarge: "
            "100 Gb/s for 8",
        ),
    )
}

# US dollars per GPU-hour. They are examples: prices change by the month, and a user's file replaces
# them.
PRICES: dict[str, float] = {"A100-80GB": 1.99, "H100": 3.29}
# Keys that a user's file must have; the others have defaults
REQUIRED = (
    "memory_gib",
    "peak_tflops",
    "memory_bandwidth",
    "link_bandwidth",
    "gpus_per_node",
    "network_bandwidth",
)


def find_machine(name: str) -> Machine:
    """The machine of that name in the table, or of a TOML file. Raises ConfigError."""
    for known, machine in MACHINES.items():
        if name.lower() == known.lower():
            return machine
    if name.endswith(".toml"):
        return read_machine(Path(name))
    names = list(MACHINES)
    by_lower = {known.lower(): known for known in names}
    hint = suggestion(name.lower(), list(by_lower), cutoff=0.5)
    for lower, known in by_lower.items():
        hint = hint.replace(lower, known)
    raise ConfigError(
        f"unknown GPU {name!r}{hint}; allowed: {', '.join(names)}, or a .toml file with "
        f"{', '.join(REQUIRED)}"
    )


def read_machine(path: Path) -> Machine:
    """Reads a user's machine: the fields of `Machine` as keys of a TOML file.

    `base = "H100"` takes what is not given from a machine of the table, its rates and price too.
    Raises ConfigError.
    """
    table = _read_toml(path)
    values: dict[str, object] = {"name": path.stem, "float32_tflops": 0.0, "float8_tflops": 0.0}
    base = table.pop("base", None)
    if base is not None:
        if not isinstance(base, str) or base.endswith(".toml"):
            raise ConfigError(f"{path}: base = {base!r}: expected one of {', '.join(MACHINES)}")
        known = find_machine(base)
        values = dataclasses.asdict(known) | {"name": path.stem, "base": known.name}
    fields = {field.name: field.type for field in dataclasses.fields(Machine)}
    problems = []
    for key, value in table.items():
        if key not in fields:
            hint = suggestion(key, list(fields))
            problems.append(f"{path}: unknown key {key}{hint}; allowed: {', '.join(fields)}")
            continue
        problem = _problem(key, value, fields[key])
        if problem:
            problems.append(f"{path}: {key} = {value!r}: {problem}")
            continue
        values[key] = value
    missing = [key for key in REQUIRED if key not in values]
    if missing and not problems:
        problems.append(f"{path}: expected {', '.join(missing)}, or base = the name of a GPU")
    if problems:
        raise ConfigError(problems)
    return Machine(**values)  # type: ignore[arg-type]


def _problem(key: str, value: object, kind: object) -> str:
    """The mistake in a value of a user's machine; empty if there is none."""
    if kind == "str":
        if not isinstance(value, str):
            return "expected text"
        if key == "half_dtype" and value not in ("bfloat16", "float16"):
            return "expected bfloat16 or float16"
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "expected a number"
    if kind == "int" and not isinstance(value, int):
        return "expected a whole number"
    may_be_zero = key.endswith(("_us", "float8_tflops", "float32_tflops"))
    if not 0 <= value <= 1e9 or (value == 0 and not may_be_zero):  # also not NaN
        return "expected a number above 0"
    return ""


def read_prices(path: Path | None, machine: Machine) -> dict[str, float]:
    """Dollars per GPU-hour by the name of a machine: the built-in ones, and those of a TOML file.

    The file has lines as `H100 = 2.5`, for machines of the table and for `machine`, the chosen one.
    A machine whose price is not known is left out. Raises ConfigError.
    """
    prices = dict(PRICES)
    if path is None:
        return prices
    names = list(dict.fromkeys([machine.name, *MACHINES]))
    by_lower = {name.lower(): name for name in reversed(names)}
    for name, value in _read_toml(path).items():
        if name.lower() not in by_lower:
            raise ConfigError(
                f"{path}: unknown GPU {name[:60]}{suggestion(name, names, cutoff=0.5)}; allowed: "
                f"{', '.join(names)}"
            )
        problem = _problem("", value, "float")
        if problem or not isinstance(value, (int, float)):
            raise ConfigError(f"{path}: {name} = {value!r}: expected dollars per GPU-hour, above 0")
        prices[by_lower[name.lower()]] = float(value)
    return prices


def price_of(machine: Machine, prices: dict[str, float]) -> float | None:
    """Dollars per GPU-hour of the machine, else of its base; None if neither is known."""
    by_lower = {name.lower(): price for name, price in prices.items()}
    own = by_lower.get(machine.name.lower())
    return by_lower.get(machine.base.lower()) if own is None else own


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return read_toml(path)
    except (OSError, ValueError) as error:
        message = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {message}") from None
