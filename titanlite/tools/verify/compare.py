"""Compares a layout with one process: same weights, same data.

What it is: `reference` trains the plain model in one process, with a plain PyTorch loop that uses
nothing of `parallel/` (but the rounding of `float8.enabled`), `optim/clip.py` or `optim/loss.py`.
With `data.document_mask` it computes each document alone, without a mask and without positions.
`measure` trains in a layout, built from the parts that train.py is built from, and compares the
loss and the gradient norm of each step, each parameter's full gradient at the first step, and the
parameters after the last step. It also fails if anything is compiled after the second step.
Why it is here: a mistake in parallel code often changes the numbers only slightly. The data makes
such mistakes visible: the sequences have different numbers of targets, so a mean of means differs
from the mean, and tokens are uniformly distributed, so every entry of the vocabulary is used. With
`ema.decay` the averaged weights are compared too.
What it costs: 5 steps in one process, once, and 5 steps in each layout.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Config, DebugConfig
from titanlite.data.stream import IGNORED, Batch, count_targets
from titanlite.distributed import process_group
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.torch_private import num_compiled_graphs
from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import Llama
from titanlite.optim.clip import clip_gradients
from titanlite.optim.ema import WeightEMA
from titanlite.optim.loss_scale import LossScale
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.auto import decide_compile, resolve_dtype
from titanlite.parallel.parallelize import build_model_parts
from titanlite.parallel.stages import Stages
from titanlite.rules.check import check_layout
from titanlite.tools.verify.updates import Updates, clip

STEPS = 5


def make_batch(step: int, config: Config, vocab_size: int) -> Batch:
    """The global batch of a step, (global_batch_size, seq_len); earlier sequences have more
    targets.

    With `data.document_mask` a sequence has about five documents.
    """
    sequences = config.training.global_batch_size
    seq_len = config.training.seq_len
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(vocab_size, (sequences, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for i in range(sequences):
        labels[i, : i * seq_len // (2 * sequences)] = IGNORED
    if not config.data.document_mask:
        return Batch(tokens[:, :-1], labels)
    starts = torch.rand(sequences, seq_len, generator=generator) < 4 / seq_len
    index = torch.arange(seq_len)
    labels[:, :-1][starts[:, 1:]] = IGNORED
    return Batch(tokens[:, :-1], labels, index - torch.where(starts, index, 0).cummax(dim=1).values)


def _alone(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels (1, n) of each row, or of each document of a row."""
    for i, (tokens, labels) in enumerate(zip(*batch[:2], strict=True)):
        starts = (
            []
            if batch.positions is None
            else (batch.positions[i] == 0).nonzero().flatten()[1:].tolist()
        )
        yield from zip(
            tokens[None].tensor_split(starts, 1), labels[None].tensor_split(starts, 1), strict=True
        )


def reference(config: Config, llama: LlamaConfig, path: Path) -> None:
    """Trains in this process alone and saves losses, norms, gradients and parameters to `path`."""
    device = _device(config)
    training = config.training
    options = config.optimizer
    with torch.device("meta"):
        model = Llama(llama, training.seq_len)
    if config.float8.enabled:
        from titanlite.parallel.float8 import apply_float8

        apply_float8(model, config.float8, device.type)
    model.to_empty(device=device)
    model.init_weights(config.run.seed)
    optimizer = Updates(model, options)  # always fp32, also where layouts compute in bf16
    losses = []
    norms = []
    gradients = {}
    averages = {name: p.detach().double() for name, p in model.named_parameters()}
    for step in range(STEPS):
        batch = make_batch(step, config, llama.vocab_size).apply(lambda tensor: tensor.to(device))
        count = int((batch.labels != IGNORED).sum())
        total = 0.0
        for tokens, labels in _alone(batch):
            logits = model(tokens)
            loss = (
                F.cross_entropy(logits[0], labels[0], ignore_index=IGNORED, reduction="sum") / count
            )
            squares = logits[0].exp().sum(dim=-1).log().square()
            loss = loss + config.loss.z_loss * squares[labels[0] != IGNORED].sum() / count
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(
            sum(
                float(p.grad.double().square().sum())
                for p in model.parameters()
                if p.grad is not None
            )
            ** 0.5
        )
        if step == 0:
            gradients = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
        clip(model, options, training.max_norm, norms[-1])
        optimizer.step()
        model.zero_grad()
        decay = min(config.ema.decay, (2 + step) / (11 + step))
        averages = {
            name: decay * averages[name] + (1 - decay) * p.detach()
            for name, p in model.named_parameters()
        }
    found = {
        "loss": losses,
        "grad_norm": norms,
        "gradient": gradients,
        "parameters": dict(model.named_parameters()),
    }
    found["averages"] = averages
    torch.save(found, path)


