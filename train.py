"""Trains a Llama: the whole run, read top to bottom.

    ./run_train.sh debug                              creates the Python environment if needed, then runs this file
    NGPU=4 ./run_train.sh llama3_8b --training.steps=100
    python train.py debug                             one process, no launcher
    torchrun --nproc-per-node 4 train.py llama3_8b    several processes, started by torchrun

Letters in shapes: B sequences of a local batch, S tokens of a sequence.
"""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.checkpoint.manager import Checkpointer, NonFinite
from titanlite.checkpoint.manifest import RunMetadata
from titanlite.checkpoint.state import ModelState, OptimizerState, RandomState
from titanlite.checkpoint.storage import SaveError
from titanlite.config.load import load_config
from titanlite.config.schema import Config, DataConfig, ProfilingConfig, portable
from titanlite.config.to_toml import to_toml
from titanlite.data.prepared import PreparedData, description, fingerprint_of, load_sources
from titanlite.data.stream import TrainStream, build_samples, count_targets
from titanlite.data.to_device import prefetch, to_device
from titanlite.data.tokenizer import Tokenizer
from titanlite.distributed import process_group
from titanlite.distributed.agreement import (
    PATIENT,
    JoinError,
    StorageError,
    broadcast_from_rank0,
    require_agreement,
)
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.run_folder import claim_folder
from titanlite.distributed.signals import FileRequest, Requests
from titanlite.distributed.watchdog import Watchdog
from titanlite.model.attention import attention_kernel
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.model.llama import Llama
from titanlite.observe.logging import log_to_file, setup_logging
from titanlite.observe.metrics import Metrics, Progress, Workload
from titanlite.observe.validation import Validator
from titanlite.optim.clip import build_clip
from titanlite.optim.optimizer import build_guard, build_optimizer
from titanlite.optim.schedule import Schedule
from titanlite.parallel.auto import decide_compile, resolve_dtype
from titanlite.parallel.parallelize import build_model_parts
from titanlite.parallel.stages import Stages
from titanlite.rules.check import check_layout, unused_settings
from titanlite.runtime.errors import EXIT_CONFIG, LAUNCHED, ConfigError
from titanlite.runtime.files import replace_file

logger = logging.getLogger("titanlite")


