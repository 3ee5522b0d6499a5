"""The end of a run: where its results are, a sample of text, commands to go on with, and its
report.

What it costs: the sample is generated on the CPU from the checkpoint just written, by rank 0.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.checkpoint.load_model import load_model
from titanlite.checkpoint.storage import step_folder
from titanlite.config.load import program_folder
from titanlite.config.schema import Config
from titanlite.data.tokenizer import Tokenizer
from titanlite.distributed.agreement import PATIENT, broadcast
from titanlite.model.flavors import LlamaConfig
from titanlite.model.generate import generate
from titanlite.runtime import interpreter
from titanlite.runtime.errors import EXIT_STOPPED
from titanlite.tools.report.page import write_report

logger = logging.getLogger("titanlite")
SAMPLE_BYTES = 8 << 30  # in fp32; a larger model is not loaded into CPU memory for a sample


def log_end(
    config: Config, script: Path, step: int, tokenizer: Tokenizer, llama: LlamaConfig
) -> int:
    """Returns the exit code. Of a finished run rank 0 logs where the results are, a sample, and
    what to try next.

    Rank 0 also writes the report. All ranks call it together. `script`: the program that has
    trained.
    """
    folder = Path(config.run.folder, config.run.name)
    stopped = step < config.training.steps
    event = {"event": "end", "step": step, "about": {"finished": not stopped}}
    if stopped:
        text = f"stopped after step {step} of {config.training.steps}; the same command resumes from here"
        logger.info(text, extra=event)
    elif dist.get_rank() == 0:
        files = f"checkpoints/step-{step}  metrics.jsonl  log.txt  config.toml"
        logger.info(f"\ndone: {step} steps. In {folder}:\n  {files}", extra=event)
        _log_results(config, script, step, tokenizer, llama)
    report_together(folder)
    return EXIT_STOPPED if stopped else 0


def report_together(folder: Path) -> None:
    """Rank 0 writes the report while the others wait: at the first exit, a launcher may end the
    other processes.
    """
    if dist.get_rank() == 0:
        write_report(folder)
    broadcast(None, PATIENT)


def _log_results(
    config: Config, script: Path, step: int, tokenizer: Tokenizer, llama: LlamaConfig
) -> None:
    folder = Path(config.run.folder, config.run.name)
    size = 4 * llama.num_parameters
    if config.validation.prompts and size > SAMPLE_BYTES:
        limit = f"at most {SAMPLE_BYTES / 1e9:.1f} GB are used for a sample"
        logger.info(
            f"\nno sample: in fp32 the model takes {size / 1e9:.1f} GB of CPU memory; {limit}"
        )
    elif config.validation.prompts:
        text = "\n".join(
            f"  | {line}" for line in sample(config, folder, step, tokenizer).splitlines()
        )
        logger.info("\na sample (temperature 0.7, top-k 50):\n%s", text)
    quoted_folder = shlex.quote(str(folder))
    python = (
        "python3" if shutil.which("python3") == sys.executable else os.path.relpath(sys.executable)
    )
    command = titanlite_command(python)
    own = script.resolve()
    shell = own.with_name("run_train.sh")
    if shell.exists():  # a clone
        train = shlex.quote(os.path.join(".", os.path.relpath(shell)))
    elif own.parent == program_folder():  # an installed wheel
        train = f"{command} train"
    else:  # a copy made by `titanlite eject`
        train = f"{python} {shlex.quote(os.path.relpath(own))}"
    prompt = config.validation.prompts[0] if config.validation.prompts else "def"
    logger.info(
        f"\nnext:\n  {command} generate {quoted_folder} --prompt {shlex.quote(prompt)}\n"
        f"  {train} {quoted_folder}/config.toml --training.steps={2 * step}    (resumes from here)"
    )


def titanlite_command(python: str) -> str:
    """How a shell in the current folder calls titanlite, without importing modules from a folder of
    data.
    """
    installed = Path(sys.executable).with_name("titanlite")
    if shutil.which("titanlite"):
        return "titanlite"
    if installed.exists():
        return shlex.quote(os.path.relpath(installed))
    if os.getcwd() == interpreter.PACKAGES:  # a clone
        return f"{python} -m titanlite"
    safe_path = " -P" if interpreter.HAS_SAFE_PATH else ""
    return f"PYTHONPATH={shlex.quote(interpreter.PACKAGES)} {python}{safe_path} -m titanlite"


def sample(config: Config, folder: Path, step: int, tokenizer: Tokenizer) -> str:
    """The text that the model generates after the first of `validation.prompts`.

    The checkpoint is loaded on the CPU, because the whole model may not fit in the memory of one
    device.
    """
    seq_len = config.training.seq_len
    seed = config.run.seed
    prompt = [tokenizer.bos, *tokenizer.encode(config.validation.prompts[0])][: seq_len - 1]
    room = min(config.validation.prompt_tokens, seq_len - len(prompt))
    model = load_model(step_folder(folder / "checkpoints", step), torch.device("cpu"), seq_len)
    new = generate(model, prompt, room, stop=tokenizer.eos, temperature=0.7, top_k=50, seed=seed)
    return tokenizer.decode([*prompt[1:], *new])
