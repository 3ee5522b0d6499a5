"""The thirteen lessons as data: the subject of each, and what a right answer does.

What it is: for the ten lessons with a gap in a program of `learn/steps/`, the number of processes,
the collectives of an optimizer step by formula, the memory, and the mistakes that are known, each
with the sign by which it is recognised. For the others, the questions are in `problems.py`.
Why it is here: the grader (`check.py`) knows no lesson, and a lesson contains no grader.
The formulas are those of the steps' headers; letters as in `learn/steps/llama.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from titanlite.model.flavors import LlamaConfig, parameter_shapes

if TYPE_CHECKING:
    from titanlite.tools.learn.measure import Measured  # with torch

# Sizes of learn/steps/llama.py and common.py
D = 64
LAYERS = 4
K = 2
DH = 16
V = 272
B = 8
S = 64
LOCAL_B = 2
SHAPES = parameter_shapes(LlamaConfig(D, LAYERS, 4, K, 128, vocab_size=V))
SIZES = [prod(shape) for shape in SHAPES.values()]
N = sum(SIZES)
NORMS = sum(prod(shape) for shape in SHAPES.values() if len(shape) == 1)
# The sizes in learn/steps/10_experts.py
EXPERTS = 4
TOP = 2
N_EXPERTS = LAYERS * EXPERTS * 3 * 64 * D
MIXTURE = LlamaConfig(D, LAYERS, 4, K, 128, vocab_size=V, num_experts=EXPERTS, expert_ffn_dim=64)
SIZES_BESIDE_EXPERTS = [
    prod(shape) for name, shape in parameter_shapes(MIXTURE).items() if ".experts." not in name
]
N_BESIDE = sum(SIZES_BESIDE_EXPERTS)
# Rows that a rank computes for all ranks in steps 1 and 2, measured with the program
ROWS_COMPUTED = (3654, 4538)
UNITS = LAYERS + 2  # of FSDP: embedding, blocks, norm with output
BUCKET_BYTES = 256 * 1024
TOLERANCE = 1e-5  # relative, of losses; ten times as much of norms
MEMORY_TOLERANCE = 1.1  # torch's versions keep more or less for the backward


class Count(NamedTuple):
    """Collectives of one kind: how many, and the bytes of their whole tensors."""

    calls: int
    bytes: int

    def times(self, number: int) -> Count:
        return Count(self.calls * number, self.bytes * number)


Counts = dict[str, Count]  # by kind, of one rank


@dataclass(frozen=True)
class Result:
    """The figures of a run and the expected ones."""

    ranks: Sequence[Measured]
    losses: Sequence[float]  # expected, as the norms
    norms: Sequence[float]
    lesson: Lesson

    @property
    def first_off(self) -> int:
        """The first step whose loss is not the expected one; 0 if all are."""
        pairs = zip(self.ranks[0].losses, self.losses, strict=False)
        off = (step for step, (loss, right) in enumerate(pairs, 1) if not _equal(loss, right))
        return next(off, 0)

    @property
    def loss_ratio(self) -> float:
        """The first loss divided by the expected one."""
        return self.ranks[0].losses[0] / self.losses[0]

    @property
    def norm_ratio(self) -> float:
        """The first gradient norm divided by the expected one; 1 where the program notes none."""
        norms = self.ranks[0].norms
        return norms[0] / self.norms[0] if norms else 1.0

    @property
    def peak_ratio(self) -> float:
        """The peak memory of the fullest rank, divided by that of a right answer."""
        return max(measured.peak for measured in self.ranks) / self.lesson.peak

    def calls(self, kind: str) -> float:
        """The calls of rank 0, divided by the expected number, or by 1 if none was expected."""
        expected = self.lesson.expected(0)
        own = self.ranks[0].calls.get(kind, 0)
        return own / expected[kind].calls if kind in expected else float(own)

    @property
    def too_much_held(self) -> int:
        """Bytes of rank 0 between two steps, beyond those of a right answer."""
        return self.ranks[0].held - self.lesson.held(0)


def _equal(value: float, expected: float) -> bool:
    return abs(value - expected) <= TOLERANCE * abs(expected)  # False for NaN


@dataclass(frozen=True)
class Mistake:
    """A known mistake: the sign by which it is recognised, and a hint."""

    name: str
    sign: Callable[[Result], bool]
    hint: str


@dataclass(frozen=True)
class Lesson:
    """A lesson. `step` is the program with the gap; it is empty for a lesson of questions."""

    name: str
    title: str
    step: str = ""
    needs: tuple[str, ...] = ()  # earlier programs that it imports
    processes: int = 1
    expected: Callable[[int], Counts] = lambda rank: {}  # rank -> collectives while recording
    held: Callable[[int], int] = lambda rank: 0  # rank -> bytes between two steps
    peak: int = 0  # bytes of the fullest rank, measured with the program of learn/steps
    recorded: tuple[int, ...] = (1, 2)  # steps
    losses: str = "losses.txt"  # in learn/steps, of one process
    mistakes: tuple[Mistake, ...] = ()


def num_buckets(sizes: Sequence[int] = SIZES) -> int:
    """The number of buckets into which `2_ddp.py` divides parameters of these sizes."""
    buckets = 1
    held = 0
    for size in reversed(sizes):
        if held and held + 4 * size > BUCKET_BYTES:
            buckets += 1
            held = 0
        held += 4 * size
    return buckets


def two_steps(counts: Counts) -> Counts:
    """The counts of the two steps that are recorded."""
    return {kind: count.times(2) for kind, count in counts.items()}


def of_tp(sequences: int) -> Counts:
    """The collectives of tensor parallel over activations, in forward and backward."""
    times = 2 * (2 * LAYERS + 1)
    along_tokens = Count(times, times * 4 * sequences * S * D)
    of_loss = 4 * sequences * S * 3  # the largest logit, and two sums
    of_norms = 4 * D * (2 * LAYERS + 1)
    return {
        "all_gather": along_tokens,
        "reduce_scatter": along_tokens,
        "all_reduce": Count(2 + 2 * LAYERS + 1, of_loss + of_norms),
    }


def of_fsdp(numbers: int) -> Counts:
    """The collectives of FSDP over so many elements, with one all-reduce for norm and loss."""
    return {
        "all_gather": Count(2 * UNITS, 2 * 4 * numbers),
        "reduce_scatter": Count(UNITS, 4 * numbers),
        "all_reduce": Count(1, 8),
    }


def expected_fsdp_tp(rank: int) -> Counts:
    """The collectives of tp 2 with dp 2: FSDP divides what tensor parallel has left."""
    counts = {}
    fsdp = of_fsdp((N - NORMS) // 2 + NORMS)
    for kind, count in of_tp(B // 2).items():
        counts[kind] = Count(count.calls + fsdp[kind].calls, count.bytes + fsdp[kind].bytes)
    # The norm and the loss are not in one all-reduce, since they are sums over different ranks
    gathered = counts["all_reduce"]
    counts["all_reduce"] = Count(gathered.calls + 1, gathered.bytes)
    return two_steps(counts)


def expected_ring(rank: int) -> Counts:
    """The collectives of 2 ranks: a forward has 1 message, a backward 2 that are twice as large."""
    block = 4 * B * K * (S // 2) * DH
    messages = Count(LAYERS * 3, LAYERS * (2 * block + 2 * 4 * block))
    return two_steps(
        {"send": messages, "recv": messages, "all_reduce": Count(num_buckets() + 1, 4 * N + 4)}
    )


def expected_checkpoint(rank: int) -> Counts:
    """Collectives of steps 1, 2 and 10 on 4 ranks, of step 11 on 2, and for the folder's name."""
    steps = 4 if rank < 2 else 3
    return {kind: count.times(steps) for kind, count in of_fsdp(N).items()}


