"""Cross entropy, summed over tokens.

What it is: the *sum* of the loss over the local targets. The caller divides it by the *global*
number of targets of the optimizer step (all local batches of all data-parallel ranks), and
gradients are summed over processes.
Why it is here: the result must not depend on how the batch is divided. The mean over ranks or local
batches of their mean losses equals the mean over all targets only if all have equally many targets.
Counts differ where labels are ignored: at the ends of documents with `data.document_mask`, in the
padding of packed rows, in prompts, and in the last batch of validation. The sum divided by the
global count is exact in all cases, over ranks and over gradient accumulation.
What it costs: at the peak three times 4 B S V bytes: the logits in fp32, their log-softmax and the
gradient; `chunked_loss.py` needs only a part of that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

SummedLoss = Callable[[Tensor, Tensor], Tensor]  # logits (B, S, V), labels (B, S) -> scalar


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sums -log p(label) over the labels that are not IGNORED (-100), as an fp32 scalar.

    logits (B, S, V), labels (B, S).
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
