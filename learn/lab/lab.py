"""The failure lab: a run has an accident, and you find out from its files what happened.

    python learn/lab/lab.py list
    python learn/lab/lab.py start freeze
    python learn/lab/lab.py answer freeze --rank 1 --phase update --at 7 --survived 4

What it is: `start` trains a small model on two processes of this machine; rank, step and phase of
the accident are drawn. What really happened is in a hidden file of the run's folder, with which
`answer` compares.
Why it is here: who has read these files once, in peace, knows where to look at night.
What it costs: up to half a minute per case, and 10 MB in outputs/lab.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config.load import load_config
from titanlite.config.mistakes import suggestion
from titanlite.distributed.run_folder import lock
from titanlite.runtime.errors import EXIT_CONFIG, EXIT_HUNG, LAUNCHED, ConfigError
from titanlite.runtime.files import read_bounded
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.cli.processes import Group, Signals, run
from titanlite.tools.prepare.cache import prepare

TRUTH = ".truth.json"
PHASES = ("reading data", "forward and backward", "update")
SAVING = "saving"
SAVE_EVERY = 4
BATCH = 8
FOLDER = Path("outputs/lab")
OPTIONS = [
    "debug",
    "--model.dim=32",
    "--model.num_layers=2",
    "--model.ffn_dim=64",
    "--training.seq_len=64",
    "--training.steps=16",
    f"--training.global_batch_size={BATCH}",
    "--training.local_batch_size=2",
    "--training.compute_dtype=float32",
    "--schedule.warmup_steps=2",
    "--metrics.log_freq=1",
    f"--checkpoint.freq={SAVE_EVERY}",
    "--checkpoint.keep=0",
    "--checkpoint.async_mode=disabled",
    "--validation.freq=0",
    "--validation.prompts=",
    "--stability.action=rollback",
    "--comm.step_timeout_seconds=4",
    "--parallel.dp_shard=2",
    "--run.device=cpu",
]


@dataclass(frozen=True)
class Case:
    """What the reader gets, and what has to be found."""

    title: str
    story: str
    questions: dict[str, str]  # option -> what to find
    exit_code: int  # of the run; with another one the accident has not happened


AT = "the step in which it happened"
SURVIVED = "the newest step whose checkpoint is complete"
CASES = {
    "freeze": Case(
        "A process stops",
        "One process of two no longer runs, and does not end either. The others wait for it until "
        "the watchdog ends the run.",
        {
            "rank": "which rank stopped",
            "phase": "what it was doing",
            "at": AT,
            "survived": SURVIVED,
        },
        exit_code=EXIT_HUNG,
    ),
    "kill": Case(
        "A process is killed",
        "One process of two disappears in the middle of its work, as by the kernel's out-of-memory "
        "killer.",
        {
            "rank": "which rank was killed",
            "phase": "what it was doing",
            "at": "the step after which it happened",
            "survived": SURVIVED,
        },
        exit_code=128 + signal.SIGKILL,
    ),
    "disk": Case(
        "The disk is full",
        "The disk of one rank takes no more data. (In truth the files of this process may not grow "
        "beyond 100 kB: your disk is safe.)",
        {
            "rank": "whose file could not be written",
            "at": "the step that could not be saved",
            "survived": SURVIVED,
        },
        exit_code=1,
    ),
    "poison": Case(
        "A batch is poisoned",
        "One sample makes the loss NaN. The run has `stability.action = rollback`, and goes on.",
        {
            "at": AT,
            "samples": "the sample numbers that it excluded, as 16-23",
            "survived": "the step whose checkpoint it loaded",
        },
        exit_code=0,
    ),
}
QUESTIONS = sorted({name for case in CASES.values() for name in case.questions})


def accident(case: str, drawn: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """What broken_train.py gets, and the right answers."""
    rank = drawn.randrange(2)
    if case == "freeze":
        at = drawn.randrange(6, 13)
        phase = drawn.choice(PHASES)
        survived = (at - 1) // SAVE_EVERY * SAVE_EVERY
        answers = {"rank": rank, "phase": phase, "at": at, "survived": survived}
        return {"rank": rank, "at": at, "phase": phase}, answers
    if case == "kill":
        at = drawn.choice((8, 12))
        answers = {"rank": rank, "phase": SAVING, "at": at, "survived": at - SAVE_EVERY}
        return {"rank": rank, "at": at}, answers
    if case == "disk":
        at = drawn.choice((8, 12))
        answers = {"rank": rank, "at": at, "survived": at - SAVE_EVERY}
        return {"rank": rank, "at": at - 1}, answers
    at = drawn.randrange(6, 13)
    first = (at - 1) * BATCH
    answers = {
        "at": at,
        "samples": f"{first}-{first + BATCH - 1}",
        "survived": (at - 1) // SAVE_EVERY * SAVE_EVERY,
    }
    return {"sample": first + drawn.randrange(BATCH)}, answers


def start(case: str, folder: Path) -> int:
    """Runs a case; 0 if the accident has happened, 1 otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = lock(folder / ".lab.lock")
    except BlockingIOError:
        raise ConfigError(
            f"{folder}: a case is running there; expected another --folder, or its end"
        ) from None
    with held:
        return run_case(case, folder)


