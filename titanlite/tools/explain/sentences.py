"""Explains each collective: what it communicates, why, and which line of ours is its cause.

What it is: rules over what was recorded, from the most specific to the most general. Lines are
found by their text in the source, so that they are those of the code that runs.
Why it is here: most collectives are called by torch, in a hook or in the backward. The line that
runs then is `loss.backward()`; the line to read is the one that asked for the technique.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from titanlite.config.load import program_folder
from titanlite.runtime.errors import ConfigError
from titanlite.tools.explain.events import ACTIVATIONS, GRADIENTS, Event, Place

ROOT = Path(__file__).parents[3]
FSDP = "titanlite/parallel/fsdp.py"
TENSOR_PARALLEL = "titanlite/parallel/tensor_parallel.py"
CONTEXT_PARALLEL = "titanlite/parallel/context_parallel.py"
EXPERT_PARALLEL = "titanlite/parallel/expert_parallel.py"
ROUTER_BALANCE = "titanlite/optim/router_balance.py"
STEP = "titanlite/parallel/step.py"
# Part of a step -> the line of the step, or of train.py after it, that calls it
LOOP_LINES = {
    "data": (STEP, "counts = stages.mesh.sum_counts("),
    "forward": (STEP, "loss += stages.forward_backward("),
    "backward": (STEP, "loss += stages.forward_backward("),
    "gradient sum": (STEP, "loss += stages.forward_backward("),
    "clip": (STEP, "grad_norm = clip_gradients("),
    "update": (STEP, "parts.optimizer.step()"),
    "balance": (STEP, "parts.balance.finish_step()"),
    "agreement": ("train.py", "agreed = requests.agree("),
    "loss": ("train.py", "loss = mesh.sum_losses(loss)"),
    "metrics": ("train.py", "metrics.log("),
}
# The three all-reduces of a loss over a divided vocabulary, in their order
LOSS = (
    ("largest logit of each token", "the vocabulary is divided, and log-softmax subtracts the "
     "largest logit of all of it, so that no exponential overflows"),
    ("sum of the exponentials of each token", "the softmax divides by the sum over the whole "
     "vocabulary, of which each rank has a part"),
    ("log-probability of each token's label", "only one rank has the label's part of the "
     "vocabulary; the others add zero"),
)  # fmt: skip


# Module whose input tp gathers -> the matrices that multiply it
MATRICES = {
    "attention": "wq, wk and wv",
    "feed_forward": "w1 and w3",
    "output": "the output layer",
}


def explained(
    events: Sequence[Event], stored: Mapping[str, tuple[int, ...]], tied: bool = False
) -> tuple[Event, ...]:
    """Adds the sentences to the events.

    `stored`: name of a parameter that tp does not divide -> its shape. `tied`: the output layer
    multiplies with the embedding.
    """
    found: list[Event] = []
    for event in events:
        event = dataclasses.replace(event, place=_phased(event))
        if event.place.phase in ("clip", "agreement", "metrics"):
            event = dataclasses.replace(event, axis="world")
        tensor, why, cause = _said(event, found, stored)
        if tied and event.axis == "tp" and event.place.module == "output":
            cause = line_of(TENSOR_PARALLEL, 'plan["output"] = PrepareModuleInputOutput(')
        called = line_of(*LOOP_LINES[event.place.phase])
        event = dataclasses.replace(event, tensor=tensor, why=why, cause=cause, loop_line=called)
        found.append(event)
    return tuple(_with_overlap(event, i, found) for i, event in enumerate(found))


@functools.cache
def line_of(file: str, text: str) -> str:
    """file:number of the first line that contains the text. Raises ConfigError if none does."""
    folder = program_folder() if file == "train.py" else ROOT  # also where it is installed
    lines = (folder / file).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if text in line:
            return f"{file}:{number}"
    raise ConfigError(f"{file}: found no line with {text!r}; expected titanlite's own file")


def _phased(event: Event) -> Place:
    """Gives reductions of weights' gradients a part of the step of their own."""
    place = event.place
    of_weights = bool(place.parameters) and event.kind in ("reduce_scatter", "all_reduce")
    if of_weights or place.function == "sum_shared_gradients":
        return dataclasses.replace(place, phase="gradient sum")
    return place