def expected_experts(rank: int) -> Counts:
    """The collectives of 2 ranks with half of the sequences each.

    An all-to-all has the bytes of the rows that leave: in the forward those that the rank has
    routed, then those that it has computed; the backward is the same.
    """
    routed = 2 * LAYERS * TOP * B * S // 2
    of_rows = 2 * (routed + ROWS_COMPUTED[rank]) * 4 * D
    of_counts = 2 * LAYERS * EXPERTS * 8
    reduced = Count(num_buckets(SIZES_BESIDE_EXPERTS) + 1, 4 * N_BESIDE + 8)
    return {
        "all_to_all": Count(2 * LAYERS * 5, of_rows + of_counts),
        "all_reduce": reduced.times(2),
    }


def held_pipeline(rank: int) -> int:
    """Bytes of two blocks and an end, and on rank 0 or 1 of what it has sent in the step."""
    blocks = (N - 2 * V * D - D) // 2
    own = blocks + V * D + (D if rank == 1 else 0)
    return 12 * own + 4 * B * S * D


LESSONS = (
    Lesson(
        "loop",
        "One process: local batches, clipping, AdamW",
        step="1_loop",
        held=lambda rank: 12 * N,  # parameters and moments
        peak=5_858_888,
        mistakes=(
            Mistake(
                "mean",
                lambda result: abs(result.loss_ratio * LOCAL_B / B - 1) < 0.01,
                "The loss of step 1 is 4 times the right one, and there are 4 local batches: a "
                "mean was taken of each, and the means were added. Sum, and divide by TARGETS.",
            ),
            Mistake(
                "not_divided",
                lambda result: abs(result.loss_ratio / (B * S) - 1) < 0.01,
                "The loss of step 1 is 512 times the right one: it is a sum over the labels of the "
                "step. Divide by TARGETS.",
            ),
            Mistake(
                "update_per_local_batch",
                lambda result: result.first_off == 1 and abs(result.loss_ratio - 1) < 0.1,
                "The loss of step 1 is wrong although nothing was trained before it: the update "
                "comes after the last local batch, not after each.",
            ),
            Mistake(
                "gradients_kept",
                lambda result: result.too_much_held >= 3 * N,
                "4 bytes per parameter too many live between two steps, and the losses are wrong "
                "from step 3 on: the gradients of a step are added to those of the step before.",
            ),
            Mistake(
                "rate_from_zero",
                lambda result: result.first_off == 2,
                "Step 1 is right and the loss of step 2 is not, so the first update is wrong. "
                "Steps count from 1: with learning_rate(0) it would change nothing.",
            ),
        ),
    ),
    Lesson(
        "ddp",
        "Data parallel: gradients summed in buckets",
        step="2_ddp",
        processes=2,
        expected=lambda rank: two_steps({"all_reduce": Count(num_buckets() + 1, 4 * N + 4)}),
        held=lambda rank: 16 * N,
        peak=5_719_788,
        mistakes=(
            Mistake(
                "averaged",
                lambda result: abs(result.norm_ratio * 2 - 1) < 1e-3,
                "The gradient norm is half of the right one: the gradients were averaged over the "
                "2 ranks. Each loss is divided by the labels of all ranks already, so sum.",
            ),
            Mistake(
                "one_call_per_parameter",
                lambda result: result.calls("all_reduce") > 2,
                "Many more all-reduces than buckets, of the same bytes: each call has a latency, "
                "so communicate a bucket when its last gradient is complete.",
            ),
            Mistake(
                "before_the_last_batch",
                lambda result: result.first_off == 2 and result.calls("all_reduce") == 1,
                "The number of all-reduces is right and the gradients are not. Either a bucket was "
                "summed before the last local batch had added to it: look at `last_batch`. Or it "
                "was used before its all-reduce had ended: `finish_step` has to wait.",
            ),
        ),
    ),
    Lesson(
        "zero1",
        "ZeRO-1: each rank updates a part",
        step="3_zero1",
        processes=2,
        expected=lambda rank: two_steps(
            {
                "reduce_scatter": Count(1, 4 * N),
                "all_gather": Count(1, 4 * N),
                "all_reduce": Count(2, 8),
            }
        ),
        held=lambda rank: 8 * N + (8 * N + 4 * N) // 2,
        peak=5_353_940,
        mistakes=(
            Mistake(
                "whole_moments",
                lambda result: result.calls("reduce_scatter") == 0,
                "No reduce-scatter: every rank receives all gradients, although it updates a part. "
                "An all-reduce of 4 N bytes sends twice as much as a reduce-scatter.",
            ),
            Mistake(
                "norm_of_the_part",
                lambda result: result.norm_ratio < 0.99 and result.calls("all_reduce") < 1,
                "The gradient norm is too small, and an all-reduce is missing: a rank has the "
                "squares of its part only. Sum the squares over the ranks, then take the root.",
            ),
            Mistake(
                "not_gathered",
                lambda result: result.calls("all_gather") == 0,
                "No all-gather: each rank has updated its own part only, and goes on with old "
                "values of the others' parts.",
            ),
        ),
    ),
    Lesson(
        "fsdp",
        "FSDP: gather, free, reduce-scatter",
        step="4_fsdp",
        processes=2,
        expected=lambda rank: two_steps(of_fsdp(N)),
        held=lambda rank: 12 * N // 2,
        peak=6_648_432,
        mistakes=(
            Mistake(
                "all_reduce",
                lambda result: result.calls("reduce_scatter") == 0,
                "No reduce-scatter: an all-reduce sends twice as much, and leaves each rank rows "
                "of gradients that it does not update.",
            ),
            Mistake(
                "never_freed",
                lambda result: result.too_much_held >= 3 * N and result.first_off == 0,
                "The losses are right, but the whole parameters live between the steps: 4 N bytes. "
                "`free` has to give their memory back.",
            ),
            Mistake(
                "gradients_kept",
                lambda result: result.too_much_held >= 3 * N and result.first_off > 0,
                "The gradients of the whole parameters live between the steps, and the next "
                "backward adds to them: set them to None after the reduce-scatter.",
            ),
        ),
    ),
    Lesson(
        "tensor_parallel",
        "Tensor and sequence parallel, and a loss over divided logits",
        step="5_tensor_parallel",
        needs=("tokens",),
        processes=2,
        expected=lambda rank: two_steps(
            {
                **of_tp(B),
                "all_reduce": Count(
                    of_tp(B)["all_reduce"].calls + 1, of_tp(B)["all_reduce"].bytes + 4
                ),
            }
        ),
        held=lambda rank: 12 * ((N - NORMS) // 2 + NORMS) + 4 * B * S * V // 2,
        peak=7_533_548,
        mistakes=(
            Mistake(
                "gradient_not_summed",
                lambda result: result.calls("reduce_scatter") < 0.9,
                "Reduce-scatters are missing, those of the backward before a divided layer. Every "
                "rank has used all tokens, so a token's gradient is the sum over the ranks.",
            ),
            Mistake(
                "own_maximum",
                lambda result: result.first_off == 1 and result.calls("all_reduce") < 1,
                "An all-reduce of the loss is missing, and the loss is wrong: exponents of ranks "
                "that have subtracted different numbers can't be added. Agree on the largest.",
            ),
            Mistake(
                "logits_gathered",
                lambda result: result.calls("all_gather") > 1,
                "More all-gathers than layers need: the logits were gathered, 4 B S V bytes, the "
                "largest tensor of the model. Sums over the vocabulary are enough.",
            ),
        ),
    ),
    Lesson(
        "fsdp_tp",
        "FSDP x tensor parallel: a mesh and its norm",
        step="6_fsdp_tp",
        needs=("tokens", "4_fsdp", "5_tensor_parallel"),
        processes=4,
        expected=expected_fsdp_tp,
        held=lambda rank: 12 * ((N - NORMS) // 4 + NORMS // 2) + 4 * (B // 2) * S * V // 2,
        peak=3_785_324,
        mistakes=(
            Mistake(
                "norms_counted_twice",
                lambda result: 1 + 1e-5 < result.norm_ratio < 1.1,
                "The gradient norm is too large: the weights of norms are on both ranks along tp, "
                "and their squares were added twice. Divide by the number of ranks that hold them.",
            ),
            Mistake(
                "norm_over_one_axis",
                lambda result: 0.4 < result.norm_ratio < 1 - 1e-5,
                "The gradient norm is too small: the ranks of one axis have been summed. The "
                "matrices are divided over both axes, so sum over all ranks.",
            ),
        ),
    ),
    Lesson(
        "pipeline",
        "Pipeline parallel: 1F1B",
        step="7_pipeline",
        processes=2,
        expected=lambda rank: two_steps(
            {
                "send": Count(B // LOCAL_B, 4 * B * S * D),
                "recv": Count(B // LOCAL_B, 4 * B * S * D),
                "all_reduce": Count(1, 8),
            }
        ),
        held=held_pipeline,
        peak=4_034_716,
        mistakes=(
            Mistake(
                "all_forwards_first",
                lambda result: result.first_off == 0 and result.peak_ratio > MEMORY_TOLERANCE,
                "The losses are right, but rank 0 holds the activations of all microbatches: that "
                "is GPipe. A backward is done as soon as its gradient can be there.",
            ),
            Mistake(
                "newest_first",
                lambda result: result.first_off > 1 and result.calls("send") == 1,
                "The messages are right in number and the gradients are wrong: they arrive in the "
                "order of the forwards, so the backward is that of the oldest microbatch.",
            ),
        ),
    ),
    Lesson(
        "ring_attention",
        "Context parallel: ring attention, online softmax",
        step="8_ring_attention",
        needs=("2_ddp",),
        processes=2,
        expected=expected_ring,
        held=lambda rank: 16 * N,
        peak=8_460_520,
        mistakes=(
            Mistake(
                "all_gathered",
                lambda result: result.calls("all_gather") > 0,
                "All keys and values were gathered, so every rank holds S of them instead of S / "
                "n. Pass one block around.",
            ),
            Mistake(
                "gradients_not_home",
                lambda result: result.calls("send") < 1,
                "A turn of the ring is missing: after n turns, not n - 1, the gradients of keys "
                "and values are on the rank that has their tokens.",
            ),
            Mistake(
                "not_scaled_down",
                lambda result: result.first_off > 0 and result.calls("send") == 1,
                "The messages are right in number and the attention is not. Most often: when a "
                "block has a larger score, what was added up before has to be scaled by "
                "exp(old - new), the output and the total. Or the own block is not masked, or the "
                "backward has forgotten a factor: if the norm of step 1 is right, look there.",
            ),
        ),
    ),
    Lesson(
        "checkpoint",
        "A sharded checkpoint that reshards",
        step="9_checkpoint",
        needs=("4_fsdp",),
        processes=4,
        recorded=(1, 2, 10, 11),
        expected=lambda rank: expected_checkpoint(rank) | {"broadcast": Count(2, 0)},
        held=lambda rank: 12 * N // 4,
        peak=6_831_268,
        mistakes=(
            Mistake(
                "own_file_only",
                lambda result: result.first_off == 11,
                "The first loss after the load is wrong: parameters are. With 2 ranks a rank needs "
                "the rows of two files; compute which rows a file has, and which are its own.",
            ),
            Mistake(
                "moments_forgotten",
                lambda result: result.first_off == 12,
                "The first loss after the load is right and the second is not, so the update is "
                "wrong: AdamW's moments and its count of steps belong to the state.",
            ),
        ),
    ),
    Lesson("recompute", "Recomputation: memory for time"),
    Lesson("planning", "Planning: 8B on 8, 70B on 64, 405B on 1,024 GPUs"),
    Lesson("five_axes", "Five axes: 405B on 512 pretended ranks"),
    Lesson(
        "experts",
        "Expert parallel: dispatch and combine",
        step="10_experts",
        needs=("2_ddp",),
        processes=2,
        losses="experts_losses.txt",
        expected=expected_experts,
        held=lambda rank: 16 * N_BESIDE + 12 * N_EXPERTS // 2,
        peak=9_575_856,
        mistakes=(
            Mistake(
                "counted_again",
                lambda result: result.first_off == 0 and result.calls("all_to_all") > 1,
                "The losses are right, and there are more all-to-alls than 5 per block and step. "
                "Counts are exchanged once: on the way back a rank gets what it has sent.",
            ),
            Mistake(
                "not_sent_back",
                lambda result: result.calls("all_to_all") < 1,
                "All-to-alls are missing. Each exchange of rows has one in the backward too: the "
                "gradient of a row goes back to the rank that has sent it, with the sizes swapped.",
            ),
            Mistake(
                "gradient_scaled",
                lambda result: result.first_off > 2 and result.calls("all_to_all") == 1,
                "The losses of steps 1 and 2 are right, so rows and results are where they belong. "
                "Gradients have another size, which AdamW's update hides at first. They travel "
                "back as they are: each loss is divided by the labels of all ranks already.",
            ),
            Mistake(
                "not_restored",
                lambda result: result.first_off > 0 and result.calls("all_to_all") == 1,
                "The all-to-alls are right in number and the losses are not: a row has met the "
                "wrong expert, or a result goes to the wrong token. Rows arrive sorted by "
                "rank; sort them by expert, and bring the results back into that order.",
            ),
        ),
    ),
)
