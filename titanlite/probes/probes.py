"""The optional measurements of a run: one object, called at fixed points of each step.

What it is: the probes of `[metrics]`. Each has a key: it measures every so many steps; 0, the
default, means never. A probe that is off returns at once. docs/measures.md explains each number.
What it costs: nothing on steps that are not measured.
"""

from __future__ import annotations

from torch import Tensor

from titanlite.config.schema import MetricsConfig
from titanlite.data.rows import Batch
from titanlite.observe.metrics import Metrics
from titanlite.parallel.stages import Stages
from titanlite.probes.activations import Activations
from titanlite.probes.layer_norms import LayerNorms
from titanlite.probes.noise_scale import NoiseScale


class Probes:
    """Measures the gradient noise scale, norms of layers, and statistics of activations."""

    def __init__(
        self, config: MetricsConfig, stages: Stages, noise_scale: NoiseScale, metrics: Metrics
    ) -> None:
        """`noise_scale` is built by the caller, since it is a part of the training state."""
        self.noise_scale = noise_scale
        self.activations = Activations(config.activations_freq, stages, metrics)
        self.layer_norms = LayerNorms(config.layer_norms_freq, stages, metrics)

    def before_step(self, batches: list[Batch]) -> None:
        """Called before a step's first forward; `batches`: its local batches, in CPU memory."""
        self.activations.before_step(batches)
        self.noise_scale.before_step(batches)

    def after_backward(self, i: int, num_batches: int, num_targets: Tensor) -> None:
        """Called after the backward of local batch `i`; `num_targets`: the step's, of all ranks."""
        self.noise_scale.after_backward(i, num_batches, num_targets)

    def before_update(self) -> None:
        """Called when gradients are clipped and weights are still those of the step before."""
        self.layer_norms.before_update()

    def after_update(self) -> None:
        """Called when weights are updated and gradients are not yet cleared."""
        self.layer_norms.after_update()
