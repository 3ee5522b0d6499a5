"""Computes names, shapes and counts of what a rank of a layout holds and computes.

What it is: the parameters of each pipeline stage as FSDP's units, cut over tp, and the sizes of the
tensors between them. `estimate*.py` make memory, traffic and products of these numbers. Imports no
torch.
Why it is here: `parallel/` gives the same facts to torch; here they are arithmetic. The rank is the
first of each axis but pp, which holds the most where a size does not divide.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from titanlite.config.schema import Config, ParallelConfig
from titanlite.model.flavors import LlamaConfig, block_shapes
from titanlite.model.flops import is_trained, with_input_gradient
from titanlite.parallel.stage_split import stage_indices, stage_modules
from titanlite.rules.degrees import local_batches, needs_fsdp, num_processes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CUT_BY_COLUMNS = ("wo", "w2")  # over tp; the other matrices are cut by rows


@dataclass(frozen=True)
class Parameter:
    """A parameter after its division by tp."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    replicated: bool  # over tp

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_adapter(self) -> bool:
        return ".lora_" in self.name

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.name

    def part_numel(self, ranks: int) -> int:
        """Elements on the first rank, where FSDP divides dimension 0 over so many."""
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers together."""

    parameters: tuple[Parameter, ...]
    reshard: bool  # freed after the forward
    block: int | None  # the block that it is, or is a part of; None: an end of the model
    axis: str  # dp_shard_cp; of experts that are divided over ep, expert_shard
    shards: int  # ranks of the axis

    @property
    def is_block(self) -> bool:
        return self.block is not None

    @functools.cached_property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @functools.cached_property
    def trained_numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters if parameter.trained)

    def part_numel(self, trained_only: bool = False) -> int:
        """Elements on the first rank of the axis."""
        return sum(
            parameter.part_numel(self.shards)
            for parameter in self.parameters
            if parameter.trained or not trained_only
        )


@dataclass(frozen=True)
class Stage:
    """A part of the model: all of it without a pipeline."""

    index: int
    blocks: tuple[int, ...]  # their numbers
    has_embedding: bool
    has_output: bool
    units: tuple[Unit, ...]  # in forward order

    def parameters_of(self, block: int) -> list[Parameter]:
        """The parameters of a block, of all its units."""
        return [one for unit in self.units if unit.block == block for one in unit.parameters]


@functools.lru_cache(maxsize=64)
def _split(llama: LlamaConfig, num_stages: int, pp_split: str) -> list[list[str]]:
    """The modules of each stage, cached: a search asks for the same ones many times."""
    return stage_modules(llama, num_stages, ParallelConfig(pp_split=pp_split).stage_starts)


@dataclass(frozen=True)
class Layout:
    """A config on a number of ranks."""

    config: Config
    llama: LlamaConfig
    degrees: dict[str, int]
    compiled: bool

    @property
    def frozen(self) -> list[str]:
        """The patterns of `training.frozen`."""
        return self.config.training.frozen_patterns

    @functools.cached_property
    def with_gradients(self) -> set[str]:
        """The names of the parameters whose input has a gradient, as in `flops.py`."""
        return with_input_gradient(self.llama, self.config.lora, self.frozen)

    @property
    def tp(self) -> int:
        return self.degrees["tp"]

    @property
    def cp(self) -> int:
        return self.degrees["cp"]

    @property
    def pp(self) -> int:
        return self.degrees["pp"]

    @property
    def shards(self) -> int:
        """The ranks that FSDP divides each parameter over."""
        return self.degrees["dp_shard"] * self.cp

    @property
    def ep(self) -> int:
        """The ranks of dp_shard x cp that the experts are divided over."""
        return self.config.parallel.ep

    @property
    def has_fsdp(self) -> bool:
        return needs_fsdp(self.config.parallel, num_processes(self.degrees))

    @property
    def compiles_experts(self) -> bool:
        """Whether compiled blocks contain their experts (`parallel/compile.py`), by torch 2.13."""
        return self.ep == 1 and self.compute_dtype == "bfloat16"

    @property
    def compute_dtype(self) -> str:
        dtype = self.config.training.compute_dtype
        return "bfloat16" if dtype == "auto" else dtype

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.compute_dtype]

    @property
    def reduce_bytes(self) -> int:
        return DTYPE_BYTES[self.config.training.reduce_dtype]

    @property
    def param_bytes(self) -> int:
        return DTYPE_BYTES[self.config.training.param_dtype]

    @property
    def local_batches(self) -> int:
        """Local batches of a rank in a step."""
        return local_batches(self.config.training, self.degrees)

    @property
    def sequences(self) -> int:
        """Sequences of one forward: a local batch, or in a pipeline a microbatch."""
        if self.pp > 1:
            return self.config.parallel.pp_microbatch_size
        return self.config.training.local_batch_size

    @property
    def microbatches(self) -> int:
        """Forwards of a local batch."""
        return self.config.training.local_batch_size // self.sequences

    @property
    def tokens(self) -> int:
        """Tokens of one forward on this rank, after the division by cp."""
        return self.sequences * self.config.training.seq_len // self.cp

    def stages_of(self, pp_rank: int) -> list[Stage]:
        """The stages of a rank, in the order of the model."""
        parallel = self.config.parallel
        if self.pp == 1:
            names = ["tok_embeddings", *self._layer_names(), "norm", "output"]
            return [self._stage(0, names)]
        per_rank = parallel.stages_per_process
        modules = _split(self.llama, self.pp * per_rank, parallel.pp_split)
        indices = stage_indices(pp_rank, self.pp, per_rank, parallel.pp_schedule)
        return [self._stage(index, modules[index]) for index in indices]

    def _layer_names(self) -> list[str]:
        return [f"layers.{number}" for number in range(self.llama.num_layers)]

    def _stage(self, index: int, modules: list[str]) -> Stage:
        """The stage of these modules, its parameters grouped as `fsdp_units` does."""
        blocks = tuple(int(name.split(".")[1]) for name in modules if name.startswith("layers."))
        vocabulary = (self.llama.vocab_size, self.llama.dim)
        ends = {
            "tok_embeddings": [self._parameter("tok_embeddings.weight", vocabulary)],
            "norm": [self._parameter("norm.weight", (self.llama.dim,))],
            "output": [self._parameter("output.weight", vocabulary)],
        }
        has = {name: name in modules for name in ends}
        first: list[Parameter] = []
        last: list[Parameter] = []
        root: list[Parameter] = []
        if self.llama.tied_embeddings:
            if has["tok_embeddings"] or has["output"]:
                root += ends["tok_embeddings"]
            if has["norm"]:
                root += ends["norm"]
        else:
            first += ends["tok_embeddings"] if has["tok_embeddings"] else []
            for name in ("norm", "output"):
                last += ends[name] if has[name] else []
        groups: list[tuple[int | None, list[Parameter]]] = [(None, first)]
        groups += [(number, self.block_parameters(number)) for number in blocks]
        groups.append((None, last))
        groups = [(block, group) for block, group in groups if group]
        units = []
        for number, (block, group) in enumerate(groups):
            is_last = number == len(groups) - 1
            reshard = self._reshards(at_the_end=is_last, with_output=has["output"])
            units += self._units(group, reshard, block)
        if root:
            reshard = self._reshards(at_the_end=True, with_output=has["output"])
            units += self._units(root, reshard, None)
        return Stage(index, blocks, has["tok_embeddings"], has["output"], tuple(units))

    def _units(self, group: list[Parameter], reshard: bool, block: int | None) -> list[Unit]:
        """The unit of these parameters, and one of their experts if ep divides them."""
        if self.ep == 1 or block is None:
            return [Unit(tuple(group), reshard, block, "dp_shard_cp", self.shards)]
        others = tuple(parameter for parameter in group if not parameter.is_expert)
        experts = tuple(parameter for parameter in group if parameter.is_expert)
        frees = self._reshards(at_the_end=False, with_output=False)
        return [
            Unit(others, reshard, block, "dp_shard_cp", self.shards),
            Unit(experts, frees, block, "expert_shard", self.shards // self.ep),
        ]

    def _reshards(self, at_the_end: bool, with_output: bool) -> bool:
        """Whether a unit is freed after the forward, as `apply_fsdp` chooses."""
        if not self.has_fsdp:
            return False
        if at_the_end and with_output and self.config.loss.num_chunks > 1:
            return False
        mode = self.config.parallel.reshard_after_forward
        if mode == "default":
            return not at_the_end and self.pp == 1
        return mode != "never"

    def block_parameters(self, number: int) -> list[Parameter]:
        """The parameters of a block, with its adapters."""
        parameters = []
        lora = self.config.lora
        for name, shape in block_shapes(self.llama).items():
            full_name = f"layers.{number}.{name}"
            parameters.append(self._parameter(full_name, shape))
            layer = name.split(".")[-2]
            is_adapted = layer in lora.target_names and lora.adapts_layer(number)
            if lora.rank > 0 and len(shape) == 2 and is_adapted:
                parameters += self._adapter(full_name.removesuffix(".weight"), shape)
        return parameters

    def has_backward(self, parameters: Iterable[Parameter]) -> bool:
        """Whether a gradient is computed of any of them or passes through them."""
        return any(
            parameter.trained or parameter.name in self.with_gradients for parameter in parameters
        )

    def _parameter(self, name: str, shape: tuple[int, ...]) -> Parameter:
        layer = name.split(".")[-2]
        is_expert = ".experts." in name
        # A rank of tp routes its own tokens, and computes with whole experts
        replicated = layer.endswith("norm") or layer == "router" or is_expert
        cut = list(shape)
        if is_expert:
            cut[0] //= self.ep
        if not replicated:
            cut[1 if layer in CUT_BY_COLUMNS else 0] //= self.tp
        return Parameter(name, tuple(cut), self._is_trained(name), replicated)

    def _adapter(self, layer: str, shape: tuple[int, ...]) -> list[Parameter]:
        """The two factors of a layer's adapter: one is cut as the layer is, the other is whole."""
        rank = self.config.lora.rank
        rows = shape[0]
        columns = shape[1]
        by_columns = layer.split(".")[-1] in CUT_BY_COLUMNS
        if by_columns:
            columns //= self.tp
        else:
            rows //= self.tp
        a = Parameter(f"{layer}.lora_a.weight", (rank, columns), True, not by_columns)
        b = Parameter(f"{layer}.lora_b.weight", (rows, rank), True, by_columns)
        return [a, b]

    def _is_trained(self, name: str) -> bool:
        return is_trained(name, self.llama, self.config.lora, self.frozen)

    def in_flight(self, pp_rank: int) -> list[int]:
        """Counts for each stage of a rank the most forwards whose backward has not begun.

        1F1B fills the pipeline behind a stage. The interleaved schedules begin with rounds of pp
        microbatches for each stage (`torch.distributed.pipelining`).
        """
        total = self.microbatches
        schedule = self.config.parallel.pp_schedule
        stages = self.config.parallel.stages_per_process
        if self.pp == 1:
            return [1]
        if schedule in ("GPipe", "LoopedBFS"):
            return [total] * stages
        if schedule == "1F1B":
            return [min(total, self.pp - pp_rank)]
        if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
            per_round = max(1, total // max(1, total // self.pp))
            ahead = (stages - 1) * per_round + 2 * (self.pp - 1 - pp_rank) + 1
            counts = [0] * stages
            for forward in range(min(stages * total, ahead)):
                counts[(forward // per_round) % stages] += 1
            return counts
        first = min(total, 2 * self.pp - 1 - pp_rank)  # a V: down the ranks and up again
        return [first, min(total, pp_rank + 1)]
