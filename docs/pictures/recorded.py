"""What the pictures show: recorded from models, placements and steps, not written by hand.

What it is: functions that processes of a pool run. Each builds a small model in a layout, with the
parts that train.py uses, and returns what a rank has or does.
Why it is here: a picture that is drawn from the program cannot show what the program does not do.
What it costs: a second each, and no more memory than the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from titanlite.config.load import load_config
from titanlite.config.schema import Config
from titanlite.distributed.dtensor import local_part
from titanlite.distributed.mesh import Mesh
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.model.llama import Llama
from titanlite.parallel import expert_parallel
from titanlite.parallel.context_parallel import local_positions
from titanlite.parallel.expert_parallel import exchange
from titanlite.parallel.parallelize import assign_shard, split_and_parallelize
from titanlite.parallel.step import build_step_parts
from titanlite.rules.check import check_layout
from titanlite.tools.plan.recorder import Call, Recorder
from titanlite.tools.plan.trace import count_step, take_step
from titanlite.tools.torch_private import join_pretended_group

CPU = torch.device("cpu")
# A model whose numbers of rows differ, so that a picture cannot mix them up
SMALL = [
    "debug",
    "--run.device=cpu",
    "--model.dim=32",
    "--model.num_layers=3",
    "--model.num_heads=4",
    "--model.num_kv_heads=2",
    "--model.ffn_dim=48",
    "--model.vocab_size=128",
    "--training.seq_len=16",
    "--training.local_batch_size=2",
    "--training.global_batch_size=8",
    "--training.compute_dtype=float32",
    "--compile.enabled=false",
]
LLAMA_1B = [  # on 8 GPUs
    "llama3_1b",
    "--run.device=cpu",
    "--parallel.dp_shard=8",
    "--training.seq_len=4096",
    "--training.local_batch_size=1",
    "--training.global_batch_size=8",
    "--training.compute_dtype=bfloat16",
    "--compile.enabled=false",
]


class Held(NamedTuple):
    """The part of a matrix that a rank holds; the last row and column are not included."""

    name: str
    shape: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]


class Expert(NamedTuple):
    """What a rank of a mixture of experts holds and exchanges."""

    held: list[Held]
    expert_shard: int
    ep: int
    sent: list[int]  # rows to each rank of ep, in the first all-to-all of a block
    received: list[int]


class Output(NamedTuple):
    """A module's output, as a rank has it."""

    module: str
    shape: tuple[int, ...]


class Collective(NamedTuple):
    """A collective of a rank."""

    kind: str
    axis: str


class Step(NamedTuple):
    """Bytes that were held after each change, by category, and the change at which each part of the
    step began.
    """

    held: list[dict[str, int]]
    parts: list[tuple[str, int]]


def settings(options: list[str], world_size: int) -> tuple[Config, LlamaConfig, dict[str, int]]:
    """A config, its model, and the degrees of its layout."""
    config = load_config(options)
    llama = resolve_flavor(config.model, 0)
    return config, llama, check_layout(config, llama, world_size)


def build(options: list[str]) -> tuple[Config, Llama, Mesh]:
    """This rank's part of a model that is not divided into stages."""
    config, llama, degrees = settings(options, dist.get_world_size())
    mesh = Mesh("cpu", degrees, config.comm.group_timeout_seconds, config.parallel.ep)
    with torch.device("meta"):
        model = Llama(llama, config.training.seq_len)
    (part,) = split_and_parallelize(model, config, mesh, compiled=False)
    part.to_empty(device=CPU)
    part.reset_rope(CPU)
    return config, part, mesh


def held_by_rank(options: list[str]) -> list[Held]:
    """The part of each parameter of the first block that this rank holds.

    Each element gets its own number, as a training run gets its weights, so the numbers that a rank
    then has say which elements it holds.
    """
    _, part, _ = build(options)
    return [
        _held(name, parameter.detach()) for name, parameter in part.layers["0"].named_parameters()
    ]


