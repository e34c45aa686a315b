"""What is claimed of a GPU, on one. The update and the sampler at Qwen3-4B's shapes with random weights: model FLOPs
used, tokens / s against the memory's bandwidth, peak memory against the plan, lengths that were not warmed up on, how
often the host waits, CUDA graphs and packed attention against their plain forms, attention's kernels, decomposition.
`mini` on it against the CPU, and killed and resumed."""

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer

from benchmarks import rig
from benchmarks.bounds import (
    Load,
    bandwidth,
    dense_rate,
    sampler,
    sampling_figure,
    timed,
    update_figure,
)
from benchmarks.measure import Figure, page
from vgrout import embedded as organism
from vgrout.config.run import OptConfig
from vgrout.data import Group
from vgrout.errors import Refused
from vgrout.model.load import as_language_model, pick_device
from vgrout.model.logprobs import foreign
from vgrout.model.memory import CONTEXT, GIB, plan
from vgrout.model.policy import Policy
from vgrout.model.source import shapes_of
from vgrout.model.svd_adapter import SvdAdapter, svd
from vgrout.optim import Optimizer
from vgrout.tensor_types import Routed

QWEN3_4B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "head_dim": 128,
}
QWEN3_4B |= {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN3_4B |= {"max_position_embeddings": 40_960, "tie_word_embeddings": True}
FAST = Load(group=8, prompts=4, prompt=700, answer=512)
QUICK = Load(group=4, prompts=1, prompt=256, answer=64)
MINI = [
    "mini",
    "--intervention=none",
    "--dtype=fp32",
    "--steps=4",
    "--checkpoint-every=2",
    "--eval-ablate-every=0",
]
MINI += ["--final-n-prompts=6", "--final-samples=1", "--allow-weak-sandbox"]
# of the host in a step, beside once a token: tests/test_pretended_gpu.py
WAITS = {"sampling": 8, "update": 30}
KERNELS = ("math", "flash", "memory-efficient", "cuDNN", "none")  # in torch's numbering


def orthogonal(W: Float[Tensor, "d_out d_in"]) -> tuple[Tensor, Tensor, Tensor]:
    """Bases in the shapes of W's SVD: work and memory are the same, and 252 decompositions of minutes are spared."""
    r = min(W.shape)
    U, Vh = (torch.linalg.qr(torch.randn(d, r, device=W.device))[0].to(W.dtype) for d in W.shape)
    return U, torch.ones(r, device=W.device), Vh.mT.contiguous()


def random_policy(shape: dict[str, Any], device: str, dtype: torch.dtype) -> Policy:
    """A policy on random weights."""
    model = rig.random_model(device=device, dtype=dtype, **shape)
    model.set_attn_implementation("sdpa")
    tokenizer: Any = AutoTokenizer.from_pretrained(organism.MODEL_DIR)
    lm = as_language_model(model, tokenizer)
    return Policy(**vars(lm), adapter=SvdAdapter(model, None, decompose=orthogonal))


def attempted(what: str, measured: Callable[[], Figure | list[Figure]]) -> list[Figure]:
    """The figures, also as JSON lines on standard error as soon as they are there; of a failure one that says why."""
    try:
        figures = made if isinstance(made := measured(), list) else [made]
    except Exception as e:
        said = " ".join(str(e).split())
        figures = [
            Figure(what, "", f"failed: {type(e).__name__}: {said[-200:]}", "a figure", False)
        ]
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a fault on the GPU ends all that follows
            torch.cuda.empty_cache()
    for figure in figures:
        print(json.dumps(asdict(figure), ensure_ascii=False), file=sys.stderr, flush=True)
    return figures


def measure(policy: Policy, load: Load, rounds: int) -> list[Figure]:
    """Update and sampling of one load; what each claim on them is worth on this device."""
    taken, plain = policy.attention(), replace(policy, graphs=False)
    update = partial(update_figure, policy=policy, load=load, rounds=rounds, goal=0.4)
    sampling = partial(sampling_figure, load=load, rounds=rounds)
    parts: dict[str, Callable[[], Figure | list[Figure]]] = {
        # first: nothing is held yet that a run would not hold
        "peak of a step, route2": lambda: fits_plan(policy, load),
        "update, none": lambda: update(
            f"none, {taken['update']}", share=True, rate=dense_rate(policy)
        ),
        "update, route2": lambda: update(
            f"route2, {taken['update']}", share=False, rate=dense_rate(policy)
        ),
        "sampling": lambda: sampling(taken["decode"], plain, rate=bandwidth(policy.device)),
        "sampling, CUDA graphs": lambda: sampling(
            "CUDA graphs", policy, rate=bandwidth(policy.device)
        ),
        "new lengths": lambda: new_lengths(policy, load, rounds),
    }
    checks = (
        same_logits,
        same_gradients,
        host_waits,
        decomposition,
        kernels,
        nan_under_a_mask,
        plans_of_cudnn,
    )
    parts |= {check.__name__: partial(check, policy, load) for check in checks}
    return [f for what, part in parts.items() for f in attempted(what, part)]


def noise(policy: Policy, load: Load, **other: int) -> list[Group]:
    """Random tokens of the load. other: of its numbers."""
    of = replace(load, **other)
    return rig.noise_groups(
        policy.model.config.vocab_size, of.group, of.prompts, of.prompt, of.answer
    )


def fits_plan(policy: Policy, load: Load) -> Figure:
    """The most that the GPU holds in two steps of route2 on both sets of weights, against the plan."""
    shapes = shapes_of(policy.model.config.to_dict())
    assert shapes is not None
    of: dict[str, Any] = {
        "group": load.group,
        "prompts": load.prompts,
        "prompt_tokens": load.prompt,
        "max_new": load.answer,
    }
    memory = plan(
        shapes, device="cuda", size=policy.model.dtype.itemsize, routes=True, by_rollout=True, **of
    )
    update, draw = rig.update(policy, noise(policy, load), True), sampler(policy, load)
    optim = Optimizer(policy.adapter, OptConfig(), 2)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        draw()
        made = update()
        assert made.g is not None
        optim.step(Routed(made.g.sum(0), made.g.sum(0)), made.metrics)
        with policy.adapter.deployed():
            pass
    peak, planned = torch.cuda.max_memory_allocated(), memory.peak - CONTEXT["cuda"]
    figure, within = (
        f"{peak / planned:.2f} × ({peak / GIB:.2f} GiB)",
        abs(peak / planned - 1) <= 0.1,
    )
    return Figure(
        "peak of a step, route2", f"plan: {planned / GIB:.2f} GiB", figure, "within 10 %", within
    )


def same_logits(policy: Policy, load: Load) -> Figure:
    """Of decoding with CUDA graphs, and without them, on the same tokens; of a row the difference over the norm."""
    groups, rows = noise(policy, load, group=1), load.prompts * load.group
    prompts = [g.rollouts[0].prompt_ids for g in groups]
    tokens = torch.tensor([g.rollouts[0].completion_ids for g in groups], device=policy.device)
    of_prompt, off = [row // load.group for row in range(rows)], list[float]()
    none = foreign(policy.model)
    # others' logits are so low that a norm would be infinite
    own = slice(None) if none is None else ~none
    with torch.no_grad():
        plain, graphs = (replace(policy, graphs=on).decoder() for on in (False, True))
        for decoder in (plain, graphs):
            decoder.prefill(prompts, rows, load.answer)
            decoder.keep(of_prompt)
        # past a graph's third use, and past a block of 128 positions
        for t in range(min(load.answer, 160)):
            want, got = (
                decoder.step(tokens[of_prompt, t])[:, own].float() for decoder in (plain, graphs)
            )
            off.append(float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max()))
    most, ran = (
        1e-3 if policy.model.dtype.itemsize >= 4 else 1e-1,
        getattr(graphs, "captures", False),
    )
    figure = f"relative difference {max(off):.0e}{'' if ran else ', no graph captured'}"
    return Figure(
        "logits, CUDA graphs",
        "the same step without",
        figure,
        f"≤ {most:g}",
        ran and max(off) <= most,
    )


def same_gradients(policy: Policy, load: Load) -> Figure:
    """Of packed rows through this device's kernel, and of padded ones through SDPA; infinities and NaNs count."""
    groups = noise(policy, load, prompts=1)
    packed, padded = (
        rig.update(p, groups, False)().g for p in (policy, replace(policy, packs=False))
    )
    assert packed is not None
    assert padded is not None
    off = (
        float((packed - padded).norm() / padded.norm())
        if packed is not None and padded is not None
        else math.nan
    )
    figure, most = (
        f"relative difference {off:.0e}",
        1e-4 if policy.model.dtype.itemsize >= 4 else 5e-2,
    )
    return Figure("gradients, packed", "padded rows, SDPA", figure, f"≤ {most:g}", off <= most)


def new_lengths(policy: Policy, load: Load, rounds: int, by: str = "") -> list[Figure]:
    """The first call on lengths that no call has had, against the second: plans, compilations, a cold allocator."""
    ratios: dict[str, list[float]] = {"update": [], "sampling": []}
    for i in range(1, rounds + 1):
        other = replace(
            load, prompt=load.prompt - min(7 * i, load.prompt // 2), answer=load.answer - i
        )
        of = {
            "update": rig.update(policy, noise(policy, other), False),
            "sampling": sampler(policy, other),
        }
        for what, run in of.items():
            ratios[what].append(timed(run) / timed(run))
    medians = {what: statistics.median(of) for what, of in ratios.items()}
    goals = {what: ("", None) if by else ("≤ 1.3 ×", x <= 1.3) for what, x in medians.items()}
    return [
        Figure(f"{w}, new lengths{by}", "the same again", f"{x:.2f} ×", *goals[w])
        for w, x in medians.items()
    ]


def plans_of_cudnn(policy: Policy, load: Load) -> list[Figure]:
    """The same under cuDNN's attention, which pick_device turns off: it would plan for every new length."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        return new_lengths(
            policy,
            replace(load, prompt=load.prompt // 2, answer=min(load.answer, 32)),
            1,
            ", cuDNN",
        )
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)


def host_waits(policy: Policy, load: Load) -> list[Figure]:
    """How often torch says that the host waits for the GPU, in sampling and in an update of a gradient a group."""
    figures = []
    for what, run in (
        ("sampling", sampler(policy, load)),
        ("update", rig.update(policy, noise(policy, load), False)),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            run()
            torch.cuda.set_sync_debug_mode("default")
        n, most = (
            sum("synchroniz" in str(w.message) for w in said),
            WAITS[what] + load.answer * (what == "sampling"),
        )
        figures.append(
            Figure(f"host waits, {what}", f"{load.answer} tokens", str(n), f"≤ {most}", n <= most)
        )
    return figures


def decomposition(policy: Policy, load: Load) -> Figure:
    """Of all adapted weights, from one of each shape."""
    shapes = Counter(site.W.shape for site in policy.adapter.sites.values())
    svd(torch.randn(64, 64, device=policy.device))  # the library's start
    seconds = sum(
        n * timed(partial(svd, torch.randn(shape, device=policy.device)))
        for shape, n in shapes.items()
    )
    return Figure(
        "SVD, all weights", f"{len(shapes)} of {shapes.total()} measured", f"{seconds:.0f} s"
    )


def kernels(policy: Policy, load: Load) -> Figure:
    """Which kernel SDPA takes; the math kernel would keep every score."""
    c, t, n = policy.model.config, load.prompt, load.prompts * load.group
    H, K, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    sizes = (n, K, H // K, D), (n, K, t, D), (n, 1, 1, t), (1, H, t, D), (1, 1, t, t)
    q, k, mask, x, square = (
        torch.zeros(s, device=policy.device, dtype=policy.model.dtype) for s in sizes
    )
    calls: dict[str, tuple[Any, ...]] = {
        "decoding": (q, k, k),
        "decoding, padded": (q, k, k, mask),
        "prompts, update": (x, x, x, square),
    }
    taken = {what: KERNELS[torch._fused_sdp_choice(*call)] for what, call in calls.items()}
    figure = "; ".join(f"{what}: {kernel}" for what, kernel in taken.items())
    return Figure("SDPA's kernels", "", figure, "not math", "math" not in taken.values())


def nan_under_a_mask(policy: Policy, load: Load) -> Figure:
    """Of cuDNN's backward where a length is 64 more than a multiple of 128, and every logit far below zero."""
    D = policy.model.config.head_dim
    like: dict[str, Any] = {"device": policy.device, "dtype": policy.model.dtype}
    q, k, v = torch.randn(3, 1, 1, 704, D, **like).mul_(0.1)
    q[..., 0], k[..., 0] = 1, -120 * D**0.5
    q.requires_grad_()
    later, bad = torch.full((704, 704), -torch.inf, **like).triu(1), []
    for on in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(on)
        (grad,) = torch.autograd.grad(
            scaled_dot_product_attention(q, k, v, attn_mask=later).sum(), q
        )
        bad.append(int((~grad.isfinite()).sum()))
    return Figure(
        "NaN gradients, 704 tokens", "with cuDNN", f"{bad[1]}; {bad[0]} with it", "0", bad[1] == 0
    )


@cache
def mini(tag: str, cpu: bool = False, kill: bool = False) -> list[dict[str, Any]]:
    """Rows of a run, which may be killed after its first checkpoint and resumed. Raises RuntimeError with its log."""
    command = [sys.executable, "-m", "vgrout.train"]
    with open(f"{tag}.log", "w", encoding="utf-8") as log:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}
        how: dict[str, Any] = {"env": os.environ | hidden, "stdout": log, "stderr": log}
        process = subprocess.Popen([*command, *MINI, f"--out-tag=_{tag}"], **how)
        if kill:
            while process.poll() is None and not [
                *Path("out/runs").glob(f"*_{tag}/resume/step_*/manifest.json")
            ]:
                time.sleep(0.05)
            process.kill()
        ended = process.wait()
        if kill:
            ended = subprocess.run([*command, MINI[0], "--resume", "latest"], **how).returncode
        if ended:
            raise RuntimeError(Path(log.name).read_text("utf-8"))
    (path,) = Path("out/runs").glob(f"*_{tag}")
    return [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]


def same_rows(against: str, tag: str, **how: bool) -> Figure:
    """`mini` in fp32 on this device against another run of it, row by row."""
    here, other = mini("gpu"), mini(tag, **how)
    both = list(zip(here, other, strict=False))
    same = sum(a["hack_s"] == b["hack_s"] and a["rew"] == b["rew"] for a, b in both)
    off = max(
        (abs(a["gn"] - b["gn"]) / a["gn"] for a, b in both if a["gn"] and b["gn"]), default=math.nan
    )
    figure = f"{same} of {(n := max(len(here), len(other)))} steps alike; norms within {off:.0e}"
    return Figure("mini, fp32, rows", against, figure, "all alike", same == n)


def run(quick: bool = False) -> str:
    """Raises Refused, one line, where there is no GPU."""
    if not torch.cuda.is_available():
        raise Refused(
            "gpu: this machine has no CUDA device that torch can use; run this bench on one with 60 GB"
        )
    device, dtype = pick_device(organism.MODEL_DIR, "bf16")
    load, gpu, made = QUICK if quick else FAST, torch.cuda.get_device_properties(0), list[Policy]()
    with rig.workplace():
        figures = attempted(
            "mini on the CPU", lambda: same_rows("the same on the CPU", "cpu", cpu=True)
        )
        figures += attempted(
            "mini, killed", lambda: same_rows("killed and resumed", "kill", kill=True)
        )
        weights = partial(random_policy, QWEN3_4B, device.type, dtype)
        figures += attempted("random weights", lambda: made.append(weights()) or [])
        for policy in made:
            figures += measure(policy, load, 2 if quick else 5)
    return page(figures, f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB; {load}.")
