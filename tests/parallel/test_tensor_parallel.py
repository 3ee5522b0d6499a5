"""The plan covers every parameter, cuts what it says, and its loss is the loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from messages import assert_mentions
from model_builder import EVEN, build_stages
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel

from titanlite.distributed.mesh import Mesh
from titanlite.model.flavors import LlamaConfig
from titanlite.optim.loss import cross_entropy_sum
from titanlite.parallel.tensor_parallel import apply_tp, loss_parallel_cross_entropy_sum
from titanlite.rules.degrees import AXES
from titanlite.runtime.errors import ConfigError


def line(size: int):
    return Mesh("cpu", {axis: size if axis == "tp" else 1 for axis in AXES}, 60)["tp"]


def placements(llama: LlamaConfig) -> dict[str, str]:
    """What each parameter is on the tp axis: the dimension that is cut, or a copy."""
    found = {}
    for name, parameter in build_stages({"tp": 2}, llama=llama).model_parts[0].named_parameters():
        assert isinstance(parameter, DTensor)
        place = parameter.placements[parameter.device_mesh.mesh_dim_names.index("tp")]
        found[name] = "copy" if place == Replicate() else f"dim {place.dim}"
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_planned(pool, tied):
    (found, _) = pool.run(2, placements, dataclasses.replace(EVEN, tied_embeddings=tied))
    assert found["tok_embeddings.weight"] == "dim 0"
    assert ("output.weight" in found) == (not tied)
    for name, place in found.items():
        if "norm" in name:
            assert place == "copy", name
        elif name.rpartition(".")[0].endswith(("wo", "w2")):
            assert place == "dim 1", name
        else:
            assert place == "dim 0", name


def loss_and_gradient(ignore: bool) -> tuple[float, torch.Tensor]:
    """The loss of logits whose vocabulary is cut over two processes, and the gradient of this part."""
    mesh = line(2)
    logits, labels = make_logits(ignore)
    mine = logits.chunk(2, dim=-1)[mesh.get_local_rank()].clone().requires_grad_()
    with loss_parallel():
        loss = loss_parallel_cross_entropy_sum(mine, labels, mesh)
        (loss * 3).backward()
    return float(loss.detach()), mine.grad


def make_logits(ignore: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits, labels = (
        torch.randn(2, 5, 16, generator=generator) * 5,
        torch.randint(16, (2, 5), generator=generator),
    )
    if ignore:
        labels[0, :3] = -100
    return logits, labels


@pytest.mark.parametrize("ignore", [False, True])
def test_the_loss_on_a_cut_vocabulary_is_the_loss(pool, ignore):
    logits, labels = make_logits(ignore)
    logits.requires_grad_()
    loss = cross_entropy_sum(logits, labels)
    (loss * 3).backward()
    found = pool.run(2, loss_and_gradient, ignore)
    assert [value for value, _ in found] == pytest.approx([float(loss.detach())] * 2, rel=1e-6)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found], dim=-1), logits.grad)


def shapes_between_modules() -> dict[str, list[int]]:
    """Sizes of what modules of a block get, in a model with D = 32, S = 16 and hidden width 48."""
    part = build_stages({"tp": 2}, llama=EVEN).model_parts[0]
    block, seen = part.layers["1"], {}
    block.register_forward_pre_hook(lambda module, args: seen.update(block=list(args[0].shape)))
    block.attention.attend.register_forward_pre_hook(
        lambda module, args: seen.update(q=list(args[0].shape), k=list(args[1].shape))
    )
    part.register_forward_hook(lambda module, args, output: seen.update(logits=list(output.shape)))
    part(torch.zeros(2, 16, dtype=torch.int64))
    return seen


def test_local_shapes(pool):
    """S/T between blocks, H/T heads inside, V/T at the end."""
    expected = {"block": [2, 8, 32], "q": [2, 2, 16, 8], "k": [2, 1, 16, 8], "logits": [2, 16, 52]}
    assert pool.run(2, shapes_between_modules) == [expected] * 2


def try_async() -> str:
    from titanlite.model.llama import Llama

    with torch.device("meta"):
        model = Llama(EVEN, 16)
    try:
        apply_tp(model, line(2), async_tp=True)
    except ConfigError as error:
        return str(error)
    return ""


def test_async_tp_needs_symmetric_memory(pool):
    for text in pool.run(2, try_async):
        assert_mentions(text, "parallel.async_tp = true", "symmetric memory")