def run_case(case: str, folder: Path) -> int:
    """The same, in a folder that is locked."""
    place = folder / case
    if place.exists():
        if not (place / TRUTH).exists():
            raise ConfigError(f"{place}: not a folder of the lab; expected another --folder")
        shutil.rmtree(place)
    place.mkdir()
    text = folder / "text.py"
    if not text.exists():  # with another time it would be prepared again
        functions = [f"def add_{i}(x):\n    return x + {i}\n\n\n" for i in range(3000)]
        text.write_text("".join(functions))
    settings, answers = accident(case, random.Random())
    (place / TRUTH).write_text(json.dumps(answers))
    print(f"{CASES[case].title}. {CASES[case].story}\nIt takes up to half a minute.", flush=True)
    script = str(Path(__file__).with_name("broken_train.py"))
    arguments = [
        *OPTIONS,
        f"--data.path={text}",
        f"--data.cache={folder / 'cache'}",
        f"--run.folder={folder}",
        f"--run.name={case}",
    ]
    prepared = prepare(load_config(arguments).data, Tokenizer(), lambda text: None)
    variables = {
        "TITANLITE_LAB": json.dumps({"case": case, **settings}),
        LAUNCHED: json.dumps([str(prepared)]),
        "OMP_NUM_THREADS": "1",
    }
    with console_in(place / "console.txt"):
        code = run([script, *arguments], variables, Group(1, 0, 2, "127.0.0.1", 0), Signals())
    expected = CASES[case].exit_code
    if code != expected:
        print(
            f"\nThe run ended with exit code {code} instead of {expected}, so the accident has not "
            f"happened. See {place / 'console.txt'}, and start the case again."
        )
        return 1
    print(f"\nThe run ended with exit code {code}. Its files are in {place}:")
    for path in sorted(place.iterdir()):
        if path.name != TRUTH:
            print(f"    {path.name}{'/' if path.is_dir() else ''}")
    print("\nFind out:")
    for name, question in CASES[case].questions.items():
        print(f"    --{name:9} {question}")
    given = " ".join(f"--{name} ..." for name in CASES[case].questions)
    if folder != FOLDER.absolute():
        given += f" --folder {folder}"
    print(f"\n    python {os.path.relpath(__file__)} answer {case} {given}")
    return 0


@contextlib.contextmanager
def console_in(path: Path) -> Iterator[None]:
    """Redirects what this process and those that it starts print into a file, as under a
    scheduler.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    before = (os.dup(1), os.dup(2))
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(before, start=1):
            os.dup2(copy, number)
            os.close(copy)


def require_answers(case: str, given: dict[str, str]) -> None:
    """Raises ConfigError for an option that the case does not ask for, or a value that is no
    answer.
    """
    asked = CASES[case].questions
    for name, value in given.items():
        if name not in asked:
            options = ", ".join(f"--{each}" for each in asked)
            raise ConfigError(f"--{name}: {case} does not ask for it; expected {options}")
        if name == "phase":
            phases = [*PHASES, SAVING]
            if value not in phases:
                hint = suggestion(value, phases)
                raise ConfigError(f"--phase {value!r}{hint}; expected one of: {', '.join(phases)}")
        elif name == "samples":
            if not re.fullmatch(r"\d+-\d+", value):
                raise ConfigError(f"--samples {value!r}: expected the first and the last, as 16-23")
        elif not re.fullmatch(r"\d+", value):
            raise ConfigError(f"--{name} {value!r}: expected a number")


def answer(case: str, folder: Path, given: dict[str, str]) -> int:
    """Compares; 0 if all is right, 1 otherwise."""
    require_answers(case, given)
    path = folder / case / TRUTH
    if not path.exists():
        raise ConfigError(f"{folder / case}: nothing has run there; expected `start {case}` before")
    truth: dict[str, Any] = json.loads(read_bounded(path))
    right = True
    for name, question in CASES[case].questions.items():
        if name not in given:
            print(f"--{name}: not answered ({question})")
            right = False
        elif given[name] == str(truth[name]):
            print(f"--{name} {given[name]}: right")
        else:
            print(f"--{name} {given[name]}: this is not {question}")
            right = False
    if right:
        print("All right.")
    return 0 if right else 1


def options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lab.py", description="The failure lab.")
    parser.add_argument("command", choices=("list", "start", "answer"))
    parser.add_argument("case", nargs="?", default="", help=", ".join(CASES))
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help=f"of the runs; default: {FOLDER}"
    )
    for name in QUESTIONS:
        parser.add_argument(f"--{name}", help="an answer")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    chosen = options(argv)
    if chosen.command == "list":
        for name, case in CASES.items():
            print(f"{name:8} {case.title}. {case.story}")
        return 0
    if chosen.case not in CASES:
        hint = suggestion(chosen.case, list(CASES))
        raise ConfigError(f"case {chosen.case!r}{hint}; expected one of: {', '.join(CASES)}")
    folder: Path = chosen.folder.absolute()
    values = vars(chosen)
    given = {name: values[name] for name in QUESTIONS if values[name] is not None}
    if chosen.command == "answer":
        return answer(chosen.case, folder, given)
    if given:
        raise ConfigError(f"--{next(iter(given))}: an answer; expected `answer {chosen.case}`")
    return start(chosen.case, folder)


if __name__ == "__main__":
    os.environ.setdefault("LOG_RANK", "0")
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
