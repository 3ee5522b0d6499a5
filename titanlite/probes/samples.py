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

import json
import logging
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.schema import ValidationConfig
from titanlite.data.stream import IGNORED, Batch, TrainStream
from titanlite.data.to_device import to_device
from titanlite.data.tokenizer import Tokenizer
from titanlite.distributed.agreement import broadcast
from titanlite.distributed.signals import Requests
from titanlite.model.generate import sample_token
from titanlite.observe.line_file import LineFile
from titanlite.observe.metrics import Metrics
from titanlite.observe.metrics_file import SAMPLES
from titanlite.parallel.stages import Stages
from titanlite.runtime.errors import ConfigError, printable
from titanlite.runtime.phases import Phase, mark_phase

logger = logging.getLogger("titanlite")
TOP_K = 50
# Characters of the end of a prompt, and of its continuation, on the console
PROMPT_SHOWN = 16
TEXT_SHOWN = 34


class Sampler:
    """Continues `validation.prompts`, and writes the texts to samples.jsonl and the console."""

    def __init__(
        self,
        config: ValidationConfig,
        seed: int,
        tokenizer: Tokenizer,
        stages: Stages,
        stream: TrainStream,
        metrics: Metrics,
    ) -> None:
        """Without prompts it does nothing. Raises ConfigError if a prompt leaves no room for a
        token.
        """
        self.config = config
        self.seed = seed
        self.tokenizer = tokenizer
        self.stages = stages
        self.mesh = stages.mesh
        self.stream = stream
        self.metrics = metrics
        self.device = metrics.device
        self.file = LineFile(metrics.file.path.with_name(SAMPLES))
        self.seq_len = stream.training.seq_len
        self.texts: list[str] = []  # the latest: of each prompt, with its continuation
        self.prompts = [[tokenizer.bos, *tokenizer.encode(text)] for text in config.prompts]
        problems = []
        for i, ids in enumerate(self.prompts, 1):
            if len(ids) >= self.seq_len:
                problems.append(
                    f"validation.prompts[{i}] has {len(ids)} tokens, with the one that begins a "
                    f"document; expected at most {self.seq_len - 1}: training.seq_len = "
                    f"{self.seq_len}, and there must be room for a new one"
                )
        if problems:
            raise ConfigError(problems)

    def due(self, finished: bool) -> bool:
        """Whether to sample now without a validation: after the last step of a run without any."""
        return finished and len(self.prompts) > 0

    def run(self, requests: Requests) -> None:
        """Samples with the current weights; nothing if a signal has arrived on any rank."""
        if not self.prompts:
            return
        continuations = self.continued(requests.agree_to_stop)
        if continuations is None:
            return
        step = self.metrics.progress.step
        self.texts = []
        for prompt, text in zip(self.config.prompts, continuations, strict=True):
            self.texts.append(prompt + text)
            beginning = printable(prompt)[-PROMPT_SHOWN:]
            continuation = printable(text)
            end = ""
            if len(continuation) > TEXT_SHOWN:
                continuation = continuation[:TEXT_SHOWN]
                end = "..."
            logger.info(f'step {step}: sample "{beginning}" + "{continuation}"{end}')
            if dist.get_rank() == 0:
                self.file.append(json.dumps({"step": step, "prompt": prompt, "text": text}))

    def continued(self, stop: Callable[[], bool]) -> list[str] | None:
        """The continuation of each prompt, the same on all ranks.

        None if `stop` returns true, which it does on all ranks or on none.
        """
        rows = [list(ids) for ids in self.prompts]
        # The same numbers at each validation: texts differ because the weights do.
        generators = [
            torch.Generator().manual_seed((self.seed + i) % (1 << 63)) for i in range(len(rows))
        ]
        open_rows = set(range(len(rows)))
        for _ in range(self.config.prompt_tokens):
            if not open_rows:
                break
            mark_phase(Phase.SAMPLE)
            if stop():
                return None
            logits = self.next_logits(rows)
            numbers = sorted(open_rows)
            chosen: list[int] = []
            if dist.get_rank() == 0:  # processors of different kinds may draw different ones
                chosen = self._choose(logits.cpu(), numbers, generators)
            for i, token in zip(numbers, broadcast(chosen), strict=True):
                if token != self.tokenizer.eos:
                    rows[i].append(token)
                if token == self.tokenizer.eos or len(rows[i]) == self.seq_len:
                    open_rows.remove(i)
        texts = []
        for prompt, row in zip(self.prompts, rows, strict=True):
            texts.append(self.tokenizer.decode(row[len(prompt) :]))
        return texts

    def _choose(
        self, logits: Tensor, numbers: list[int], generators: list[torch.Generator]
    ) -> list[int]:
        """The next tokens of these rows; where a logit is not finite, the one that ends the
        document.
        """
        finite = logits.isfinite().all(-1).tolist()
        chosen = []
        for i in numbers:
            token = self.tokenizer.eos
            if finite[i]:
                token = sample_token(
                    logits[i], self.config.prompt_temperature, TOP_K, generators[i]
                )
            chosen.append(token)
        return chosen

    def next_logits(self, rows: list[list[int]]) -> Tensor:
        """The logits after each row of tokens, fp32 (P, V), the same bits on all ranks.

        All ranks call it together.
        """
        vocab_size = self.stages.model_parts[0].config.vocab_size
        result = torch.zeros(len(rows), vocab_size, device=self.device)

        def take(logits: Tensor, labels: Tensor) -> Tensor:
            """Stores the logits of the positions whose label is the number of a row.

            logits (B, S/cp, V/tp), or those of a microbatch or a chunk of tokens; labels (B, S/cp).
            """
            labelled = labels != IGNORED
            first = self.mesh["tp"].get_local_rank() * logits.shape[-1]
            columns = slice(first, first + logits.shape[-1])
            result[labels[labelled], columns] = logits[labelled].float()
            return result.new_zeros(())

        with self.stages.in_place_of_loss(take):
            for batch in self._batches(rows):
                self.stages.evaluate(batch.apply(lambda tensor: to_device(tensor, self.device)))
        # Exactly one rank (under tp, one tp group) has stored the logits of a row
        self.mesh.sum_losses(result)
        if self.mesh["tp"].size() > 1:
            dist.all_reduce(result, group=self.mesh["tp"].get_group())
        return result

    def _batches(self, rows: list[list[int]]) -> Iterator[Batch]:
        """This data-parallel rank's rows: every n-th, in as many batches on each rank.

        The label of a row's last token is the row's number.
        """
        rank = self.mesh.data_rank
        num_ranks = self.mesh.data_size
        size = self.stream.training.local_batch_size
        for start in range(0, len(rows), num_ranks * size):
            end = min(len(rows), start + num_ranks * size)
            tokens = torch.zeros(size, self.seq_len, dtype=torch.int64)
            labels = torch.full_like(tokens, IGNORED)
            for place, number in enumerate(range(start + rank, end, num_ranks)):
                row = rows[number]
                tokens[place, : len(row)] = torch.tensor(row)
                labels[place, len(row) - 1] = number
            positions = None
            if self.stream.document_mask:  # each row is one document
                positions = torch.arange(self.seq_len).repeat(size, 1)
            yield Batch(tokens, labels, positions)
