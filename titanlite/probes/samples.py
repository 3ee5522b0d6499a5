"""Samples during training: at each validation the model continues `validation.prompts`, in its
current layout.

What it is: the prompts are the rows of a batch, padded to whole sequences, and the batch runs
through the stages as one of validation does, in the same compiled graphs. Where the loss would be
computed, the logits of each prompt's last token are taken: the labels, which are sharded over cp
and divided into microbatches like the tokens, say where those are. Exactly one rank (under tp, one
tp group) has the logits of a prompt; all others add zeros, so a sum over all axes gives them to
every rank. Rank 0 chooses the tokens, because processors of different kinds may draw different
ones.
Why it is here: a loss does not show that a model repeats itself or closes no bracket. Weights stay
where they are, so this works for a model that fits on no single device.
What it costs: there is no key/value cache, which pipelines and context parallel would need to
divide too. Each new token is a forward of one local batch of whole sequences on every rank, about a
third of the time in which the rank trains on it, one all-reduce of P V fp32 numbers for each axis,
with P prompts, and a small message over gloo. More prompts than all data-parallel ranks have rows
take several batches. The random state of training is not used.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.data.stream import IGNORED, Batch
from titanlite.data.to_device import to_device
from titanlite.distributed.agreement import broadcast
from titanlite.distributed.watchdog import mark_phase
from titanlite.model.generate import sample_token
from titanlite.observe.line_file import LineFile
from titanlite.observe.metrics_file import SAMPLES
from titanlite.observe.validation import Validator
from titanlite.runtime.errors import ConfigError, printable

logger = logging.getLogger("titanlite")
TOP_K = 50
SHOWN = 16, 34  # characters of the end of a prompt and of its continuation on the console


class SamplingValidator:
    """Validates, then samples."""

    def __init__(self, validator: Any, sampler: Sampler) -> None:
        self.validator = validator
        self.sampler = sampler
        self.due = validator.due

    def maybe_run(self, step: int, last: bool, stop: Callable[[], bool]) -> float | None:
        """As `Validator.maybe_run`."""
        loss: float | None = self.validator.maybe_run(step, last, stop)
        if loss is not None:
            self.sampler.run(step, stop)
        return loss


class Sampler:
    """Continues the prompts, and writes the texts to samples.jsonl and the console."""

    def __init__(self, stages: Any, validator: Validator, seed: int) -> None:
        """Raises ConfigError if a prompt leaves no room for a token."""
        self.stages = stages
        self.config = validator.config
        self.seed = seed
        self.mesh = validator.mesh
        self.stream = validator.stream
        self.device = validator.metrics.device
        self.tokenizer = validator.data[0].tokenizer
        self.file = LineFile(validator.metrics.file.path.with_name(SAMPLES))
        self.seq_len: int = self.stream.training.seq_len
        self.prompts = [
            [self.tokenizer.bos, *self.tokenizer.encode(text)] for text in self.config.prompts
        ]
        problems = [
            f"validation.prompts[{i}] has {len(ids)} tokens, with the one that begins a document; expected at most "
            f"{self.seq_len - 1}: training.seq_len = {self.seq_len}, and there must be room for a new one"
            for i, ids in enumerate(self.prompts, 1)
            if len(ids) >= self.seq_len
        ]
        if problems:
            raise ConfigError(problems)

    def run(self, step: int, stop: Callable[[], bool]) -> None:
        """Samples with the current weights; nothing if `stop` returns true, which it does on all
        ranks or on none.
        """
        texts = self.continued(stop)
        if texts is None:
            return
        for prompt, text in zip(self.config.prompts, texts, strict=True):
            begin = printable(prompt)[-SHOWN[0] :]
            more = printable(text)
            logger.info(
                f'step {step}: sample "{begin}" + "{more[: SHOWN[1]]}"'
                + "..." * (len(more) > SHOWN[1])
            )
            if dist.get_rank() == 0:
                row = {"step": step, "prompt": prompt, "text": text}
                self.file.append(json.dumps(row))

    def continued(self, stop: Callable[[], bool]) -> list[str] | None:
        """The continuation of each prompt, the same on all ranks; None: `stop`."""
        rows = [list(ids) for ids in self.prompts]
        # The same numbers at each validation: texts differ because the weights do.
        generators = [
            torch.Generator().manual_seed((self.seed + i) % (1 << 63)) for i in range(len(rows))
        ]
        open_rows = set(range(len(rows)))
        eos = self.tokenizer.eos
        for _ in range(self.config.prompt_tokens):
            if not open_rows:
                break
            mark_phase("sampling")
            if stop():
                return None
            logits = self.next_logits(rows)
            numbers = sorted(open_rows)
            chosen = self._choose(logits.cpu(), numbers, generators) if dist.get_rank() == 0 else []
            for i, token in zip(numbers, broadcast(chosen), strict=True):
                if token != eos:
                    rows[i].append(token)
                if token == eos or len(rows[i]) == self.seq_len:
                    open_rows.remove(i)
        pairs = zip(self.prompts, rows, strict=True)
        return [self.tokenizer.decode(row[len(prompt) :]) for prompt, row in pairs]

    def _choose(
        self, logits: Tensor, numbers: list[int], generators: list[torch.Generator]
    ) -> list[int]:
        """The next tokens of these rows; where a logit is not finite, the one that ends the
        document.
        """
        finite = logits.isfinite().all(-1).tolist()
        temperature = self.config.prompt_temperature
        return [
            sample_token(logits[i], temperature, TOP_K, generators[i])
            if finite[i]
            else self.tokenizer.eos
            for i in numbers
        ]

    def next_logits(self, rows: list[list[int]]) -> Tensor:
        """The logits after each row of tokens, fp32 (P, V), the same bits on all ranks.

        All ranks call it together.
        """
        vocab_size: int = self.stages.model_parts[0].config.vocab_size
        found = torch.zeros(len(rows), vocab_size, device=self.device)

        def take(logits: Tensor, labels: Tensor) -> Tensor:
            """logits (B, S/cp, V/tp), or those of a microbatch or a chunk of tokens; labels (B,
            S/cp).
            """
            there = labels != IGNORED
            first = self.mesh["tp"].get_local_rank() * logits.shape[-1]
            found[labels[there], first : first + logits.shape[-1]] = logits[there].float()
            return found.new_zeros(())

        with self._in_place_of_loss(take):
            for batch in self._batches(rows):
                self.stages.evaluate(batch.apply(lambda tensor: to_device(tensor, self.device)))
        self.mesh.sum_losses(found)
        if self.mesh["tp"].size() > 1:
            dist.all_reduce(found, group=self.mesh["tp"].get_group())
        return found

    def _batches(self, rows: list[list[int]]) -> Iterator[Batch]:
        """This data-parallel rank's rows: every n-th, in as many batches on each rank.

        The label of a row's last token is the row's number.
        """
        rank = self.mesh.data_rank
        world = self.mesh.data_size
        size = self.stream.training.local_batch_size
        for start in range(0, len(rows), world * size):
            shape = (size, self.seq_len)
            tokens = torch.zeros(shape, dtype=torch.int64)
            labels = torch.full(shape, IGNORED)
            for place, number in enumerate(
                range(start + rank, min(len(rows), start + world * size), world)
            ):
                row = rows[number]
                tokens[place, : len(row)] = torch.tensor(row)
                labels[place, len(row) - 1] = number
            one_document = (
                torch.arange(self.seq_len).repeat(size, 1) if self.stream.document_mask else None
            )
            yield Batch(tokens, labels, one_document)

    @contextlib.contextmanager
    def _in_place_of_loss(self, function: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
        """Within it, the stages call `function` with logits and labels."""
        holder = self.stages.runner
        # a loss in chunks computes the logits, and has the actual loss
        if hasattr(holder.loss, "num_chunks"):
            holder = holder.loss
        kept = holder.loss
        holder.loss = function
        try:
            yield
        finally:
            holder.loss = kept
