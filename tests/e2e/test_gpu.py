"""On a CUDA device: training in bf16, no hidden waits, and resuming. Skipped without one."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from checkpoints import write_step
from launches import alive, finish, start, wait_for_step, workers
from runs import curve, rows, train_run, train_until, validation
from safetensors.torch import load_file

from titanlite.checkpoint.async_save import AsyncSaver
from titanlite.checkpoint.manifest import RunMetadata
from titanlite.data.rows import Batch
from titanlite.data.to_device import prefetch
from titanlite.model.flavors import FLAVORS
from titanlite.observe.start_and_end import attention_kernel
from titanlite.parallel import parallelize
from titanlite.parallel.float8 import Scaling, float8_linear
from titanlite.tools.verify.pool import Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def pool():
    """Its workers join with NCCL and gloo, as training does."""
    return Pool(["train", "tomllib", "pytest"], device="cuda")


# Fixtures, not `skipif`: the workers of the pool import this file, and asking for the capability
# starts CUDA's allocator, before `open_device` has set its options.
@pytest.fixture
def products_in_8_bits():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no 8-bit products here")


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN's attention may not be there")


def test_bf16_on_the_gpu_follows_fp32_on_the_cpu(pool, arguments, tmp_path):
    """Initial weights differ between the devices' generators, so curves are compared by what they
    reach.
    """
    run = [*arguments, "--training.steps=30", "--optimizer.lr=1e-2"]
    assert pool.run(1, train_run, [*run, "--run.name=cpu", "--run.device=cpu"]) == [0]
    assert pool.run(1, train_run, [*run, "--run.name=gpu", "--run.device=cuda"], timeout=120) == [0]
    assert validation(tmp_path / "gpu")[30] == pytest.approx(
        validation(tmp_path / "cpu")[30], rel=0.05
    )
    assert all(
        row["mfu"] is None or 0 < row["mfu"] < 100 for row in rows(tmp_path / "gpu") if "mfu" in row
    )


@pytest.mark.parametrize(
    "more", [[], ["--data.document_mask", "--model.dim=64"]], ids=["", "documents"]
)
def test_samples_during_training(pool, arguments, tmp_path, more):
    """Texts at each validation, and the losses of a run without them, bit by bit."""
    run = [*arguments, *more, "--run.device=cuda", "--debug.deterministic"]
    prompts = ['--validation.prompts=["def ", "x"]', "--validation.prompt_tokens=8"]
    assert pool.run(1, train_run, [*run, "--run.name=without"], timeout=120) == [0]
    assert pool.run(1, train_run, [*run, *prompts, "--run.name=with"], timeout=120) == [0]
    assert curve(tmp_path / "with") == curve(tmp_path / "without")
    assert len((tmp_path / "with/samples.jsonl").read_text().splitlines()) == 6


OPTIONS = [
    "recompute.mode=selective",
    "recompute.mode=full",
    "compile.enabled",
    "compile.enabled=auto",
    "training.compute_dtype=float32",
]
OPTIONS += ["loss.num_chunks=3"]
COMPILED = pytest.mark.parametrize("compiled", ["auto", "false"])
needs_float8 = pytest.mark.usefixtures("products_in_8_bits")


# Heads of 16 numbers, which FlexAttention supports
DOCUMENTS = ["--data.document_mask", "--model.dim=64"]


def test_flex_attention_in_compiled_blocks_is_that_outside_of_them(pool, arguments, tmp_path):
    """And both follow the mask that is a tensor, which an environment without a compiler gets."""
    run = [*arguments, "--run.device=cuda", *DOCUMENTS]
    assert pool.run(
        1, train_run, [*run, "--run.name=compiled", "--compile.enabled=true"], timeout=300
    ) == [0]
    assert pool.run(
        1, train_run, [*run, "--run.name=plain", "--compile.enabled=false"], timeout=300
    ) == [0]
    assert pool.run(
        1, train_with_a_tensor, [*run, "--run.name=tensor", "--compile.enabled=false"], timeout=300
    ) == [0]
    for step, values in curve(tmp_path / "tensor").items():
        for name in ("compiled", "plain"):
            assert curve(tmp_path / name)[step] == pytest.approx(values, rel=2e-2)


def train_with_a_tensor(arguments: list[str]) -> int:
    parallelize.SMALLEST_HEAD = 1000
    return train_run(arguments)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_follow_plain_bf16(pool, arguments, tmp_path, option):
    run = [*arguments, "--run.device=cuda"]
    assert pool.run(1, train_run, [*run, "--run.name=plain"], timeout=120) == [0]
    assert pool.run(1, train_run, [*run, "--run.name=other", f"--{option}"], timeout=300) == [0]
    for step, values in curve(tmp_path / "plain").items():
        assert curve(tmp_path / "other")[step] == pytest.approx(values, rel=2e-2)
    compiled = "blocks compiled by inductor" in (tmp_path / "other/log.txt").read_text()
    assert compiled == option.startswith("compile.enabled")


@needs_float8
def test_products_in_8_bits_are_those_that_are_emulated():
    """The same 8-bit numbers on both sides; sums differ, since the hardware's have fewer bits."""
    found = []
    for emulate in (False, True):
        generator = torch.Generator("cuda").manual_seed(0)
        x = torch.randn(
            3, 50, 256, generator=generator, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        weight = torch.randn(
            512, 256, generator=generator, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        out = float8_linear(x, weight, Scaling(emulate))
        out.square().sum().backward()
        found.append([out.detach(), x.grad, weight.grad])
    for hardware, emulated in zip(*found, strict=True):
        assert (hardware - emulated).float().norm() <= 1e-2 * emulated.float().norm()


@needs_float8
@COMPILED
def test_float8_follows_bf16(pool, arguments, tmp_path, compiled):
    run = [*arguments, "--run.device=cuda", f"--compile.enabled={compiled}"]
    assert pool.run(1, train_run, [*run, "--run.name=plain"], timeout=300) == [0]
    assert pool.run(1, train_run, [*run, "--run.name=float8", "--float8.enabled"], timeout=300) == [
        0
    ]
    for step, (loss, _) in curve(tmp_path / "plain").items():
        assert curve(tmp_path / "float8")[step][0] == pytest.approx(loss, rel=2e-2)


@pytest.mark.usefixtures("hopper")
def test_cudnn_computes_attention_on_hopper():
    device = torch.device("cuda")
    assert attention_kernel(FLAVORS["llama3_1b"], 4096, torch.bfloat16, device) == "cudnn"


def test_verify_on_one_gpu(tmp_path):
    """Layouts of one process, in fp32 and bf16, compiled with inductor; several GPUs need
    `titanlite verify` itself.
    """
    from titanlite.tools.cli.verify_command import run as verify

    assert verify(["debug", "--run.device=cuda", "--processes=1"]) == 0


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@needs_two
def test_verify_on_two_gpus():
    from titanlite.tools.cli.verify_command import run as verify

    assert verify(["debug", "--run.device=cuda", "--processes=2", "--quick"]) == 0


@needs_two
@pytest.mark.parametrize(
    ("number", "codes"), [(signal.SIGKILL, {137, 124}), (signal.SIGSTOP, {124})]
)
def test_a_process_that_is_lost_ends_the_run(arguments, tmp_path, number, codes):
    """NCCL does not report it: the launcher or the watchdog does."""
    long = [
        "--run.device=cuda",
        "--training.steps=1000000",
        "--validation.freq=0",
        "--comm.step_timeout_seconds=10",
    ]
    process = start([*arguments, *long], NGPU="2")
    wait_for_step(tmp_path / "debug", 5, process)
    pids = workers(process)
    os.kill(pids[1], number)
    lost = time.monotonic()
    code, output = finish(process)
    assert code in codes, output
    assert time.monotonic() - lost < 10 + 5
    assert not any(alive(pid) for pid in pids)


def test_cpu_offload_follows_plain_training(pool, arguments, tmp_path):
    run = [*arguments, "--run.device=cuda", "--training.compute_dtype=float32"]
    assert pool.run(1, train_run, [*run, "--run.name=plain"], timeout=120) == [0]
    assert pool.run(
        1, train_run, [*run, "--run.name=offloaded", "--parallel.cpu_offload"], timeout=120
    ) == [0]
    for step, values in curve(tmp_path / "plain").items():
        assert curve(tmp_path / "offloaded")[step] == pytest.approx(values, rel=1e-3)


def test_optimizer_offload_is_plain_training(pool, arguments, tmp_path):
    """Bit for bit, also when resumed: the update is computed on the GPU."""
    run = [*arguments, "--run.device=cuda", "--debug.deterministic"]
    assert pool.run(1, train_run, [*run, "--run.name=plain"], timeout=300) == [0]
    run += ["--run.name=offloaded", "--parallel.optimizer_offload"]
    assert pool.run(1, train_until, 3, run, timeout=300) == [75]
    assert pool.run(1, train_run, run, timeout=300) == [0]
    assert curve(tmp_path / "offloaded") == curve(tmp_path / "plain")


@COMPILED
@pytest.mark.parametrize("more", [[], DOCUMENTS], ids=["", "documents"])
def test_two_deterministic_runs_are_equal_bit_for_bit(pool, arguments, tmp_path, compiled, more):
    run = [
        *arguments,
        *more,
        "--run.device=cuda",
        f"--compile.enabled={compiled}",
        "--debug.deterministic",
    ]
    for name in ("a", "b"):
        assert pool.run(1, train_run, [*run, f"--run.name={name}"], timeout=300) == [0]
    assert curve(tmp_path / "a") == curve(tmp_path / "b")


@COMPILED
def test_activation_offload_changes_no_bit(pool, arguments, tmp_path, compiled):
    run = [
        *arguments,
        "--run.device=cuda",
        f"--compile.enabled={compiled}",
        "--debug.deterministic",
    ]
    run += ["--recompute.mode=full"]
    for name in ("true", "false"):
        assert pool.run(
            1, train_run, [*run, f"--run.name={name}", f"--recompute.offload={name}"], timeout=300
        ) == [0]
    assert curve(tmp_path / "true") == curve(tmp_path / "false")


def test_float16_follows_bfloat16(pool, arguments, tmp_path):
    run = [*arguments, "--run.device=cuda", "--training.steps=30", "--optimizer.lr=1e-2"]
    for dtype in ("bfloat16", "float16"):
        more = [f"--run.name={dtype}", f"--training.compute_dtype={dtype}"]
        assert pool.run(1, train_run, [*run, *more], timeout=300) == [0]
    assert validation(tmp_path / "float16")[30] == pytest.approx(
        validation(tmp_path / "bfloat16")[30], rel=0.05
    )


@COMPILED
def test_resume_on_the_gpu(pool, arguments, tmp_path, compiled):
    run = [*arguments, "--run.device=cuda", f"--compile.enabled={compiled}"]
    assert pool.run(1, train_run, [*run, "--run.name=whole"], timeout=300) == [0]
    assert pool.run(1, train_until, 3, [*run, "--run.name=stopped"], timeout=300) == [75]
    assert pool.run(1, train_run, [*run, "--run.name=stopped"], timeout=300) == [0]
    for step, values in curve(tmp_path / "whole").items():
        assert curve(tmp_path / "stopped")[step] == pytest.approx(values, rel=1e-3)


def segments_that_grow() -> set[bool]:
    kept = torch.zeros(1000, device="cuda")
    return {segment["is_expandable"] for segment in torch.cuda.memory_snapshot() if kept.is_cuda}


def test_memory_is_allocated_in_segments_that_grow(pool):
    assert pool.run(1, segments_that_grow, timeout=120) == [{True}]


def change_after_staging(folder, mode: str) -> None:
    """The weight changes on the GPU as soon as it may, before it is written; twice, because buffers
    are used again.
    """
    changed, weight = threading.Event(), torch.zeros(1_000_000, device="cuda")
    saver = AsyncSaver(mode, 0, weight.device)
    for step in (1, 2):

        def write(state, failure, step=step):
            assert mode == "disabled" or changed.wait(10)
            write_step(folder, step, state, {}, RunMetadata({}, {}, ""), failure)

        weight.fill_(float(step))
        saver.save({"model": SimpleNamespace(state_dict=lambda: {"weight": weight})}, write)
        saver.wait_for_staging()
        weight.fill_(7.0)
        changed.set()
        saver.wait()
        changed.clear()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_is_saved_in_the_background_is_the_state_of_the_call(pool, tmp_path, mode):
    pool.run(1, change_after_staging, tmp_path, mode, timeout=120)
    for step in (1, 2):
        saved = load_file(tmp_path / f"step-{step}/model-00000.safetensors")["model.weight"]
        assert torch.equal(saved, torch.full((1_000_000,), float(step)))


def test_a_run_that_saves_in_the_background_goes_on(pool, arguments, tmp_path):
    run = [
        *arguments,
        "--run.device=cuda",
        "--checkpoint.async_mode=async",
        "--checkpoint.freq=1",
    ]
    assert pool.run(1, train_run, [*run, "--run.name=whole"], timeout=120) == [0]
    assert pool.run(1, train_until, 3, [*run, "--run.name=stopped"], timeout=120) == [75]
    assert pool.run(1, train_run, [*run, "--run.name=stopped"], timeout=120) == [0]
    for step, values in curve(tmp_path / "whole").items():
        assert curve(tmp_path / "stopped")[step] == pytest.approx(values, rel=1e-3)


def test_batches_that_are_copied_ahead_arrive_whole():
    """Small ones while the device has work, whose memory must not be used again too soon; and large
    ones that take milliseconds to arrive and are read at once."""
    device = torch.device("cuda")
    work = torch.randn(4096, 4096, device=device)
    for side, products in ((512, 1), (2900, 0)):
        sums = []
        batches = (
            Batch(torch.full((side, side), i), torch.full((side, side), -i)) for i in range(20)
        )
        for batch in prefetch(batches, device):
            for _ in range(products):
                work = work @ work / 64
            sums.append(torch.stack([batch.tokens.sum(), batch.labels.sum()]))
        assert torch.stack(sums).tolist() == [[i * side**2, -i * side**2] for i in range(20)]
    assert list(prefetch([], device)) == []


GUARDED = ["--stability.action=rollback", "--stability.threshold=10", "--stability.warmup_steps=0"]
GUARDED += ["--checkpoint.freq=5"]


def run_that_may_not_wait(arguments: list[str]) -> int:
    """Forbids synchronisation from the second step's data to the third's, neither of which is
    logged.
    """
    from titanlite.data.stream import TrainStream

    original, steps = TrainStream.next_step, iter(range(1, 1000))

    def next_step(stream):
        torch.cuda.set_sync_debug_mode("error" if next(steps) in (2, 3) else "default")
        return original(stream)

    TrainStream.next_step = next_step
    try:
        return train_run(arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        TrainStream.next_step = original


@COMPILED
@pytest.mark.parametrize("more", [[], DOCUMENTS, GUARDED], ids=["plain", "documents", "guarded"])
def test_a_step_that_is_not_logged_does_not_wait_for_the_gpu(pool, arguments, compiled, more):
    quiet = [
        "--run.device=cuda",
        "--metrics.log_freq=5",
        "--validation.freq=0",
        f"--compile.enabled={compiled}",
    ]
    assert pool.run(1, run_that_may_not_wait, [*arguments, *quiet, *more], timeout=300) == [0]
