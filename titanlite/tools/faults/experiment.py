"""Runs a fault, or the healthy program, through the check that can see it.

What it is: `Experiments.run` gives the differences from what is right, in the order in which they
are computed, so that the first one that is too large can be named. Faults of a step go through the
comparison of `titanlite verify` itself. The others are compared with an uninterrupted run of one
process, and the logits of exported models with those that they should have.
Why it is here: a prediction of one figure and one step can be compared with what happens.
What it costs: one to four seconds per run, of a model with 2 blocks of width 32, on 1 or 2
processes, once on 4. The patch exists in worker processes, which end afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import runpy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from titanlite.config.load import load_config, program_folder
from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.model.llama import Llama
from titanlite.runtime.files import read_bounded
from titanlite.tokenizer.tokenizer import Tokenizer, named_tokenizer
from titanlite.tools.faults.catalogue import find_fault
from titanlite.tools.faults.fault import Fault
from titanlite.tools.formats.check_export import TOLERANCE, compare_tensors, logits_difference
from titanlite.tools.formats.convert import convert, load_full_state
from titanlite.tools.formats.export import Options
from titanlite.tools.formats.full_state import FullTensor
from titanlite.tools.prepare.cache import prepare
from titanlite.tools.verify.campaign import reference_key, tolerances_of
from titanlite.tools.verify.compare import Differences, larger, measure_steps, reference
from titanlite.tools.verify.ladder import Case, make_case, parse_layout
from titanlite.tools.verify.pool import Pool

SMALL = [
    "debug",
    "--model.dim=32",
    "--model.ffn_dim=64",
    "--model.num_layers=2",
    "--training.seq_len=32",
]
# Whole runs stop after step 3 of 6; the schedule does not depend on the number of steps
STOP = 3
STEPS = 6
RUN = [
    *SMALL,
    "--training.global_batch_size=8",
    "--training.local_batch_size=2",
    "--optimizer.eps=1e-5",  # as in `titanlite verify`: see make_case
    "--schedule.name=constant",
    "--schedule.warmup_steps=10",
    "--metrics.log_freq=1",
    "--checkpoint.freq=0",
    f"--validation.freq={STOP}",
    "--validation.samples=8",
    "--validation.prompts=",
    "--compile.enabled=false",
    "--training.compute_dtype=float32",
    "--run.device=cpu",
    "--run.name=run",
]
ADAPTERS = ["--lora.rank=4", "--optimizer.lr=0.01"]
EXPORT = Options(to="hf", verify=False)
RUN_TOLERANCE = 1e-5
TIMEOUT = 300  # seconds, of a call that takes a few; other programs may use the cores


@dataclasses.dataclass(frozen=True)
class Measured:
    """One difference from what is right."""

    figure: str
    step: int
    difference: float
    tolerance: float

    @property
    def is_off(self) -> bool:
        return not self.difference <= self.tolerance  # NaN is off


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a check found, in the order in which it was computed."""

    measured: Sequence[Measured]

    def first_off(self) -> Measured | None:
        """The first figure that differs; None if all are right."""
        for measured in self.measured:
            if measured.is_off:
                return measured
        return None

    def largest(self, figure: str) -> float:
        """The largest difference of a figure over all steps."""
        differences = [each.difference for each in self.measured if each.figure == figure]
        return functools.reduce(larger, differences)


def plant(name: str) -> AbstractContextManager[None]:
    """Plants the fault of this name within the context; none if `name` is empty."""
    if not name:
        return contextlib.nullcontext()
    return find_fault(name).plant()


