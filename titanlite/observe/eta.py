"""Estimates the time until the run ends.

What it is: the remaining tokens at the speed of the last minutes, plus the validations and saves
that are still to come. Their number follows from their frequencies; each is expected to take the
mean of the latest ones. Sampling from prompts counts as a part of its validation.
Why it is here: a validation can take as long as a hundred steps, and the first step and the first
evaluation of a process also compile. So the first logged window counts only until there is another
one, and not at all if blocks are compiled: until then nothing is known. The first validation counts
without its first forward.
What it costs: a few numbers for each logged step, all from the host's clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from titanlite.config.schema import CheckpointConfig, ValidationConfig

# Speed is the mean over so many seconds of training: enough to be steady, few enough to follow
HORIZON = 300.0


class Kind(NamedTuple):
    """The kind of a pause of training: whether it validates, and whether it saves."""

    validates: bool
    saves: bool


VALIDATION = Kind(True, False)
SAVE = Kind(False, True)
BOTH = Kind(True, True)
NEITHER = Kind(False, False)


class Eta:
    """Follows the windows between logged steps, and the pauses of training."""

    def __init__(
        self,
        steps: int,
        validation: ValidationConfig,
        checkpoint: CheckpointConfig,
        compiles: bool = False,
    ) -> None:
        """`compiles`: whether the first step compiles."""
        self.steps = steps
        self.compiles = compiles
        self.validation = validation
        self.checkpoint = checkpoint
        self.windows: deque[tuple[float, int]] = deque()  # (seconds, tokens)
        # Sums over all windows
        self.seconds = 0.0
        self.tokens = 0
        self.pauses = {kind: deque[float](maxlen=8) for kind in (VALIDATION, SAVE, BOTH)}
        self._first_window = True  # whether only the first window is there
        self._first_validation = True

    def add_window(
        self,
        seconds: float,
        tokens: int,
        pauses: Iterable[tuple[int, float]] = (),
        compiling: float = 0.0,
    ) -> None:
        """Adds the steps since the last logged one: seconds and tokens of training, and pauses.

        A pause is (the step before it, its seconds). `compiling`: seconds of the first evaluation
        of this process.
        """
        for step, pause in pauses:
            self._add_pause(step, pause, compiling)
        if self.windows and self._first_window:
            self._first_window = False
            self._drop_oldest()
        self.windows.append((seconds, tokens))
        self.seconds += seconds
        self.tokens += tokens
        while self.seconds - self.windows[0][0] > HORIZON:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        seconds, tokens = self.windows.popleft()
        self.seconds -= seconds
        self.tokens -= tokens

    def _add_pause(self, step: int, seconds: float, compiling: float) -> None:
        kind = self._kind(step)
        if kind.validates and self._first_validation:
            seconds = max(0.0, seconds - compiling)
            self._first_validation = False
        if kind in self.pauses:
            self.pauses[kind].append(seconds)

    def _kind(self, step: int) -> Kind:
        """Returns the kind of the pause after this step."""
        last = step == self.steps
        validates = is_multiple(step, self.validation.freq) or (last and self.validation.freq > 0)
        saves = last or (step > 0 and is_multiple(step, self.checkpoint.freq))
        # A pause that neither step frequency explains was a save by minutes
        if step > 0 and not validates and self.checkpoint.freq_minutes > 0:
            saves = True
        return Kind(validates, saves)

    def remaining(self, step: int, tokens: int) -> float | None:
        """Estimates the seconds from this step's log line until the last step is saved; None
        while only the window that compiled is there.

        `tokens` are still to be trained on. The pause after this step is counted too.
        """
        if self.compiles and self._first_window and tokens > 0:
            return None
        training = tokens * self.seconds / max(1, self.tokens)
        cost = self._costs()
        both = self._count(step, math.lcm(self.validation.freq, self.checkpoint.freq))
        validations = self._count(step, self.validation.freq) - both
        saves = self._count(step, self.checkpoint.freq) - both
        pauses = cost[self._kind(self.steps)]
        pauses += validations * cost[VALIDATION] + saves * cost[SAVE] + both * cost[BOTH]
        if self.checkpoint.freq_minutes:
            # A save by steps restarts the minutes: add only the saves that steps do not cause
            by_minutes = training / 60 / self.checkpoint.freq_minutes - saves - both
            pauses += max(0.0, by_minutes) * cost[SAVE]
        return training + pauses

    def _count(self, step: int, freq: int) -> int:
        """Counts the multiples of `freq` from `step` to the step before the last; 0: there are
        none.
        """
        if freq == 0:
            return 0
        return (max(step, self.steps) - 1) // freq - (step - 1) // freq

    def _costs(self) -> dict[Kind, float]:
        """Estimates the seconds of each kind of pause.

        A kind that has not occurred yet is estimated from the other kinds, or is 0.
        """
        validation = mean(self.pauses[VALIDATION])
        save = mean(self.pauses[SAVE])
        both = mean(self.pauses[BOTH])
        if validation is None:
            validation = max(0.0, (both or 0.0) - (save or 0.0))
        if save is None:
            save = max(0.0, (both or 0.0) - validation)
        if both is None:
            both = validation + save
        return {NEITHER: 0.0, VALIDATION: validation, SAVE: save, BOTH: both}


def is_multiple(step: int, freq: int) -> bool:
    """Whether something that happens every `freq` steps (0: never) happens after this one."""
    return freq > 0 and step % freq == 0


def mean(values: Collection[float]) -> float | None:
    """Returns the mean; None without values."""
    if not values:
        return None
    return sum(values) / len(values)
