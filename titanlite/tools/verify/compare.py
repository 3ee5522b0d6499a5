"""Compares a layout with one process: same weights, same data.

What it is: `reference` trains the plain model in one process, with a plain PyTorch loop that uses
nothing of `parallel/` (but the rounding of `float8.enabled`), `optim/clip.py` or `optim/loss.py`.
With `data.document_mask` it computes each document alone, without a mask and without positions;
with `data.packing = best_fit` it computes no padding.
`measure` takes the steps of train.py (`parallel/step.py`) in a layout, and compares the
loss and the gradient norm of each step, each parameter's full gradient at the first step, and the
parameters after the last step. Of a mixture of experts it compares the experts that each token
chooses, in each step and block. It also fails if anything is compiled after the second step.
Why it is here: a mistake in parallel code often changes the numbers only slightly. The data makes
such mistakes visible: the sequences have different numbers of targets, so a mean of means differs
from the mean, and tokens are uniformly distributed, so every entry of the vocabulary is used. With
`ema.decay` the averaged weights are compared too.
What it costs: 5 steps in one process, once, and 5 steps in each layout.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Config, DebugConfig, ScheduleConfig
from titanlite.data.order import dropout_keys
from titanlite.data.rows import IGNORED, Batch, count_tokens
from titanlite.distributed import process_group
from titanlite.distributed.mesh import Mesh
from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import Llama
from titanlite.optim.loss_scale import LossScale
from titanlite.parallel.auto import decide_compile, resolve_dtype
from titanlite.parallel.float8 import apply_float8
from titanlite.parallel.lora import apply_dropout, apply_lora
from titanlite.parallel.parallelize import assign_shard, build_model_parts, freeze
from titanlite.parallel.step import Unmeasured, build_step_parts, optimizer_step
from titanlite.rules.check import check_layout
from titanlite.rules.compiled import compiles_loss
from titanlite.tools.torch_private import num_compiled_graphs
from titanlite.tools.verify.routing import (
    Decisions,
    Routing,
    compare_decisions,
    token_places,
)
from titanlite.tools.verify.updates import Updates, clip

STEPS = 5
# The margin of a router's decision (routing.py) that rounding may turn: cp=2 turned one of 5e-7
NEAR_TIE = 2e-6
DRAWS = 8


def make_batch(step: int, config: Config, vocab_size: int, draw: int = 0) -> Batch:
    """The global batch of a step, (global_batch_size, seq_len); earlier sequences have more
    targets.

    With `data.document_mask` a sequence has about five documents; with `data.packing = best_fit` up
    to half of each later sequence is padding. `draw`: which of the batches that the step may have.
    """
    sequences = config.training.global_batch_size
    seq_len = config.training.seq_len
    generator = torch.Generator().manual_seed(step + STEPS * draw)
    tokens = torch.randint(vocab_size, (sequences, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for i in range(sequences):
        labels[i, : i * seq_len // (2 * sequences)] = IGNORED
    batch = Batch(tokens[:, :-1], labels)
    if config.lora.drops:
        samples = range(step * sequences, (step + 1) * sequences)
        batch = batch._replace(dropout_keys=dropout_keys(config.run.seed, samples, seq_len))
    if config.data.packing == "best_fit":
        lengths = torch.randint(seq_len // 2, seq_len, (sequences, 1), generator=generator)
        lengths[: sequences // 2] = seq_len
        padding = torch.arange(seq_len) >= lengths
        labels[padding.roll(-1, dims=1)] = IGNORED  # also that of the last token
        labels[padding] = IGNORED
        batch = batch._replace(tokens=batch.tokens.masked_fill(padding, 0), padding=padding)
    if not config.data.document_mask:
        return batch
    starts = torch.rand(sequences, seq_len, generator=generator) < 4 / seq_len
    labels[:, :-1][starts[:, 1:]] = IGNORED  # the first token of the next document
    index = torch.arange(seq_len)
    latest_start = torch.where(starts, index, 0).cummax(dim=1).values
    return batch._replace(positions=index - latest_start)


def split_documents(batch: Batch) -> Iterator[Batch]:
    """Each row, or each document of a row, as a batch (1, n) without positions and padding."""
    for i in range(len(batch.tokens)):
        row = take_rows(batch, i, i + 1)
        row = take_tokens(row, 0, int(count_tokens([row])))._replace(padding=None)
        starts = [0]
        if row.positions is not None:
            starts = (row.positions[0] == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], row.tokens.shape[1]]
        for start, end in zip(starts, ends, strict=True):
            yield take_tokens(row, start, end)._replace(positions=None)


def reference(config: Config, llama: LlamaConfig, path: Path) -> None:
    """Trains in this process alone and saves losses, norms, gradients and parameters to `path`."""
    device = _device(config)
    training = config.training
    options = config.optimizer
    with torch.device("meta"):
        model = Llama(llama, training.seq_len)
    if config.float8.enabled:
        apply_float8(model, config.float8, device.type)
    if config.lora.rank:
        apply_lora(model, config.lora)
    if config.lora.drops:
        apply_dropout(model)
    freeze(model, training.frozen_patterns, adapted=config.lora.rank > 0)
    model.to_empty(device=device)
    model.init_weights(config.run.seed)
    fill_weights([model])
    optimizer = Updates(model, options)  # always fp32, also where layouts compute in bf16
    losses: list[float] = []
    norms: list[float] = []
    first_gradients: dict[str, Tensor] = {}
    averages = {name: p.detach().double() for name, p in model.named_parameters()}
    routing = Routing(model, config.loss.router_aux_loss)
    chosen: list[dict[str, tuple[Tensor, Tensor]]] = []
    draws: list[int] = []
    for step in range(STEPS):
        draws.append(draw_without_near_tie(step, config, model, routing))
        batch = make_batch(step, config, llama.vocab_size, draws[-1])
        batch = batch.apply(lambda tensor: tensor.to(device))
        losses.append(train_on_tokens(model, batch, config.loss.z_loss, routing))
        routing.finish_step()
        chosen.append(dict(routing.chosen))
        squares = 0.0
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            squares += float(parameter.grad.double().square().sum())
            if step == 0:
                first_gradients[name] = parameter.grad.clone()
        norms.append(math.sqrt(squares))
        clip(model, options, training.max_norm, norms[-1])
        optimizer.step()
        model.zero_grad()
        decay = min(config.ema.decay, (2 + step) / (11 + step))
        for name, parameter in model.named_parameters():
            averages[name] = decay * averages[name] + (1 - decay) * parameter.detach()
    results = {
        "loss": losses,
        "grad_norm": norms,
        "gradient": first_gradients,
        "parameters": dict(model.named_parameters()),
        "averages": averages,
        "draws": draws,
        "chosen": chosen,
    }
    torch.save(results, path)


@torch.no_grad()
def draw_without_near_tie(step: int, config: Config, model: Llama, routing: Routing) -> int:
    """Returns the first draw of a step's batch in which no router nearly ties, or that with the
    largest margin.
    """
    if not model.config.num_experts:
        return 0
    device = next(model.parameters()).device
    best = 0
    largest = 0.0
    for draw in range(DRAWS):
        batch = make_batch(step, config, model.config.vocab_size, draw)
        for document in split_documents(batch.apply(lambda tensor: tensor.to(device))):
            logits_of(model, document)
        margin = routing.take_smallest_margin()
        if margin > largest:
            best = draw
            largest = margin
        if margin > NEAR_TIE:
            break
    return best


def logits_of(model: Llama, document: Batch) -> Tensor:
    """The logits (n, V) of one row."""
    block_inputs = {}
    if document.dropout_keys is not None:
        block_inputs["dropout_keys"] = document.dropout_keys
    logits: Tensor = model(document.tokens, **block_inputs)
    return logits[0]


def train_on_tokens(model: Llama, batch: Batch, z_loss: float, routing: Routing) -> float:
    """Adds to the gradients; returns the mean loss of the targets, each document alone, without the
    auxiliary loss of routers.
    """
    num_targets = int((batch.labels != IGNORED).sum())
    total = 0.0
    for document in split_documents(batch):
        logits = logits_of(model, document)
        labels = document.labels[0]
        entropy = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        log_sums = logits.exp().sum(dim=-1).log()
        squares = z_loss * log_sums.square()[labels != IGNORED].sum()
        loss = entropy / num_targets + squares / num_targets
        (loss + routing.loss(int(count_tokens([batch])))).backward()
        total += loss.item()
    return total


@torch.no_grad()
def fill_weights(parts: Sequence[nn.Module]) -> None:
    """Biases and adapters that are not zero, as in a trained model, and routers with a tie.

    After a few steps from zero, biases and adapters would be little but rounding errors divided by
    their size. Experts 0 and 1 of each router are equally probable in the first step.
    """
    for part in parts:
        for name, parameter in part.named_parameters():
            if name.endswith(".bias"):
                std = 0.1
            elif name.endswith((".lora_b.weight", ".router.weight")):
                std = 0.02  # as that of the weights
            else:
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            full = std * torch.randn(parameter.shape, generator=generator)
            if name.endswith(".router.weight"):
                # Zeros: products with other equal rows may differ in the last bit
                full[:2] = 0.0
            assign_shard(parameter, full.to(parameter.device))


@dataclass
class Differences:
    """Relative differences from the reference."""

    loss: list[float] = field(default_factory=list)  # of each step
    grad_norm: list[float] = field(default_factory=list)
    gradient: float = 0.0  # of the first step, the largest of all tensors
    parameters: float = 0.0  # after the last step, the same
    # The share of routers' decisions that are others, of each step; empty without experts and in
    # other dtypes than fp32
    choices: list[float] = field(default_factory=list)
    decisions: int = 0  # how many were compared, over all ranks and steps
    example: str = ""  # a choice of this rank that is another one


def measure(config: Config, llama: LlamaConfig, path: Path) -> dict[str, float]:
    """`measure_steps`, and of each figure the largest difference.

    `decisions` is the number of routers' decisions that were compared. Raises RuntimeError if one
    of them differs.
    """
    differences = measure_steps(config, llama, path)
    if differences.example:
        share = max(differences.choices)
        raise RuntimeError(f"{differences.example} (up to {share:.1%} of a step's choices differ)")
    return {
        "loss": functools.reduce(larger, differences.loss),
        "grad_norm": functools.reduce(larger, differences.grad_norm),
        "gradient": differences.gradient,
        "parameters": differences.parameters,
        "decisions": differences.decisions,
    }


def measure_steps(config: Config, llama: LlamaConfig, path: Path) -> Differences:
    """Trains in this layout; all processes call it. Returns the relative differences from the
    reference.

    Loss and gradient norm: of each step. Gradients and parameters: the norm of the difference
    divided by the norm of the reference's tensor, the largest of all tensors.
    Raises RuntimeError if something is compiled after the second step.
    """
    device = _device(config)
    training = config.training
    degrees = check_layout(config, llama, dist.get_world_size())
    config = resolve_dtype(config, llama, device)
    constant = ScheduleConfig(name="constant", warmup_steps=0)
    config = dataclasses.replace(config, schedule=constant)
    compiled = decide_compile(config, llama, degrees, device)
    mesh = Mesh(device.type, degrees, config.comm.timeout_seconds, config.parallel.ep)
    with torch.device("meta"):
        model = Llama(llama, training.seq_len)
    model_parts = build_model_parts(model, config, mesh, device, compiled)
    fill_weights(model_parts)
    parts = build_step_parts(model_parts, config, mesh, device, compiled)
    parts.ema.start()
    expected = torch.load(path, map_location="cpu", mmap=True)
    differences = Differences()
    first_gradients = FirstGradients(model_parts, parts.scaler, expected["gradient"])
    decisions = [Decisions(part) for part in model_parts]
    size = training.local_batch_size
    # Local batches are dealt out to the data-parallel ranks in turn
    first_rows = range(mesh.data_rank * size, training.global_batch_size, mesh.data_size * size)
    places = token_places(first_rows, config, mesh)
    graphs: list[int] = []
    compiles = compiled or compiles_loss(config.compile, compiled, device.type)
    for step in range(STEPS):
        global_batch = make_batch(step, config, llama.vocab_size, expected["draws"][step])
        batches = [take_rows(global_batch, row, row + size) for row in first_rows]
        samples = range(step * len(global_batch.tokens), (step + 1) * len(global_batch.tokens))
        measures = first_gradients if step == 0 else Unmeasured()
        result = optimizer_step(step + 1, batches, samples, parts, measures)
        loss = mesh.sum_losses(result.loss)
        differences.loss.append(abs(float(loss) / expected["loss"][step] - 1))
        norm_ratio = float(result.grad_norm) / expected["grad_norm"][step]
        differences.grad_norm.append(abs(norm_ratio - 1))
        if llama.num_experts and training.compute_dtype == "float32":  # rounding turns near ties
            chosen = expected["chosen"][step]
            compared = compare_decisions(decisions, places, chosen, global_batch)
            counts = torch.tensor([compared.number, compared.different], device=device)
            dist.all_reduce(counts)
            number, different = counts.tolist()
            all_tokens = llama.num_layers * int(count_tokens([global_batch]))
            if number != all_tokens:
                raise RuntimeError(f"routers chose for {number} tokens; expected {all_tokens}")
            differences.decisions += number
            differences.choices.append(different / number)
            if compared.example and not differences.example:
                differences.example = f"step {step + 1}, {compared.example}"
        graphs.append(num_compiled_graphs() if compiles else 0)
    differences.gradient = first_gradients.difference
    if graphs[-1] > graphs[1]:
        raise RuntimeError(
            f"compiled {graphs[-1] - graphs[1]} graphs after the second step; expected none"
        )
    parameters = [named for part in model_parts for named in part.named_parameters()]
    differences.parameters = largest_difference(parameters, expected["parameters"])
    ema = parts.ema
    if ema.enabled:
        averages = zip(ema.names, ema.averages, strict=True)
        difference = largest_difference(averages, expected["averages"])
        differences.parameters = larger(differences.parameters, difference)
    return differences


class FirstGradients(Unmeasured):
    """Compares the gradients of a step, before they are clipped, with those expected."""

    def __init__(
        self, model_parts: Sequence[nn.Module], scaler: LossScale, expected: dict[str, Tensor]
    ) -> None:
        self.model_parts = model_parts
        self.scaler = scaler
        self.expected = expected
        self.difference = math.nan

    def after_backward(self, i: int, num_batches: int, num_targets: Tensor) -> None:
        if i == num_batches - 1:
            # A generator: a list would keep these gradients in memory until the end
            gradients = trained_gradients(self.model_parts)
            scale = float(self.scaler.scale)  # the gradients still have it
            self.difference = largest_difference(gradients, self.expected, scale)


def trained_gradients(parts: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor | None]]:
    """Name and gradient of each trained parameter. Raises RuntimeError if a frozen one has one."""
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                yield name, parameter.grad
            elif parameter.grad is not None:
                raise RuntimeError(f"{name} is frozen, and has a gradient")


def take_rows(batch: Batch, start: int, stop: int) -> Batch:
    return batch.apply(lambda tensor: tensor[start:stop])


def take_tokens(batch: Batch, start: int, stop: int) -> Batch:
    return batch.apply(lambda tensor: tensor[:, start:stop])


def _device(config: Config) -> torch.device:
    """The device of this worker. Its process group exists already."""
    return process_group.start(config.run, config.comm, DebugConfig())


def largest_difference(
    tensors: Iterable[tuple[str, Tensor | None]], expected: dict[str, Tensor], scale: float = 1.0
) -> float:
    """The largest relative difference of the tensors, divided by `scale`, from those expected;
    infinite if one is missing.

    A layer's bias counts with its weight, as the column for a feature that is always 1: the
    gradient of the keys' bias alone is nearly zero, because it changes the scores of a query by
    nearly the same number for all keys.
    """
    differences: dict[str, float] = {}  # by module, as the next one
    norms: dict[str, float] = {}
    for name, tensor in tensors:
        if tensor is None:
            return float("inf")
        if isinstance(tensor, DTensor):
            # It may be offloaded, while its mesh communicates on the GPU
            on_device: Any = tensor.to(tensor.device_mesh.device_type)
            tensor = on_device.full_tensor()
        actual = tensor.detach().cpu().double() / scale
        correct = expected[name].detach().double()
        module = name.rpartition(".")[0]
        difference = float(torch.linalg.vector_norm(actual - correct))
        differences[module] = math.hypot(differences.get(module, 0.0), difference)
        norms[module] = math.hypot(norms.get(module, 0.0), float(torch.linalg.vector_norm(correct)))
    largest = 0.0
    for module, difference in differences.items():
        largest = larger(largest, difference / norms[module])
    return largest


def larger(a: float, b: float) -> float:
    """The larger value; NaN if one is NaN, which `max` may lose."""
    if math.isnan(a) or math.isnan(b):
        return float("nan")
    return max(a, b)