class Experiments:
    """Runs checks on a pool; references and prepared text are kept for the next one."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        """`folder`: for references, prepared text and runs; empty."""
        self.pool = pool
        self.folder = folder
        self._references: dict[object, Path] = {}
        self._healthy: dict[object, Outcome] = {}  # by check and layout
        self._text: Path | None = None
        self._run_number = 0

    def run(self, fault: Fault, planted: bool) -> Outcome:
        """The check of this fault, with the fault planted or without."""
        if planted:
            return self._run(fault, fault.name)
        key = (fault.check, fault.layout, fault.resumed)
        if key not in self._healthy:
            self._healthy[key] = self._run(fault, "")
        return self._healthy[key]

    def _run(self, fault: Fault, name: str) -> Outcome:
        """`name`: of the fault that is planted; empty: none."""
        if fault.check in ("verify", "experts"):
            return Outcome(self._verify(fault.layout, name))
        if fault.check == "run":
            return Outcome(self._compare_runs(fault, name))
        if fault.check == "merge":
            return Outcome(self._merge(fault, name))
        return Outcome(self._export(name))

    def _verify(self, layout: str, name: str) -> list[Measured]:
        case = make_case(SMALL, layout, "cpu")
        llama = llama_of(case.config)
        key = reference_key(case.config, llama)
        if key not in self._references:
            path = self.folder / f"reference-{len(self._references)}.pt"
            self.pool.run(1, reference, case.config, llama, path, timeout=TIMEOUT)
            self._references[key] = path
        ranks = self.pool.run(
            case.processes,
            measure_planted,
            name,
            case.config,
            llama,
            self._references[key],
            timeout=TIMEOUT,
        )
        return in_order(case, ranks)

    def _compare_runs(self, fault: Fault, name: str) -> list[Measured]:
        if "run" not in self._references:
            self._references["run"] = self._train("", [("", STEPS)], [])
        parts = [(fault.layout, STEPS)]
        if fault.resumed is not None:
            parts = [(fault.layout, STOP), (fault.resumed, STEPS)]
        return compare_losses(self._references["run"], self._train(name, parts, []))

    def _merge(self, fault: Fault, name: str) -> list[Measured]:
        base = self.folder / "base.pt"
        options = [f"--checkpoint.initial_load={base}", "--validation.freq=0", *ADAPTERS]
        if "merge" not in self._references:
            save_model(base)
            self._references["merge"] = self._train("", [("", STEPS)], options)
        expected = self._references["merge"]
        run = self._train(name, [(fault.layout, STEPS)], options)
        (difference,) = self.pool.run(
            1, merge_planted, name, expected, run, joins=False, timeout=TIMEOUT
        )
        return [*compare_losses(expected, run), Measured("merged", 0, difference, TOLERANCE)]

    def _train(self, name: str, parts: list[tuple[str, int]], options: list[str]) -> Path:
        """A run with the fault, in a layout until a step, and then in another; its folder."""
        if self._text is None:
            self._text = make_text(self.folder)
        self._run_number += 1
        folder = self.folder / f"run-{self._run_number}"
        for layout, steps in parts:
            degrees = dict(parse_layout(layout))
            arguments = [*RUN, *options, f"--data.path={self._text}", f"--run.folder={folder}"]
            arguments += [f"--{key}={value}" for key, value in degrees.items()]
            arguments.append(f"--training.steps={steps}")
            processes = make_case(SMALL, layout, "cpu").processes
            codes = self.pool.run(processes, train_planted, name, arguments, timeout=TIMEOUT)
            assert set(codes) == {0}, codes
        return folder / "run"

    def _export(self, name: str) -> list[Measured]:
        self._run_number += 1
        folder = self.folder / f"export-{self._run_number}"
        folder.mkdir()
        ((different, logits),) = self.pool.run(
            1, export_planted, name, folder, joins=False, timeout=TIMEOUT
        )
        return [Measured("tensors", 0, different, 0.0), Measured("logits", 0, logits, TOLERANCE)]


def llama_of(config: Config) -> LlamaConfig:
    return resolve_flavor(config.model, named_tokenizer(config.data.tokenizer).size)


def measure_planted(name: str, config: Config, llama: LlamaConfig, path: Path) -> Differences:
    """Runs verify's comparison with the fault, in a worker."""
    with plant(name):
        return measure_steps(config, llama, path)


def train_planted(name: str, arguments: list[str]) -> int:
    """Runs train.py with the fault, in a worker; returns its exit code."""
    main = runpy.run_path(str(program_folder() / "train.py"))["main"]
    with plant(name):
        code: int = main(load_config(arguments))
    return code


