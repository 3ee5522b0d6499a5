"""Cross entropy, summed over tokens.

What it is: the *sum* of the loss over the local targets. The caller divides by the *global* number of targets of
the whole optimizer step (all microbatches, all data-parallel ranks), and gradients are summed over processes.
Why it is here: a mean of means weights the tokens of a short rank or microbatch more than others; a sum over a
count is the same number however the batch is cut.
What it costs: at its peak three times B * S * V * 4 bytes: the logits in fp32, their log-softmax and the gradient.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Scalar fp32: sum of -log p(label). logits (B, S, V), labels (B, S); a label of -100 is no target."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