def _said(
    event: Event, before: Sequence[Event], stored: Mapping[str, tuple[int, ...]]
) -> tuple[str, str, str]:
    """The tensor, the reason and the cause of a collective."""
    place = event.place
    if place.phase == "data":
        return (
            "numbers of tokens and targets of this step",
            "the loss is divided by the number of all ranks' targets, so it must be known before "
            "the first backward",
            place.line,
        )
    if place.phase == "clip":
        return (
            "sum of the squares of all gradients",
            "clipping scales by the norm of the whole gradient, of which each rank has a part",
            place.line,
        )
    if place.phase == "agreement":
        return (
            "requests to stop, to save or to profile, as bits",
            "a signal may reach one process only; afterwards all take the same branch",
            place.line,
        )
    if place.phase == "loss":
        return (
            "loss of this step",
            _of_loss(event.axis),
            place.line,
        )
    if place.phase == "metrics" and event.kind == "all_reduce" and event.axis == "pp":
        return (
            "auxiliary loss and load of the experts of each block",
            "a logged step has those of all blocks, and each stage has some",
            line_of(ROUTER_BALANCE, "self.mesh.sum_stages(figures)"),
        )
    if place.phase == "metrics":
        return (
            "step time and memory of every rank",
            "a logged step names the slowest rank and the fullest one",
            place.line,
        )
    if place.phase == "update":
        return _of_update(event)
    if place.phase == "balance":
        return (
            "tokens and probabilities of each expert, of each block",
            "the load of experts, and the auxiliary loss, are those of the whole global batch",
            line_of(ROUTER_BALANCE, "means = self.mesh.sum_tokens(sums) / self.tokens"),
        )
    if place.function == "sum_shared_gradients":
        return (
            "gradient of tok_embeddings.weight",
            "the first and the last stage hold the tied embedding, and each has a part of its "
            "gradient",
            place.line,
        )
    if event.kind in ("send", "recv"):
        return _of_message(event)
    if place.parameters and event.axis != "tp":
        return _of_fsdp(event)
    if place.parameters:
        return _of_norm(event, before, stored)
    if event.axis == "ep":
        return _of_ep(event, before)
    if event.axis == "tp":
        return _of_tp(event, before)
    if event.axis == "cp":
        return _of_cp(event)
    return place.module or f"a tensor of {place.function}", "the line says", place.line


def _of_loss(axis: str) -> str:
    if axis == "pp":
        return "only the last stage computes the loss, and the other stages add zero"
    return "each rank has the loss of its own tokens; a logged step needs their sum"


def _of_update(event: Event) -> tuple[str, str, str]:
    if "muon" in event.place.line:
        return (
            "a matrix that Muon orthogonalises, or its update",
            "the orthogonal update of a matrix needs all of it, and this rank has a part",
            event.place.line,
        )
    return "what the optimizer reads", "the update needs values of other ranks", event.place.line


def unit_of(parameters: Sequence[str]) -> str:
    """The name of a unit that FSDP gathers: layers.0, or norm and output."""
    modules = [name.rpartition(".")[0] for name in parameters]
    blocks = {match[0] for name in modules if (match := re.match(r"layers\.\d+", name))}
    if len(blocks) == 1 and all(".experts." in name for name in parameters):
        return f"{blocks.pop()}.feed_forward.experts"
    if len(blocks) == 1:
        return blocks.pop()
    return " and ".join(dict.fromkeys(modules))


def _is_within(module: str, unit: str) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in unit.split(" and "))


def _of_fsdp(event: Event) -> tuple[str, str, str]:
    place = event.place
    number = len(place.parameters)
    unit = unit_of(place.parameters)
    parameters = f"{number} parameters" if number > 1 else place.parameters[0]
    # Tied embeddings are in no unit: they remain for the model, with the last norm
    of_model = place.parameters[0].startswith("tok_embeddings") and number > 1
    cause = line_of(FSDP, "fully_shard(model" if of_model else "fully_shard(unit")
    if event.axis == "expert_shard":
        cause = line_of(FSDP, "fully_shard(experts")
    if event.kind == "all_gather":
        tensor = f"weights of {unit} ({parameters})"
        if place.phase == "forward":
            return tensor, "each rank stores a part of these weights and computes with all", cause
        why = "they were freed after the forward, and the backward needs them"
        if place.parameters == ("tok_embeddings.weight",):
            why = (
                "they were freed after the forward, and FSDP gathers again what it freed; the "
                "backward of an embedding would not need them"
            )
        elif place.module and not place.recomputed and not _is_within(place.module, unit):
            why = (
                "they were freed after the forward; FSDP gathers them while the unit after this "
                "one computes its gradients"
            )
        return tensor, why, cause
    tensor = f"gradients of {unit} ({parameters})"
    if event.kind == "reduce_scatter":
        return (
            tensor,
            "each rank has the gradient of its own tokens, and keeps the sum of the part that it "
            "stores",
            cause,
        )
    return (
        tensor,
        "the replicas of this shard have seen other tokens, and their gradients are added",
        line_of(FSDP, 'mesh["dp_replicate", "dp_shard_cp"] if replicated'),
    )


