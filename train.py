"""Trains a Llama: the whole run, read top to bottom.

    ./run_train.sh debug                              creates the Python environment if needed, then runs this file
    NGPU=4 ./run_train.sh llama3_8b --training.steps=100
    python train.py debug                             one process, no launcher
    torchrun --nproc-per-node 4 train.py llama3_8b    several processes, started by torchrun

Letters in shapes: B sequences of a local batch, S tokens of a sequence.
"""

import contextlib
import dataclasses
import logging
import os
import shlex
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.checkpoint.manager import Checkpointer, NonFinite
from titanlite.checkpoint.manifest import RunMetadata
from titanlite.checkpoint.state import ModelState, OptimizerState, RandomState
from titanlite.checkpoint.storage import SaveError, step_folder
from titanlite.config.files import replace_file
from titanlite.config.load import load_config, program_folder
from titanlite.config.schema import EXIT_CONFIG, EXIT_STOPPED, Config, ConfigError, ProfilingConfig, portable
from titanlite.config.text import to_toml
from titanlite.data.prepared import PreparedData, prepared_folder
from titanlite.data.stream import TrainStream, Windows, count_targets
from titanlite.data.to_device import prefetch, to_device
from titanlite.data.tokenizer import Tokenizer
from titanlite.distributed import process_group
from titanlite.distributed.agreement import StorageError, broadcast_from_rank0, require_agreement
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.run_folder import claim_folder
from titanlite.distributed.signals import Requests
from titanlite.distributed.watchdog import Watchdog
from titanlite.model.attention import attention_kernel
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.model.llama import Llama
from titanlite.observe.logging import log_to_file, setup_logging
from titanlite.observe.metrics import Metrics, Progress, Workload
from titanlite.observe.validation import Validator
from titanlite.optim.clip import clip_grad_norm
from titanlite.optim.optimizer import build_optimizer
from titanlite.optim.schedule import Schedule
from titanlite.parallel.auto import resolve_auto
from titanlite.parallel.parallelize import build_model_parts
from titanlite.parallel.rules import check_layout, unused_settings
from titanlite.parallel.stages import Stages

logger = logging.getLogger("titanlite")
SAMPLE_BYTES = 8 << 30  # in fp32; a larger model is not loaded into CPU memory for a sample at the end