def main(config: Config) -> int:
    """Trains until `training.steps` or a signal.

    Returns the exit code: 0 finished, 75 stopped after saving.
    """
    # 1. World: the ranks, how they are arranged, and the folder they share
    timeout = config.comm.group_timeout_seconds
    deterministic = config.debug.deterministic
    device = process_group.start(config.run.device, timeout, config.run.seed, deterministic)
    rank = dist.get_rank()
    folder = Path(config.run.folder, config.run.name)
    setup_logging(rank)
    require_agreement(configuration=portable(config))
    tokenizer = Tokenizer(config.data.tokenizer)
    llama = resolve_flavor(config.model, tokenizer.size)
    degrees = check_layout(config, llama, dist.get_world_size())
    _lock = claim_folder(folder)  # held until this function returns
    broadcast_from_rank0(lambda: log_to_file(folder / "log.txt"))
    config = resolve_dtype(config, llama, device)  # `auto` becomes a number format
    # Not recorded: a resumed run may be on another device
    compiled = decide_compile(config, llama, degrees, device)
    mesh = Mesh(device.type, degrees, timeout)
    progress = Progress()
    # Reports a rank that hangs
    watchdog = Watchdog(config.comm, folder, lambda: progress.step, device.type == "cpu")
    requests = Requests()  # from here on a signal makes the run save and end

    # 2. Data: text is tokenised once; sample i of the stream is a function of (seed, i)
    data = load_sources(config.data, prepared_folders(config.data, tokenizer), tokenizer)
    # Preparing it takes a node as long as it takes
    require_agreement(PATIENT, data=fingerprint_of(data))
    samples = build_samples(data, config.data, config.training, config.run.seed)
    if config.training.epochs:
        from titanlite.config.budget import epochs_in_steps

        config = epochs_in_steps(config, samples.rows[0].count)
    training = config.training
    stream = TrainStream(
        samples, training, mesh.data_rank, mesh.data_size, config.data.document_mask
    )

    # 3. Model: first shapes only; then memory and weights for this rank's part of it
    with torch.device("meta"):
        model = Llama(llama, training.seq_len)
    # One part, or this rank's pipeline stages
    model_parts = build_model_parts(model, config, mesh, device, compiled)
    stages = Stages(model_parts, config, mesh, device)

    # 4. Training state: everything that a step changes, and its checkpoints
    optimizer = build_optimizer(model_parts, config.optimizer, config.parallel.optimizer_offload)
    schedule = Schedule(optimizer, config.schedule, config.optimizer.lr, training.steps)
    states: dict[str, Any] = {
        "model": ModelState(model_parts),
        "optimizer": OptimizerState(model_parts, optimizer),
        "data": stream,
        "progress": progress,
        "random": RandomState(),
    }
    clip = build_clip(stages, optimizer, training, config.optimizer, device, states)
    metadata = RunMetadata(mesh.degrees, dataclasses.asdict(config), fingerprint_of(data))
    files = checkpoint_files(config, data, llama)
    checkpoint = Checkpointer(config.checkpoint, folder, states, files, metadata, device)
    guard = checkpoint.guard = build_guard(config.stability, states, optimizer, device, mesh)
    stages, connect = build_measures(config, stages, optimizer, states)
    if not checkpoint.load() and config.checkpoint.initial_load:
        # Other formats: imported only if used
        from titanlite.tools.formats.load_weights import load_weights

        load_weights(config.checkpoint, ModelState(model_parts), llama, tokenizer)

    # 5. Metrics and validation
    workload = Workload(
        training, config.validation, config.checkpoint, llama, process_group.device_name(device)
    )
    metrics = Metrics(config.metrics, folder, device, progress, workload)
    metrics.more += [state.columns for state in states.values() if hasattr(state, "columns")]
    validator = connect(Validator(config.validation, data, stream, stages.evaluate, mesh, metrics))
    garbage = process_group.GarbageCollection(training.gc_freq)
    broadcast_from_rank0(lambda: replace_file(folder / "config.toml", to_toml(config).encode()))
    log_start(config, llama, mesh, device, compiled, progress.step)
    if progress.step == 0:
        validator.maybe_run(0, False, requests.agree_to_stop)
        metrics.end_pause()

    # 6. Loop: one optimizer step after the other
    requests.agree()  # a signal may have arrived during the set-up
    wants_profile, profile_step = build_profiler(config.profiling, folder, progress)
    with sinks(config, folder, metadata):
        metrics.start()
        while progress.step < training.steps and not requests.stop:
            progress.step += 1

            # One optimizer step
            batches = stream.next_step()  # local batches of tokens and labels (B, S)
            # Over all ranks
            num_targets = mesh.sum_counts(to_device(count_targets(batches), device))
            loss = torch.zeros((), device=device)
            for i, batch in enumerate(prefetch(batches, device)):
                loss += stages.forward_backward(batch, num_targets, last=i == len(batches) - 1)
            grad_norm = clip()
            lr = schedule.set_lr(progress.step)
            checkpoint.wait_for_staging()  # weights and moments are about to change
            if guard:
                # Withholds the update if the step is bad
                guard.judge(progress.step, loss, grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            metrics.count_step(stream.step_tokens)

            # After some steps: log, validate, save, stop. All ranks take the same branches
            agreed = requests.agree(checkpoint.wants_save(), checkpoint.failed, wants_profile())
            finished = progress.step == training.steps
            last = finished or agreed.stop
            logs = metrics.due(last)
            saves = checkpoint.due(progress.step, last, agreed.save)
            validates = validator.due(progress.step, finished)
            read = logs or saves or validates or checkpoint.unproven or agreed.failed
            if read:
                loss = mesh.sum_losses(loss)
                if checkpoint.require_finite(progress.step, grad_norm, loss):
                    metrics.start()  # rolled back
                    continue
            if logs:
                metrics.log(loss, grad_norm, num_targets, lr, stream)
            if agreed.failed:
                checkpoint.close()  # raises the error of the save
            if saves or validates:
                with metrics.paused():
                    held_out_loss = validator.maybe_run(
                        progress.step, finished, requests.agree_to_stop
                    )
                    checkpoint.maybe_save(
                        progress.step, last or requests.stop, agreed.save, held_out_loss
                    )
            garbage.step(progress.step)
            profile_step(agreed.profile, last or requests.stop)
    watchdog.close()
    garbage.close()
    # With what it needs for a sample and the report
    from titanlite.tools.report.summary import log_end

    code = log_end(config, Path(__file__), progress.step, tokenizer, llama)
    requests.restore()
    return code


def build_profiler(config: ProfilingConfig, folder: Path, progress: Progress) -> Any:
    """Two functions for each step: whether this process has a request to record steps, and what
    records them.
    """
    profiler = None
    file = FileRequest(folder / "PROFILE")

    def step(requested: bool, last: bool) -> None:
        nonlocal profiler
        file.open = False
        if profiler is None and (requested or config.enabled or config.ranks != "all"):
            from titanlite.observe.profile import Profiler  # when it is used first

            profiler = Profiler(config, folder / "traces", progress)
        if profiler:
            profiler.after_step(requested, last)

    if config.enabled or config.ranks != "all":
        step(requested=False, last=False)  # refuses wrong ranks before the first step
    return file.seen, step


def sinks(config: Config, folder: Path, metadata: RunMetadata) -> Any:
    """A context manager that copies metrics.jsonl to `metrics.sinks`; without any it does nothing."""
    if not config.metrics.sinks:
        return contextlib.nullcontext()
    from titanlite.sinks.feed import Sinks

    return Sinks(config.metrics, folder, metadata.layout, metadata.config)


def build_measures(config: Config, stages: Stages, optimizer: Any, states: dict[str, Any]) -> Any:
    """Adds [ema], measures of [metrics], and samples.

    Returns the run's stages, and a function of its validator.
    """
    section = config.metrics
    keys = ("noise_scale_freq", "layer_norms_freq", "activations_freq")
    if not any(
        (config.ema.decay, config.validation.prompts, *(getattr(section, key) for key in keys))
    ):
        return stages, lambda validator: validator
    from titanlite.probes.probes import Measures

    measures = Measures(config, stages, optimizer, states)
    return measures, measures.connect


def prepared_folders(section: DataConfig, tokenizer: Tokenizer) -> list[Path]:
    """The folder of each source's prepared data: from the launcher, once per node, or found or made
    here.

    Raises ConfigError as `prepare` does.
    """
    if LAUNCHED in os.environ:
        return [Path(folder) for folder in json.loads(os.environ[LAUNCHED])]
    from titanlite.tools.prepare.cache import prepare  # without the launcher

    return [prepare(part, tokenizer, logger.info) for part in section.parts()]


def checkpoint_files(
    config: Config, data: list[PreparedData], llama: LlamaConfig
) -> dict[str, bytes]:
    """The small files with which a checkpoint can be used without the run's folder: name ->
    content.
    """
    return {
        "config.toml": to_toml(config).encode(),
        "data.json": description(data),
        "model.json": llama.to_json().encode(),
        **data[0].tokenizer.files,
    }


def log_start(
    config: Config,
    llama: LlamaConfig,
    mesh: Mesh,
    device: torch.device,
    compiled: bool,
    step: int,
) -> None:
    """Logs the model, the ranks and the batch, which settings have no effect, and if the run is
    already complete.
    """
    for note in unused_settings(config, mesh.degrees):
        logger.info(note)
    training = config.training
    dtype = getattr(torch, training.compute_dtype)
    whole_sequences = mesh.degrees["cp"] == 1
    attention = (
        attention_kernel(llama, training.seq_len, dtype, device)
        if whole_sequences
        else "over ranks"
    )
    # See `block_mask.py`
    attention = "within documents" if config.data.document_mask else attention
    layout = (
        ", ".join(f"{axis} {degree}" for axis, degree in mesh.degrees.items() if degree > 1)
        or "one process"
    )
    blocks = f"compiled by {config.compile.backend}" if compiled else "not compiled"
    later = f" (later {training.batch_ramp})" if training.batch_ramp else ""
    local_batches = training.global_batch_size // (training.local_batch_size * mesh.data_size)
    used = f"{process_group.device_name(device)} x {dist.get_world_size()}"
    about = {
        "parameters": llama.num_parameters,
        "device": used,
        "layout": layout,
        "torch": torch.__version__,
    }
    logger.info(
        f"{config.model.flavor}: {llama.num_parameters:,} parameters, vocabulary {llama.vocab_size:,}; "
        f"{used} ({layout}), compute {training.compute_dtype}, reduce {training.reduce_dtype}, attention {attention}, "
        f"blocks {blocks}; {training.global_batch_size} sequences of {training.seq_len} per step{later}, "
        f"{local_batches} x {training.local_batch_size} in each process",
        extra={"event": "start", "step": step, "about": about},
    )
    if step >= training.steps:
        logger.info(
            f"nothing left to train: the run is at step {step}, and training.steps = {training.steps}"
        )


def run(argv: list[str]) -> int:
    """Calls `main`, and turns errors into messages and exit codes."""
    if {"-h", "--help"} & set(argv):
        from titanlite.config.help import help_text

        print(help_text())
        return 0
    try:
        config = load_config(argv, Path(__file__).resolve().with_name("train_configs"))
        return main(config)
    except (ConfigError, JoinError, NonFinite, SaveError, StorageError) as error:
        # One process of each node prints it; before it has joined the others, each its own
        if os.environ.get("LOCAL_RANK", "0") == "0" or not dist.is_initialized():
            print(f"error: {error}".replace("\n", "\nerror: "), file=sys.stderr)
        if isinstance(error, NonFinite):  # on all ranks
            # What the run did until then
            from titanlite.tools.report.summary import report_together

            report_together(Path(config.run.folder, config.run.name))
        return EXIT_CONFIG if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        from titanlite.runtime.failure import report_failure  # when it is used

        return report_failure(error, __file__)


if __name__ == "__main__":
    process_group.finish(run(sys.argv[1:]))