def measure(config: Config, llama: LlamaConfig, path: Path) -> dict[str, float]:
    """Trains in this layout; all processes call it. Returns the largest relative differences from
    the reference.

    Loss and gradient norm: the largest of all steps. Gradients and parameters: the norm of the
    difference divided by the norm of the reference's tensor, the largest of all tensors.
    Raises RuntimeError if something is compiled after the second step.
    """
    device = _device(config)
    training = config.training
    degrees = check_layout(config, llama, dist.get_world_size())
    config = resolve_dtype(config, llama, device)
    compiled = decide_compile(config, llama, degrees, device)
    mesh = Mesh(device.type, degrees, config.comm.timeout_seconds)
    with torch.device("meta"):
        model = Llama(llama, training.seq_len)
    parts = build_model_parts(model, config, mesh, device, compiled)
    stages = Stages(parts, config, mesh, device)
    optimizer = build_optimizer(parts, config.optimizer, config.parallel.optimizer_offload)
    scaler = LossScale(training, optimizer, device)
    ema = WeightEMA(config.ema, parts, optimizer)
    ema.start()
    expected = torch.load(path, map_location="cpu", mmap=True)
    found = {"loss": 0.0, "grad_norm": 0.0, "gradient": 0.0, "parameters": 0.0}
    graphs: list[int] = []
    compiles = config.compile.loss or compiled
    for step in range(STEPS):
        whole = make_batch(step, config, llama.vocab_size)
        rows = [
            slice(i, i + training.local_batch_size)
            for i in range(0, len(whole.tokens), training.local_batch_size)
        ]
        batches = [
            whole.apply(operator.itemgetter(part))
            for part in rows[mesh.data_rank :: mesh.data_size]
        ]
        num_targets = mesh.sum_counts(count_targets(batches).to(device))
        loss = torch.zeros((), device=device)
        for i, batch in enumerate(batches):
            batch = batch.apply(lambda tensor: tensor.to(device))
            last = i == len(batches) - 1
            loss += stages.forward_backward(batch, num_targets, scaler.scale, last)
        if step == 0:
            gradients = ((name, p.grad) for part in parts for name, p in part.named_parameters())
            scale = float(scaler.scale)  # the gradients still have it
            found["gradient"] = _farthest(gradients, expected["gradient"], scale)
        scaler.unscale()
        norm = clip_gradients(
            parts, training.max_norm, config.optimizer, device, stages.shared_params
        )
        scaler.judge(norm)
        loss = mesh.sum_losses(loss)
        for name, value in (("loss", loss), ("grad_norm", norm)):
            found[name] = _worse(found[name], abs(float(value) / expected[name][step] - 1))
        optimizer.step()
        ema.update()
        optimizer.zero_grad()
        graphs.append(num_compiled_graphs() if compiles else 0)
    if graphs[-1] > graphs[1]:
        raise RuntimeError(
            f"compiled {graphs[-1] - graphs[1]} graphs after the second step; expected none"
        )
    parameters = (named for part in parts for named in part.named_parameters())
    found["parameters"] = _farthest(parameters, expected["parameters"])
    if ema.enabled:
        averages = zip(ema.names, ema.averages, strict=True)
        found["parameters"] = _worse(found["parameters"], _farthest(averages, expected["averages"]))
    return found


def _device(config: Config) -> torch.device:
    """The device of this worker. Its process group exists already."""
    return process_group.start(config.run, config.comm, DebugConfig())


def _farthest(
    found: Iterable[tuple[str, Any]], expected: dict[str, Tensor], scale: float = 1.0
) -> float:
    """The largest relative difference of the tensors, divided by `scale`; infinite if one is
    missing.
    """
    largest = 0.0
    for name, tensor in found:
        if tensor is None:
            return float("inf")
        whole: Any = tensor
        if isinstance(tensor, DTensor):  # perhaps offloaded, while its mesh communicates on the GPU
            whole = whole.to(tensor.device_mesh.device_type).full_tensor()
        right = expected[name].detach().double()
        difference = torch.linalg.vector_norm(
            whole.detach().cpu().double() / scale - right
        ) / torch.linalg.vector_norm(right)
        largest = _worse(largest, float(difference))
    return largest


def _worse(a: float, b: float) -> float:
    """The larger value; NaN if one is NaN."""
    return max(a, b) if a == a and b == b else float("nan")
