"""The time until the run ends.

What it is: the remaining tokens at the speed of the last minutes, plus the validations and saves
that are still to come. Their number follows from their frequencies; each is expected to take the
mean of the latest ones. Sampling from prompts counts as a part of its validation.
Why it is here: a validation can take as long as a hundred steps, and the first step and the first
evaluation of a process also compile. So the first logged window counts only until there is another
one, and the first validation counts without its first forward.
What it costs: a few numbers for each logged step; all from the host's clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from titanlite.config.schema import CheckpointConfig, ValidationConfig

# Seconds of training from which the speed is taken: long enough for a mean, short enough to follow
HORIZON = 300.0
# Kinds of pauses: whether they validate and save
VALIDATION = (True, False)
SAVE = (False, True)
BOTH = (True, True)


class Eta:
    """Follows the windows between logged steps, and the pauses of training."""

    def __init__(
        self, steps: int, validation: ValidationConfig, checkpoint: CheckpointConfig
    ) -> None:
        self.steps = steps
        self.validation = validation
        self.checkpoint = checkpoint
        self.windows: deque[tuple[float, int]] = deque()  # seconds and tokens
        # Their sums
        self.seconds = 0.0
        self.tokens = 0
        self.pauses = {kind: deque[float](maxlen=8) for kind in (VALIDATION, SAVE, BOTH)}
        # Waits for the second window, for the first validation
        self._first_window = self._first_validation = True

    def add_window(
        self,
        seconds: float,
        tokens: int,
        pauses: Iterable[tuple[int, float]] = (),
        compiling: float = 0.0,
    ) -> None:
        """The steps since the last logged one: seconds and tokens of training, and the pauses
        between them.

        A pause has the step before it, and its seconds. `compiling`: seconds of the first
        evaluation of this process.
        """
        for step, paused in pauses:
            self._add_pause(step, paused, compiling)
        if self.windows and self._first_window:
            self._first_window = False
            self._drop_oldest()
        self.windows.append((seconds, tokens))
        self.seconds = self.seconds + seconds
        self.tokens = self.tokens + tokens
        while self.seconds - self.windows[0][0] > HORIZON:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        seconds, tokens = self.windows.popleft()
        self.seconds = self.seconds - seconds
        self.tokens = self.tokens - tokens

    def _add_pause(self, step: int, seconds: float, compiling: float) -> None:
        validates, saves = self._kind(step)
        if validates and self._first_validation:
            seconds = max(0.0, seconds - compiling)
            self._first_validation = False
        if (validates, saves) in self.pauses:
            self.pauses[validates, saves].append(seconds)

    def _kind(self, step: int) -> tuple[bool, bool]:
        freq = self.checkpoint.freq
        last = step == self.steps
        validates = self.validation.freq > 0 and (last or step % self.validation.freq == 0)
        regular = step > 0 and freq > 0 and step % freq == 0
        return validates, last or regular or (
            step > 0 and not validates and self.checkpoint.freq_minutes > 0
        )

    def remaining(self, step: int, tokens: int) -> float:
        """Seconds from the log line of this step until the last step is saved; `tokens` are still
        to be trained on.

        The pauses after this step are still to come too.
        """
        training = tokens * self.seconds / max(1, self.tokens)
        cost = self._costs()
        pauses = cost[self._kind(self.steps)]
        every = self.validation.freq
        freq = self.checkpoint.freq
        both = self._count(step, math.lcm(every, freq))
        validations = self._count(step, every) - both
        saves = self._count(step, freq) - both
        pauses += validations * cost[VALIDATION] + saves * cost[SAVE] + both * cost[BOTH]
        # a save by steps restarts the minutes, so only what is not by steps is added
        if self.checkpoint.freq_minutes:
            pauses += (
                max(0.0, training / 60 / self.checkpoint.freq_minutes - saves - both) * cost[SAVE]
            )
        return training + pauses

    def _count(self, step: int, freq: int) -> int:
        """How many of the steps from `step` to the one before the last are multiples of `freq`; 0
        is never.
        """
        return (max(step, self.steps) - 1) // freq - (step - 1) // freq if freq else 0

    def _costs(self) -> dict[tuple[bool, bool], float]:
        """Expected seconds of each kind of pause; what has not occurred yet is taken from the other
        kinds, or is 0.
        """
        mean = {
            kind: sum(values) / len(values) if values else None
            for kind, values in self.pauses.items()
        }
        validation = mean[VALIDATION]
        save = mean[SAVE]
        both = mean[BOTH]
        if validation is None:
            validation = max(0.0, (both or 0.0) - (save or 0.0))
        if save is None:
            save = max(0.0, (both or 0.0) - validation)
        return {
            VALIDATION: validation,
            SAVE: save,
            BOTH: validation + save if both is None else both,
        }
