"""The optimizer step: in which order it calls its parts, and that there is no other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from model_builder import EVEN, build_stages

from titanlite.config.schema import Config, ScheduleConfig, TrainingConfig
from titanlite.data.rows import IGNORED, Batch
from titanlite.optim.optimizer import build_optimizer
from titanlite.optim.schedule import Schedule
from titanlite.optim.stability import Guard
from titanlite.parallel.step import StepParts, build_step_parts, optimizer_step

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_nothing_else_takes_a_step():
    """What is compared, planned, explained and timed is what trains."""
    files = [ROOT / "train.py", *ROOT.glob("titanlite/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    callers = [path for path in files if "stages.forward_backward(" in path.read_text()]
    named_by = ROOT / "titanlite/tools/explain/sentences.py"  # in a string
    assert set(callers) == {ROOT / "titanlite/parallel/step.py", named_by}


def make_parts() -> StepParts:
    """The parts of one process, whose rate falls by a tenth of its peak in each step."""
    stages = build_stages({}, llama=EVEN)
    schedule = ScheduleConfig(name="linear", warmup_steps=0, min_ratio=0.0)
    config = Config(
        training=TrainingConfig(
            seq_len=16, local_batch_size=2, steps=11, compute_dtype="float32", max_norm=0.5
        ),
        schedule=schedule,
    )
    return build_step_parts(stages.model_parts, config, stages.mesh, CPU, compiled=False)


class Notes:
    """Notes what is true at each of the points of a step."""

    def __init__(self, parts: StepParts) -> None:
        self.parts = parts
        self.weight = parts.stages.model_parts[0].norm.weight
        self.calls: list[str] = []
        self.first = self.weight.detach().clone()

    def squares(self) -> float:
        parameters = self.parts.stages.model_parts[0].parameters()
        return sum(float(p.grad.square().sum()) for p in parameters)

    def before_step(self, batches: list[Batch]) -> None:
        assert self.weight.grad is None
        self.calls.append(f"step of {len(batches)}")

    def after_backward(self, i: int, num_batches: int, num_targets: torch.Tensor) -> None:
        assert int(num_targets) == 2 * 2 * 16 - 3
        self.calls.append(f"backward {i} of {num_batches}")
        self.norm = self.squares() ** 0.5

    def save(self) -> None:
        assert torch.equal(self.weight, self.first)
        self.calls.append("save")

    def before_update(self) -> None:
        assert torch.equal(self.weight, self.first)
        assert self.squares() ** 0.5 == pytest.approx(0.5, rel=1e-4)  # clipped
        self.calls.append("update")

    def after_update(self) -> None:
        assert not torch.equal(self.weight, self.first)
        assert self.weight.grad is not None
        self.calls.append("updated")


def one_step() -> None:
    parts = make_parts()
    notes = Notes(parts)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for ignored in (0, 3):
        tokens = torch.randint(EVEN.vocab_size, (2, 17), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[0, :ignored] = IGNORED
        batches.append(Batch(tokens[:, :-1], labels))
    padding = torch.zeros(2, 16, dtype=torch.bool)
    padding[1, 11:] = True
    batches[1] = batches[1]._replace(padding=padding)
    result = optimizer_step(2, batches, range(4), parts, notes, notes.save)
    assert notes.calls == [
        "step of 2",
        "backward 0 of 2",
        "backward 1 of 2",
        "save",
        "update",
        "updated",
    ]
    assert notes.weight.grad is None
    assert float(result.grad_norm) == pytest.approx(notes.norm, rel=1e-5)
    assert 0 < float(result.loss) < 10
    assert int(result.num_tokens) == 2 * 2 * 16 - 5
    assert result.lr == pytest.approx(0.9 * parts.schedule.peak_lr)


def test_the_order_of_a_step(pool):
    pool.run(1, one_step)


def bad_step() -> None:
    parts = make_parts()
    stages = parts.stages
    config = Config()
    optimizer = build_optimizer(stages.model_parts, config.optimizer)
    stability = dataclasses.replace(config.stability, action="skip")
    guard = Guard(stability, optimizer, parts.scaler, stages.mesh, CPU)
    schedule = Schedule(optimizer, config.schedule, config.optimizer.lr, 10)
    parts = dataclasses.replace(parts, optimizer=optimizer, guard=guard, schedule=schedule)

    class Poison(Notes):
        def after_backward(self, i: int, num_batches: int, num_targets: torch.Tensor) -> None:
            self.weight.grad.fill_(float("nan"))

        def before_update(self) -> None: ...

        def after_update(self) -> None:
            assert torch.equal(self.weight, self.first)

    tokens = torch.zeros(2, 16, dtype=torch.int64)
    result = optimizer_step(1, [Batch(tokens, tokens)], range(7, 9), parts, Poison(parts))
    (pending,) = guard.pending
    assert (pending.step, pending.first, pending.end) == (1, 7, 9)
    assert torch.isnan(result.grad_norm)


def test_a_bad_step_is_withheld_and_its_samples_are_named(pool):
    pool.run(1, bad_step)
