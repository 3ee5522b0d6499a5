"""Divergence: from which checkpoint a run resumes after its gradient norm was NaN or infinite.

What it is: training that diverges in the process that saved a checkpoint resumes from this checkpoint. If it diverges
again before any step is finite, the checkpoint is the cause, or as good as: it is renamed, and the next start resumes
from the one before. At most three are renamed in a row, because then something else is the cause.
"""

from __future__ import annotations

from pathlib import Path

from titanlite.checkpoint.storage import list_steps, set_aside, step_folder

MAX_RENAMED = 3
HINT = "checkpoint.load_step = N selects another"


def step_back(folder: Path, resumed: int, chosen: bool) -> str:
    """Renames the checkpoint of step `resumed` unless it is 0; returns what the next start resumes from, as a message.

    `resumed`: the step that this process has resumed from, if no step was finite since; `chosen`: by the user.
    """
    try:
        steps = list_steps(folder)
        if not resumed:
            return f"the same command resumes from step {steps[-1]}; {HINT}" if steps else "no checkpoint was saved"
        at_once = f"no step since step {resumed}, from which this run resumed, was finite"
        older = [step for step in steps if step < resumed]
        names = [path.name for path in folder.glob("step-*.diverged*")]
        renamed = [step for step in (int(name[5:].partition(".")[0]) for name in names) if older and step > older[-1]]
        if chosen or not older or len(renamed) >= MAX_RENAMED:
            return f"{at_once}; {HINT}" + (f"; {len(renamed)} were renamed already" if renamed else "")
        aside = set_aside(step_folder(folder, resumed), "diverged")
    except (OSError, ValueError) as error:
        return f"{error}; {HINT}"
    return f"{at_once}: renamed to {aside}; the same command resumes from step {older[-1]}; {HINT}"
