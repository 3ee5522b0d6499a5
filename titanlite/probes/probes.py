"""What a run measures if asked: one object with the points of a step at which it is measured.

What it is: the probes of `[metrics]`, each with a key that says every how many steps it measures;
0, the default, is never. A probe that is off returns at once. docs/measures.md says what each
number means.
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
    """The gradient noise scale, norms of layers, and statistics of activations."""

    def __init__(
        self, config: MetricsConfig, stages: Stages, noise_scale: NoiseScale, metrics: Metrics
    ) -> None:
        """`noise_scale` is built before, since it is a part of the training state."""
        self.noise_scale = noise_scale
        self.activations = Activations(config.activations_freq, stages, metrics)
        self.layer_norms = LayerNorms(config.layer_norms_freq, stages, metrics)

    def before_step(self, batches: list[Batch]) -> None:
        """`batches`: all local batches of the step, in CPU memory."""
        self.activations.before_step(batches)
        self.noise_scale.before_step(batches)

    def after_backward(self, i: int, num_batches: int, num_targets: Tensor) -> None:
        """After the backward of local batch `i`; `num_targets`: of the step, over all ranks."""
        self.noise_scale.after_backward(i, num_batches, num_targets)

    def before_update(self) -> None:
        """Gradients are clipped, weights still those of the step before."""
        self.layer_norms.before_update()

    def after_update(self) -> None:
        """Weights are updated, gradients still there."""
        self.layer_norms.after_update()
