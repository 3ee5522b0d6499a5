"""Trains a Llama: the whole run, read top to bottom.

    ./run_train.sh debug                              sets up what is missing, then runs this file under torchrun
    NGPU=4 ./run_train.sh llama3_8b --training.steps=100
    python train.py debug                             one process, no launcher
    torchrun --nproc-per-node 4 train.py llama3_8b    the same without our launcher

Letters in shapes: B sequences of a microbatch, S tokens of a sequence.
"""

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

from titanlite import runtime
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.state import ModelState, OptimizerState, RandomState
from titanlite.config import EXIT_CONFIG, EXIT_STOPPED, Config, ConfigError, check_world, portable
from titanlite.configure import load_config, to_toml
from titanlite.data.prepare import prepare
from titanlite.data.shards import Tokens, read_manifest
from titanlite.data.stream import TrainStream, Windows, count_targets
from titanlite.data.tokenizer import Tokenizer
from titanlite.model.flavors import resolve_flavor
from titanlite.model.generate import generate
from titanlite.model.llama import Llama
from titanlite.observe.logging import log_to_file, setup_logging
from titanlite.observe.metrics import Metrics, NonFinite, Progress
from titanlite.observe.profile import profiler
from titanlite.observe.validate import Validator
from titanlite.optim.clip import clip_grad_norm
from titanlite.optim.optimizer import build_optimizer
from titanlite.optim.schedule import Schedule
from titanlite.parallel.mesh import build_mesh, data_rank, sum_over_data
from titanlite.parallel.parallelize import compute_dtypes, parallelize
from titanlite.parallel.shard import assign_shard, reduce_gradients_when
from titanlite.parallel.stages import Stages
from titanlite.plan.flops import flops_per_token, peak_tflops
from titanlite.runtime import to_device

logger = logging.getLogger("titanlite")