def main(config: Config) -> int:
    """Trains until `training.steps` or a signal. Returns the exit code: 0 finished, 75 stopped after saving."""
    # 1. World: the ranks, how they are arranged, and the folder they share
    device = process_group.start(config.run.device, config.comm.group_timeout_seconds, config.run.seed)
    rank, folder = dist.get_rank(), Path(config.run.folder, config.run.name)
    setup_logging(rank)
    require_agreement(configuration=portable(config))
    tokenizer = Tokenizer(config.data.tokenizer)
    llama = resolve_flavor(config.model, tokenizer.size)
    degrees = check_layout(config, llama, dist.get_world_size())
    _lock = claim_folder(folder)  # held until this function returns
    broadcast_from_rank0(lambda: log_to_file(folder / "log.txt"))
    asked, config = config, resolve_auto(config, llama.dim, degrees, device.type)
    record = dataclasses.replace(config, compile=asked.compile)  # checkpoints keep `auto`: each start resolves it
    training = config.training
    mesh = Mesh(device.type, degrees, config.comm.group_timeout_seconds)
    progress = Progress()
    watchdog = Watchdog(config.comm, folder, lambda: progress.step, device.type == "cpu")  # reports a rank that hangs
    requests = Requests()  # from here on a signal makes the run save and end

    # 2. Data: text is tokenised once; sample i of the stream is a function of (seed, i)
    data = PreparedData(prepared_folder(config.data, tokenizer, logger.info), tokenizer)
    require_agreement(data=data.fingerprint)
    stream = TrainStream(
        Windows(data.tokens("train"), training.seq_len, "training"),
        seed=config.run.seed,
        local_batch_size=training.local_batch_size,
        accumulation=training.global_batch_size // (training.local_batch_size * mesh.data_size),
        rank=mesh.data_rank,
        world=mesh.data_size,
    )

    # 3. Model: first shapes only; then memory and weights for this rank's part of it
    with torch.device("meta"):
        model = Llama(llama, training.seq_len)
    model_parts = build_model_parts(model, config, mesh, device)  # one part, or this rank's pipeline stages
    stages = Stages(model_parts, config, mesh, device)

    # 4. Training state: everything that a step changes, and its checkpoints
    optimizer = build_optimizer(model_parts, config.optimizer)
    schedule = Schedule(optimizer, config.schedule, config.optimizer.lr, training.steps)
    states = {
        "model": ModelState(model_parts),
        "optimizer": OptimizerState(model_parts, optimizer),
        "data": stream,
        "progress": progress,
        "random": RandomState(),
    }
    metadata = RunMetadata(mesh.degrees, dataclasses.asdict(record), data.fingerprint)
    files = checkpoint_files(record, data, llama)
    checkpoint = Checkpointer(config.checkpoint, folder, states, files, metadata, device)
    if not checkpoint.load() and config.checkpoint.initial_load:
        from titanlite.formats.load import load_weights  # other formats: imported only if used

        load_weights(config.checkpoint, ModelState(model_parts), llama, tokenizer, checkpoint.group)

    # 5. Metrics and validation
    workload = Workload.of(training, llama, process_group.device_name(device))
    metrics = Metrics(config.metrics, folder, device, progress, workload)
    validator = Validator(config.validation, training, data, stages.evaluate, mesh, metrics)
    garbage = process_group.GarbageCollection(training.gc_freq)
    broadcast_from_rank0(lambda: replace_file(folder / "config.toml", to_toml(record).encode()))
    log_start(config, llama, mesh, device)
    if progress.step == 0:
        validator.maybe_run(0, False, requests.agree_to_stop)
    if progress.step >= training.steps:
        logger.info(f"nothing left to train: the run is at step {progress.step}, and training.steps = {training.steps}")

    # 6. Loop: one optimizer step after the other
    requests.agree()  # a signal may have arrived during the set-up
    metrics.start()
    with profiling(config.profiling, folder / "traces", rank, progress) as profile_step:
        while progress.step < training.steps and not requests.stop:
            progress.step += 1

            # One optimizer step
            batches = stream.next_step()  # local batches of tokens and labels, each (B, S)
            num_targets = mesh.sum_counts(to_device(count_targets(batches), device))  # over all ranks
            loss = torch.zeros((), device=device)
            for i, (tokens, labels) in enumerate(prefetch(batches, device)):
                loss += stages.forward_backward(tokens, labels, num_targets, last=i == len(batches) - 1)
            grad_norm = clip_grad_norm(model_parts, training.max_norm, device, stages.shared_params)
            lr = schedule.set_lr(progress.step)
            checkpoint.wait_for_staging()  # weights and moments are about to change
            optimizer.step()
            optimizer.zero_grad()
            metrics.count_step()

            # After some steps: log, validate, save, stop. All ranks take the same branches
            agreed = requests.agree(save=checkpoint.wants_save(), failed=checkpoint.failed)
            finished = progress.step == training.steps
            last = finished or agreed.stop
            logs, saves = metrics.due(last), checkpoint.due(progress.step, last, agreed.save)
            validates = validator.due(progress.step, finished)
            if logs or saves or validates or checkpoint.unproven:
                checkpoint.require_finite(progress.step, grad_norm)
            if logs:
                metrics.log(mesh.sum_losses(loss), grad_norm, lr, stream.epochs)
            if agreed.failed:
                checkpoint.close()  # raises the error of the save
            if saves or validates:
                with metrics.paused():
                    held_out_loss = validator.maybe_run(progress.step, finished, requests.agree_to_stop)
                    checkpoint.maybe_save(progress.step, last or requests.stop, agreed.save, held_out_loss)
            garbage.step(progress.step)
            profile_step()
    watchdog.close()
    garbage.close()
    finished = progress.step >= training.steps
    if finished:
        log_end(config, folder, progress.step, tokenizer, llama)
    else:
        logger.info(f"stopped after step {progress.step} of {training.steps}; the same command resumes from here")
    requests.restore()
    return 0 if finished else EXIT_STOPPED


def profiling(config: ProfilingConfig, folder: Path, rank: int, progress: Progress) -> Any:
    """A context manager that yields a function to call after each step; without profiling it does nothing."""
    if not config.enabled:
        return contextlib.nullcontext(lambda: None)
    from titanlite.observe.profile import profiler

    return profiler(config, folder, rank, progress)


