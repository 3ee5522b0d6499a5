"""Logs the messages at the start and the end of a run.

What it is: at the start the model, the layout and the batch, with the settings that have no effect;
at the end where the results are, a sample of text, and commands to go on with.
"""

from __future__ import annotations

import logging
import os
import shlex
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
from titanlite.runtime.device import device_name
from titanlite.runtime.errors import EXIT_STOPPED
from titanlite.runtime.shell_command import package_variable, python_command, titanlite_command
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
    and that continue the run on as many processes.
    """
    here = Path.cwd()
    command = titanlite_command(here)
    world_size = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    number = ""
    if per_node > 1 or os.environ.get("NGPU"):
        number = f"NGPU={per_node} "
    script = script.resolve()
    shell = script.with_name("run_train.sh")
    if shell.exists():  # a clone
        train = number + shlex.quote(os.path.join(".", os.path.relpath(shell)))
    elif script.parent == program_folder():  # an installed wheel
        train = f"{number}{command} train"
    else:  # a copy made by `titanlite eject`
        train = f"{package_variable()}{python_command(here)} "
        if per_node > 1:
            train += f"-m torch.distributed.run --nproc-per-node {per_node} "
        train += shlex.quote(os.path.relpath(script))
    resumes = "resumes from here"
    if per_node < world_size:
        resumes += "; on each node, with the variables of this run"
    prompt = "def"
    if config.validation.prompts:
        prompt = config.validation.prompts[0]
    quoted_folder = shlex.quote(str(folder))
    use = f"{command} generate {quoted_folder} --prompt {shlex.quote(prompt)}"
    if (folder / "checkpoints" / f"step-{step}" / TEMPLATE_FILE).exists():
        use = f"{command} generate {quoted_folder} --chat 'a question'"
    return f"\nnext:\n  {use}\n  {train} {quoted_folder} --training.steps={2 * step}    ({resumes})"
