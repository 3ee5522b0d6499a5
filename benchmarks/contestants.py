"""The training steps that benchmarks compare: the same Llama in titanlite and other code, on one
device.

Each contestant is built from the same configuration and starts with the weights of `Titanlite` for
that seed. Its method `step(tokens, labels)`, with tokens and labels (B, S), is one optimizer step
and returns the mean loss before it, on the device. All of them clip to norm 1 and use fused AdamW
at a constant rate.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from titanlite.config.load import load_config
from titanlite.config.schema import Config, ScheduleConfig
from titanlite.data.order import dropout_keys
from titanlite.data.rows import Batch
from titanlite.distributed import process_group
from titanlite.distributed.mesh import Mesh
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.model.llama import Llama
from titanlite.observe.step_times import StepTimes
from titanlite.parallel.auto import decide_compile, resolve_dtype
from titanlite.parallel.parallelize import build_model_parts
from titanlite.parallel.step import Unmeasured, build_step_parts, optimizer_step
from titanlite.rules.check import check_layout
from titanlite.rules.compiled import reason_not_compiled
from titanlite.runtime import phases
from titanlite.runtime.phases import Phase, mark_phase
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.formats import huggingface, huggingface_config
from titanlite.tools.formats.full_state import half_split

Step = Callable[[Tensor, Tensor], Tensor]


def configuration(arguments: list[str]) -> tuple[Config, LlamaConfig]:
    """Resolves the config and the model's shape as train.py does; the vocabulary is 4,112 if the
    flavor has none.
    """
    config = load_config(arguments)
    return config, resolve_flavor(config.model, 4112)


@functools.cache
def text() -> Tensor:
    """Tokenises half a million tokens of the standard library with the bundled tokenizer."""
    tokenizer, ids = Tokenizer(), []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        ids += tokenizer.encode(path.read_text(errors="replace"))
        if len(ids) > 500_000:
            break
    return torch.tensor(ids)


def make_batch(config: Config, device: torch.device, number: int) -> tuple[Tensor, Tensor]:
    """Makes windows of the text and labels, (B, S), the same for every contestant."""
    size, seq_len = config.training.local_batch_size, config.training.seq_len
    starts = [(number * size + row) * seq_len % (len(text()) - seq_len - 1) for row in range(size)]
    tokens = torch.stack([text()[start : start + seq_len + 1] for start in starts])
    return tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)


class Titanlite:
    """The step of train.py (`parallel/step.py`)."""

    name = "titanlite"

    def __init__(self, arguments: list[str]) -> None:
        self.config, self.llama = configuration(arguments)
        self.device = process_group.start(self.config.run, self.config.comm, self.config.debug)
        degrees = check_layout(self.config, self.llama, 1)
        self.config = resolve_dtype(self.config, self.llama, self.device)
        constant = ScheduleConfig(name="constant", warmup_steps=0)
        self.config = dataclasses.replace(self.config, schedule=constant)
        compiled = decide_compile(self.config, self.llama, degrees, self.device)
        mesh = Mesh(self.device.type, degrees, 600)
        with torch.device("meta"):
            model = Llama(self.llama, self.config.training.seq_len)
        self.model_parts = build_model_parts(model, self.config, mesh, self.device, compiled)
        self.parts = build_step_parts(self.model_parts, self.config, mesh, self.device, compiled)
        reason = reason_not_compiled(self.config, degrees, self.llama.dim, self.device.type)
        self.not_compiled = "" if compiled else reason or "no compiler"
        self.steps = 0
        self.times = StepTimes(self.config.metrics, self.device)

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """A batch that is in CPU memory goes to the device as in train.py.

        With `data.document_mask` each sequence counts as four documents of equal length.
        """
        phases.listeners.clear()
        if self.times.enabled:
            phases.add_listener(self.times.mark)  # only this contestant marks phases
        mark_phase(Phase.READ_DATA)
        batch = Batch(tokens, labels)
        if self.config.data.document_mask:
            positions = torch.arange(tokens.shape[1], device=tokens.device) % (tokens.shape[1] // 4)
            batch = batch._replace(positions=positions.repeat(len(tokens), 1))
        if self.config.lora.drops:
            samples = range(self.steps * len(tokens), (self.steps + 1) * len(tokens))
            keys = dropout_keys(self.config.run.seed, samples, tokens.shape[1])
            batch = batch._replace(dropout_keys=keys.to(tokens.device))
        samples = range(self.steps * len(tokens), (self.steps + 1) * len(tokens))
        self.steps += 1
        result = optimizer_step(self.steps, [batch], samples, self.parts, Unmeasured())
        guard = self.parts.guard
        if guard.noticed:
            outcome = guard.read(self.steps, result.loss, result.grad_norm)
            raise RuntimeError(f"expected no bad step: {outcome}")
        if self.times.enabled and self.steps % self.config.metrics.log_freq == 0:
            mark_phase(Phase.START_TIMING)
            self.times.columns()
        return result.loss


def initial_weights(config: Config, llama: LlamaConfig, device: torch.device) -> Llama:
    """Builds the model without parallelism, with the initial weights of `Titanlite`."""
    with torch.device("meta"):
        model = Llama(llama, config.training.seq_len)
    model.to_empty(device=device)
    model.init_weights(config.run.seed)
    return model


def adamw(model: Any, config: Config) -> torch.optim.AdamW:
    section = config.optimizer
    return torch.optim.AdamW(
        model.parameters(),
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=True,
    )


class HuggingFace:
    """transformers' model of the same blocks, as LlamaForCausalLM, with SDPA attention.

    `compiled`: the whole model, as its guide recommends.
    """

    name = "transformers"

    def __init__(self, arguments: list[str], device: torch.device, compiled: bool) -> None:
        import transformers

        config, llama = configuration(arguments)
        fields = huggingface_config.to_config(llama, config.training.seq_len, "float32")
        fields |= {"attn_implementation": "sdpa", "use_cache": False}
        own = transformers.AutoConfig.for_model(**fields)
        with device:
            self.model: Any = transformers.AutoModelForCausalLM.from_config(own)
        source = initial_weights(config, llama, device).state_dict()
        theirs = self.model.state_dict()
        with torch.no_grad():
            for name, there in huggingface.names(llama).items():
                turned = huggingface.is_permuted(name)
                if len(there) == 1:
                    theirs[there[0]].copy_(
                        half_split(source[name], llama.head_dim) if turned else source[name]
                    )
            for i in range(llama.num_layers if llama.num_experts else 0):
                ours = f"layers.{i}.feed_forward.experts"
                gate_and_up = torch.cat(
                    (source[f"{ours}.w1.weight"], source[f"{ours}.w3.weight"]), 1
                )
                theirs[f"model.layers.{i}.mlp.experts.gate_up_proj"].copy_(gate_and_up)
                theirs[f"model.layers.{i}.mlp.experts.down_proj"].copy_(source[f"{ours}.w2.weight"])
        self.model.train()
        self.optimizer = adamw(self.model, config)
        bfloat16 = config.training.compute_dtype == "bfloat16"
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)
        self.forward = torch.compile(self.model) if compiled else self.model

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with self.autocast:
            loss = self.forward(input_ids=tokens, labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(
    step: Step,
    batches: list[tuple[Tensor, Tensor]],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Times each step; on CUDA by events, so that the host runs ahead as it does in training."""
    if device.type != "cuda":
        seconds = []
        for tokens, labels in batches:
            started = clock()
            step(tokens, labels)
            seconds.append(clock() - started)
        return seconds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    events[0].record()
    for (tokens, labels), event in zip(batches, events[1:], strict=True):
        step(tokens, labels)
        event.record()
    wait(device)
    return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(events)]


def side_by_side(
    a: Step,
    b: Step,
    batches: list[tuple[Tensor, Tensor]],
    device: torch.device,
    rounds: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[tuple[list[float], list[float]], list[float]]:
    """Times steps of A and B in the order A B B A, `rounds` times; every turn takes all batches.

    Also returns how much faster A is in each round: the median over rounds stays fair if the
    machine's speed drifts.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    ratios = []
    for _ in range(rounds):
        turns: tuple[list[float], list[float]] = ([], [])
        for which in (0, 1, 1, 0):
            turns[which].extend(timed((a, b)[which], batches, device, clock))
        ratios.append(statistics.median(turns[1]) / statistics.median(turns[0]))
        for all_rounds, turn in zip(seconds, turns, strict=True):
            all_rounds.extend(turn)
    return seconds, ratios


def threads() -> str:
    return f"{torch.get_num_threads()} threads of {os.cpu_count()}"
