"""Scores during training: at each validation the model answers `validation.questions`, and its
answers are compared with the expected ones.

What it is: a file of JSON lines with `prompt` and `answer`, a text or a list of texts of which each
is right. The model continues each prompt, greedily and in its current layout (`continuation.py`).
The exact match of an answer is 1 if it equals an expected one, its F1 the harmonic mean of the
shares of its words that are expected and of the expected words that it has; both after SQuAD's
normalisation, and of the expected answer that gives most. The means over all questions are a row of
metrics.jsonl.
Why it is here: a loss on answers falls while the text that the model writes by itself stays wrong.
What it costs: nothing without questions. With them, for each group of questions that one forward
serves (data-parallel ranks times `training.local_batch_size`), a forward per token of the longest
answer.
Reference: SQuAD, arXiv 1606.05250, and its evaluation script.
"""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from pathlib import Path

from titanlite.config.schema import ValidationConfig
from titanlite.data.questions import Question, read_questions
from titanlite.data.stream import TrainStream
from titanlite.distributed.agreement import broadcast_from_rank0
from titanlite.distributed.signals import Requests
from titanlite.observe.metrics import Metrics
from titanlite.parallel.stages import Stages
from titanlite.probes.continuation import Choice, Continuation
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("titanlite")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")
SHOWN = 6  # of the questions that are too long


def normalised(text: str) -> str:
    """In lower case, without punctuation and articles, with single spaces. Of a text in which there
    is nothing else, such as "+" or "The", they stay: not all of these are the same answer.
    """
    text = text.lower()
    words = ARTICLES.sub(" ", text.translate(WITHOUT_PUNCTUATION)).split()
    return " ".join(words or text.split())


def exact_match(text: str, answers: list[str]) -> float:
    """1 if the text is one of the answers, else 0."""
    return float(normalised(text) in [normalised(answer) for answer in answers])


def f1(text: str, answers: list[str]) -> float:
    """The largest F1 of the text's words with those of an answer."""
    return max(_f1(normalised(text).split(), normalised(answer).split()) for answer in answers)


def _f1(words: list[str], expected: list[str]) -> float:
    if not words or not expected:
        return float(words == expected)
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected))


def encode_prompt(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a prompt. Names of special tokens, as a chat template writes them, are these
    tokens; a text without any is the beginning of a document, after bos.
    """
    names = sorted(filter(None, tokenizer.special), key=len, reverse=True)
    parts = [text]
    if names:
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
    if len(parts) == 1:
        return [tokenizer.bos, *tokenizer.encode(text)]
    ids: list[int] = []
    for part in parts:
        if part in tokenizer.special:
            ids.append(tokenizer.special[part])
        else:
            ids += tokenizer.encode(part)
    return ids


class Scorer:
    """Answers `validation.questions`, and logs the scores as exact_match and f1."""

    def __init__(
        self,
        config: ValidationConfig,
        tokenizer: Tokenizer,
        stages: Stages,
        stream: TrainStream,
        metrics: Metrics,
    ) -> None:
        """Without questions it does nothing. Raises ConfigError, on all ranks, if the file is wrong
        or a prompt leaves no room for an answer.
        """
        self.config = config
        self.metrics = metrics
        self.continuation = Continuation(tokenizer, stages, stream, metrics.device)
        ends = {tokenizer.eos, *tokenizer.special.values()}
        self.choice = Choice(config.answer_tokens, 0.0, 0, ends, config.answer_end)
        self.questions: list[Question] = []
        if config.questions:
            rows = broadcast_from_rank0(lambda: read_questions(Path(config.questions)))
            self.questions = [Question(*row) for row in rows]
        self.prompts = [encode_prompt(question.prompt, tokenizer) for question in self.questions]
        problems = []
        seq_len = stream.training.seq_len
        for question, ids in zip(self.questions, self.prompts, strict=True):
            if not 0 < len(ids) < seq_len:
                problems.append(
                    f"{config.questions}:{question.line}: the prompt has {len(ids)} tokens; "
                    f"expected 1 to {seq_len - 1}: training.seq_len = {seq_len}, and there must "
                    "be room for an answer"
                )
        if problems:
            raise ConfigError(problems[:SHOWN])

    def due(self, finished: bool) -> bool:
        """Whether to score now without a validation: after the last step of a run without any."""
        return finished and len(self.questions) > 0

    def run(self, requests: Requests) -> None:
        """Scores the current weights; nothing if a signal has arrived on any rank."""
        if not self.questions:
            return
        answers = self.answers(requests)
        if answers is None:
            return
        matches = 0.0
        overlaps = 0.0
        for question, answer in zip(self.questions, answers, strict=True):
            matches += exact_match(answer, question.answers)
            overlaps += f1(answer, question.answers)
        count = len(self.questions)
        step = self.metrics.progress.step
        row = {
            "step": step,
            "validation/exact_match": matches / count,
            "validation/f1": overlaps / count,
        }
        logger.info(
            f"step {step}: answers  exact_match {matches / count:.4f}  f1 {overlaps / count:.4f}"
        )
        self.metrics.write(row)

    def answers(self, requests: Requests) -> list[str] | None:
        """The answer to each question, the same on all ranks; None if a signal has arrived."""
        found: list[str] = []
        size = self.continuation.at_once
        for start in range(0, len(self.prompts), size):
            group = self.prompts[start : start + size]
            texts = self.continuation.texts(group, self.choice, requests.agree_to_stop)
            if texts is None:
                return None
            found += texts
        return found