def checkpoint_files(config: Config, data: PreparedData, llama: LlamaConfig) -> dict[str, bytes]:
    """The small files with which a checkpoint can be used without the run's folder: name -> content."""
    return {
        "config.toml": to_toml(config).encode(),
        "data.json": (data.folder / "manifest.json").read_bytes(),
        "tokenizer.model": data.tokenizer.path.read_bytes(),
        "model.json": llama.to_json().encode(),
    }


def log_start(config: Config, llama: LlamaConfig, mesh: Mesh, device: torch.device) -> None:
    """Logs the model, the ranks and the batch, and which settings have no effect."""
    for note in unused_settings(config, mesh.degrees):
        logger.info(note)
    training = config.training
    dtype, whole_sequences = getattr(torch, training.compute_dtype), mesh.degrees["cp"] == 1
    attention = attention_kernel(llama, training.seq_len, dtype, device) if whole_sequences else "over ranks"
    layout = ", ".join(f"{axis} {degree}" for axis, degree in mesh.degrees.items() if degree > 1) or "one process"
    compiled = f"compiled by {config.compile.backend}" if config.compile.enabled == "true" else "not compiled"
    local_batches = training.global_batch_size // (training.local_batch_size * mesh.data_size)
    logger.info(
        f"{config.model.flavor}: {llama.num_parameters:,} parameters, vocabulary {llama.vocab_size:,}; "
        f"{process_group.device_name(device)} x {dist.get_world_size()} ({layout}), compute {training.compute_dtype}, "
        f"reduce {training.reduce_dtype}, attention {attention}, blocks {compiled}; "
        f"{training.global_batch_size} sequences of {training.seq_len} per step, "
        f"{local_batches} x {training.local_batch_size} in each process"
    )


def log_end(config: Config, folder: Path, step: int, tokenizer: Tokenizer, llama: LlamaConfig) -> None:
    """Rank 0 logs the results, a sample from the checkpoint just written, and what to try next."""
    if dist.get_rank() != 0:
        return
    logger.info(f"\ndone: {step} steps. In {folder}:\n  checkpoints/step-{step}  metrics.jsonl  log.txt  config.toml")
    size = 4 * llama.num_parameters
    if config.run.sample_tokens and size > SAMPLE_BYTES:
        limit = f"at most {SAMPLE_BYTES / 1e9:.1f} GB are used for a sample"
        logger.info(f"\nno sample: in fp32 the model takes {size / 1e9:.1f} GB of CPU memory; {limit}")
    elif config.run.sample_tokens:
        text = "\n".join(f"  | {line}" for line in sample(config, folder, step, tokenizer).splitlines())
        logger.info("\na sample (temperature 0.7, top-k 50):\n%s", text)
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
        f"  {train} {quoted_folder}/config.toml --training.steps={2 * step}    (resumes from here)"
    )


def sample(config: Config, folder: Path, step: int, tokenizer: Tokenizer) -> str:
    """The text that the model generates after `run.sample_prompt`.

    The checkpoint is loaded on the CPU, because the whole model may not fit in the memory of one device.
    """
    from titanlite.checkpoint.load_model import load_model
    from titanlite.model.generate import generate

    seq_len, seed = config.training.seq_len, config.run.seed
    prompt = [tokenizer.bos, *tokenizer.encode(config.run.sample_prompt)][: seq_len - 1]
    room = min(config.run.sample_tokens, seq_len - len(prompt))
    model = load_model(step_folder(folder / "checkpoints", step), torch.device("cpu"), seq_len)
    new = generate(model, prompt, room, stop=tokenizer.eos, temperature=0.7, top_k=50, seed=seed)
    return tokenizer.decode([*prompt[1:], *new])


def run(argv: list[str]) -> int:
    """Calls `main`, and turns errors into messages and exit codes."""
    try:
        return main(load_config(argv, Path(__file__).resolve().with_name("train_configs")))
    except (ConfigError, process_group.JoinError, NonFinite, SaveError, StorageError) as error:
        # One process of each node prints it; before it has joined the others, each its own
        if os.environ.get("LOCAL_RANK", "0") == "0" or not dist.is_initialized():
            print(f"error: {error}".replace("\n", "\nerror: "), file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    process_group.finish(run(sys.argv[1:]))