def mixture_of_rank(options: list[str]) -> Expert:
    """What this rank holds of the first block, and sends in a forward with random tokens."""
    held = held_by_rank(options)
    config, part, mesh = build(options)
    part.init_weights(0, assign_shard, CPU)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (config.training.local_batch_size, config.training.seq_len)
    tokens = torch.randint(part.config.vocab_size, shape, generator=generator)
    sizes: list[tuple[list[int], list[int]]] = []

    def note(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        sizes.append((sent, received))
        return exchange(rows, sent, received, group)

    with mock.patch.object(expert_parallel, "exchange", note), torch.no_grad():
        part(tokens)
    line = {axis: mesh[axis].get_local_rank() for axis in ("expert_shard", "ep")}
    return Expert(held, line["expert_shard"], line["ep"], *sizes[0])


def _held(name: str, parameter: torch.Tensor) -> Held:
    numbers = torch.arange(float(parameter.numel())).reshape(parameter.shape)
    assign_shard(parameter, numbers)
    columns = parameter.numel() // parameter.shape[0]  # of an expert, all its rows
    own = local_part(parameter).flatten().int()
    rows = _without_gaps(own // columns)
    return Held(
        name.removesuffix(".weight"),
        (parameter.shape[0], columns),
        rows,
        _without_gaps(own % columns),
    )


def _without_gaps(numbers: torch.Tensor) -> tuple[int, int]:
    """The first number and the one after the last; between them all occur."""
    found = numbers.unique().tolist()
    assert found == list(range(found[0], found[-1] + 1))
    return found[0], found[-1] + 1


class Events(Recorder):
    """Also notes the order of collectives, and what was held after each change."""

    def __init__(self, mesh: Mesh, vocab_size: int) -> None:
        super().__init__(mesh, vocab_size)
        self.events: list[Output | Collective] = []
        self.step = Step([], [])
        self.in_step = False

    def count(self, call: Call) -> None:
        super().count(call)
        if call.size > 1:
            self.events.append(Collective(call.kind, call.axis))

    def _add(self, category: str, nbytes: int) -> None:
        super()._add(category, nbytes)
        if self.in_step:
            self.step.held.append(dict(self.held))

    def enter(self, part: str) -> None:
        super().enter(part)
        self.step.parts.append((part, len(self.step.held)))

    def __enter__(self) -> Events:
        self.in_step = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.in_step = False


def forward_of_block(options: list[str]) -> list[Output | Collective]:
    """What happens on this rank in the forward of the first block, in order."""
    config, part, mesh = build(options)
    recorder = Events(mesh, 0)
    block = part.layers["0"]
    for name, module in block.named_modules():
        if name and next(module.parameters(), None) is not None:
            module.register_forward_hook(_noting(recorder, name))
    block.register_forward_hook(lambda *arguments: recorder.events.append(Output("block", ())))
    tokens = torch.zeros(config.training.local_batch_size, config.training.seq_len, dtype=torch.int)
    with recorder, torch.no_grad():
        # What comes before the block is not shown
        block.register_forward_pre_hook(lambda *arguments: recorder.events.clear())
        part(tokens)
    return recorder.events[: recorder.events.index(Output("block", ()))]


def _noting(recorder: Events, name: str) -> Callable[..., None]:
    def note(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        recorder.events.append(Output(name, tuple(local_part(output).shape)))

    return note


def calls_of_fsdp(options: list[str]) -> list[tuple[str, str]]:
    """Records (what, unit) of each call of FSDP in the second step, in the order in which the host
    makes them; the names are the labels of a trace. The unit of the model itself is empty.
    """
    config, part, mesh = build(options)
    parts = build_step_parts([part], config, mesh, CPU, compiled=False)
    take_step(config, parts)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        take_step(config, parts)
    events = sorted((event.time_range.start, event.name) for event in profile.events() or ())
    return list(_calls(name for _, name in events if name.startswith("FSDP::")))


def _calls(labels: Iterator[str]) -> Iterator[tuple[str, str]]:
    for label in labels:
        what, _, unit = label.removeprefix("FSDP::").partition(" (")
        yield what, unit.removesuffix(")")


def positions(options: list[str]) -> list[int]:
    """The positions of a sequence that this rank of the cp axis computes."""
    config, _, degrees = settings(options, dist.get_world_size())
    mesh = Mesh("cpu", degrees, config.comm.group_timeout_seconds)
    method = config.parallel.cp_method
    return local_positions(config.training.seq_len, mesh["cp"], method).tolist()


def memory_of_step(options: list[str], world_size: int) -> Step:
    """A step of rank 0 on pretended tensors. The process joins no group before."""
    join_pretended_group(0, world_size)
    config, llama, degrees = settings(options, world_size)
    mesh = Mesh("cpu", degrees, config.comm.group_timeout_seconds)
    made: list[Events] = []

    def make(mesh: Mesh, vocab_size: int) -> Recorder:
        made.append(Events(mesh, vocab_size))
        return made[0]

    count_step(config, llama, mesh, make=make)
    return made[0].step
