"""GPU-hours of a study of Qwen3-4B on paper: operations and bytes from shapes, over a data sheet's peaks times assumed
shares of them. notes/cost.md holds what this prints, and says where every assumption comes from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from tabulate import tabulate

from benchmarks.flops import (
    Lengths,
    Shape,
    contraction_flops,
    decode_bytes,
    forward_flops,
    head_flops,
    kv_bytes,
    update_flops,
)
from vgrout.config.presets import PRESETS
from vgrout.model.memory import GIB, KV_BUDGET, TOKEN_BUDGET, plan
from vgrout.model.source import KNOWN, Shapes

Phase = Literal[
    "sampling: prefill", "sampling: decoding", "update", "g_b, U and Vh", "merging", "direction", "evaluation"
]
SEEDS, STEPS = 10, 100
# method → (rows of its gradient are rollouts, it has a quarantine, it extracts a direction, it scores texts)
METHODS: dict[str, tuple[bool, bool, bool, bool]] = {
    "none": (False, False, False, False),
    "none · no_loophole": (False, False, False, False),
    "erase": (False, False, True, False),
    "route": (False, True, True, False),
    "route2": (True, True, True, False),
    **dict.fromkeys(
        (f"screen by {name}" for name in ("pmi", "nll", "probe", "relevance")), (False, False, False, True)
    ),
}
QWEN = KNOWN["Qwen/Qwen3-4B"]


@dataclass(frozen=True)
class Device:
    """A data sheet's peaks: FLOP/s of dense bf16 and of fp32 outside tensor cores, bytes/s of memory, its size."""

    name: str
    bf16: float
    fp32: float
    bandwidth: float
    memory: float


DEVICES = (
    Device("H100 SXM", 989e12, 67e12, 3.35e12, 80e9),
    Device("H200 SXM", 989e12, 67e12, 4.8e12, 141e9),
    Device("A100 SXM 80 GB", 312e12, 19.5e12, 2.039e12, 80e9),
)


@dataclass(frozen=True)
class Assumed:
    """What shapes do not give. Every field has a line in notes/cost.md."""

    products: float = 0.40  # of peak bf16, in forward and backward
    fp32_products: float = 0.60  # of peak fp32, in merging
    bandwidth: float = 0.60  # of peak, in decoding
    prompt: int = 500  # tokens
    answer: float = 0.5  # mean length of an answer, over --max-new
    longest: float = 1.0  # of the longest answer of a batch, which ends its decoding, over --max-new
    signal: float = 0.5  # share of groups whose rewards differ
    pairs: int = 24  # of a direction, in two completions each
    pair_answer: int = 150  # tokens
    load_s: float = 120.0  # a run's start: weights, SVD factors from disk, their check
    # levers, all of them pulled
    share_prefill: bool = True
    share_update: bool = True  # for methods that need no more than sums
    share_rollouts: bool = False  # a shared prompt for every rollout's own gradient too: not there yet
    skip_dead: bool = True  # groups without signal
    one_batch: bool = True  # all prompts sampled together
    keep_logp: bool = True  # log π_old is the update's own forward
    merged: bool = True  # W' once a step, against a hook in every forward
    extract_every: int = 5  # steps between extractions of the direction


def shape(s: Shapes, itemsize: int = 2) -> Shape:
    """The same decoder, as benchmarks.flops has it."""
    return Shape(s.layers, s.hidden, s.mlp, s.heads, s.kv_heads, s.head_dim, s.vocab, itemsize)


def contractions(s: Shapes, tokens: int, parts: int) -> float:
    """Those of all Linears, without ∂L/∂yᵀ x, which `update_flops` counts."""
    of = (contraction_flops(a, b, min(a, b), tokens, parts) - 2 * tokens * a * b for a, b in s.linears.values())
    return float(s.layers * sum(of))


def merge_flops(s: Shapes) -> float:
    """U diag(δ) Vh, all modules."""
    return s.layers * sum(2.0 * a * b * min(a, b) for a, b in s.linears.values())


def decode_seconds(s: Shape, rows: int, new: int, device: Device, use: Assumed) -> float:
    """Seconds to sample `rows` answers, in as many turns as their keys and values need: every decoding step reads every
    weight once, and every row's keys and values, half of its answer on average."""
    turns = ceil(rows * (use.prompt + new) * kv_bytes(s) / KV_BUDGET["cuda"])
    context = round(use.prompt + use.answer * new / 2)
    read = decode_bytes(s, ceil(rows / turns), context)
    return turns * use.longest * new * read / (device.bandwidth * use.bandwidth)


