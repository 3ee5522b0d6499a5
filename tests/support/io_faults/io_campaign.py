"""Makes each file operation of a command fail, and simulates a power failure after each."""

from __future__ import annotations

import collections
import functools
import gc
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

from io_calls import HARMLESS, KINDS, Call, Outcome, Watch, forked
from io_scenarios import SCENARIOS, Scenario
from power_loss import Disk, Tree, read_tree, write_tree

RECOVERIES = 100  # states after a power failure on which the command is started again


def started(name: str, folder: str) -> Scenario:
    scenario = SCENARIOS[name](Path(folder))
    gc.collect()
    gc.freeze()  # a collection would visit, and so copy, what the forked processes share
    return scenario


def start(scenario: Scenario, kind: str = "", at: int = 0) -> tuple[Outcome, Watch]:
    """Starts the command in an empty folder; its `at`-th call to which `kind` applies fails."""
    empty(scenario.work)
    scenario.prepare()
    watch = Watch(kind, at)

    def run() -> int:
        watch.open(scenario.work)
        scenario.report = lambda text: (watch.calls.append(Call("reported", text)), print(text))
        return scenario.run()

    outcome = forked(run, lambda: (watch.tried, watch.calls, watch.struck))
    watch.tried, watch.calls, watch.struck = outcome.result
    return outcome, watch


def empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def repeat(scenario: Scenario) -> list[str]:
    """Starts the same command again; returns what is wrong afterwards."""
    again = forked(lambda: scenario.run(again=True))
    return (
        [f"exit code {again.code} when repeated: {again.output[-800:]}"]
        if again.code
        else scenario.unrecovered()
    )


def fail_calls(folder: str, name: str, sample: int = 0) -> dict[str, Any]:
    """Makes each call fail in each way, one per start of the command; or those of a sample."""
    begun, scenario = time.monotonic(), started(name, folder)
    outcome, watch = start(scenario)
    assert outcome.code == 0, outcome.output
    calls = collections.Counter(watch.tried)
    cases = [
        (kind, at + 1)
        for kind in KINDS
        for at in range(sum(calls[call] for call in KINDS[kind][1]))
    ]
    if sample:
        cases = random.Random(name).sample(cases, min(sample, len(cases)))
    problems = []
    for kind, at in cases:
        outcome, watch = start(scenario, kind, at)
        found = (
            scenario.lost(outcome, kind)
            + unclear(outcome, kind)
            + ([] if watch.struck else ["nothing failed"])
        )
        found += repeat(scenario) if kind not in HARMLESS or found else []
        if found:
            problems.append(
                f"{name}: {kind} in call {at}: {'; '.join(found)}\n{outcome.output[-800:]}"
            )
    seconds = time.monotonic() - begun
    return {
        "calls": sum(calls.values()),
        "cases": len(cases),
        "seconds": seconds,
        "problems": problems,
    }


def unclear(outcome: Outcome, kind: str) -> list[str]:
    """Problems: an exit code that is not documented, or an error that is not one line."""
    errors = [line for line in outcome.output.splitlines() if line.startswith("error:")]
    found = [] if outcome.code in (0, 1, 2) else [f"exit code {outcome.code}"]
    found += ["a stack trace"] if "Traceback" in outcome.output else []
    found += ["failed although the fault is harmless"] if kind in HARMLESS and outcome.code else []
    return found + (
        [f"{len(errors)} errors, exit code {outcome.code}"]
        if len(errors) != bool(outcome.code)
        else []
    )


def fail_power(folder: str, name: str, sample: int = 0) -> dict[str, Any]:
    """Examines what the disk may hold after a power failure at each moment of a command; or a
    sample of these states.

    In some of the states the command is started again.
    """
    begun, scenario, draw = time.monotonic(), started(name, folder), random.Random(name)
    empty(scenario.work)
    scenario.prepare()
    disk = Disk(scenario.work, read_tree(scenario.work))
    outcome, watch = start(scenario)
    assert outcome.code == 0, outcome.output
    states: dict[Any, tuple[str, Tree, Outcome]] = {}
    now, output = "at the start", ""
    for number, call in enumerate([None, *watch.calls, Call("reported", "end")]):
        if call is not None:
            now = f"after operation {number}, {call.name} {call.path}"
            disk.apply(call)
            output += f"{call.path}\n" if call.name == "reported" else ""
        for tree in disk.crashes(draw):
            failed = Outcome(int("end" not in output), output, None)
            states.setdefault((output, *sorted(tree.items())), (now, tree, failed))
    chosen = draw.sample(list(states.values()), min(sample or len(states), len(states)))
    problems = []
    for number, (now, tree, failed) in enumerate(chosen):
        empty(scenario.work)
        write_tree(tree, scenario.work)
        found = scenario.lost(failed, "power")
        found += repeat(scenario) if number < (sample // 10 or RECOVERIES) else []
        problems += [f"{name}: power failure {now}: {'; '.join(found)}"] if found else []
    seconds = time.monotonic() - begun
    return {
        "calls": len(watch.calls),
        "cases": len(chosen),
        "seconds": seconds,
        "problems": problems,
    }


def fail_sample(folder: str, cases: list[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """Runs several scenarios in one process: (function, scenario, number of cases)."""
    results = []
    for number, (function, name, sample) in enumerate(cases):
        (inner := Path(folder, str(number))).mkdir()
        results.append(globals()[function](str(inner), name, sample))
    return results


def strikes(folder: str) -> dict[str, str]:
    """Kind of fault -> the error of a program whose second write has it."""
    path = Path(folder, "file")

    def write_thrice(watch: Watch, sizes: list[int]) -> int:
        watch.open(Path(folder))
        try:
            with path.open("wb", buffering=0) as file:
                assert [os.write(file.fileno(), b"abcd") for _ in sizes] == sizes
        except OSError as error:
            print(error.strerror, end="")
        return 0

    found = {}
    for kind in KINDS:
        watch = Watch(kind, 3 if "open" in KINDS[kind][1] else 2)
        sizes = [4, 2 if kind == "short" else 4, 4]
        outcome = forked(
            functools.partial(write_thrice, watch, sizes),
            functools.partial(getattr, watch, "struck"),
        )
        assert outcome.code == 0, outcome.output
        found[kind] = outcome.output if outcome.result else "did not strike"
    return found
