"""Evaluates a Llama on tasks of EleutherAI's lm-eval.

What it is: `Evaluated` answers the three kinds of request of lm-eval: the log-likelihood of a
continuation, that of a whole text, and text that is generated until a stop string. `run_tasks` has
lm-eval read tasks, ask and compute metrics.
Why it is here: lm-eval's own class for models of Hugging Face gives the same answers for the
exported model ([test](../../tests/tools/evaluate/test_harness.py)), but needs the export, which has
no averaged weights of a run.
What it costs: a forward per continuation, in batches of similar lengths, and a forward per
generated token.

A prompt begins with the tokens that the tokenizer's files put before a text. A text that is too
long loses its beginning.
Import it after `stay_offline`, because the libraries read the environment when they are imported.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from titanlite.config.mistakes import suggestion
from titanlite.model.generate import generate
from titanlite.model.llama import Llama
from titanlite.runtime.errors import ConfigError, shortened
from titanlite.tokenizer.tokenizer import Tokenizer

NEW_TOKENS = 256  # of generated text, unless the task limits it; lm-eval's default
# log-likelihood in nats, and whether each token was the most likely one
Scored = tuple[float, bool]


class Evaluated(TemplateLM):
    """A model with its tokenizer behind the interface that lm-eval calls."""

    def __init__(
        self, model: Llama, tokenizer: Tokenizer, batch_size: int, stop: Set[int] = frozenset()
    ) -> None:
        """`stop`: ids that end a generated text, beside the tokenizer's eos."""
        super().__init__()
        self.stop = {tokenizer.eos, *stop}
        self.model = model
        self.encoder = tokenizer
        self.batch_size = batch_size
        self.max_length = model.seq_len

    @property
    def eot_token_id(self) -> int:
        return self.encoder.eos

    @property
    def prefix_token_id(self) -> int:
        """The token before an empty prompt."""
        return self.encoder.bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        start = [] if add_special_tokens is False else self.encoder.before
        return start + self.encoder.encode(string)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of each whole text.

        A text is computed in parts of the sequence length, each after one token of context.
        """
        parts = []
        counts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            found = get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, context_len=1
            )
            windows = [("", *make_disjoint_window(window)) for window in found]
            parts += windows
            counts.append(len(windows))
        scores = iter(self._loglikelihood_tokens(parts))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[Scored]:
        """The log-likelihood of each continuation, by (text, context ids, continuation ids)."""
        results: list[Scored] = [(0.0, True)] * len(requests)
        order = sorted(
            range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2])
        )
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            for i, score in zip(
                chosen, self._score([requests[i][1:] for i in chosen]), strict=True
            ):
                results[i] = score
        return results

    @torch.no_grad()  # FSDP's weights may not be made in inference mode, and used outside of it
    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        rows = [(context + continuation)[-self.max_length - 1 :] for context, continuation in pairs]
        tokens = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.int64)
        for row, ids in zip(tokens, rows, strict=True):
            # What follows is padding, which causal attention ignores
            row[: len(ids) - 1] = torch.tensor(ids[:-1])
        logits = self.model(tokens.to(self.model.rope.device))  # (B, S, V)
        scores = []
        for number, (ids, (_, continuation)) in enumerate(zip(rows, pairs, strict=True)):
            length = min(len(continuation), len(ids) - 1)
            scores.append(
                _scored(
                    logits[number, len(ids) - 1 - length : len(ids) - 1], ids[len(ids) - length :]
                )
            )
        return scores

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each prompt, up to a stop string or the end of the document."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, prompt: str, options: dict[str, Any]) -> str:
        chosen = normalize_gen_kwargs(options, NEW_TOKENS)
        stops = handle_stop_sequences(chosen["until"], eos=None)
        limit = min(chosen["max_gen_toks"], self.max_length - 1)
        ids = self.tok_encode(prompt) or [self.prefix_token_id]
        context = ids[limit - self.max_length :]
        new = generate(
            self.model,
            context,
            limit,
            stop=self.stop,
            temperature=float(chosen.get("temperature", 0.0)),
            top_k=int(chosen.get("top_k", 0)),
            seed=0,
        )
        text: list[int] = []
        for token in new:
            text.append(token)
            if any(stop and stop in self.encoder.decode(text) for stop in stops):
                break
        return str(postprocess_generated_text(self.encoder.decode(text), stops, None))


def _scored(logits: Tensor, tokens: list[int]) -> Scored:
    """The log-likelihood of tokens (T,) with these logits (T, V), and whether each is likeliest."""
    wanted = torch.tensor(tokens, device=logits.device)
    logs = logits.float().log_softmax(-1)
    return float(logs.gather(1, wanted[:, None]).sum()), bool((logs.argmax(-1) == wanted).all())


def run_tasks(
    model: Evaluated,
    names: list[str],
    include: Path | None,
    num_fewshot: int | None,
    limit: int | None,
) -> dict[str, dict[str, float]]:
    """Runs tasks: task or group -> metric -> value. The standard error of `acc` is `acc_stderr`.

    Raises ConfigError for a task that does not exist or cannot be loaded.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        tasks = TaskManager(include_path=include)
        problems = [
            f"--tasks {name}: no such task{suggestion(name, tasks.all_tasks)}"
            for name in _unknown(names, tasks)
        ]
        if problems:
            raise ConfigError(problems)
        tasks.load(names)
    except ConfigError:
        raise
    except Exception as error:  # of a task's file, of its code, or of reading its data
        reason = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 1000)
        advice = "data that is not on this machine is downloaded with --online"
        raise ConfigError(
            f"--tasks {','.join(names)}: cannot be loaded: {reason}; {advice}"
        ) from None
    found = simple_evaluate(
        model,
        tasks=list(names),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=tasks,
        log_samples=False,
    )
    assert found is not None  # it is None on other ranks
    return {name: _metrics(values) for name, values in found["results"].items()}


def _unknown(names: list[str], tasks: TaskManager) -> list[str]:
    """The names and patterns (mmlu_*) that match no task."""
    return [name for name in names if not tasks.match_tasks([name])]


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """Renames lm-eval's `acc,none` to acc and keeps the names of other filters."""
    result = {}
    for key, value in values.items():
        name, comma, chosen = key.partition(",")
        if comma and isinstance(value, int | float):  # also numpy's
            filtered = name.removesuffix("_stderr") + ("" if chosen == "none" else f"_{chosen}")
            result[filtered + ("_stderr" if name.endswith("_stderr") else "")] = float(value)
    return result
