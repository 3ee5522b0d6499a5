"""Draws a pipeline schedule slot by slot, and measures its bubble.

    python docs/draw_schedule.py [--schedule 1F1B] [--pp 2] [--microbatches 4] [--stages 1]

What it is: the order in which each rank computes, and a simulation that places it in time.
Messages take no time. In slots, a forward, a backward, and each half of a divided backward take one
slot. In time, a forward takes 1, a backward 2, and each half of a backward 1. The forward of a
microbatch on a stage waits for its forward on the previous stage; its backward waits for its
backward on the next stage, and on the last stage for its forward. The gradients of the weights wait
for those of the inputs.
Why it is here: the pictures in parallelism.md are the output of this script, or are drawn from it
by pictures/pipelines.py. Tests compare them, compare the order with what torch runs, and compare
the idle slots with the formulas of the bubble.
What it costs: nothing; no process is started and nothing is sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed.pipelining.schedules import get_schedule_class

SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # rank 0 has the first and the last stage
# Duration of each kind of task, by torch's names: forward, backward, and the two halves of a
# backward: gradients of the inputs, gradients of the weights
TIMES = {"F": 1, "B": 2, "I": 1, "W": 1}


class Task(NamedTuple):
    """A forward, a backward or half of one, of one microbatch on one stage."""

    kind: str  # a key of TIMES
    stage: int
    microbatch: int


class Timed(NamedTuple):
    """A task and when it runs."""

    task: Task
    start: int
    end: int


def rank_orders(
    schedule: str, pp: int, microbatches: int, stages_per_rank: int = 1
) -> list[list[Task]]:
    """Lists what each rank computes, in order."""
    if schedule == "GPipe":  # all forwards, then all backwards
        return [_forwards_and_backwards(rank, microbatches, microbatches) for rank in range(pp)]
    # a rank starts one forward for each rank from itself to the end of the pipeline
    if schedule == "1F1B":
        return [
            _forwards_and_backwards(rank, microbatches, min(microbatches, pp - rank))
            for rank in range(pp)
        ]
    return _order_of_torch(schedule, pp, microbatches, stages_per_rank)


def _forwards_and_backwards(stage: int, microbatches: int, warmup: int) -> list[Task]:
    """Builds the order of GPipe and 1F1B.

    Warmup: `warmup` forwards. Steady state: one backward, one forward. Cooldown: the backwards that
    are left.
    """
    order = [Task("F", stage, i) for i in range(warmup)]
    for i in range(microbatches - warmup):
        order += [Task("B", stage, i), Task("F", stage, warmup + i)]
    return order + [Task("B", stage, i) for i in range(microbatches - warmup, microbatches)]


def _order_of_torch(
    schedule: str, pp: int, microbatches: int, stages_per_rank: int
) -> list[list[Task]]:
    """Returns `pipeline_order` of torch's schedule, without its idle slots.

    torch runs this order if a rank has several stages. For GPipe and 1F1B it runs a loop
    instead, and the `pipeline_order` of 1F1B differs from it: the last rank begins with microbatch
    1 (torch 2.13).
    """
    num_stages = pp * stages_per_rank
    stages: Any = [  # the attributes of rank 0's PipelineStages that the order depends on
        SimpleNamespace(
            stage_index=stage,
            num_stages=num_stages,
            group_size=pp,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == num_stages - 1,
            has_backward=True,
            submod=None,
        )
        for stage in ([0, num_stages - 1] if schedule in V_SHAPED else range(0, num_stages, pp))
    ]
    cls: Any = get_schedule_class(schedule)
    order = cls(stages, n_microbatches=microbatches).pipeline_order
    return [[task for action in order[rank] for task in _tasks(action)] for rank in range(pp)]


def _tasks(action: Any) -> list[Task]:
    """Converts torch's action to tasks: one, none for an idle slot, or several in a row."""
    if action is None:
        return []
    if action.sub_actions:
        return [task for part in action.sub_actions for task in _tasks(part)]
    return [Task(action.computation_type.value, action.stage_index, action.microbatch_index)]


