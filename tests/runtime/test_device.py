"""The device of a process, its allocators, and the kernels that torch may choose."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import read_step
from messages import refused
from runs import curve, train_run

from titanlite.checkpoint.manifest import read_manifest
from titanlite.runtime.device import (
    FabricInfo,
    device_type,
    open_device,
    segments_can_grow,
    use_deterministic_operators,
)

ROOT = Path(__file__).parents[2]
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.mark.parametrize(
    ("name", "available", "expected"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_auto_is_cuda_where_there_is_one(monkeypatch, name, available, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert device_type(name) == expected


def test_a_device_that_torch_does_not_find_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused("run.device = cuda", "no such device", "auto", "cpu"):
        device_type("cuda")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_allocator_settings_are_kept(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for other in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:128")
    open_device("cuda")
    assert [v for k, v in os.environ.items() if k.endswith("ALLOC_CONF")] == [
        "max_split_size_mb:128"
    ]


class Management:
    """In place of the driver's library; `answers`: of each GPU to the question how GPUs are
    connected; None: this process may not use it.
    """

    def __init__(self, *answers: int | None) -> None:
        self.answers = answers

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count) -> int:
        count._obj.value = len(self.answers)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, device) -> int:
        device._obj.value = 1 + index.value
        return 4 if self.answers[index.value] is None else 0

    def nvmlDeviceGetGpuFabricInfoV(self, device, info) -> int:
        assert ctypes.sizeof(FabricInfo) == 36
        assert info._obj.version == 2 << 24 | 36
        answer = self.answers[device.value - 1]
        assert answer is not None
        return answer


@pytest.mark.parametrize(
    ("release", "library", "expected"),
    [
        ("2.11.0+cu130", Management(3), True),  # which does not ask
        ("2.13.0+cu130", Management(0, 0), True),
        ("2.13.0+cu130", Management(0, None, 0), True),
        ("2.13.0+cu130", Management(0, 3), False),
        ("2.13.0+cu130", Management(None), False),
        ("2.13.0+cu130", object(), False),
        ("2.13.0+cu130", None, False),
        ("2.11.0", None, False),
        ("2.15.0", Management(3), True),
    ],
)
def test_segments_grow_where_torchs_first_allocation_survives_it(
    monkeypatch, release, library, expected
):
    def load(name):
        assert name == "libnvidia-ml.so.1"
        if library is None:
            raise OSError(name)
        return library

    monkeypatch.setattr(torch, "__version__", release)
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert segments_can_grow() == expected


PAGES = """
import resource, torch
from titanlite.runtime.device import open_device
open_device("cpu")
counts = []
for _ in range(40):
    torch.ones(10_000_000)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(counts[-1] - counts[19])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no other C library is set")
@pytest.mark.parametrize(
    "name",
    [
        "",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
        ),
    ],
)
def test_freed_memory_is_used_again_unless_the_environment_says_otherwise(name):
    """Pages that the system gives out for twenty tensors of 40 MB, after twenty others: of at most
    2 MB each.
    """
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))
    }
    environment |= {"PYTHONPATH": str(ROOT)} | ({name: ""} if name else {})
    done = subprocess.run(
        [sys.executable, "-c", PAGES], env=environment, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) > 10 * 20) == bool(name)


def run_and_report(arguments: list[str]) -> tuple[bool, bool, str]:
    import torch._inductor.config as inductor_config

    assert train_run(arguments) == 0
    return (
        torch.are_deterministic_algorithms_enabled(),
        inductor_config.deterministic,
        os.environ[WORKSPACE],
    )


@pytest.mark.parametrize(
    ("processes", "more"),
    [
        (1, []),
        pytest.param(
            2,
            ["parallel.dp_shard=2", "compile.enabled", "compile.backend=aot_eager"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_runs_are_equal_bit_for_bit(pool, arguments, tmp_path, processes, more):
    arguments = [
        *arguments,
        "--training.steps=3",
        "--debug.deterministic",
        *(f"--{option}" for option in more),
    ]
    for name in ("a", "b"):
        found = pool.run(processes, run_and_report, [*arguments, f"--run.name={name}"])
        assert found == [(True, True, ":4096:8")] * processes
    assert curve(tmp_path / "a") == curve(tmp_path / "b")
    states = [
        torch.cat([tensor.flatten().double() for tensor in load(tmp_path / name)])
        for name in ("a", "b")
    ]
    assert torch.equal(*states)


def load(folder: Path) -> list[torch.Tensor]:
    """All parameters and moments of the last checkpoint."""
    path = folder / "checkpoints/step-3"
    manifest = read_manifest(path)
    names = [name for name in manifest.tensors if name.startswith(("model.", "optimizer."))]
    tensors = {name: torch.empty(manifest.tensors[name].shape) for name in names}
    tree: dict = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        tree.setdefault(part, {})[rest] = tensor
    read_step(path, manifest, tree)
    return list(tensors.values())


def test_a_workspace_for_which_cublas_is_reproducible_is_kept(monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)  # and restored afterwards
    try:
        for given, used in (("", ":4096:8"), (":16:8", ":16:8"), (":0:0", ":4096:8")):
            monkeypatch.setenv(WORKSPACE, given)
            use_deterministic_operators()
            assert os.environ[WORKSPACE] == used
    finally:
        torch.use_deterministic_algorithms(False)


def train_and_report(arguments: list[str], cudnn: str) -> tuple[bool, str]:
    import torch.compiler.config as compiler_config

    run = [*arguments, f"--run.name={cudnn}", f"--debug.cudnn_attention={cudnn}"]
    assert train_run(run) == 0
    return torch.backends.cuda.cudnn_sdp_enabled(), compiler_config.cache_key_tag


@pytest.mark.slow
def test_the_choice_reaches_torch_and_its_caches(pool, arguments):
    ((with_cudnn, plain),) = pool.run(1, train_and_report, arguments, "true")
    ((without, marked),) = pool.run(1, train_and_report, arguments, "false")
    assert (with_cudnn, without) == (True, False)
    assert marked != plain
