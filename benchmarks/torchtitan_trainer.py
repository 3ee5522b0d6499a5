"""The Trainer of torchtitan 0.2.2 as a contestant: its model, loop, optimizer and options, with
given tokens.

It differs from a plain run of torchtitan in the model's shape (a flavor of titanlite), the missing
tokenizer and data loader, and for the pair `fsdp` a call of its `apply_fsdp` on a mesh of one
process, which it makes only for more processes. Nothing of torchtitan is copied or changed.
torchtitan has no CPU path. Without CUDA, this file replaces the device functions that it calls, so
that the comparison can be tried on any machine; its speed there has no meaning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import sys
import types
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from titanlite.config.schema import Config
from titanlite.distributed import process_group
from titanlite.model.flavors import LlamaConfig
from titanlite.parallel.auto import compute_dtype

RECOMPUTE = {"none": ("none", "op"), "full": ("full", "op"), "selective": ("selective", "op")}


def _stand_in_for_cuda() -> None:
    """Makes the CPU a device for torchtitan, without Triton and memory statistics.

    Call it before the import.
    """
    kernels = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None  # type: ignore[attr-defined]
    sys.modules[kernels.__name__] = kernels
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.get_device_name, cpu.memory_stats = lambda device: "CPU", lambda device: {}
    cpu.get_device_properties = lambda device: types.SimpleNamespace(total_memory=1)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None


def _stand_in_for_datasets() -> None:
    """Makes torchtitan importable without the package `datasets`, whose loaders we do not use."""
    if importlib.util.find_spec("datasets") is None:
        sys.modules |= {"datasets": mock.MagicMock(), "datasets.distributed": mock.MagicMock()}


def job(config: Config, compute: str) -> Any:
    """Builds torchtitan's JobConfig with the settings of `config`."""
    from torchtitan.config import JobConfig

    made = JobConfig()
    made.model.name, made.model.flavor = "llama3", "same"
    training, optimizer = made.training, made.optimizer
    training.local_batch_size, training.seq_len = (
        config.training.local_batch_size,
        config.training.seq_len,
    )
    training.max_norm, training.mixed_precision_param = config.training.max_norm, compute
    optimizer.lr, (optimizer.beta1, optimizer.beta2) = config.optimizer.lr, config.optimizer.betas
    optimizer.eps, optimizer.weight_decay = config.optimizer.eps, config.optimizer.weight_decay
    made.lr_scheduler.warmup_steps, made.lr_scheduler.decay_ratio = 0, 0.0
    made.activation_checkpoint.mode, made.activation_checkpoint.selective_ac_option = RECOMPUTE[
        config.recompute.mode
    ]
    made.compile.enable, made.compile.components = (
        config.compile.enabled == "true",
        ["model", "loss"],
    )
    made.metrics.log_freq = 1 << 40
    made.training.gc_freq = config.training.gc_freq or 1 << 40
    return made


class Torchtitan:
    """Runs steps of torchtitan's Trainer."""

    name = "torchtitan"

    def __init__(self, trainer: Any, config: Config, llama: LlamaConfig) -> None:
        self.trainer, self.config, self.llama, self.device = trainer, config, llama, trainer.device
        self.loss = torch.zeros(())
        original = trainer.forward_backward_step

        def remember(**arguments: Any) -> Tensor:
            loss: Tensor = original(**arguments)
            self.loss = loss
            return loss

        trainer.forward_backward_step = remember
        trainer.step = 2  # its metrics do not log step 2

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.trainer.train_step(iter([({"input": tokens}, labels)]))
        return self.loss.detach()


def build(config: Config, llama: LlamaConfig, pair: str, weights: dict[str, Tensor]) -> Torchtitan:
    """Builds torchtitan with these weights. `pair`: autocast or fsdp."""
    device = process_group.start(config.run, config.comm, config.debug)
    if device.type != "cuda":
        _stand_in_for_cuda()
    _stand_in_for_datasets()
    os.environ.setdefault("LOCAL_RANK", "0")
    import torchtitan.train as module
    from torchtitan.models.llama3 import get_train_spec
    from torchtitan.models.llama3.infra.parallelize import apply_fsdp, parallelize_llama
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

    scaling = llama.rope_scaling
    shape = TransformerModelArgs(
        dim=llama.dim,
        n_layers=llama.num_layers,
        n_heads=llama.num_heads,
        n_kv_heads=llama.num_kv_heads,
        vocab_size=llama.vocab_size,
        multiple_of=llama.ffn_dim,
        ffn_dim_multiplier=min(1.0, llama.ffn_dim / int(8 * llama.dim / 3)),
        norm_eps=llama.norm_eps,
        rope_theta=llama.rope_theta,
        rope_scaling_args=RoPEScalingArgs(
            scaling.factor,
            scaling.low_freq_factor,
            scaling.high_freq_factor,
            scaling.original_context,
        )
        if scaling
        else RoPEScalingArgs(scaling_factor=1.0),
    )
    names = compute_dtype(config, llama.dim, device.type), config.training.reduce_dtype
    dtypes = [getattr(torch, name) for name in names]

    def parallelize(model: Any, dims: Any, job_config: Any) -> Any:
        model = parallelize_llama(model, dims, job_config)
        if pair == "fsdp":
            mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("fsdp",))
            apply_fsdp(model, mesh, *dtypes, pp_enabled=False)
        return model

    spec = dataclasses.replace(
        get_train_spec(),
        model_args={"same": shape},
        parallelize_fn=parallelize,
        build_tokenizer_fn=None,
        build_dataloader_fn=None,
    )
    with mock.patch.object(module.train_spec_module, "get_train_spec", return_value=spec):
        trainer = module.Trainer(job(config, str(dtypes[0]).removeprefix("torch.")))
    if pair == "fsdp":
        trainer.maybe_enable_amp = contextlib.nullcontext()
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(trainer.model_parts[0], {**weights}, options=options)
    return Torchtitan(trainer, config, llama)
