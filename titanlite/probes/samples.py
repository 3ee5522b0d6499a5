"""Samples text during training: at each validation the model continues `validation.prompts`.

What it is: the prompts are encoded once; their continuations (`continuation.py`) go to
samples.jsonl, and the beginning of each to the console.
Why it is here: a loss does not show that a model repeats itself or closes no bracket.
What it costs: nothing without prompts; see `continuation.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Set

import torch.distributed as dist

from titanlite.config.schema import ValidationConfig
from titanlite.data.stream import TrainStream
from titanlite.distributed.signals import Requests
from titanlite.observe.line_file import LineFile
from titanlite.observe.metrics import Metrics
from titanlite.observe.metrics_file import SAMPLES
from titanlite.parallel.stages import Stages
from titanlite.probes.continuation import Continuation
from titanlite.runtime.errors import ConfigError, printable
from titanlite.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("titanlite")
# Characters on the console: the end of a prompt, and the beginning of its continuation
PROMPT_SHOWN = 16
TEXT_SHOWN = 34


class Sampler:
    """Continues `validation.prompts`, and writes the texts to samples.jsonl and the console."""

    def __init__(
        self,
        config: ValidationConfig,
        seed: int,
        tokenizer: Tokenizer,
        ends: Set[int],
        stages: Stages,
        stream: TrainStream,
        metrics: Metrics,
    ) -> None:
        """Encodes the prompts; without any, the sampler does nothing. `ends`: the ids that end a
        text. Raises ConfigError if a prompt leaves no room for a token.
        """
        self.config = config
        self.seed = seed
        self.metrics = metrics
        self.continuation = Continuation(tokenizer, ends, stages, stream, metrics.device)
        self.file = LineFile(metrics.file.path.with_name(SAMPLES))
        self.texts: list[str] = []  # the latest: each prompt with its continuation
        self.prompts = [tokenizer.encode_prompt(text) for text in config.prompts]
        if self.prompts:
            logger.info("samples: %s", tokenizer.prompt_rule())
        seq_len = stream.training.seq_len
        problems = []
        for i, ids in enumerate(self.prompts, 1):
            if len(ids) >= seq_len:
                problems.append(
                    f"validation.prompts[{i}] has {len(ids)} tokens, with those that the tokenizer "
                    f"puts before it; expected at most {seq_len - 1}: training.seq_len = "
                    f"{seq_len}, and there must be room for a new one"
                )
        if problems:
            raise ConfigError(problems)

    def due(self, finished: bool) -> bool:
        """Whether to sample without a validation: after the last step, if a run never validates."""
        return finished and len(self.prompts) > 0

    def run(self, requests: Requests) -> None:
        """Samples with the current weights; logs nothing if a signal has arrived on any rank."""
        if not self.prompts:
            return
        continuations = self.continuation.texts(
            self.prompts,
            self.config.prompt_tokens,
            self.config.prompt_temperature,
            self.seed,
            requests.agree_to_stop,
        )
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
