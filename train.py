"""Trains a Llama: the whole run, read top to bottom.

    ./run_train.sh debug             makes the Python environment if needed, then runs this file
    NGPU=4 ./run_train.sh llama3_8b --training.steps=100
    python train.py debug            one process, no launcher
    torchrun --nproc-per-node 4 train.py llama3_8b

Checkpoints use torch.distributed.checkpoint: `states`, below, are its Stateful objects, which the
manager passes to `dcp.save` and `dcp.load` (titanlite/checkpoint/manager.py). An asynchronous save,
or one from a GPU, passes copies of their state to `dcp.save`.

Off is a value, not an absence. A mesh axis that is not used has size 1. A part that is switched off
(loss scale, guard, average of the weights, probes, sampler, sinks, profiler) is built all the same:
it has no state and does nothing. So `main` has no branch for a feature: every run takes these
steps, in this order.

Letters in shapes: B sequences of a local batch, S tokens of a sequence.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

PARENT = os.getppid()  # a launcher may be killed while the imports below take seconds

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from titanlite.bridge.tools import (
    adopt_model,
    frozen_fingerprint,
    load_initial_weights,
    prepared_folders,
    write_export,
    write_report,
)
from titanlite.checkpoint.manager import Checkpointer, Diverged
from titanlite.checkpoint.run_facts import RunFacts
from titanlite.checkpoint.state import (
    FrozenWeights,
    ModelState,
    OptimizerState,
    RandomState,
    every_name,
)
from titanlite.checkpoint.storage import SaveError
from titanlite.config.batch_sizes import first_steps
from titanlite.config.budget import epochs_in_steps
from titanlite.config.help import HELP, help_text
from titanlite.config.load import load_config
from titanlite.config.schema import Config, portable
from titanlite.data.order import build_samples
from titanlite.data.prepared import fingerprint_of, load_sources
from titanlite.data.stream import TrainStream
from titanlite.distributed import process_group
from titanlite.distributed.agreement import PATIENT, broadcast_from_rank0, require_agreement
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.run_folder import RunFolder
from titanlite.distributed.signals import Requests
from titanlite.distributed.watchdog import Watchdog
from titanlite.model.flavors import resolve_flavor
from titanlite.model.llama import Llama
from titanlite.observe.logging import log_to_file, setup_logging
from titanlite.observe.metrics import Metrics, Progress
from titanlite.observe.profile import Profiler
from titanlite.observe.start_and_end import log_end, log_start
from titanlite.observe.validation import Validator
from titanlite.observe.waits import time_waits
from titanlite.optim.ema import WeightEMA
from titanlite.parallel.auto import decide_compile, resolve_dtype
from titanlite.parallel.lora import is_adapter
from titanlite.parallel.parallelize import build_model_parts
from titanlite.parallel.step import build_step_parts, optimizer_step
from titanlite.probes.noise_scale import NoiseScale
from titanlite.probes.probes import Probes
from titanlite.probes.samples import Sampler
from titanlite.rules.check import check_layout
from titanlite.rules.paths import require_initial_load
from titanlite.runtime.errors import EXIT_CONFIG, ConfigError, JoinError, StorageError
from titanlite.runtime.failure import report_failure
from titanlite.runtime.garbage import GarbageCollection
from titanlite.runtime.interpreter import open_closed_streams
from titanlite.sinks.feed import Sinks
from titanlite.tokenizer.tokenizer import named_tokenizer

logger = logging.getLogger("titanlite")


def main(config: Config) -> int:
    """Trains until `training.steps` or a signal.

    Returns the exit code: 0 finished, 75 stopped after saving.
    """
    # 1. World: the ranks, how they are arranged, and the folder they share
    device = process_group.start(config.run, config.comm, config.debug)
    setup_logging(dist.get_rank())
    require_agreement(configuration=portable(config))
    tokenizer = named_tokenizer(config.data.tokenizer)
    llama = resolve_flavor(config.model, tokenizer.size)
    degrees = check_layout(config, llama, dist.get_world_size())
    require_initial_load(config)  # before data and model are built
    run_folder = RunFolder(config.run)  # locked until this process ends
    folder = run_folder.path
    broadcast_from_rank0(lambda: log_to_file(folder / "log.txt"))
    config = resolve_dtype(config, llama, device)  # `auto` becomes a number format
    # Not recorded: a resumed run may be on another device
    compiled = decide_compile(config, llama, degrees, device)
    mesh = Mesh(device.type, degrees, config.comm.group_timeout_seconds, config.parallel.ep)
    progress = Progress()
    # Ends the run if a rank hangs
    watchdog = Watchdog(config.comm, folder, progress, device, first_steps(config.training))
    # From here on a signal makes the run save and end
    requests = Requests(folder, PARENT)

    # 2. Data: text is tokenised once; sample i of the stream is a function of (seed, i)
    data = load_sources(config.data, prepared_folders(config.data, tokenizer), tokenizer)
    require_agreement(PATIENT, data=fingerprint_of(data))  # preparing takes nodes different times
    samples = build_samples(data, config.data, config.training, config.run.seed)
    config = epochs_in_steps(
        config, samples.rows[0].count
    )  # keys that counted epochs count steps from here on
    training = config.training
    stream = TrainStream(samples, training, mesh, config.data.document_mask, config.lora.drops)

    # 3. Model: first shapes only; then memory and weights of this rank's part
    with torch.device("meta"):
        model = Llama(llama, training.seq_len)
    # The model, or the pipeline stages of this rank
    model_parts = build_model_parts(model, config, mesh, device, compiled)

    # 4. Training state: everything that a step changes. A checkpoint holds exactly these
    parts = build_step_parts(model_parts, config, mesh, device, compiled)
    stages = parts.stages  # forward and backward
    noise_scale = NoiseScale(config.metrics, stages, parts.scaler, progress)
    states: dict[str, Stateful] = {
        "model": ModelState(model_parts, saved_names(config)),
        "frozen": FrozenWeights(config.checkpoint.initial_load, frozen_fingerprint(config)),
        "optimizer": OptimizerState(model_parts, parts.optimizer),
        "data": stream,
        "progress": progress,
        "random": RandomState(),
        "loss_scale": parts.scaler,
        f"stability-{config.stability.window}": parts.guard,  # a changed window starts empty
        "ema": parts.ema,
        "router": parts.balance,
        "noise_scale": noise_scale,
    }
    # Saved in each checkpoint, so that it can be used without the run's folder
    facts = RunFacts(config, llama, mesh.layout, data)
    checkpoint = Checkpointer(config.checkpoint, folder, states, facts, device, parts.guard)
    resumed = checkpoint.load()
    load_initial_weights(config, model_parts, llama, tokenizer, resumed)
    parts.ema.start()  # copies these weights, unless the checkpoint had an average

    # 5. Metrics and validation
    # Each may add values to a logged step
    columns = (parts.scaler, parts.guard, parts.balance, noise_scale)
    metrics = Metrics(config, llama, folder, device, progress, columns)
    # With metrics.rank_waits, wraps torch's functions that wait for other ranks
    time_waits(metrics.step_times, device)
    probes = Probes(config.metrics, stages, noise_scale, metrics)
    validator = Validator(config.validation, data, stream, stages.evaluate, mesh, metrics)
    sampler = Sampler(
        config.validation, config.run.seed, tokenizer, facts.ends, stages, stream, metrics
    )
    profiler = Profiler(config.profiling, folder, progress)
    garbage = GarbageCollection(training.gc_freq)
    run_folder.write("config.toml", facts.toml)
    log_start(config, llama, mesh, device, compiled, progress)
    if progress.step == 0 and validator.due(finished=False):
        with metrics.paused():
            validate(validator, parts.ema, sampler, requests)

    # 6. Loop: one optimizer step after the other
    requests.agree()  # a signal may have arrived during the set-up
    with Sinks(config.metrics, folder, facts.layout, facts.config):
        profiler.step(requested=False, last=False)  # a recording may begin with the first step
        metrics.start()
        while progress.step < training.steps and not requests.stop:
            progress.step += 1

            # One optimizer step: forward, backward, clipping, update (parallel/step.py)
            batches = stream.next_step()  # local batches of tokens and labels (B, S)
            loss, grad_norm, num_tokens, num_targets, lr = optimizer_step(
                progress.step,
                batches,
                stream.step_samples,
                parts,
                probes,
                checkpoint.saver.wait_for_staging,  # a save may still copy what an update changes
            )
            metrics.count_step(stream.step_positions, num_tokens, num_targets)

            # After some steps: log, validate, save, stop. All ranks take the same branches
            agreed = requests.agree(
                save=checkpoint.minutes_passed(),
                trouble=checkpoint.saver.failed or parts.guard.noticed,
            )
            finished = progress.step == training.steps
            last = finished or agreed.stop
            logs = metrics.due(last)
            validates = any(part.due(finished) for part in (validator, sampler))
            saves = checkpoint.due(progress.step, last or agreed.save)
            if logs or validates or saves or agreed.trouble or checkpoint.unproven:
                loss = mesh.sum_losses(loss)
                # Here the host waits for the device: it reads the loss and the norm
                outcome = parts.guard.read(progress.step, loss, grad_norm)
                if outcome.diverged:
                    checkpoint.roll_back(outcome)  # raises Diverged, unless action = rollback
                    metrics.start()
                    continue
                if outcome.finite:  # a finite loss proves the last save
                    checkpoint.prove(outcome.loss)
            if logs:
                metrics.log(loss, grad_norm, num_targets, lr, stream)
            if agreed.trouble:
                checkpoint.close()  # raises the error of a save that has failed
            if validates or saves:
                with metrics.paused():
                    held_out_loss = None
                    if validates:
                        held_out_loss = validate(validator, parts.ema, sampler, requests)
                    last = last or requests.stop  # a signal ends a validation
                    if checkpoint.due(progress.step, last or agreed.save):
                        checkpoint.save(progress.step, held_out_loss, wait=last)
                        requests.saved()
            garbage.step(progress.step)
            profiler.step(agreed.profile, last)
            requests.profiled()
        profiler.close()
        watchdog.close()
        metrics.close()
        garbage.close()
        code = log_end(config, Path(__file__), progress.step, sampler.texts)
        write_report(folder)  # the sinks get it, with the traces
    write_export(config, folder, progress.step)
    requests.restore()
    return code


def validate(
    validator: Validator, ema: WeightEMA, sampler: Sampler, requests: Requests
) -> float | None:
    """Computes the loss on held-out text, by which `keep_best` selects checkpoints; also the loss
    of the averaged weights, and samples of text.

    Returns None if there is no validation, or if a signal has arrived: then the run saves and ends.
    """
    loss = validator.run(requests)
    if loss is not None and ema.validates:
        with ema.in_place_of_weights():
            validator.run_average(requests)
    if not requests.stop:
        sampler.run(requests)
    return loss


def saved_names(config: Config) -> Callable[[str], bool]:
    """Selects the parameters that a checkpoint holds: all, or with LoRA only the adapters."""
    if config.lora.rank > 0:
        return is_adapter
    return every_name


def run(argv: list[str]) -> int:
    """Calls `main`, and turns errors into messages and exit codes."""
    open_closed_streams()
    try:
        if set(HELP) & set(argv):
            print(help_text(argv))
            return 0
        config = load_config(argv, Path(__file__).resolve().with_name("train_configs"))
        return main(adopt_model(config))
    except (ConfigError, JoinError, Diverged, SaveError, StorageError) as error:
        # One process per node prints it; before the process group exists, every process does
        if os.environ.get("LOCAL_RANK", "0") == "0" or not dist.is_initialized():
            print(f"error: {error}".replace("\n", "\nerror: "), file=sys.stderr)
        if isinstance(error, Diverged):  # on all ranks
            write_report(Path(config.run.folder, config.run.name))  # about the run until then
        return EXIT_CONFIG if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        return report_failure(error, __file__)


if __name__ == "__main__":
    process_group.finish(run(sys.argv[1:]))