@torch.no_grad()
def save_model(path: Path) -> None:
    """A model of the shape SMALL."""
    llama = llama_of(load_config(SMALL))
    model = Llama(llama, 32)
    model.init_weights(0)
    weights = model.state_dict()
    for parameter, value in weights.items():
        if ".attention.w" in parameter:  # as after training: attention that is not uniform
            value *= 4
    shape = dataclasses.asdict(llama)
    torch.save({"model": weights, "model_config": shape, "step": 1, "seq_len": 32}, path)


def export_planted(name: str, folder: Path) -> tuple[float, float]:
    """Exports a model for Hugging Face with the fault, in a worker.

    Returns the number of tensors that differ when they are read again, and the difference of its
    logits relative to the largest one.
    """
    source = folder / "model.pt"
    save_model(source)
    target = folder / "exported"
    with plant(name):
        result = convert(source, target, EXPORT, log=lambda text: None)
        written = load_full_state(source)
        problems = compare_tensors(written, result, unrounded, False, lambda num_bytes: None)
        difference, largest = logits_difference(written, result, unrounded, half_split=True)
    return float(len(problems)), difference / largest


def merge_planted(name: str, trained: Path, run: Path) -> float:
    """Exports the run with the fault, in a worker, which adds its adapters to its weights.

    Returns the largest difference of its logits from those of the run `trained`, relative to the
    largest logit.
    """
    target = run.parent / "exported"
    with plant(name):
        result = convert(run, target, EXPORT, log=lambda text: None)
    source = load_full_state(trained)
    difference, largest = logits_difference(source, result, unrounded, half_split=True)
    return difference / largest


def unrounded(tensor: FullTensor, rows: Tensor) -> Tensor:
    """The rows of a tensor as an export in the same dtype has them."""
    return rows


def in_order(case: Case, ranks: Sequence[Differences]) -> list[Measured]:
    """Sorts what verify measured, the largest of all ranks, in the order of a run."""
    tolerances = tolerances_of(case)
    measured: list[Measured] = []

    def add(figure: str, step: int, differences: list[float]) -> None:
        largest = functools.reduce(larger, differences)
        measured.append(Measured(figure, step, largest, tolerances[figure]))

    num_steps = len(ranks[0].loss)
    for i in range(num_steps):
        if ranks[0].choices:  # of a mixture of experts, the same on all ranks
            measured.append(Measured("choices", i + 1, ranks[0].choices[i], 0.0))
        add("loss", i + 1, [rank.loss[i] for rank in ranks])
        if i == 0:
            add("gradient", 1, [rank.gradient for rank in ranks])
        add("grad_norm", i + 1, [rank.grad_norm[i] for rank in ranks])
    add("parameters", num_steps, [rank.parameters for rank in ranks])
    return measured


def compare_losses(expected: Path, run: Path) -> list[Measured]:
    """The losses of a run beside those that are right, relative to these."""
    found = losses_of(run)
    return [
        Measured(figure, step, abs(found[step, figure] / value - 1), RUN_TOLERANCE)
        for (step, figure), value in losses_of(expected).items()
    ]


def losses_of(folder: Path) -> dict[tuple[int, str], float]:
    """Reads (step, figure) -> value, in the order of the run's metrics.jsonl."""
    losses: dict[tuple[int, str], float] = {}
    for line in read_bounded(folder / "metrics.jsonl").splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name == "loss":
                losses[row["step"], "loss"] = value
            elif name.startswith("validation/") and name.endswith("/loss"):
                losses[row["step"], "validation"] = value
    return losses


def make_text(folder: Path) -> Path:
    """Prepared data of a text that is the same everywhere."""
    path = folder / "text.py"
    blocks = [
        f"def add_{i}(x):\n    y = x + {i * i % 97}\n    return y * {i % 7}\n\n\n"
        for i in range(400)
    ]
    path.write_text("".join(blocks))
    arguments = [*SMALL, f"--data.path={path}", f"--data.cache={folder / 'cache'}"]
    return prepare(load_config(arguments).data, Tokenizer(), lambda text: None)
