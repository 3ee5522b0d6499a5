"""The choices of routers: in the single-process reference, and in a layout beside it.

What it is: `Routing` computes the auxiliary loss of the reference by its definition, as a term of
the loss of each forward, and records the experts of each token. It shares no code with
`optim/router_balance.py`. `Decisions` records what the routers of a layout choose in forwards, and
`compare_decisions` compares that with the reference, token by token: `token_places` says which
tokens of the global batch a rank routes.
Why it is here: two layouts may choose every expert equally often, for different tokens.
Near ties: rounding may turn a decision between two experts whose logits are nearly
equal, and then that token has other results. So the reference draws a batch with such a near tie
again, and another decision is shown with its margin, the distance of these two logits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titanlite.config.schema import Config
from titanlite.data.rows import Batch
from titanlite.distributed.mesh import Mesh
from titanlite.model.llama import Llama
from titanlite.model.moe import MixtureOfExperts
from titanlite.parallel.context_parallel import local_positions


class Routing:
    """The routers of a model that is not parallel; nothing if it has no experts."""

    def __init__(self, model: Llama, weight: float) -> None:
        """`weight`: router_aux_loss."""
        self.weight = weight
        self.num_layers = len(model.layers)
        self.logits: dict[str, list[Tensor]] = {}  # of each forward of this step
        self.loads: dict[str, Tensor] = {}  # f_e of the step before
        # The experts of each token in the last step (T, k), and their margins (T,)
        self.chosen: dict[str, tuple[Tensor, Tensor]] = {}
        self.experts_per_token = model.config.experts_per_token
        for name, block in model.layers.items():
            moe = block.feed_forward
            if isinstance(moe, MixtureOfExperts):
                self.logits[name] = []
                self.loads[name] = torch.full(
                    (moe.num_experts,), moe.experts_per_token / moe.num_experts
                )
                moe.router.register_forward_hook(functools.partial(self._record, name))

    def _record(self, name: str, module: nn.Module, args: object, output: Tensor) -> None:
        self.logits[name].append(output.flatten(0, -2))

    def loss(self, tokens: int) -> Tensor | float:
        """The part of the auxiliary loss that the last forward adds; `tokens`: of the step."""
        total: Tensor | float = 0.0
        for name, logits in self.logits.items():
            probabilities = logits[-1].exp() / logits[-1].exp().sum(dim=-1, keepdim=True)
            load = self.loads[name].to(probabilities)
            total = total + len(load) * (load * probabilities.sum(dim=0) / tokens).sum()
        return self.weight * total / self.num_layers

    def take_smallest_margin(self) -> float:
        """Returns the smallest margin of the forwards of this step, and forgets them. Ties, whose
        margin is 0, are left out.
        """
        smallest = math.inf
        for logits in self.logits.values():
            if logits:
                margins = _margins(torch.cat(logits), self.experts_per_token)
                smallest = min([smallest, *margins[margins > 0].tolist()])
            logits.clear()
        return smallest

    def finish_step(self) -> None:
        """Notes the choices of the step, in the order of tokens; each token's in ascending order.

        Of experts with equal logits, those with lower numbers are chosen.
        """
        for name, logits in self.logits.items():
            scores = torch.cat(logits).detach()
            by_score = scores.argsort(dim=-1, descending=True, stable=True)
            experts = by_score[:, : self.experts_per_token].sort(dim=-1).values
            counts = torch.zeros(scores.shape[1], dtype=torch.int64)
            for expert in range(scores.shape[1]):
                counts[expert] = (experts == expert).sum()
            margins = _margins(scores, self.experts_per_token)
            self.chosen[name] = (experts.cpu(), margins.cpu())
            self.loads[name] = counts / len(scores)
            logits.clear()


def _margins(logits: Tensor, k: int) -> Tensor:
    """Computes the margin of each token's choice: (T, E) -> (T,).

    It is the k-th largest logit minus the next one, divided by the largest logit.
    """
    if k == logits.shape[1]:
        return torch.full_like(logits[:, 0], math.inf)
    ranked = logits.sort(dim=-1, descending=True).values
    return (ranked[:, k - 1] - ranked[:, k]) / logits.abs().max()


class Decisions:
    """Records the experts that each token of a part of a model chooses, in the forwards of a step.

    It records nothing of a part without experts.
    """

    def __init__(self, part: Llama) -> None:
        self.in_forward = False
        self.chosen: dict[str, list[Tensor]] = {}  # by block, of each forward: (T, k), ascending
        part.register_forward_pre_hook(self._begin)
        part.register_forward_hook(self._end)
        for name, block in part.layers.items():
            moe = block.feed_forward
            if isinstance(moe, MixtureOfExperts):
                self.chosen[name] = []
                route = functools.partial(self._route, moe.route, name)
                moe.route = route  # type: ignore[method-assign]

    def _begin(self, module: nn.Module, args: object) -> None:
        self.in_forward = True

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        self.in_forward = False

    def _route(
        self,
        route: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]],
        name: str,
        x: Tensor,
        padding: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        weights, chosen = route(x, padding)
        if self.in_forward:  # else it is a recomputation, in the backward
            self.chosen[name].append(chosen.sort(dim=-1).values.cpu())
        return weights, chosen

    def take(self) -> dict[str, list[Tensor]]:
        """Returns what was recorded since the last call."""
        chosen = {name: list(forwards) for name, forwards in self.chosen.items()}
        for forwards in self.chosen.values():
            forwards.clear()
        return chosen


def token_places(first_rows: Sequence[int], config: Config, mesh: Mesh) -> list[Tensor]:
    """The tokens that this rank routes in each forward of a step, as places in the global batch.

    Token s of sequence i has the place i S + s. `first_rows`: the first sequence of each local
    batch.
    """
    training = config.training
    parallel = config.parallel
    size = training.local_batch_size
    if mesh["pp"].size() > 1:  # each microbatch is a forward
        size = parallel.pp_microbatch_size
    tp = mesh["tp"]
    positions = local_positions(training.seq_len, mesh["cp"], parallel.cp_method)  # (S/cp,)
    positions = positions.chunk(tp.size())[tp.get_local_rank()]  # (S/cp/tp,)
    places: list[Tensor] = []
    for first_row in first_rows:
        for row in range(first_row, first_row + training.local_batch_size, size):
            rows = torch.arange(row, row + size)
            places.append((rows[:, None] * training.seq_len + positions).flatten())
    return places


class Compared(NamedTuple):
    """The decisions of a rank in one step, beside those of one process."""

    number: int  # one for each token and block
    different: int
    example: str = ""  # one that is different


def compare_decisions(
    parts: Sequence[Decisions],
    places: list[Tensor],
    expected: dict[str, tuple[Tensor, Tensor]],
    batch: Batch,
) -> Compared:
    """Compares a step's choices with `expected`: by block, those of all tokens (T, k) with their
    margins (T,). `batch`: the global batch, whose padding has no choices.
    """
    seq_len = batch.tokens.shape[1]
    is_token = torch.ones_like(batch.tokens, dtype=torch.bool).flatten()
    if batch.padding is not None:
        is_token = ~batch.padding.flatten()
    numbers = is_token.cumsum(dim=0) - 1  # the token at each place
    number = 0
    different = 0
    example = ""
    for part in parts:
        for name, forwards in part.take().items():
            experts, margins = expected[name]
            all_places = torch.cat(places)
            of_tokens = is_token[all_places]
            chosen = torch.cat(forwards)[of_tokens]
            real_places = all_places[of_tokens]
            tokens = numbers[real_places]
            others = (chosen != experts[tokens]).any(dim=1)
            number += len(tokens)
            different += int(others.sum())
            if different and not example:
                i = int(others.nonzero()[0])
                place = int(real_places[i])
                token = int(tokens[i])
                example = (
                    f"layers.{name}: token {place % seq_len} of sequence {place // seq_len} chose "
                    f"experts {chosen[i].tolist()}; in one process {experts[token].tolist()}, with "
                    f"a margin of {margins[token]:.0e} of the largest logit"
                )
    return Compared(number, different, example)