def place_in_slots(order: list[list[Task]]) -> list[list[Task | None]]:
    """Places each rank's tasks in slots, in order and as early as inputs allow; None is idle."""
    placed = place_in_time(order, dict.fromkeys(TIMES, 1))
    end = max(timed.end for row in placed for timed in row)
    slots: list[list[Task | None]] = [[None] * end for _ in placed]
    for row, timed_row in zip(slots, placed, strict=True):
        for timed in timed_row:
            row[timed.start] = timed.task
    return slots


def place_in_time(order: list[list[Task]], times: Mapping[str, int] = TIMES) -> list[list[Timed]]:
    """Places each rank's tasks in time, in order and as early as their inputs allow.

    `times`: the duration of each kind of task.
    """
    last_stage = max(task.stage for tasks in order for task in tasks)
    placed: list[list[Timed]] = [[] for _ in order]
    ends: dict[Task, int] = {}
    waiting = [list(tasks) for tasks in order]
    while any(waiting):
        moved = False
        for rank, tasks in enumerate(waiting):
            while tasks and _inputs(tasks[0], last_stage) <= ends.keys():
                task = tasks.pop(0)
                free = placed[rank][-1].end if placed[rank] else 0
                start = max([free, *(ends[needed] for needed in _inputs(task, last_stage))])
                placed[rank].append(Timed(task, start, start + times[task.kind]))
                ends[_result(task)] = start + times[task.kind]
                moved = True
        if not moved:
            raise ValueError(
                f"this order cannot be run: every rank waits, at {[tasks[:1] for tasks in waiting]}"
            )
    return placed


def idle_time(placed: list[list[Timed]]) -> Fraction:
    """Computes idle time as a part of all time, from the first task of any rank to the last."""
    end = max(timed.end for row in placed for timed in row)
    busy = sum(timed.end - timed.start for row in placed for timed in row)
    return 1 - Fraction(busy, end * len(placed))


def _result(task: Task) -> Task:
    """The result that others wait for: a whole backward gives the gradient of the input too."""
    return task._replace(kind="B") if task.kind == "I" else task


def _inputs(task: Task, last_stage: int) -> set[Task]:
    """Lists the tasks whose results a task needs."""
    kind, stage, microbatch = task
    if kind == "F":
        return {Task("F", stage - 1, microbatch)} if stage else set()
    if kind == "W":
        return {Task("B", stage, microbatch)}
    return {Task("F", stage, microbatch)} | (
        {Task("B", stage + 1, microbatch)} if stage < last_stage else set()
    )


def bubble(slots: list[list[Task | None]]) -> Fraction:
    """Computes idle slots as a part of all slots."""
    everything = [task for row in slots for task in row]
    return Fraction(everything.count(None), len(everything))


def draw(slots: list[list[Task | None]]) -> str:
    """Draws one line per rank.

    `>0` is the forward of microbatch 0, `<0` its backward or the gradients of the inputs, `w0`
    those of the weights; `2>0` names stage 2 as well; `.` is an idle slot.
    """
    several = any(task and task.stage != rank for rank, row in enumerate(slots) for task in row)
    cells = [[_cell(task, several) for task in row] for row in slots]
    width = max(len(cell) for row in cells for cell in row)
    lines = (
        f"rank {rank}   " + " ".join(f"{cell:<{width}}" for cell in row).rstrip()
        for rank, row in enumerate(cells)
    )
    return "\n".join(lines)


def _cell(task: Task | None, several: bool) -> str:
    if task is None:
        return "."
    sign = {"F": ">", "B": "<", "I": "<", "W": "w"}[task.kind]
    return f"{task.stage if several else ''}{sign}{task.microbatch}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a pipeline schedule.")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B")
    parser.add_argument("--pp", type=int, default=2, help="processes of the pipeline")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--stages", type=int, default=1, help="stages of each process")
    options = parser.parse_args()
    slots = place_in_slots(
        rank_orders(options.schedule, options.pp, options.microbatches, options.stages)
    )
    print(draw(slots))
    print(f"idle: {bubble(slots)} of all slots")


if __name__ == "__main__":
    main()