def _of_norm(
    event: Event, before: Sequence[Event], stored: Mapping[str, tuple[int, ...]]
) -> tuple[str, str, str]:
    """Explains the all-reduce of a norm's gradient, which a tp rank has for its tokens or heads.

    DTensor sums it when FSDP takes the gradients of a unit, in the order of its parameters.
    """
    place = event.place
    replicated = [name for name in place.parameters if stored.get(name) == event.shape]
    earlier = 0
    for other in reversed(before):
        if other.axis != "tp" or other.place.parameters != place.parameters:
            break
        earlier += other.shape == event.shape
    name = replicated[earlier] if earlier < len(replicated) else unit_of(place.parameters)
    module = name.rpartition(".")[0].rpartition(".")[2]
    if ".experts." in name or module == "router":
        text = "gradient = [Partial()" if module != "router" else "style = SequenceParallel("
        return (
            f"gradient of {name}",
            "the tokens are divided by sequence, and each rank has the gradient of those that it "
            "routes or computes",
            line_of(EXPERT_PARALLEL, text),
        )
    cause = _row_of(module)
    why = "its input is divided by sequence, so each rank has the gradient of its own tokens"
    if module in ("q_norm", "k_norm"):
        why = "its input is divided by heads, so each rank has the gradient of its own heads"
    return f"gradient of {name}", why, cause


def _row_of(module: str) -> str:
    """The row of the table of tensor parallelism for a module."""
    text = (ROOT / TENSOR_PARALLEL).read_text()
    names = [module, module.rpartition(".")[2]]
    for name in names:
        for row in (f'"{name}": ', f'plan["{name}"]', f'"attention.{name}"'):
            if row in text:
                return line_of(TENSOR_PARALLEL, row)
    return line_of(TENSOR_PARALLEL, "parallelize_module(block")


def _of_tp(event: Event, before: Sequence[Event]) -> tuple[str, str, str]:
    place = event.place
    if "z_loss" in place.line:
        tensor = "log of the sum of each token's exponentials, for the z-loss"
        return tensor, "each rank has it of its part of the vocabulary", place.line
    if not place.module and event.kind == "all_reduce":
        earlier = 0
        for other in reversed(before):
            if other.axis != "tp" or other.place.module or other.kind != "all_reduce":
                break
            earlier += 1
        tensor, why = LOSS[earlier % len(LOSS)]
        cause = line_of(TENSOR_PARALLEL, "loss = cross_entropy_sum(DTensor.from_local(")
        return tensor, why, cause
    block = re.sub(r"^layers\.\d+\.", "", place.module)
    cause = _row_of(block)
    again = ", computed again for the backward" if place.recomputed else ""
    of_gradient = place.phase == "backward" and not place.recomputed
    tensor = f"{place.role} of {place.module}"
    if of_gradient:
        tensor = f"gradient of the {tensor}"
    tensor += again
    if place.role == "inside":
        return tensor, "this module combines what the ranks of tp have", cause
    matrices = MATRICES.get(block, "this module")
    if event.kind == "all_gather" and not of_gradient:
        why = (
            f"this rank's rows of {matrices} multiply all tokens, and each rank has only a part of "
            "the sequence"
        )
    elif event.kind == "all_gather":
        why = (
            "each rank has this gradient for its part of the sequence, and its part of the matrix "
            "has seen all tokens"
        )
    elif not of_gradient:
        why = (
            "each rank has multiplied with its columns of the matrix, which gives one term of a "
            "sum; each keeps the sum for its part of the sequence"
        )
        if place.module == "tok_embeddings":
            why = (
                "each rank has looked up the tokens of its part of the vocabulary, with zeros for "
                "the others; each keeps the sum for its part of the sequence"
            )
    else:
        why = (
            f"this rank's rows of {matrices} give one term of this gradient; each rank keeps the "
            "sum for its part of the sequence"
        )
    return tensor, why, cause


def _of_cp(event: Event) -> tuple[str, str, str]:
    place = event.place
    module = place.module.rpartition(".")[0] or place.module
    ulysses = line_of(CONTEXT_PARALLEL, "return sharded.redistribute(placements=[target])")
    gathered = line_of(CONTEXT_PARALLEL, "gathered = sharded.redistribute(")
    backward = place.phase == "backward" and not place.recomputed
    again = ", computed again for the backward" if place.recomputed else ""
    if place.line.startswith(ulysses) or (backward and event.kind != "reduce_scatter"):
        of = "gradients of " if backward else ""
        return (
            f"{of}queries, keys, values or results of {module}{again}",
            "attention needs whole sequences, so each rank exchanges its part of the sequence for "
            "a part of the heads, or back",
            ulysses,
        )
    if event.kind == "reduce_scatter":
        return (
            f"gradients of keys and values of {module}",
            "every rank's queries have used these keys and values; each rank keeps the sum for its "
            "own tokens",
            gathered,
        )
    return (
        f"keys and values of {module}{again}",
        "the queries of this rank attend to the tokens of all ranks",
        gathered,
    )


