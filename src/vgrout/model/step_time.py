"""How long a training step takes on a GPU: an estimate from the model's shapes. Torch-free.

A step is sampling, the update, and grading what was sampled. Sampling is bound by memory: each token
of a row reads the weights, and the row's keys and values. The update is bound by arithmetic. How near
they come to a card's data sheet was measured on one kind of card, with one model; see the rates
below. On other cards these rates are assumed, and nothing was measured.
"""

from dataclasses import dataclass

from vgrout.model.flops import Lengths, decode_bytes, forward_flops, update_flops
from vgrout.model.shapes import BF16, Shapes


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, by its maker's data sheet."""

    name: str
    gigabytes: int  # of memory, 10⁹ bytes
    bandwidth: float  # of the memory, bytes / s
    products: float  # of dense matrices in bf16, summed in fp32: FLOP / s

    def __str__(self) -> str:
        return f"{self.name}, {self.gigabytes} GB"


# By the names that nvidia-smi gives; one kind of card has variants of different rates. Figures of the
# makers' data sheets, without sparsity.
BY_CLIENT_NAME = {
    "NVIDIA GeForce RTX 3090": Card("RTX 3090", 24, 0.936e12, 71e12),
    "NVIDIA GeForce RTX 4090": Card("RTX 4090", 24, 1.008e12, 165e12),
    "NVIDIA RTX A6000": Card("RTX A6000", 48, 0.768e12, 155e12),
    "NVIDIA L40S": Card("L40S", 48, 0.864e12, 362e12),
    "NVIDIA A100-SXM4-40GB": Card("A100 SXM", 40, 1.555e12, 312e12),
    "NVIDIA A100 80GB PCIe": Card("A100 PCIe", 80, 1.935e12, 312e12),
    "NVIDIA A100-SXM4-80GB": Card("A100 SXM", 80, 2.039e12, 312e12),
    "NVIDIA H100 PCIe": Card("H100 PCIe", 80, 2.0e12, 756e12),
    "NVIDIA H100 80GB HBM3": Card("H100 SXM", 80, 3.35e12, 989e12),
    "NVIDIA H200": Card("H200", 141, 4.8e12, 989e12),
}
# One card of each size, which a plan names wherever it is made.
COMPARED = tuple(
    BY_CLIENT_NAME[name]
    for name in ("NVIDIA GeForce RTX 4090", "NVIDIA L40S", "NVIDIA H100 80GB HBM3")
)

# ── the rates. All were measured on an H200 with Qwen3-4B's shapes, random weights, bf16 and torch
# 2.11, in November 2026; every figure is in notes/benchmarks.md, under gpu.

MEASURED_ON = "an H200 (November 2026)"

# Share of the data sheet's bandwidth while sampling with CUDA graphs: `python -m benchmarks gpu`. It
# came to 0.34 and 0.36 in two hosts and to 0.31 in a third process, with 32 rows; to 0.30 with 258
# rows (`train full`). The note says 41 %: that is of the 4.1 TB/s at which copies were timed there.
OF_BANDWIDTH = 0.33
# Share of the data sheet's bf16 products in an update, its forward passes as wide as the card
# holds: 0.27 for `none` and for `route2`. With forward passes of 4,096 tokens it was 0.27 and 0.28 in
# one host, and 0.17 to 0.19 in a slower one, whose calls the card had to wait for.
OF_PRODUCTS = 0.27
# Seconds of one worker for an answer: `python -m benchmarks grading`, real programs, one core of an
# AMD EPYC. Answers are graded beside sampling, but of those that all end last none can be before.
GRADING = 1 / 75

# Weights to which the rates apply: a quarter of the measured model's to four times as many. The
# kernels of smaller ones are too short for the host, and so bound by its calls.
FEWEST_WEIGHTS, MOST_WEIGHTS = 1e9, 16e9
# Tokens of an update to which they apply: those of the narrowest forward pass that was measured.
FEWEST_TOKENS = 4_096


@dataclass(frozen=True, slots=True)
class Load:
    """What a step samples and learns from; every answer is as long as it may be."""

    prompts: int
    group: int  # answers to a prompt
    prompt: int  # tokens of a prompt
    answer: int  # tokens of an answer
    by_rollout: bool = False  # each answer has a gradient of its own
    updates: int = 1  # on the same answers
    reference: bool = False  # the adapter's zero reads every answer, for the KL

    @property
    def answers(self) -> int:
        """Answers of a step."""
        return self.prompts * self.group

    @property
    def lengths(self) -> list[Lengths]:
        """Tokens of each prompt and of its answers."""
        return [(self.prompt, [self.answer] * self.group)] * self.prompts


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step's parts."""

    sampling: float
    update: float
    grading: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.sampling + self.update + self.grading


def rates_apply(shapes: Shapes, itemsize: int, load: Load) -> bool:
    """Whether model and load are near enough to what was measured."""
    tokens = load.prompts * load.prompt + load.answers * load.answer
    return (
        itemsize == BF16
        and FEWEST_WEIGHTS <= shapes.parameters <= MOST_WEIGHTS
        and tokens >= FEWEST_TOKENS
    )


def sampling_seconds(card: Card, shapes: Shapes, load: Load, rows: int) -> float:
    """Seconds in which all answers are sampled, each prompt read once.

    rows: answers that the card's memory holds at once; the others have to wait for a turn.
    """
    context = load.prompt + load.answer // 2
    full_turns, rest = divmod(load.answers, max(1, rows))
    of_a_token = full_turns * decode_bytes(shapes, BF16, max(1, rows), context)
    if rest:
        of_a_token += decode_bytes(shapes, BF16, rest, context)
    decoding = load.answer * of_a_token / (card.bandwidth * OF_BANDWIDTH)
    prompts = [(load.prompt, [1])] * load.prompts
    reading = forward_flops(shapes, prompts, share=True) / (card.products * OF_PRODUCTS)
    return decoding + reading


def update_seconds(card: Card, shapes: Shapes, load: Load) -> float:
    """Seconds of the forward and backward passes of a step."""
    flops = load.updates * update_flops(shapes, load.lengths, share=not load.by_rollout)
    if load.reference:
        flops += forward_flops(shapes, load.lengths, share=True)
    return flops / (card.products * OF_PRODUCTS)


def grading_seconds(answers: int, workers: int) -> float:
    """Seconds in which answers are graded in the sandbox.

    workers: of the grader; 0: nothing is graded there, and it takes no time.
    """
    return answers * GRADING / workers if workers else 0.0


def step_time(card: Card, shapes: Shapes, load: Load, *, rows: int, workers: int = 0) -> StepTime:
    """Seconds of a step. rows: as in `sampling_seconds`. workers: as in `grading_seconds`."""
    return StepTime(
        sampling=sampling_seconds(card, shapes, load, rows),
        update=update_seconds(card, shapes, load),
        grading=grading_seconds(load.answers, workers),
    )
