"""Optional measurements during training: averaged weights, statistics every few steps, samples of
text.

What it is: `Measures` takes the place of the stages in the training loop, which stays as it is. It
connects what [ema], [metrics] and `validation.prompts` enable to the points where they work:
between two local batches, around the optimizer's step, before the first local batch, after a
validation. docs/measures.md says what each number means.
What it costs: nothing on steps that are not measured, apart from the average (`optim/ema.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titanlite.config.schema import Config
from titanlite.data.stream import Batch
from titanlite.observe.validation import Validator


class Measures:
    """Stages that also measure: `forward_backward`, `evaluate` and `shared_params` as those of
    `Stages`.
    """

    def __init__(
        self, config: Config, stages: Any, optimizer: torch.optim.Optimizer, states: dict[str, Any]
    ) -> None:
        """Adds to `states` what a checkpoint keeps.

        Raises ConfigError if something cannot be measured.
        """
        self.config = config
        self.stages = stages
        self.optimizer = optimizer
        self.evaluate = stages.evaluate
        self.shared_params = stages.shared_params
        self.progress = states["progress"]
        self.ema: Any = None
        self.noise_scale: Any = None
        self.activations: Any = None
        self._first = True  # the next local batch is the first of a step
        if config.ema.decay:
            from titanlite.optim.ema import WeightEMA

            self.ema = states["ema"] = WeightEMA(stages.model_parts, config.ema, optimizer)
        if config.metrics.noise_scale_freq:
            from titanlite.probes.noise_scale import NoiseScale

            self.noise_scale = states["noise_scale"] = NoiseScale(stages, states.get("loss_scale"))

    def connect(self, validator: Validator) -> Any:
        """Call it once the state is loaded. Returns the validator, or one that also validates the
        average or samples.

        Raises ConfigError if a prompt is too long.
        """
        metrics = validator.metrics
        section = self.config.metrics
        if section.layer_norms_freq:
            from titanlite.probes.layer_norms import LayerNorms

            LayerNorms(self.stages, self.optimizer, metrics, section.layer_norms_freq)
        if section.activations_freq:
            from titanlite.probes.activations import Activations

            ring = self.stages.mesh["cp"].size() > 1 and self.config.parallel.cp_method == "ring"
            flex = self.config.data.document_mask and metrics.device.type == "cuda"
            self.activations = Activations(self.stages, metrics, logits=not (ring or flex))
        connected: Any = validator
        if self.ema is not None:
            self.ema.start()
            connected = (
                AveragedValidator(validator, self.ema) if self.config.ema.validate else validator
            )
        if self.config.validation.prompts:
            from titanlite.probes.samples import Sampler, SamplingValidator

            connected = SamplingValidator(
                connected, Sampler(self.stages, validator, self.config.run.seed)
            )
        return connected

    def forward_backward(self, batch: Batch, num_targets: Tensor, last: bool = True) -> Tensor:
        """As `Stages.forward_backward`."""
        section = self.config.metrics
        first = self._first
        self._first = last
        noise_scale = (
            self.noise_scale
            if self._due(section.noise_scale_freq) and not (first and last)
            else None
        )
        if self.activations and first and self._due(section.activations_freq):
            self.activations.measure(batch)
        if noise_scale and first:
            noise_scale.before_first(batch)
        loss: Tensor = self.stages.forward_backward(batch, num_targets, last)
        if noise_scale and first:
            noise_scale.after_first()
        elif noise_scale and last:
            noise_scale.after_last(num_targets)
        return loss

    def _due(self, freq: int) -> bool:
        return freq > 0 and self.progress.step % freq == 0


class AveragedValidator:
    """Validates the weights, then their average: as `validation/<source>/ema_loss`.

    That is in a separate row after that of the weights. Which checkpoints are kept is decided by
    the loss of the weights.
    """

    def __init__(self, validator: Validator, ema: Any) -> None:
        self.validator = validator
        self.ema = ema
        self.due = validator.due

    def maybe_run(self, step: int, last: bool, stop: Callable[[], bool]) -> float | None:
        """As `Validator.maybe_run`: the loss of the weights."""
        loss = self.validator.maybe_run(step, last, stop)
        if loss is None:
            return None
        row: dict[str, Any] = {"step": step}
        with self.ema.in_place_of_weights():
            for name, windows in self.validator.windows.items():
                sums = self.validator.sums_over(windows, stop)
                if sums is None:
                    return loss  # the run stops
                row[f"validation/{name}/ema_loss"] = sums[0] / sums[1]
                self.validator.metrics.log_validation(name, {"ema_loss": sums[0] / sums[1]})
        self.validator.metrics.write(row)
        return loss
