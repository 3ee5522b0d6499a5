"""Bad steps are found, whatever the losses do, and without reading a number from the device."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from titanlite.config.schema import StabilityConfig, TrainingConfig
from titanlite.optim.found_inf import withhold
from titanlite.optim.loss_scale import LossScale
from titanlite.optim.stability import Guard, Pending, Verdict, robust_z
from titanlite.runtime.errors import ConfigError

CPU, NAN = torch.device("cpu"), float("nan")


def make_guard(dtype: str = "float32", scale: float = 1.0, **keys) -> Guard:
    """A guard of one parameter, whose steps have eight samples each."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.1, fused=True)
    scaler = LossScale(TrainingConfig(compute_dtype=dtype, loss_scale=scale), optimizer, CPU)
    mesh = SimpleNamespace(degrees={"tp": 1})
    return Guard(StabilityConfig(**keys), optimizer, scaler, mesh, CPU)


def make_float16_guard(scale: float, **keys) -> Guard:
    return make_guard("float16", scale, **keys)


def acts_on(guard: Guard) -> Verdict:
    """The bad step on which the run must act, after waiting for all numbers."""
    return guard.read(0, torch.ones(()), torch.ones(())).acts_on


NO_OVERFLOW = torch.zeros((), dtype=torch.bool)
HAS_TARGETS = torch.zeros((), dtype=torch.bool)  # the step is not empty


def withheld(guard: Guard, losses: Tensor, norms: Tensor, first: int = 1) -> list[int]:
    """The positions of the steps whose updates are withheld."""
    decided = (
        guard.decide(first + i, now, NO_OVERFLOW, HAS_TARGETS)[1]
        for i, now in enumerate(torch.stack([losses, norms], dim=1))
    )
    return [i for i, bad in enumerate(decided) if bad]


