"""Types a step: no term of a sum is used as the whole, and nothing that varies is taken for equal.

    python tests/support/typed_step.py '[["dp_shard=2", ""], ["tp=2", "partial-sums"]]'

prints, as a JSON list, the type error of each pair of a layout and a planted fault; "" if there is
none. A layout has one axis, because a DTensor drops the types of all other axes.

What it is: one step of a small model, as one rank of a group whose other ranks do not exist, while
spmd_types (a package for developers) watches each operation. It gives each tensor a type along the
axis that is larger than 1, and rejects an operation whose arguments do not fit:

    R  equal on all ranks; each rank's gradient is a term of a sum
    I  equal on all ranks, and so is the gradient
    V  another value on each rank
    P  a term of a sum: linear operations and sums over ranks only

Why it is here: `titanlite verify` compares values with a reference, within a tolerance. Types need
neither, and hold for all values; but they see neither order nor content nor factors, no norms, no
pipelines, nothing inside of a DTensor, and no operation without gradients (clipping, validation).
What the annotations below claim, and the checker takes for granted:
* Weights are equal at the start. A weight that FSDP gathers is R if the mesh that its gradients are
  summed over has the axis, else I.
* Batches vary along dp_replicate and dp_shard and are equal along cp and tp. Positions, RoPE and
  masks vary along cp.
* The loss of a rank, and its counts of targets, are terms of a sum along the data axes and cp; along
  tp each rank computes the same loss. After `Mesh.sum_losses` the loss is equal.
* The identity functions of FSDP, of the routers and of the exchange of rows keep a type; the chunked
  loss returns I along tp, where it sums inside, and V along the axes over which tokens are cut.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from titanlite.config.schema import Config
from titanlite.data.rows import Batch, count_targets
from titanlite.distributed.mesh import Mesh
from titanlite.model.llama import Llama
from titanlite.optim import chunked_loss, router_balance
from titanlite.parallel import expert_parallel, step
from titanlite.parallel.context_parallel import AllGatherAttention
from titanlite.parallel.parallelize import assign_shard, split_and_parallelize
from titanlite.rules.check import check_layout
from titanlite.tools.faults.experiment import SMALL, llama_of, plant
from titanlite.tools.torch_private import join_pretended_group
from titanlite.tools.verify.compare import make_batch, take_rows
from titanlite.tools.verify.ladder import make_case

READS = ("dp_replicate", "dp_shard")  # ranks along these axes read different sequences
CPU = torch.device("cpu")


def chunked_rule(result: Tensor, *, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """Types the chunked loss: over a vocabulary that tp cuts, the sum is made inside."""
    allowed = {(spmd.R, spmd.V): spmd.I, (spmd.V, spmd.R): spmd.V}
    of_weight = spmd.get_local_type(weight)
    kinds = {}
    for axis, kind in spmd.get_local_type(hidden).items():
        if (kind, of_weight[axis]) not in allowed:
            raise spmd.SpmdTypeError(f"chunked loss of hidden {kind}, weight {of_weight[axis]}")
        kinds[axis] = allowed[kind, of_weight[axis]]
    for argument in (hidden, weight, labels):
        spmd.rules.ignore(argument)
    spmd.assert_type(result, kinds)


def register_functions() -> None:
    for identity in (router_balance.Observe, expert_parallel.AllToAll):
        spmd.register_local_autograd_function(identity)
    chunked_loss._Chunked.spmd_typecheck = staticmethod(chunked_rule)  # type: ignore[attr-defined]


class Typed:
    """Types the tensors of a step along one axis of the mesh."""

    def __init__(self, axis: str, mesh: Mesh) -> None:
        self.axis = axis
        self.group = mesh[axis].get_group()
        self.paused: list[Any] = []  # checks that are off while FSDP's hooks run

    def annotate(self, tensor: Tensor, varying: tuple[str, ...]) -> Tensor:
        same = spmd.I if self.axis == "tp" else spmd.R
        return spmd.assert_type(tensor, {self.axis: spmd.V if self.axis in varying else same})

    def as_term(self, value: Tensor) -> Tensor:
        """Makes a term of a sum of a value that varies over the axes that cut tokens."""
        varies = spmd.get_axis_local_type(value, self.axis) is spmd.V
        if not varies or self.axis == "tp":
            return value
        return spmd.reinterpret(value, self.group, src=spmd.V, dst=spmd.P)

    def watch(self, model: nn.Module) -> None:
        """Adds hooks: weights get types once they are gathered, and FSDP's own hooks run unchecked,
        and keep the types of what passes them.
        """
        # By name: a gathered weight is another tensor
        summed = {name for name, weight in model.named_parameters() if self.sums(weight)}
        for path, module in model.named_modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self.pause, prepend=True)
                module.register_forward_pre_hook(self.go_on)
                module.register_forward_hook(self.pause, prepend=True)
                module.register_forward_hook(self.go_on)
            if isinstance(module, FSDPModule) or module is model:
                hook = functools.partial(self.type_weights, summed, path)
                module.register_forward_pre_hook(hook)

    def sums(self, weight: Tensor) -> bool:
        """Whether FSDP sums the gradients of a weight over the axis."""
        if not isinstance(weight, DTensor):
            return False
        sizes = dict(
            zip(weight.device_mesh.mesh_dim_names or (), weight.device_mesh.shape, strict=True)
        )
        sizes.pop("tp", None)
        return dist.get_world_size() in sizes.values()

    def type_weights(self, summed: set[str], path: str, module: nn.Module, arguments: Any) -> None:
        for name, weight in module.named_parameters(path):
            if not isinstance(weight, DTensor) and not spmd.has_local_type(weight):
                spmd.assert_type(weight, {self.axis: spmd.R if name in summed else spmd.I})

    def pause(self, module: nn.Module, *passed: Any) -> None:
        check = spmd.no_typecheck()
        check.__enter__()
        self.paused.append((check, tree_leaves(passed[-1])))

    def go_on(self, module: nn.Module, *passed: Any) -> None:
        check, before = self.paused.pop()
        check.__exit__(None, None, None)
        for old, new in zip(before, tree_leaves(passed[-1]), strict=True):
            if new is not old and not isinstance(new, DTensor) and spmd.has_local_type(old):
                spmd.assert_type_like(new, old)


def type_step(config: Config) -> None:
    """Takes forward and backward of a step. Raises SpmdTypeError."""
    llama = llama_of(config)
    degrees = check_layout(config, llama, dist.get_world_size())
    (axis,) = [name for name in degrees if degrees[name] > 1]
    mesh = Mesh("cpu", degrees, config.comm.group_timeout_seconds, config.parallel.ep)
    typed = Typed(axis, mesh)
    with torch.device("meta"):
        model = Llama(llama, config.training.seq_len)
    (part,) = split_and_parallelize(model, config, mesh, compiled=False)
    part.to_empty(device=CPU)
    part.init_weights(0, assign_shard, CPU)
    parts = step.build_step_parts([part], config, mesh, CPU, compiled=False)
    stages = parts.stages
    loss = stages.runner.loss
    stages.runner.loss = lambda output, labels: typed.as_term(loss(output, labels))
    typed.watch(part)
    with spmd.set_current_mesh({axis: spmd.MeshAxis.of(typed.group)}):
        positions = [part.rope, stages.sharder.positions]
        for block in part.layers.values():
            attend = block.get_submodule("attention.attend")
            if isinstance(attend, AllGatherAttention):
                positions += attend.masks
        for tensor in positions:
            typed.annotate(tensor, ("cp",))
        batches = typed_batches(typed, config, llama.vocab_size, mesh.data_size)
        parts.balance.start_step(torch.tensor(1), 1.0)
        spmd.assert_type(parts.balance.tokens, {axis: spmd.R})
        for layer in parts.balance.layers.values():
            spmd.assert_type(layer.sums, {axis: spmd.P})
            spmd.assert_type(layer.load, {axis: spmd.R})
            spmd.assert_type(layer.mean_probability, {axis: spmd.R})
        with typecheck(strict_mode="strict", local=True):
            num_targets = mesh.sum_counts(typed.as_term(count_targets(batches)))
            losses = [stages.forward_backward(batch, num_targets) for batch in batches]
            typed.annotate(mesh.sum_losses(sum(losses[1:], losses[0])), ())
            parts.balance.finish_step()


def typed_batches(typed: Typed, config: Config, vocab_size: int, data_size: int) -> list[Batch]:
    """The local batches of a rank (B, S), two at most."""
    rows = make_batch(0, config, vocab_size)
    size = config.training.local_batch_size
    num_batches = min(2, config.training.global_batch_size // size // data_size)
    batches = [take_rows(rows, i * size, (i + 1) * size) for i in range(num_batches)]
    return [batch.apply(lambda tensor: typed.annotate(tensor, READS)) for batch in batches]


def problem_of(layout: str, fault: str = "") -> str:
    """Returns the type error of a step in a layout, with a fault planted; "" if there is none."""
    case = make_case([*SMALL, "--model.num_layers=3"], layout, "cpu")
    join_pretended_group(0, case.processes)
    try:
        with plant(fault):
            type_step(case.config)
    except spmd.SpmdTypeError as error:
        return str(error) or type(error).__name__
    finally:
        dist.destroy_process_group()
    return ""


if __name__ == "__main__":
    register_functions()
    json.dump([problem_of(layout, fault) for layout, fault in json.loads(sys.argv[1])], sys.stdout)