def main(config: Config) -> int:
    """Trains until `training.steps` or a signal. Returns the exit code: 0 finished, 75 stopped after saving."""
    # 1. World: who takes part, and how the processes are arranged
    training = config.training
    device = runtime.start(config.run.device, config.comm.timeout_seconds, config.run.seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    setup_logging(rank)
    dp_replicate, dp_shard = check_world(config, world_size)
    timeout = config.comm.timeout_seconds
    mesh = build_mesh(device.type, dp_replicate=dp_replicate, dp_shard=dp_shard, timeout_seconds=timeout)
    dp_rank, dp_size = data_rank(mesh)
    global_sum = functools.partial(sum_over_data, mesh=mesh)
    folder = Path(config.run.folder, config.run.name)
    _lock = runtime.claim_folder(folder)  # until this function returns
    if rank == 0:
        log_to_file(folder / "log.txt")

    # 2. Data: text, tokenised once; sample i of the stream is a function of (seed, i)
    tokenizer = Tokenizer(config.data.tokenizer)
    prepared = prepare(config.data, tokenizer, logger.info)
    manifest = read_manifest(prepared)
    runtime.require_agreement(configuration=portable(config), data=manifest["fingerprint"])
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
    llama = resolve_flavor(config.model, tokenizer.size)
    with torch.device("meta"):
        model = Llama(llama, training.seq_len)
    parallelize(model, config, mesh)
    model.to_empty(device=device)
    model.init_weights(config.run.seed, assign_shard)
    stages = Stages(model)

    # 4. State: what changes while training, and where it is kept
    optimizer = build_optimizer(model, config.optimizer)
    schedule = Schedule(optimizer, config.schedule, config.optimizer.lr, training.steps)
    progress = Progress()
    states = {
        "model": ModelState(model),
        "optimizer": OptimizerState(model, optimizer),
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
    checkpoint = Checkpointer(config.checkpoint, folder, states, extra_files)
    checkpoint.load()

    # 5. What is told: the step's numbers, the loss on held-out text
    metrics = Metrics(
        config.metrics,
        folder,
        device,
        progress,
        global_sum=global_sum,
        total_steps=training.steps,
        tokens_per_step=training.global_batch_size * training.seq_len,
        flops_per_token=flops_per_token(llama, training.seq_len),
        peak_tflops=peak_tflops(runtime.device_name(device)),
    )
    held_out = Tokens(prepared, manifest, "validation")
    validator = Validator(
        config.validation,
        Windows(held_out, training.seq_len, "validation") if config.validation.freq else None,
        manifest["name"],
        tokenizer.token_bytes,
        metrics,
        stages.evaluate,
        batch_size=training.local_batch_size,
        rank=dp_rank,
        world=dp_size,
    )
    if rank == 0:
        (folder / "config.toml").write_text(to_toml(config))
    compute, reduce = compute_dtypes(config, device.type)
    logger.info(
        f"{config.model.flavor}: {llama.num_parameters:,} parameters, vocabulary {llama.vocab_size:,}; "
        f"{runtime.device_name(device)} x {world_size} (dp_replicate {dp_replicate}, dp_shard {dp_shard}), "
        f"compute {compute}, reduce {reduce}; {training.global_batch_size} sequences of {training.seq_len} per step, "
        f"in {accumulation} microbatches of {training.local_batch_size} per process"
    )

    # 6. Loop: one optimizer step after the other
    stop = runtime.StopFlag(timeout)
    garbage = runtime.GarbageCollection(training.gc_freq)
    if progress.step == 0:
        validator.maybe_run(0, False, stop.agree)
    metrics.start()
    with profiler(config.profiling, folder / "traces", rank, lambda: progress.step) as profile_step:
        while progress.step < training.steps and not stop.requested:
            progress.step += 1
            batches = stream.next_step()  # microbatches of tokens and labels, each (B, S)
            num_targets = global_sum(to_device(count_targets(batches), device))
            loss = torch.zeros((), device=device)
            for index, (tokens, labels) in enumerate(batches):
                reduce_gradients_when(model, index == accumulation - 1, config.parallel)
                loss += stages.forward_backward(to_device(tokens, device), to_device(labels, device), num_targets)
            grad_norm = clip_grad_norm(model, training.max_norm)
            lr = schedule.lr
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

            finished = progress.step == training.steps
            last = stop.agree() or finished
            metrics.step(loss, grad_norm, lr, stream.epochs, last)
            if validator.due(progress.step, finished) or checkpoint.due(progress.step, last):
                metrics.require_finite(grad_norm)
                with metrics.paused():
                    validator.maybe_run(progress.step, finished, stop.agree)
                    checkpoint.maybe_save(progress.step, last or stop.requested)
            garbage.step(progress.step)
            profile_step()
    garbage.close()
    finished = progress.step >= training.steps
    if finished:
        say_what_was_made(config, folder, progress.step, model, tokenizer)
    else:
        logger.info(f"stopped after step {progress.step} of {training.steps}; the same command goes on from here")
    stop.restore()
    return 0 if finished else EXIT_STOPPED


def say_what_was_made(config: Config, folder: Path, step: int, model: Llama, tokenizer: Tokenizer) -> None:
    """Prints the results, a sample and what to try next. All processes take part: each holds a piece of the model."""
    logger.info(f"\ndone: {step} steps. In {folder}:\n  checkpoints/step-{step}  metrics.jsonl  log.txt  config.toml")
    prompt = [tokenizer.bos, *tokenizer.encode(config.run.sample_prompt)][: model.seq_len - 1]
    room = min(config.run.sample_tokens, model.seq_len - len(prompt))
    if room > 0:
        with torch.compiler.set_stance("force_eager"):  # one token at a time would compile for every length
            new = generate(
                model,
                prompt,
                room,
                stop=tokenizer.eos,
                temperature=0.7,
                top_k=50,
                seed=config.run.seed,
                agree=runtime.as_rank_0,
            )
            text = tokenizer.decode([*prompt[1:], *new])
        quoted = "\n".join(f"  | {line}" for line in text.splitlines())
        logger.info("\na sample (temperature 0.7, top-k 50):\n%s", quoted)
    quoted_folder = shlex.quote(str(folder))
    python = "python3" if shutil.which("python3") == sys.executable else os.path.relpath(sys.executable)
    script = shlex.quote(os.path.join(".", os.path.relpath(Path(__file__).with_name("run_train.sh"))))
    command = "titanlite" if shutil.which("titanlite") else f"{python} -m titanlite"
    logger.info(
        f"\nnext:\n  {command} generate {quoted_folder} --prompt {shlex.quote(config.run.sample_prompt)}\n"
        f"  {script} {quoted_folder}/config.toml --training.steps={2 * step}    (goes on from here)"
    )


def run(argv: list[str]) -> int:
    """`main` with errors turned into messages and exit codes."""
    try:
        return main(load_config(argv))
    except (ConfigError, NonFinite) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one process of each node says it
            print(f"error: {error}".replace("\n", "\nerror: "), file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException:  # torch's CheckpointException is no Exception
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    runtime.finish(run(sys.argv[1:]))
