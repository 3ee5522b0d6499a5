"""A mixture of experts, in the place of a block's feed-forward (arXiv 1701.06538, 2101.03961).

What it is: a router gives each token a probability for each of E experts, which are small SwiGLU
feed-forwards. The token is computed by the k experts with the highest probabilities, and the result
is the sum of their outputs, weighted by these probabilities divided by their sum. This is Qwen3-MoE
(arXiv 2505.09388); Mixtral (arXiv 2401.04088) computes the same. No token is dropped: an expert
computes as many tokens as choose it.
Why it is here: the model has the parameters of E experts and the compute of k. It contains no
parallelism; `parallel/expert_parallel.py` divides the experts from outside.
What it costs: per token 6 k D F FLOPs in the forward and 2 E D for the router; memory for k rows
(D) and k hidden rows (F) per token.

How it is computed: each token is copied k times, and the copies are sorted by expert, so that the
tokens of an expert are neighbouring rows. Then one grouped product per matrix computes all experts.

    T = 3 tokens, E = 4, k = 2     token 0 chooses experts 2, 0    token 1: 2, 3    token 2: 0, 3
    rows, sorted by expert         0 2 | | 0 1 | 1 2               counts (2, 0, 2, 2)

Shapes in comments: T tokens of all sequences, E experts, k experts per token, D = dim, F =
expert_ffn_dim, R rows = T k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.model.flavors import LlamaConfig
from titanlite.model.wrappable import Wrappable


class ExpertLinear(nn.Module):
    """E linear layers of the same shape; each row is multiplied by one expert's matrix."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiplies rows (R, in), sorted by expert, to (R, out).

        `ends` (E,), int32: the index after each expert's last row.
        """
        return multiply(rows, self.weight, ends)


def multiply(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiplies rows (R, in), sorted by expert, with weights (E, out, in) to (R, out)."""
    # What `grouped_mm` does not have: float64, and rows of other than whole 16 bytes
    if rows.dtype == torch.float64 or any(width % 8 for width in weight.shape[1:]):
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = zip(rows.split(counts), weight, strict=True)
        return torch.cat([F.linear(part, matrix) for part, matrix in parts])
    return F.grouped_mm(rows, weight.mT, offs=ends)


class Experts(nn.Module):
    """E feed-forwards (SwiGLU) with hidden width F."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        num = config.num_experts
        dim = config.dim
        hidden = config.expert_ffn_dim
        self.w1 = ExpertLinear(num, dim, hidden)
        self.w2 = ExpertLinear(num, hidden, dim)
        self.w3 = ExpertLinear(num, dim, hidden)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Computes rows (R, D) that are sorted by expert; counts (E,): each expert's rows."""
        ends = counts.cumsum(dim=0).int()
        return self.w2(F.silu(self.w1(rows, ends)) * self.w3(rows, ends), ends)


class RouterProbabilities(nn.Module):
    """Computes each token's probabilities of the experts.

    It is a module so that balancing (`optim/router_balance.py`) can observe them, and add to their
    gradient. `padding` (B, S), bool: the positions that balancing leaves out.
    """

    def forward(self, logits: Tensor, padding: Tensor | None = None) -> Tensor:
        return F.softmax(logits, dim=-1, dtype=torch.float32)


class MixtureOfExperts(Wrappable):
    """The router and the experts: (B, S, D) -> (B, S, D)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.experts_per_token = config.experts_per_token
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.probabilities = RouterProbabilities()
        self.experts = Experts(config)

    def compute(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Computes all positions; `padding`: see `RouterProbabilities`."""
        k = self.experts_per_token
        weights, chosen = self.route(x, padding)  # (T, k)
        # `order` (R,): the copies of tokens, sorted by expert
        experts, order = chosen.flatten().sort(stable=True)
        counts = count(experts, self.num_experts)
        # `index_select`: on a CPU its backward is faster than that of `[order]`
        rows = x.flatten(0, 1).repeat_interleave(k, dim=0).index_select(0, order)  # (R, D)
        outputs = restore_order(self.experts(rows, counts), order)  # (R, D), by token
        outputs = outputs.unflatten(0, (-1, k)) * weights[..., None].type_as(x)  # (T, k, D)
        return outputs.sum(dim=1).view_as(x)

    def route(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """Chooses the experts of each token: weights and numbers of experts, both (T, k)."""
        probabilities = self.probabilities(self.router(x), padding).flatten(0, 1)  # (T, E), fp32
        return choose(probabilities, self.experts_per_token)


def restore_order(rows: Tensor, order: Tensor) -> Tensor:
    """Undoes `rows.index_select(0, order)`."""
    return rows.index_select(0, order.argsort())


def count(experts: Tensor, num_experts: int) -> Tensor:
    """Counts each expert in ascending numbers (R,) -> (E,); the host does not wait."""
    numbers = torch.arange(num_experts, device=experts.device)
    ends = torch.searchsorted(experts, numbers, right=True)
    return ends.diff(prepend=ends.new_zeros(1))


def choose(probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Chooses the k most probable experts of each token; of equals, those with lower numbers.

    probabilities (T, E) -> weights, which add up to 1, and numbers of experts, both (T, k).
    """
    # not `topk`, which chooses among equals as the device does
    highest, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    weights = highest[:, :k]
    return weights / weights.sum(dim=-1, keepdim=True), experts[:, :k]