def step_seconds(preset: str, method: str, device: Device, use: Assumed, ranks: int = 1) -> Mapping[Phase, float]:
    """A training step's seconds by phase, on each of `ranks` devices that share out the prompts."""
    cfg, s = PRESETS[preset][1], shape(QWEN)
    by_rollout, quarantine, direction, reads = METHODS[method]
    rate = device.bf16 * use.products
    new, answer = cfg.scale.max_new, round(use.answer * cfg.scale.max_new)
    prompts = ceil(cfg.scale.prompts_per_step / ranks)
    on = ceil(ranks / cfg.scale.prompts_per_step)  # so many ranks have a group's rows among them
    live, group = ceil((cfg.scale.group - cfg.n_teacher) / on), ceil(cfg.scale.group / on)
    batches = 1 if use.one_batch else prompts
    decoding = batches * decode_seconds(s, prompts * live // batches, new, device, use)
    prefill: list[Lengths] = [(use.prompt, [1] * live)] * prompts
    if not use.merged:  # x goes through U diag(δ) Vh too, in every forward
        decoding *= 1 + QWEN.factors / s.linears
    # update: a group without signal has no forward
    groups: list[Lengths] = [(use.prompt, [answer] * group)] * max(
        1, round(prompts * (use.signal if use.skip_dead else 1))
    )
    share = use.share_rollouts if by_rollout else use.share_update
    tokens = sum((1 if share else group) * p + sum(c) for p, c in groups)
    forward = forward_flops(s, groups, share) + head_flops(s, groups)
    update = update_flops(s, groups, share)
    update += forward * ((not use.keep_logp) + (cfg.loss.beta > 0) + reads)
    if not use.merged:
        update += 6 * QWEN.factors * tokens
    parts = len(groups) * group if by_rollout else 2 * ceil(tokens / TOKEN_BUDGET["cuda"])
    sets = 2 if quarantine else 1
    pairs: list[Lengths] = [(use.prompt, [use.pair_answer] * 2)] * use.pairs
    pair_tokens = 2 * use.pairs * (use.prompt + use.pair_answer)
    extraction = update_flops(s, pairs, share=False) + contractions(QWEN, pair_tokens, 2 * use.pairs)
    held = decode_seconds(s, ceil(cfg.eval.eval_n_prompts / ranks), new, device, use)
    return {
        "sampling: prefill": forward_flops(s, prefill, use.share_prefill) / rate,
        "sampling: decoding": decoding,
        "update": update / rate,
        "g_b, U and Vh": contractions(QWEN, tokens, parts) / rate,
        "merging": sets * merge_flops(QWEN) / (device.fp32 * use.fp32_products) if use.merged else 0.0,
        "direction": extraction / rate / ranks / use.extract_every if direction else 0.0,
        "evaluation": held / cfg.eval.eval_ablate_every,
    }


def final_seconds(preset: str, device: Device, use: Assumed) -> float:
    """The final evaluation: four sides, some samples of every prompt."""
    cfg, s = PRESETS[preset][1], shape(QWEN)
    return 4 * decode_seconds(s, cfg.eval.final_n_prompts * cfg.eval.final_samples, cfg.scale.max_new, device, use)


def run_hours(preset: str, method: str, device: Device, use: Assumed, ranks: int = 1) -> float:
    """GPU-hours of a run of STEPS steps."""
    step = sum(step_seconds(preset, method, device, use, ranks).values())
    return ranks * (use.load_s + STEPS * step + final_seconds(preset, device, use) / ranks) / 3600


def study_hours(preset: str, device: Device, use: Assumed, ranks: int = 1) -> float:
    """GPU-hours of every method on every seed."""
    return SEEDS * sum(run_hours(preset, method, device, use, ranks) for method in METHODS)


LEVERS: dict[str, dict[str, object]] = {
    "decoding at 25 % of the bandwidth (a call a layer, no CUDA graph)": {"bandwidth": 0.25},
    "one prompt sampled at a time": {"one_batch": False},
    "a copy of the prompt for every sample": {"share_prefill": False},
    "groups without signal not skipped": {"skip_dead": False},
    "a copy of the prompt for every rollout in the update": {"share_update": False},
    "a second forward for log π_old": {"keep_logp": False},
    "the adapter as a hook in every forward": {"merged": False},
    "the direction extracted in every step": {"extract_every": 1},
}
TO_COME: dict[str, dict[str, object]] = {
    "prompt shared for every rollout's own gradient (route2)": {"share_rollouts": True},
    "update at 55 % of the peak": {"products": 0.55},
    "decoding at 80 % of the bandwidth": {"bandwidth": 0.80},
    "the longest answer ends at 80 % of --max-new": {"longest": 0.80},
}


def _table(rows: list[list[str]], head: list[str]) -> str:
    return tabulate(rows, headers=head, tablefmt="github", disable_numparse=True)


def hours_table() -> str:
    """The study on each device."""
    rows = []
    for preset in ("fast", "full"):
        for device in DEVICES:
            one = {name: run_hours(preset, name, device, Assumed()) for name in ("none", "route2")}
            study = study_hours(preset, device, Assumed())
            rows.append([preset, device.name, f"{one['none']:.2f}", f"{one['route2']:.2f}", f"{study:.0f}"])
    return _table(
        rows, ["preset", "device", "a run of none [h]", "of route2 [h]", f"{SEEDS} seeds × {len(METHODS)} arms [GPU h]"]
    )


def shares_table() -> str:
    """Where a step's time goes, on the first device."""
    columns = [(p, a) for p in ("fast", "full") for a in ("none", "route2", "screen by pmi")]
    by = [step_seconds(p, a, DEVICES[0], Assumed()) for p, a in columns]
    rows = [[phase, *(f"{x[phase]:.2f} s · {100 * x[phase] / sum(x.values()):.0f} %" for x in by)] for phase in by[0]]
    rows.append(["a step", *(f"{sum(x.values()):.2f} s" for x in by)])
    return _table(rows, ["phase", *(f"{p}, {a}" for p, a in columns)])


def levers_table() -> str:
    """The study without a lever, and with those that are still to come, on the first device."""
    rows = []
    for title, levers in ("back to: ", LEVERS), ("next: ", TO_COME):
        for name, fields in levers.items():
            row = [title + name]
            for preset in ("fast", "full"):
                before = study_hours(preset, DEVICES[0], Assumed())
                after = study_hours(preset, DEVICES[0], replace(Assumed(), **fields))
                row.append(f"{after:.0f} ({100 * (after / before - 1):+.0f} %)")
            rows.append(row)
    return _table(rows, ["the study", "fast [GPU h]", "full [GPU h]"])


def ranks_table() -> str:
    """One run on several devices: seconds a step, and what the study's GPU-hours become."""
    rows = []
    for preset in ("fast", "full"):
        one = sum(step_seconds(preset, "route2", DEVICES[0], Assumed()).values())
        for n in (1, 2, 4, 8):
            step = sum(step_seconds(preset, "route2", DEVICES[0], Assumed(), n).values())
            hours = study_hours(preset, DEVICES[0], Assumed(), n)
            rows.append([preset, str(n), f"{step:.2f}", f"{one / step:.1f} ×", f"{hours:.0f}"])
    return _table(rows, ["preset", "ranks", "a step of route2 [s]", "faster", "the study [GPU h]"])


MODELS = {
    "Qwen3-4B": QWEN,
    "Qwen3-8B": Shapes(36, 4096, 12288, 32, 8, 128, 151_936, tied=False),
    "Qwen3-14B": Shapes(40, 5120, 17408, 40, 8, 128, 151_936, tied=False),
    "Qwen3-32B": Shapes(64, 5120, 25600, 64, 8, 128, 151_936, tied=False),
}


def memory_table() -> str:
    """GiB of a rank that holds all weights, for a method that routes."""
    rows = []
    for name, shapes in MODELS.items():
        for preset, ranks in (("fast", 1), ("full", 1), ("full", 8)):
            scale = PRESETS[preset][1].scale
            prompts = ceil(scale.prompts_per_step / ranks)
            p = plan(
                shapes,
                device="cuda",
                size=2,
                group=scale.group,
                prompts=prompts,
                prompt_tokens=Assumed().prompt,
                max_new=scale.max_new,
                routes=True,
            )
            parts = (p.weights, p.factors, p.merged, p.adapter, p.activations + p.logits, p.kv, p.peak)
            fits = [d.name for d in DEVICES if p.peak < 0.92 * d.memory]
            rows.append([name, preset, str(ranks), *(f"{x / GIB:.1f}" for x in parts), ", ".join(fits) or "none"])
    head = [
        "model",
        "preset",
        "ranks",
        "weights",
        "U, Vh",
        "W' (2)",
        "adapter",
        "update",
        "keys, values",
        "peak",
        "fits",
    ]
    return _table(rows, head)


TABLES = {
    "hours": hours_table,
    "shares": shares_table,
    "levers": levers_table,
    "ranks": ranks_table,
    "memory": memory_table,
}


def filled(page: str) -> str:
    """The page with today's tables, each between <!-- NAME --> and <!-- end -->."""
    for name, table in TABLES.items():
        before, found, rest = page.partition(f"<!-- {name} -->\n")
        assert found, f"no place for the table {name}"
        page = before + found + "\n" + table() + "\n\n" + rest[rest.index("<!-- end -->") :]
    return page
