"""Trains a Llama: the whole run, read top to bottom.

    ./run_train.sh debug                              sets up what is missing, then runs this file under torchrun
    NGPU=4 ./run_train.sh llama3_8b --training.steps=100
    python train.py debug                             one process, no launcher
    torchrun --nproc-per-node 4 train.py llama3_8b    the same without our launcher

Letters in shapes: B sequences of a local batch, S tokens of a sequence.
"""

import dataclasses
import functools
import logging
import os
import shlex
import shutil
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.checkpoint.load_model import load_model
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import RunMetadata
from titanlite.checkpoint.state import ModelState, OptimizerState, RandomState
from titanlite.checkpoint.storage import SaveError, step_folder
from titanlite.config.load import load_config, program_folder
from titanlite.config.schema import EXIT_CONFIG, EXIT_STOPPED, Config, ConfigError, portable
from titanlite.config.text import to_toml
from titanlite.data.prepare import prepare
from titanlite.data.shards import Tokens, read_manifest
from titanlite.data.stream import TrainStream, Windows, count_targets
from titanlite.data.to_device import prefetch, to_device
from titanlite.data.tokenizer import Tokenizer
from titanlite.distributed import process_group
from titanlite.distributed.agreement import require_agreement
from titanlite.distributed.garbage_collection import GarbageCollection
from titanlite.distributed.mesh import DATA_AXES, LOSS_AXES, Mesh, data_rank, sum_over
from titanlite.distributed.run_folder import claim_folder
from titanlite.distributed.signals import Requests
from titanlite.distributed.watchdog import Watchdog
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.model.flops import flops_per_token, peak_tflops
from titanlite.model.generate import generate
from titanlite.model.llama import Llama
from titanlite.observe.logging import log_to_file, setup_logging
from titanlite.observe.metrics import Metrics, NonFinite, Progress
from titanlite.observe.profile import profiler
from titanlite.observe.validation import Validator
from titanlite.optim.clip import clip_grad_norm
from titanlite.optim.optimizer import build_optimizer
from titanlite.optim.schedule import Schedule
from titanlite.parallel.attention import attention_kernel
from titanlite.parallel.fsdp import assign_shard
from titanlite.parallel.parallelize import (
    compute_dtypes,
    reason_blocks_not_compiled,
    resolve_auto,
    split_and_parallelize,
)
from titanlite.parallel.rules import check_layout, unused_settings
from titanlite.parallel.stages import Stages

logger = logging.getLogger("titanlite")


