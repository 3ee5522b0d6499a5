"""Waits: which of torch's ways to wait for other ranks are seen, and only those that delay the
computation.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from runs import train_run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titanlite.observe import waits
from titanlite.observe.waits import time_streams, time_waits, timed
from titanlite.parallel.expert_parallel import exchange

CPU, DELAY = torch.device("cpu"), 0.5


class Recorder:
    """Counts waits and their seconds; as in `StepTimes`, a wait within a wait is none."""

    has_waits = True

    def __init__(self) -> None:
        self.count, self.seconds, self.inside = 0, 0.0, False

    def begin_wait(self) -> bool:
        if self.inside:
            return False
        self.inside, self.started = True, time.perf_counter()
        return True

    def end_wait(self) -> None:
        self.inside = False
        self.count, self.seconds = self.count + 1, self.seconds + time.perf_counter() - self.started


def functions_of_torch() -> dict[str, object]:
    """The functions of torch's modules and the methods of their classes, by name."""
    found: dict[str, object] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "torch":
            continue
        for name, value in list(vars(module).items()):
            if callable(value):
                found[f"{module_name}.{name}"] = value
            if isinstance(value, type) and value.__module__.split(".")[0] == "torch":
                methods = {
                    f"{value.__module__}.{name}.{key}": of for key, of in vars(value).items()
                }
                found |= {key: of for key, of in methods.items() if callable(of)}
    return found


def replaced_by_a_run(arguments: list[str]) -> list[str]:
    """The functions of torch that a run replaces, and the operators for which it adds kernels."""
    before, kernels = functions_of_torch(), set(torch.library._impls)
    assert train_run(arguments) == 0
    after = functions_of_torch()
    replaced = [name for name, function in before.items() if after.get(name) is not function]
    return sorted(replaced) + sorted(set(torch.library._impls) - kernels)


@pytest.mark.parametrize("layout", ["dp_shard", "tp", "cp", "pp"])
def test_a_plain_run_replaces_no_function_of_torch(pool, arguments, layout):
    assert pool.run(2, replaced_by_a_run, [*arguments, f"--parallel.{layout}=2"]) == [[], []]


def test_a_run_that_measures_waits_replaces_what_waits_py_says(pool, arguments):
    for replaced in pool.run(2, replaced_by_a_run, [*arguments, "--metrics.rank_waits=true"]):
        assert {name.split(".")[-1] for name in replaced} == {
            "wait",
            "_c10d_functional/wait_tensor/CPU",
        }


def all_reduce() -> None:
    x = torch.ones(3) * (1 + dist.get_rank())
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3


def message() -> None:
    x, other = torch.full((2,), float(dist.get_rank())), torch.empty(2)
    peer = 1 - dist.get_rank()
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, other, peer)]
    ):
        work.wait()
    assert other.tolist() == [float(peer)] * 2


def dtensor() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0)
    x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    assert torch.equal(x.redistribute(mesh, [Replicate()]).to_local(), whole)


def compiled_functional_collective() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD).sin()

    x = torch.ones(3)
    assert torch.equal(
        torch.compile(function, backend="aot_eager", fullgraph=True)(x), torch.full((3,), 4.0).sin()
    )


def backward_through_dtensor() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    x.redistribute(mesh, [Replicate()]).to_local().square().sum().backward()
    assert torch.equal(x.grad.to_local(), 2 * x.to_local())


def sharded_model() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


OPERATIONS = [
    all_reduce,
    message,
    dtensor,
    compiled_functional_collective,
    backward_through_dtensor,
    sharded_model,
]


def called_collectives() -> dict[str, int]:
    """The calls of each wrapped collective, in a step of a model that is sharded and replicated,
    and when rows travel to experts.
    """
    calls = dict.fromkeys(waits.COLLECTIVES, 0)

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **keys: Any) -> Any:
            calls[name] += 1
            return function(*args, **keys)

        return call

    with contextlib.ExitStack() as stack:
        for name in waits.COLLECTIVES:
            function = counted(name, getattr(dist, name))
            stack.enter_context(mock.patch.object(dist, name, function))
        model = torch.nn.Linear(4, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 4)).sum().backward()
        exchange(torch.ones(4, 2), [1] * 4, [1] * 4, dist.group.WORLD)
    return calls


def test_a_step_calls_the_collectives_that_are_timed(pool):
    """By the names of this release of torch: wrapping a name that is not called times nothing."""
    for calls in pool.run(4, called_collectives):
        assert min(calls.values()) >= 1


class Ticks(threading.Thread):
    """Counts while other threads let it run."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self.start()

    def run(self) -> None:
        while True:
            time.sleep(0.01)
            self.count += 1


def waited_for_the_other(operation: Any) -> tuple[int, float, float, int]:
    """Rank 1 comes later. Number and seconds of the waits, the seconds of it all, and another
    thread's ticks in them.

    After a first call.
    """
    operation()
    recorder, ticks = Recorder(), Ticks()
    time_waits(recorder, CPU)
    dist.barrier()
    recorder.count, recorder.seconds, ticks.count = 0, 0.0, 0
    started = time.perf_counter()
    if dist.get_rank() == 1:
        time.sleep(DELAY)
    operation()
    return recorder.count, recorder.seconds, time.perf_counter() - started, ticks.count


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_waiting_for_a_late_rank_is_seen(pool, operation):
    """Whichever way it waits, also where the operation was compiled before waits were timed."""
    early, late = pool.run(2, waited_for_the_other, operation)
    assert early[0] >= 1
    assert late[0] >= 1
    assert 0.8 * DELAY < early[1] < early[2], (
        "the rank that is early waits for nearly all of the delay"
    )
    assert late[1] < 0.5 * DELAY
    assert early[3] > 3, "waits release the GIL: gloo's and the watchdog's threads need it"


def test_an_error_ends_the_wait():
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError):
        timed(lambda: 1 / 0, recorder.begin_wait, recorder.end_wait)()
    assert (recorder.count, recorder.inside) == (1, False)


class Stream:
    """A pretended CUDA stream, with torch's two ways to wait."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.waited: list[str] = []

    def wait_event(self, event: str) -> None:
        self.waited.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> str:
        return "all that the other stream has"


def test_of_streams_only_that_of_the_computation_is_timed(monkeypatch):
    class Pretended(Stream):
        wait_event, wait_stream = Stream.wait_event, Stream.wait_stream

    recorder, computing, gathering = Recorder(), Pretended(), Pretended()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    time_streams(Pretended, recorder.begin_wait, recorder.end_wait)
    gathering.wait_event("weights are free")
    gathering.wait_stream(computing)
    assert recorder.count == 0
    computing.wait_event("weights have come")
    assert recorder.count == 1
    computing.wait_stream(gathering)
    assert recorder.count == 1, (
        "that is how the computation waits for a batch, which is no communication"
    )
    assert computing.waited == ["weights have come", "all that the other stream has"]
    assert gathering.waited == ["weights are free", "all that the other stream has"]


def test_all_that_is_patched_on_a_gpu_exists():
    assert all(callable(getattr(dist, name)) for name in waits.COLLECTIVES)
    assert callable(torch.cuda.Stream.wait_event)
    assert callable(torch.cuda.Stream.wait_stream)
    for operator in (waits.SHARD_ALL_TO_ALL, waits.WAIT_TENSOR):
        assert operator.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeExplicitAutograd)
