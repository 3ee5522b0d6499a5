"""Continues prompts with the model during training, in its current layout.

What it is: the prompts are the rows of a batch, padded to whole sequences, and the batch runs
through the stages as a validation batch does, in the same compiled graphs. A function in place of
the loss takes the logits of each prompt's last token. It finds them by the labels, which are
sharded over cp and divided into microbatches like the tokens. Exactly one rank (under tp, one tp
group) has the logits of a prompt; all others add zeros, so a sum over all axes gives them to every
rank. Rank 0 chooses the tokens, because processors of different kinds may draw different ones.
Why it is here: samples of text need it. Weights stay where they are, so this works for a model that
fits on no single device.
What it costs: there is no key/value cache, because pipelines and context parallel would have to
divide it too. Each new token costs a forward of one local batch of whole sequences on every rank
(about a third of the time of training on it), one all-reduce of P V fp32 numbers for each axis,
with P prompts, and a small message over gloo. More prompts than all data-parallel ranks have rows
(`at_once`) take several batches. The random state of training is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.data.rows import IGNORED, Batch
from titanlite.data.stream import TrainStream
from titanlite.data.to_device import to_device
from titanlite.distributed.agreement import broadcast
from titanlite.model.generate import sample_token
from titanlite.parallel.stages import Stages
from titanlite.runtime.phases import Phase, mark_phase
from titanlite.tokenizer.tokenizer import Tokenizer

TOP_K = 50


class Continuation:
    """Continues prompts with the current weights; all ranks call it together."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        ends: Set[int],
        stages: Stages,
        stream: TrainStream,
        device: torch.device,
    ) -> None:
        """`ends`: the ids that end a text (`tokenizer/kept_files.py`), eos among them."""
        self.tokenizer = tokenizer
        self.ends = ends
        self.stages = stages
        self.mesh = stages.mesh
        self.stream = stream
        self.device = device
        self.seq_len = stream.training.seq_len

    @property
    def at_once(self) -> int:
        """The number of prompts that one forward serves."""
        return self.mesh.data_size * self.stream.training.local_batch_size

    def texts(
        self,
        prompts: Sequence[list[int]],
        new_tokens: int,
        temperature: float,
        seed: int,
        stop: Callable[[], bool],
    ) -> list[str] | None:
        """Returns the text that continues each prompt by up to `new_tokens`, the same on all ranks.

        Returns None if `stop` returns true, which it does on all ranks or on none.
        """
        rows = [list(ids) for ids in prompts]
        # The same seeds at each validation, so that texts differ only because the weights do.
        seeds = [(seed + i) % (1 << 63) for i in range(len(rows))]  # a seed has 63 bits
        generators = [torch.Generator().manual_seed(one) for one in seeds]
        open_rows = set(range(len(rows)))
        for _ in range(new_tokens):
            if not open_rows:
                break
            mark_phase(Phase.SAMPLE)
            if stop():
                return None
            logits = self.next_logits(rows)
            numbers = sorted(open_rows)
            chosen: list[int] = []
            if dist.get_rank() == 0:  # other processors may draw other tokens
                chosen = self._choose(logits.cpu(), numbers, temperature, generators)
            for i, token in zip(numbers, broadcast(chosen), strict=True):
                ended = token in self.ends
                if not ended:
                    rows[i].append(token)
                if ended or len(rows[i]) == self.seq_len:
                    open_rows.remove(i)
        return [
            self.tokenizer.decode(row[len(prompt) :])
            for row, prompt in zip(rows, prompts, strict=True)
        ]

    def _choose(
        self,
        logits: Tensor,
        numbers: list[int],
        temperature: float,
        generators: list[torch.Generator],
    ) -> list[int]:
        """Chooses the next tokens of these rows; if a logit is not finite, the one that ends the
        document.
        """
        finite = logits.isfinite().all(-1).tolist()
        chosen = []
        for i in numbers:
            token = self.tokenizer.eos
            if finite[i]:
                token = sample_token(logits[i], temperature, TOP_K, generators[i])
            chosen.append(token)
        return chosen

    def next_logits(self, rows: list[list[int]]) -> Tensor:
        """Computes the logits after each row of tokens, fp32 (P, V), the same bits on all ranks.

        All ranks call it together.
        """
        vocab_size = self.stages.model_parts[0].config.vocab_size
        result = torch.zeros(len(rows), vocab_size, device=self.device)

        def take(logits: Tensor, labels: Tensor) -> Tensor:
            """Stores the logits at the positions whose label is a row's number.

            logits (B, S/cp, V/tp), or those of a microbatch or a chunk of tokens; labels (B, S/cp).
            """
            labelled = labels != IGNORED
            first = self.mesh["tp"].get_local_rank() * logits.shape[-1]
            columns = slice(first, first + logits.shape[-1])
            result[labels[labelled], columns] = logits[labelled].float()
            return result.new_zeros(())

        for batch in self._batches(rows):
            self.stages.evaluate(batch.apply(lambda tensor: to_device(tensor, self.device)), take)
        # Exactly one rank (under tp, one tp group) has stored the logits of a row
        self.mesh.sum_losses(result)
        if self.mesh["tp"].size() > 1:
            dist.all_reduce(result, group=self.mesh["tp"].get_group())
        return result

    def _batches(self, rows: list[list[int]]) -> Iterator[Batch]:
        """Yields this data-parallel rank's rows, every n-th, in equally many batches on each rank.

        The label of a row's last token is the row's number.
        """
        rank = self.mesh.data_rank
        num_ranks = self.mesh.data_size
        size = self.stream.training.local_batch_size
        for start in range(0, len(rows), self.at_once):
            end = min(len(rows), start + self.at_once)
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