def healthy(steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """Losses that fall from 8 to 2 with noise of 0.05, and norms that fall with noise of 20 %."""
    generator, fall = torch.Generator().manual_seed(seed), torch.exp(-torch.arange(steps) / 300)
    losses = 2 + 6 * fall + 0.05 * torch.randn(steps, generator=generator)
    return losses, (0.3 + 0.7 * fall) * torch.exp(0.2 * torch.randn(steps, generator=generator))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_ten_spikes_in_two_thousand_noisy_losses(seed):
    """Five of the loss, five of the norm; all are found, and at most one healthy step is taken for
    a spike.
    """
    losses, norms = healthy(2000, seed)
    at = 150 + torch.randperm(1800, generator=torch.Generator().manual_seed(seed))[:10]
    losses[at[:5]] += 0.6
    norms[at[5:]] *= 8
    found, planted = (
        set(withheld(make_guard(threshold=8, action="skip"), losses, norms)),
        set(at.tolist()),
    )
    assert planted <= found
    assert len(found - planted) <= 1


def test_a_spike_before_the_end_of_the_warmup_is_none():
    losses, norms = healthy(400, 0)
    losses[250] += 5
    assert withheld(make_guard(threshold=8, action="skip", warmup_steps=300), losses, norms) == []
    assert withheld(make_guard(threshold=8, action="skip", warmup_steps=250), losses, norms) == [
        250
    ]


def test_a_new_level_is_adopted_within_a_window():
    """The first 64 steps, half a window, are all spikes; then none is."""
    losses, norms = torch.randn(600, generator=torch.Generator().manual_seed(0)), torch.ones(600)
    losses[300:] += 20
    found = withheld(make_guard(threshold=6, action="skip"), 10 + losses, norms)
    assert found[0] == 300
    assert 30 <= len(found) <= 64
    assert found[-1] < 300 + 64


def test_what_is_not_finite_never_enters_the_window():
    losses, norms = healthy(300, 1)
    guard, other = make_guard(threshold=8, action="skip"), make_guard(threshold=8, action="skip")
    assert withheld(guard, losses, norms) == []
    bad = [NAN, math.inf, -math.inf] * 20
    assert withheld(guard, torch.tensor(bad), torch.ones(60), 301) == list(range(60))
    assert withheld(guard, torch.ones(60), torch.tensor(bad), 361) == list(range(60))
    withheld(other, losses, norms)
    assert torch.equal(guard.values, other.values)
    assert guard.counts.tolist() == [300, 120, 120]
    for one in (guard, other):
        now = torch.tensor([2.5, 0.3])
        assert robust_z(one.values, one.counts[0], now).isfinite().all()


def test_a_step_without_targets_is_not_judged():
    """Its loss is undefined and its gradient 0; neither ends a sequence of broken steps."""
    losses, norms = healthy(200, 1)
    guard, other = make_guard(threshold=8, action="skip"), make_guard(threshold=8, action="skip")
    for one in (guard, other):
        assert withheld(one, losses, norms) == []
        assert withheld(one, torch.tensor([NAN]), torch.ones(1), 201) == [0]
    empty = torch.tensor([NAN, 0.0])
    for step in range(202, 302):
        numbers, flag = guard.decide(step, empty, NO_OVERFLOW, ~HAS_TARGETS)
        assert not flag
        assert numbers[0] == 0
    assert torch.equal(guard.values, other.values)
    assert torch.equal(guard.counts, other.counts)


def test_z_is_that_of_the_definition():
    """Not full, full and around; with a fall, which is taken out, and a rise, which is not."""
    generator = torch.Generator().manual_seed(0)
    for steps in (13, 16, 37):
        for slope in (-0.3, 0.2):
            values = [
                5 + slope * i + float(torch.randn((), generator=generator)) for i in range(steps)
            ]
            ring = torch.zeros(1, 16)
            for i, value in enumerate(values):
                ring[0, i % 16] = value
            last = values[-16:]
            lag = statistics.median(b - a for a, b in zip(last, last[8:], strict=False)) / 8
            level = [value + min(0.0, lag) * (len(last) - i) for i, value in enumerate(last)]
            middle = statistics.median(level)
            deviation = 1.4826 * statistics.median(abs(value - middle) for value in level)
            z = robust_z(ring, torch.tensor(steps), torch.tensor([9.0]))
            assert float(z) == pytest.approx((9.0 - middle) / deviation, rel=1e-4)


def test_equal_losses_do_not_make_every_change_a_spike():
    guard = make_guard(threshold=6, action="skip")
    losses = torch.full((300,), 2.0)
    losses[200], losses[220] = 2.01, 2.02  # 5 and 10 thousandths of the median
    assert withheld(guard, losses, torch.ones(300)) == [220]


def test_without_a_threshold_only_what_is_not_finite_is_bad():
    losses, norms = healthy(300, 2)
    losses[200], losses[250] = 1e9, NAN
    assert withheld(make_guard(action="skip"), losses, norms) == [250]


@pytest.mark.parametrize("action", ["stop", "skip", "rollback"])
def test_deciding_reads_nothing_from_the_device(action):
    """A fake tensor has no numbers to read."""
    with FakeTensorMode():
        guard = make_guard(action=action, threshold=8, warmup_steps=0)
        for step in range(1, 4):
            no = torch.zeros((), dtype=torch.bool)
            numbers, flag = guard.decide(step, torch.ones(2), no, no)
    assert (numbers.shape, flag.shape, flag.dtype) == ((7,), (), torch.bool)


def test_an_optimizer_that_would_ignore_the_flag_is_refused():
    optimizer = torch.optim.RAdam([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(ConfigError, match="RAdam cannot withhold an update"):
        Guard(
            StabilityConfig(action="skip"),
            optimizer,
            SimpleNamespace(),
            SimpleNamespace(degrees={"tp": 1}),
            CPU,
        )


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)


def step(guard: Guard, number: int, loss: float, norm: float = 1.0) -> bool:
    """One optimizer step; returns whether the parameter and its state kept their bits."""
    optimizer = guard.optimizer
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.full((3,), norm)
    guard.scaler.judge(torch.tensor(norm))
    guard.judge(number, range(8), torch.tensor(loss), torch.tensor(norm), torch.tensor(8))
    before = [
        tensor.detach().clone() for tensor in (parameter, *optimizer.state[parameter].values())
    ]
    optimizer.step()
    after = [tensor.detach() for tensor in (parameter, *optimizer.state[parameter].values())]
    return bool(before) and all(
        torch.equal(a, b) for a, b in zip(before, after, strict=len(before) > 1)
    )


@pytest.mark.parametrize("action", ["stop", "skip", "rollback"])
def test_the_update_of_a_bad_step_is_withheld(alone, action):
    """With `skip` that of this step, otherwise all until the run acts on it."""
    guard = make_guard(action=action, threshold=8)
    kept = [step(guard, i, NAN if i == 2 else 3.0) for i in range(1, 6)]
    assert kept == (
        [False, True, False, False, False] if action == "skip" else [False, True, True, True, True]
    )
    assert guard.noticed == (action != "skip")
    if action != "skip":
        assert (
            str(acts_on(guard))
            == "step 2 (samples 0 to 7): the loss is nan, the gradient norm is 1"
        )
        guard.reset()
        assert not guard.noticed
        assert not step(guard, 2, 3.0)


def test_an_overflow_of_loss_scaling_is_not_a_bad_step(alone):
    """Its update is withheld too; a loss that is not finite is bad with it and without it."""
    guard = make_float16_guard(2.0**10, action="stop", threshold=8)
    assert not step(guard, 1, 3.0)
    assert step(guard, 2, 3.0, math.inf)
    assert not guard.noticed
    assert guard.counts.tolist() == [1, 0, 0]
    assert not step(guard, 3, 3.0)
    assert step(guard, 4, NAN, math.inf)
    assert acts_on(guard).step == 4


@pytest.mark.parametrize("action", ["stop", "skip", "rollback"])
def test_an_overflow_at_the_lowest_scale_is_a_bad_step(alone, action):
    """What happens then is decided by `stability.action`, as in other dtypes."""
    guard = make_float16_guard(2.0, action=action, threshold=8)
    assert not step(guard, 1, 3.0)
    assert step(guard, 2, 3.0, math.inf)
    assert (float(guard.scaler.scale), guard.counts.tolist()) == (1, [1, 0, 0])
    assert step(guard, 3, 3.0, math.inf)
    assert guard.counts.tolist() == [1, 1, 1]
    assert guard.noticed == (action != "skip")
    assert step(guard, 4, 3.0) == (action != "skip")


def test_what_the_guard_has_set_is_not_taken_for_an_overflow(alone):
    """Without loss scaling nothing replaces it."""
    guard = make_guard(action="skip")
    assert [step(guard, i, NAN if i == 2 else 3.0) for i in range(1, 4)] == [False, True, False]
    assert guard.counts.tolist() == [2, 1, 0]


class Copy:
    """In place of the event that is recorded after a copy."""

    def __init__(self) -> None:
        self.complete, self.waits = False, 0

    def query(self) -> bool:
        return self.complete

    def synchronize(self) -> None:
        self.complete, self.waits = True, self.waits + (not self.complete)


def test_the_host_waits_for_no_copy_until_it_must(alone):
    guard = make_guard(action="stop", threshold=8)
    copies = [Copy() for _ in range(4)]

    def send(step, first, end, numbers):
        guard.pending.append(Pending(step, first, end, numbers, copies[step - 1]))

    with mock.patch.object(guard, "send", send):
        for number in range(1, 5):
            step(guard, number, NAN if number == 2 else 3.0)
            assert not guard.noticed
    copies[0].complete = True
    assert not guard.noticed
    copies[1].complete = True
    assert guard.noticed
    assert [copy.waits for copy in copies] == [0, 0, 0, 0]
    assert acts_on(guard).step == 2
    assert [copy.waits for copy in copies] == [0, 0, 1, 1]


def test_too_many_bad_steps_in_a_row(alone):
    """Spikes do not count: there are at most half a window of them in a row."""
    guard = make_guard(action="skip", max_skips=3)
    for number, loss in enumerate([NAN, NAN, 3.0, NAN, NAN, NAN, NAN], 1):
        step(guard, number, loss)
        assert guard.noticed == (number >= 6)
    assert (acts_on(guard).step, acts_on(guard).num_not_finite) == (6, 3)


def test_without_a_setting_it_judges_nothing_and_has_no_state(alone):
    guard = make_guard()
    assert not step(guard, 1, NAN)
    assert not hasattr(guard.optimizer, "found_inf")
    assert not guard.noticed
    assert (guard.state_dict(), guard.columns()) == ({}, {})
    guard.load_state_dict({})
    outcome = guard.read(1, torch.tensor(NAN), torch.tensor(math.inf))
    assert (outcome.diverged, outcome.finite) == (True, False)
    assert outcome.description == "step 1: the loss is nan, the gradient norm is inf"
    assert guard.read(1, torch.tensor(math.inf), torch.tensor(1.0)).diverged
    assert not guard.read(1, torch.tensor(NAN), torch.tensor(0.0)).diverged, "no targets"
    assert not guard.read(1, torch.tensor(3.0), torch.tensor(1.0)).diverged


def test_columns_and_state(alone):
    guard, other = make_guard(action="skip", threshold=8), make_guard(action="skip", threshold=8)
    step(guard, 1, 3.0)
    columns = guard.columns()
    assert all(math.isnan(columns.pop(name)) for name in ("loss_z", "grad_norm_z"))
    assert columns == {"bad_steps": 0, "rollbacks": 0}
    step(guard, 2, NAN)
    assert guard.columns()["bad_steps"] == 1
    assert all(value.isfinite().all() for value in guard.state_dict().values())
    other.load_state_dict(guard.state_dict())
    assert torch.equal(other.values, guard.values)
    assert other.counts.tolist() == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "threshold", "most"),
    [("normal", 6, 0), ("normal", 8, 0), ("normal", 10, 0), ("laplace", 10, 1)],
)
def test_the_figures_of_the_documentation(noise, threshold, most):
    """docs/stability.md: six seeds, other spikes than above."""
    for seed in range(6):
        generator, fall = torch.Generator().manual_seed(seed), torch.exp(-torch.arange(2000) / 300)
        errors = torch.randn(2000, generator=generator)
        if noise == "laplace":  # of the same standard deviation
            uniform = torch.rand(2000, generator=generator) - 0.5
            errors = -uniform.sign() * torch.log1p(-2 * uniform.abs()) / math.sqrt(2)
        losses = 2 + 6 * fall + 0.05 * errors
        norms = (0.3 + 0.7 * fall) * torch.exp(0.2 * torch.randn(2000, generator=generator))
        planted = 150 + torch.randperm(1800, generator=generator)[:10]
        losses[planted[:5]] += 0.6
        norms[planted[5:]] *= 8
        found = set(withheld(make_guard(threshold=threshold, action="skip"), losses, norms))
        assert set(planted.tolist()) <= found
        assert len(found) - 10 <= most


@pytest.mark.parametrize("groups", [[[], [1.0]], [[]]], ids=["muon has all but one", "none"])
def test_an_update_is_withheld_whatever_the_first_group_holds(groups):
    """A pipeline stage may train nothing, and with Muon AdamW may have nothing in its first."""
    parameters = [[torch.nn.Parameter(torch.tensor(value)) for value in group] for group in groups]
    optimizer = torch.optim.AdamW([{"params": group} for group in parameters], fused=True)
    for parameter in parameters[-1]:
        parameter.grad = torch.ones(())
    withhold(optimizer, torch.tensor(True))
    optimizer.step()
    assert all(parameter.item() == 1 for group in parameters for parameter in group)