def _of_ep(event: Event, before: Sequence[Event]) -> tuple[str, str, str]:
    """Explains the exchanges of a block: in a forward counts, dispatch and combine, in its backward
    the gradients of the last two, in reverse order.
    """
    place = event.place
    block = ".".join(place.module.split(".")[:2])
    again = ", computed again for the backward" if place.recomputed else ""
    if event.dtype == "int64":
        return (
            f"counts: rows of {block} for each expert{again}",
            "each rank must know how many rows it gets from each other one",
            line_of(EXPERT_PARALLEL, "dist.all_to_all_single(received, counts"),
        )
    earlier = 0  # exchanges of rows of this pass
    for other in reversed(before):
        if other.axis != "ep" or other.dtype == "int64" or not _same_pass(other.place, place):
            break
        earlier += 1
    of_gradient = place.phase == "backward" and not place.recomputed
    dispatches = earlier % 2 == (1 if of_gradient else 0)
    if dispatches:
        tensor = f"dispatch: rows of {block}"
        why = "each row is computed by the rank that has its expert"
        if of_gradient:
            why = "a row's gradient goes back to the rank of its token"
        cause = line_of(EXPERT_PARALLEL, "arrived = AllToAll.apply(")
    else:
        tensor = f"combine: results of {block}"
        why = "a row's result goes back to the rank of its token"
        if of_gradient:
            why = "the gradient of a result goes to the rank that has its expert"
        cause = line_of(EXPERT_PARALLEL, "returned: Tensor = AllToAll.apply(")
    if of_gradient:
        tensor = tensor.replace(": ", ": gradients of ")
    return tensor + again, why, cause


def _same_pass(one: Place, other: Place) -> bool:
    return (one.phase, one.module, one.recomputed) == (other.phase, other.module, other.recomputed)


def _of_message(event: Event) -> tuple[str, str, str]:
    sender, receiver = event.ranks
    ends = f"rank {sender} to rank {receiver}"
    if event.place.role == ACTIVATIONS:
        return (
            f"activations of a microbatch, {ends}",
            f"rank {receiver} has the next stage, and continues the forward with them",
            event.place.line,
        )
    if event.place.role == GRADIENTS:
        return (
            f"gradient of a microbatch's activations, {ends}",
            f"rank {receiver} has the stage before, and continues the backward with it",
            event.place.line,
        )
    return (
        f"a microbatch's activations or their gradient, {ends}",
        "another stage continues with them",
        event.place.line,
    )


def _with_overlap(event: Event, i: int, events: Sequence[Event]) -> Event:
    """Adds the computation that could hide an event, if the device runs both at once.

    This is the computation until the rank needs the result; for FSDP, until the gathered unit
    computes.
    """
    place = event.place
    behind = "nothing: what follows needs the result"
    flops = 0
    if place.parameters and event.axis != "tp":
        unit = unit_of(place.parameters)
        if event.kind == "all_gather":
            behind, flops = _until_used(event, i, events, unit)
        else:
            behind = "the backward of the units before it"
            flops = _flops_until_reduced(i, events)
            if not flops:
                behind = "nothing: no matrix product is left"
    elif event.kind in ("send", "recv") and place.function != "sum_shared_gradients":
        behind = "other microbatches, as far as the schedule has them"
    elif place.phase == "agreement":
        behind = "the device's work: it is on the hosts, and they do not wait for the device"
    return dataclasses.replace(event, behind=behind, hidden_flops=flops)


def _until_used(event: Event, i: int, events: Sequence[Event], unit: str) -> tuple[str, int]:
    """The unit that the device computes during an all-gather of weights."""
    if event.place.phase == "forward":
        # The host calls it before the unit computes; the device is still at the unit before
        flops = 0
        previous = ""
        for other in reversed(events[:i]):
            if other.place.phase != "forward" or other.local_batch != event.local_batch:
                break
            if other.kind == "all_gather" and other.place.parameters:
                previous = unit_of(other.place.parameters)
                break
        if not previous:
            return "nothing: it is the first", 0
        for other in reversed(events[: i + 1]):
            flops += other.flops
            if other.place.parameters and unit_of(other.place.parameters) == previous:
                flops -= other.flops
                break
        return f"the forward of {previous}", flops
    flops = 0
    for other in events[i + 1 :]:
        if other.place.parameters and other.kind != "all_gather" and other.axis != "tp":
            flops += other.flops
            return f"the backward of {unit_of(other.place.parameters)}", flops
        flops += other.flops
    return "the backward of the unit after it", flops


def _flops_until_reduced(i: int, events: Sequence[Event]) -> int:
    """The FLOPs between a reduction of gradients and the next one."""
    flops = 0
    for other in events[i + 1 :]:
        if other.place.phase not in ("forward", "backward", "gradient sum"):
            break
        flops += other.flops
        if other.kind == "reduce_scatter" and other.place.parameters:
            break
    return flops