def main(config: Config) -> int:
    """Trains until `training.steps` or a signal. Returns the exit code: 0 finished, 75 stopped after saving."""
    # 1. World: who takes part, and how the processes are arranged
    training = config.training
    device = process_group.start(config.run.device, config.comm.group_timeout_seconds, config.run.seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    setup_logging(rank)
    tokenizer = Tokenizer(config.data.tokenizer)
    llama = resolve_flavor(config.model, tokenizer.size)
    settled = resolve_auto(config, llama.dim, device.type)  # what `auto` means here
    require_agreement(configuration=portable(config), compute_dtype=settled.training.compute_dtype)
    config = settled
    mesh = Mesh(device.type, check_layout(config, llama, world_size), config.comm.group_timeout_seconds)
    dp_rank, dp_size = data_rank(mesh)
    sum_counts, sum_losses = (functools.partial(sum_over, mesh=mesh, axes=axes) for axes in (DATA_AXES, LOSS_AXES))
    folder = Path(config.run.folder, config.run.name)
    _lock = claim_folder(folder)  # until this function returns
    if rank == 0:
        log_to_file(folder / "log.txt")
    watchdog = Watchdog(config.comm, folder, device.type == "cpu")  # names the process for which all others wait
    requests = Requests(config.comm.group_timeout_seconds)  # from here on a signal saves and leaves

    # 2. Data: text, tokenised once; sample i of the stream is a function of (seed, i)
    prepared = prepare(config.data, tokenizer, logger.info)
    manifest = read_manifest(prepared)
    require_agreement(data=manifest["fingerprint"])
    accumulation = training.global_batch_size // (training.local_batch_size * dp_size)
    stream = TrainStream(
        Windows(Tokens(prepared, manifest, "train"), training.seq_len, "training"),
        seed=config.run.seed,
        local_batch_size=training.local_batch_size,
        accumulation=accumulation,
        rank=dp_rank,
        world=dp_size,
    )

    # 3. Model: without memory first, then split, then memory for this process's part only, then values
    watchdog.phase("building the model")
    with torch.device("meta"):
        model = Llama(llama, training.seq_len)
    parts = split_and_parallelize(model, config, mesh)  # one, or the pipeline stages of this process
    for part in parts:
        part.to_empty(device="cpu" if config.parallel.cpu_offload else device)
        part.init_weights(config.run.seed, assign_shard, device)
    stages = Stages(parts, config, mesh, device)

    # 4. State: what changes while training, and where it is kept
    optimizer = build_optimizer(parts, config.optimizer)
    schedule = Schedule(optimizer, config.schedule, config.optimizer.lr, training.steps)
    progress = Progress()
    model_state = ModelState(parts)
    states = {
        "model": model_state,
        "optimizer": OptimizerState(parts, optimizer),
        "schedule": schedule,
        "data": stream,
        "progress": progress,
        "random": RandomState(),
    }
    extra_files = {
        "config.toml": to_toml(config).encode(),
        "data.json": (prepared / "manifest.json").read_bytes(),
        "tokenizer.model": tokenizer.path.read_bytes(),
        "model.json": llama.to_json().encode(),
    }
    facts = RunMetadata(mesh.degrees, dataclasses.asdict(config), manifest["fingerprint"])
    checkpoint = Checkpointer(config.checkpoint, folder, states, extra_files, facts, device)
    watchdog.phase("loading")
    if not checkpoint.load() and config.checkpoint.initial_load:
        from titanlite.formats.load import load_weights  # foreign formats, imported only when asked for

        load_weights(config.checkpoint, model_state, llama, tokenizer.path.read_bytes(), checkpoint.saver.group)

    # 5. What is told: the step's numbers, the loss on held-out text
    metrics = Metrics(
        config.metrics,
        folder,
        device,
        progress,
        sum_losses=sum_losses,
        total_steps=training.steps,
        tokens_per_step=training.global_batch_size * training.seq_len,
        flops_per_token=flops_per_token(llama, training.seq_len),
        peak_tflops=peak_tflops(process_group.device_name(device)),
        before_raising=checkpoint.close,
    )
    held_out = Tokens(prepared, manifest, "validation")
    validator = Validator(
        config.validation,
        Windows(held_out, training.seq_len, "validation") if config.validation.freq else None,
        manifest["name"],
        tokenizer.token_bytes,
        metrics,
        stages.evaluate,
        sum_counts=sum_counts,
        batch_size=training.local_batch_size,
        rank=dp_rank,
        world=dp_size,
    )
    if rank == 0:
        (folder / "config.toml").write_text(to_toml(config))
    say_what_runs(config, llama, mesh, accumulation, device)

    # 6. Loop: one optimizer step after the other
    stop_validation = watchdog.marking("validation", requests.agree_to_stop)
    garbage = GarbageCollection(training.gc_freq)
    if progress.step == 0:
        validator.maybe_run(0, False, stop_validation)
    if progress.step >= training.steps:
        logger.info(f"nothing left to train: the run is at step {progress.step}, and training.steps = {training.steps}")
    requests.agree()  # a signal may have come since
    metrics.start()
    with profiler(config.profiling, folder / "traces", rank, lambda: progress.step) as profile_step:
        while progress.step < training.steps and not requests.stop:
            progress.step += 1
            watchdog.phase("reading data", progress.step)
            batches = stream.next_step()  # local batches of tokens and labels, each (B, S)
            num_targets = sum_counts(to_device(count_targets(batches), device))
            loss = torch.zeros((), device=device)
            for index, (tokens, labels) in enumerate(prefetch(batches, device)):
                watchdog.phase("forward and backward", progress.step)
                loss += stages.forward_backward(tokens, labels, num_targets, index == accumulation - 1)
            watchdog.phase("update", progress.step)
            grad_norm = clip_grad_norm(parts, training.max_norm, device, stages.held_twice)
            lr = schedule.lr
            checkpoint.wait_for_staging()  # weights and moments are about to change
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

            finished = progress.step == training.steps
            agreed = requests.agree(save=checkpoint.wants_save(), failed=checkpoint.failed)
            last = agreed.stop or finished
            metrics.step(loss, grad_norm, lr, stream.epochs, last)
            if agreed.failed:
                checkpoint.close()  # raises what went wrong
            if validator.due(progress.step, finished) or checkpoint.due(progress.step, last, agreed.save):
                metrics.require_finite(grad_norm)
                with metrics.paused():
                    held_out_loss = validator.maybe_run(progress.step, finished, stop_validation)
                    watchdog.phase("saving")
                    checkpoint.maybe_save(progress.step, last or requests.stop, agreed.save, held_out_loss)
            watchdog.phase("tidying up and profiling")
            garbage.step(progress.step)
            profile_step()
    watchdog.close()
    garbage.close()
    finished = progress.step >= training.steps
    if finished:
        say_what_was_made(config, folder, progress.step, tokenizer)
    else:
        logger.info(f"stopped after step {progress.step} of {training.steps}; the same command goes on from here")
    requests.restore()
    return 0 if finished else EXIT_STOPPED


def say_what_runs(config: Config, llama: LlamaConfig, mesh: Mesh, accumulation: int, device: torch.device) -> None:
    """Rank 0 prints the model, the processes and the batch, and which settings change nothing."""
    for note in unused_settings(config, mesh.degrees):
        logger.info(note)
    training = config.training
    compute, reduce = compute_dtypes(config, llama.dim, device.type)
    alone = mesh["cp"].size() == 1
    attention = attention_kernel(llama, training.seq_len, compute, device) if alone else "over processes"
    layout = ", ".join(f"{axis} {degree}" for axis, degree in mesh.degrees.items() if degree > 1) or "one process"
    why_not = reason_blocks_not_compiled(config, llama.dim, mesh)
    blocks = f"blocks not compiled ({why_not})" if why_not else f"blocks compiled by {config.compile.backend}"
    logger.info(
        f"{config.model.flavor}: {llama.num_parameters:,} parameters, vocabulary {llama.vocab_size:,}; "
        f"{process_group.device_name(device)} x {dist.get_world_size()} ({layout}), "
        f"compute {compute}, reduce {reduce}, "
        f"attention {attention}, {blocks}; "
        f"{training.global_batch_size} sequences of {training.seq_len} per step, "
        f"{accumulation} x {training.local_batch_size} in each process"
    )


def say_what_was_made(config: Config, folder: Path, step: int, tokenizer: Tokenizer) -> None:
    """Rank 0 prints the results, a sample from the checkpoint just written, and what to try next."""
    if dist.get_rank() != 0:
        return
    logger.info(f"\ndone: {step} steps. In {folder}:\n  checkpoints/step-{step}  metrics.jsonl  log.txt  config.toml")
    seq_len = config.training.seq_len
    prompt = [tokenizer.bos, *tokenizer.encode(config.run.sample_prompt)][: seq_len - 1]
    room = min(config.run.sample_tokens, seq_len - len(prompt))
    if room > 0:  # from the checkpoint: no process may hold the whole model, whose memory is the CPU's here
        model = load_model(step_folder(folder / "checkpoints", step), torch.device("cpu"), seq_len)
        seed = config.run.seed
        new = generate(model, prompt, room, stop=tokenizer.eos, temperature=0.7, top_k=50, seed=seed)
        text = tokenizer.decode([*prompt[1:], *new])
        quoted = "\n".join(f"  | {line}" for line in text.splitlines())
        logger.info("\na sample (temperature 0.7, top-k 50):\n%s", quoted)
    quoted_folder = shlex.quote(str(folder))
    python = "python3" if shutil.which("python3") == sys.executable else os.path.relpath(sys.executable)
    command = "titanlite" if shutil.which("titanlite") else f"{python} -m titanlite"
    own = Path(__file__).resolve()
    if (script := own.with_name("run_train.sh")).exists():  # a clone
        train = shlex.quote(os.path.join(".", os.path.relpath(script)))
    elif own.parent == program_folder():  # an installed wheel
        train = f"{command} train"
    else:  # a copy made by `titanlite eject`
        train = f"{python} {shlex.quote(os.path.relpath(own))}"
    logger.info(
        f"\nnext:\n  {command} generate {quoted_folder} --prompt {shlex.quote(config.run.sample_prompt)}\n"
        f"  {train} {quoted_folder}/config.toml --training.steps={2 * step}    (goes on from here)"
    )


def run(argv: list[str]) -> int:
    """`main` with errors turned into messages and exit codes."""
    try:
        return main(load_config(argv))
    except (ConfigError, NonFinite, SaveError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one process of each node says it
            print(f"error: {error}".replace("\n", "\nerror: "), file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException:  # torch's CheckpointException is no Exception
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    process_group.finish(run(sys.argv[1:]))
