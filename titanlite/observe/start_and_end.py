"""Logs the messages at the start and the end of a run.

What it is: at the start the model, the layout and the batch, with the settings that have no effect;
at the end where the results are, a sample of text, and commands to go on with.
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
from torch import Tensor
from torch.nn.attention import SDPBackend

from titanlite.config.budget import warmup_problem
from titanlite.config.load import program_folder
from titanlite.config.schema import Config
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.torch_private import attention_backend
from titanlite.model.attention import share_heads
from titanlite.model.flavors import LlamaConfig
from titanlite.model.flops import num_adapter_parameters
from titanlite.observe.metrics import Progress
from titanlite.rules.unused import unused_settings
from titanlite.runtime import interpreter
from titanlite.runtime.device import device_name
from titanlite.runtime.errors import EXIT_STOPPED
from titanlite.tokenizer.tokenizer_json import TEMPLATE_FILE

logger = logging.getLogger("titanlite")


def log_start(
    config: Config,
    llama: LlamaConfig,
    mesh: Mesh,
    device: torch.device,
    compiled: bool,
    progress: Progress,
) -> None:
    """Logs the model, the layout and the batch, which settings have no effect, and whether the run
    is already complete.
    """
    for note in unused_settings(config, llama, mesh.degrees):
        logger.info(note)
    problem = warmup_problem(config)
    if problem:
        logger.warning(problem)
    training = config.training
    axes = [f"{axis} {degree}" for axis, degree in mesh.layout.items() if degree > 1]
    layout = ", ".join(axes) or "one process"
    blocks = "not compiled"
    if compiled:
        blocks = f"compiled by {config.compile.backend}"
    later = ""
    if training.batch_ramp:
        later = f" (later {training.batch_ramp})"
    num_batches = training.global_batch_size // (training.local_batch_size * mesh.data_size)
    devices = f"{device_name(device)} x {dist.get_world_size()}"
    used = ""
    if llama.num_experts:
        used = f"of which a token uses {llama.num_active_parameters:,}, "
    adapters = ""
    if config.lora.rank > 0:
        adapters = f"{num_adapter_parameters(llama, config.lora):,} of adapters are trained, "
    about = {
        "parameters": llama.num_parameters,
        "device": devices,
        "layout": layout,
        "torch": torch.__version__,
    }
    logger.info(
        f"{config.model.flavor}: {llama.num_parameters:,} parameters, "
        f"{used}{adapters}vocabulary {llama.vocab_size:,}; "
        f"{devices} ({layout}), "
        f"compute {training.compute_dtype}, reduce {training.reduce_dtype}, "
        f"attention {_attention(config, llama, mesh, device)}, blocks {blocks}; "
        f"{training.global_batch_size} sequences of {training.seq_len} per step{later}, "
        f"{num_batches} x {training.local_batch_size} in each process",
        extra={"event": "start", "step": progress.step, "about": about},
    )
    if progress.step >= training.steps:
        logger.info(
            f"nothing left to train: the run is at step {progress.step}, and "
            f"training.steps = {training.steps}"
        )


def _attention(config: Config, llama: LlamaConfig, mesh: Mesh, device: torch.device) -> str:
    """Describes how attention is computed."""
    places = []
    if config.data.document_mask:
        places.append("documents")
    if any(llama.windows(config.training.seq_len)):
        places.append(f"a window of {llama.sliding_window}")
    if places:
        return f"within {' and '.join(places)}"  # see `block_mask.py`
    if mesh.degrees["cp"] > 1:
        return "over ranks"
    dtype = getattr(torch, config.training.compute_dtype)
    return attention_kernel(llama, config.training.seq_len, dtype, device)


def attention_kernel(
    config: LlamaConfig, seq_len: int, dtype: torch.dtype, device: torch.device
) -> str:
    """Names the kernel for a model of this shape on whole sequences in training.

    It is cudnn, flash, efficient or math.
    """

    def empty(num_heads: int) -> Tensor:
        shape = (1, num_heads, seq_len, config.head_dim)
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)

    q = empty(config.num_heads)
    k = share_heads(q, empty(config.num_kv_heads))
    grouped = q.shape[1] != k.shape[1]
    kernel = SDPBackend(attention_backend(q, k, k, enable_gqa=grouped))
    return kernel.name.removesuffix("_ATTENTION").lower()


def log_end(config: Config, script: Path, step: int, texts: list[str]) -> int:
    """Logs how the run ended, and returns its exit code.

    For a finished run it logs where the results are, a sample, and what to try next. `script`: the
    program that has trained; `texts`: the latest samples.
    """
    if step < config.training.steps:
        logger.info(
            f"stopped after step {step} of {config.training.steps}; "
            "the same command resumes from here",
            extra={"event": "end", "step": step, "about": {"finished": False}},
        )
        return EXIT_STOPPED
    if dist.get_rank() == 0:
        folder = Path(config.run.folder, config.run.name)
        files = f"checkpoints/step-{step}  metrics.jsonl  log.txt  config.toml"
        logger.info(
            f"\ndone: {step} steps. In {folder}:\n  {files}",
            extra={"event": "end", "step": step, "about": {"finished": True}},
        )
        for text in texts[:1]:
            lines = "\n".join(f"  | {line}" for line in text.splitlines())
            temperature = config.validation.prompt_temperature
            logger.info("\na sample (temperature %g, top-k 50):\n%s", temperature, lines)
        logger.info(_next_commands(config, script, folder, step))
    return 0


def _next_commands(config: Config, script: Path, folder: Path, step: int) -> str:
    """Writes the commands that generate text with the run's model, or its answer to a question,
    and that continue the run.
    """
    python = os.path.relpath(sys.executable)
    if shutil.which("python3") == sys.executable:
        python = "python3"
    command = titanlite_command(python)
    script = script.resolve()
    shell = script.with_name("run_train.sh")
    if shell.exists():  # a clone
        train = shlex.quote(os.path.join(".", os.path.relpath(shell)))
    elif script.parent == program_folder():  # an installed wheel
        train = f"{command} train"
    else:  # a copy made by `titanlite eject`
        train = f"{python} {shlex.quote(os.path.relpath(script))}"
    prompt = "def"
    if config.validation.prompts:
        prompt = config.validation.prompts[0]
    quoted_folder = shlex.quote(str(folder))
    use = f"{command} generate {quoted_folder} --prompt {shlex.quote(prompt)}"
    if (folder / "checkpoints" / f"step-{step}" / TEMPLATE_FILE).exists():
        use = f"{command} generate {quoted_folder} --chat 'a question'"
    return (
        f"\nnext:\n  {use}\n"
        f"  {train} {quoted_folder}/config.toml --training.steps={2 * step}    (resumes from here)"
    )


def titanlite_command(python: str) -> str:
    """Writes how a shell in the current folder calls titanlite without importing modules from that
    folder, which may hold data.
    """
    installed = Path(sys.executable).with_name("titanlite")
    if shutil.which("titanlite"):
        return "titanlite"
    if installed.exists():
        return shlex.quote(os.path.relpath(installed))
    if os.getcwd() == interpreter.PACKAGES:  # a clone
        return f"{python} -m titanlite"
    safe_path = " -P" if interpreter.HAS_SAFE_PATH else ""
    packages = shlex.quote(interpreter.PACKAGES)
    return f"PYTHONPATH={packages} {python}{safe_path} -m titanlite"
