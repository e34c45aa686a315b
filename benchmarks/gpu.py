"""What is claimed of a GPU, on one. The update and the sampler at Qwen3-4B's shapes with random weights: model FLOPs
used, tokens / s against the memory's bandwidth, peak memory against the plan, lengths that were not warmed up on, CUDA
graphs and packed attention against their plain forms. `mini` on it against the CPU, and killed and resumed."""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks import rig
from benchmarks.bounds import Load, bandwidth, dense_rate, sampler, sampling_figure, timed, update_figure
from benchmarks.measure import Figure, page
from vgrout.config.run import OptConfig
from vgrout.data import organism
from vgrout.model.load import as_language_model, pick_device
from vgrout.model.memory import CONTEXT, GIB, plan
from vgrout.model.policy import Policy
from vgrout.model.source import shapes_of
from vgrout.model.svd_adapter import SvdAdapter
from vgrout.optim import Optimizer
from vgrout.tensor_types import Routed

QWEN3_4B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
FAST = Load(group=8, prompts=4, prompt=700, answer=512)
QUICK = Load(group=4, prompts=1, prompt=256, answer=64)
MINI = ["--intervention=none", "--dtype=fp32", "--steps=4", "--checkpoint-every=2", "--eval-ablate-every=0"]
MINI += ["--final-n-prompts=6", "--final-samples=1", "--allow-weak-sandbox"]


def orthogonal(W: Float[Tensor, "d_out d_in"]) -> tuple[Tensor, Tensor, Tensor]:
    """Bases in the shapes of W's SVD: work and memory are the same, and 252 decompositions of minutes are spared."""
    r = min(W.shape)
    U, Vh = (torch.linalg.qr(torch.randn(d, r, device=W.device))[0].to(W.dtype) for d in W.shape)
    return U, torch.ones(r, device=W.device), Vh.mT.contiguous()


def random_policy(shape: dict[str, Any], device: str, dtype: torch.dtype, attention: str) -> Policy:
    """A policy on random weights."""
    model = rig.random_model(device=device, dtype=dtype, **shape)
    model.set_attn_implementation(attention)
    tokenizer: Any = AutoTokenizer.from_pretrained(organism.MODEL_DIR)
    lm = as_language_model(model, tokenizer)
    return Policy(**vars(lm), adapter=SvdAdapter(model, None, decompose=orthogonal))


def measure(shape: dict[str, Any], load: Load, device: str, dtype: torch.dtype, rounds: int) -> list[Figure]:
    """Update and sampling of one load; what each claim on them is worth on this device."""
    policy = random_policy(shape, device, dtype, "sdpa")
    rate, kernels = dense_rate(policy), policy.attention()
    return [
        fits_plan(policy, load),  # first: nothing is held yet that a run would not hold
        update_figure(f"none, {kernels['update']}", policy, load, True, rate, rounds, 0.4),
        update_figure(f"route2, {kernels['update']}", policy, load, False, rate, rounds, 0.4),
        sampling_figure(kernels["decode"], policy, load, bandwidth(policy.device), rounds),
        sampling_figure("CUDA graphs", replace(policy, graphs=True), load, bandwidth(policy.device), rounds),
        same_tokens(policy, load),
        same_gradients(policy, load),
        *new_lengths(policy, load, rounds),
    ]


def fits_plan(policy: Policy, load: Load) -> Figure:
    """The most that the GPU holds in two steps of route2 on both sets of weights, against the plan."""
    shapes = shapes_of(policy.model.config.to_dict())
    assert shapes is not None
    kind, size = policy.device.type, policy.model.dtype.itemsize
    of = {"group": load.group, "prompts": load.prompts, "prompt_tokens": load.prompt, "max_new": load.answer}
    made = plan(shapes, device=kind, size=size, routes=True, by_rollout=True, **of)
    groups = rig.noise_groups(shapes.vocab, load.group, load.prompts, load.prompt, load.answer)
    optim, update, draw = (
        Optimizer(policy.adapter, OptConfig(), 2),
        rig.update(policy, groups, True),
        sampler(policy, load),
    )
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        draw()
        g, loss = update()
        optim.step(Routed(g.sum(0), g.sum(0)), loss)
        with policy.adapter.deployed():
            pass
    if kind != "cuda":
        return Figure("peak of a step, route2", f"plan: {made.peak / GIB:.2f} GiB", "measured on a GPU alone")
    peak, planned = torch.cuda.max_memory_allocated(), made.peak - CONTEXT[kind]
    figure = f"{peak / planned:.2f} × ({peak / GIB:.2f} GiB)"
    within = abs(peak / planned - 1) <= 0.1
    return Figure("peak of a step, route2", f"plan: {planned / GIB:.2f} GiB", figure, "within 10 %", within)


def same_tokens(policy: Policy, load: Load) -> Figure:
    """Answers by CUDA graphs, and by the same step without them, from the same noise. Rounding may turn a token."""
    plain, graphs = (sampler(replace(policy, graphs=on), load)() for on in (False, True))
    pairs = [(a.ids, b.ids) for of in zip(plain, graphs, strict=True) for a, b in zip(*of, strict=True)]
    equal = sum(a == b for a, b in pairs) / len(pairs)
    return Figure("answers, CUDA graphs", "the same step without them", f"{equal:.0%} equal", "≥ 80%", equal >= 0.8)


def same_gradients(policy: Policy, load: Load) -> Figure:
    """Of packed rows through this device's kernel, and of padded ones through SDPA; infinities and NaNs count."""
    groups = rig.noise_groups(policy.model.config.vocab_size, load.group, 1, load.prompt, load.answer)
    packed, padded = (rig.update(policy, groups, False, packing=p)()[0] for p in ("shared", "padded"))
    off = float((packed - padded).norm() / padded.norm()) if packed is not None and padded is not None else math.nan
    most = 1e-4 if policy.model.dtype.itemsize >= 4 else 5e-2
    return Figure(
        "gradients, packed", "padded rows, SDPA", f"relative difference {off:.0e}", f"≤ {most:g}", off <= most
    )


def new_lengths(policy: Policy, load: Load, rounds: int) -> list[Figure]:
    """The first call on lengths that no call has had, against the second: plans, compilations, a cold allocator."""
    ratios: dict[str, list[float]] = {"update": [], "sampling": []}
    for i in range(1, rounds + 1):
        other = replace(load, prompt=load.prompt - min(7 * i, load.prompt // 2), answer=load.answer - i)
        groups = rig.noise_groups(policy.model.config.vocab_size, load.group, load.prompts, other.prompt, other.answer)
        for what, run in (("update", rig.update(policy, groups, False)), ("sampling", sampler(policy, other))):
            ratios[what].append(timed(run) / timed(run))
    medians = {what: statistics.median(of) for what, of in ratios.items()}
    return [
        Figure(f"{what}, new lengths", "the same lengths again", f"{x:.2f} ×", "≤ 1.3 ×", x <= 1.3)
        for what, x in medians.items()
    ]


def runs() -> list[Figure]:
    """`mini` in fp32 on the GPU against the CPU, and against itself killed after its first checkpoint and resumed."""
    command = [sys.executable, "-m", "vgrout.train"]
    argv = [*command, "mini", *MINI]

    def rows(tag: str, gpu: bool = True, kill: bool = False) -> list[dict[str, Any]]:
        environment = os.environ | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
        process = subprocess.Popen([*argv, f"--out-tag=_{tag}"], env=environment, stdout=subprocess.DEVNULL)
        if kill:
            while process.poll() is None and not [*Path("out/runs").glob(f"*_{tag}/resume/step_*/manifest.json")]:
                time.sleep(0.05)
            process.kill()
        process.wait()
        (path,) = Path("out/runs").glob(f"*_{tag}")
        if kill:
            subprocess.run([*command, "mini", "--resume", str(path)], check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]

    here, others = (
        rows("gpu"),
        {"the same on the CPU": rows("cpu", gpu=False), "killed and resumed": rows("kill", kill=True)},
    )
    figures = []
    for against, other in others.items():
        same = sum(a["hack_s"] == b["hack_s"] and a["rew"] == b["rew"] for a, b in zip(here, other, strict=True))
        off = max(abs(a["gn"] - b["gn"]) / a["gn"] for a, b in zip(here, other, strict=True) if a["gn"] and b["gn"])
        figure = f"{same} of {len(here)} steps alike; norms within {off:.0e}"
        figures.append(Figure("mini, fp32, rows", against, figure, "all alike", same == len(here)))
    return figures


def run(quick: bool = False) -> str:
    """Raises ValueError, one line, where there is no GPU."""
    if not torch.cuda.is_available():
        raise ValueError("gpu: this machine has no CUDA device that torch can use; run this bench on one with 60 GB")
    device, dtype = pick_device(organism.MODEL_DIR, "bf16")
    load, gpu = QUICK if quick else FAST, torch.cuda.get_device_properties(0)
    with rig.workplace():
        figures = [*runs(), *measure(QWEN3_4B, load, device.type, dtype, 2 if quick else 5)]
    return page(figures, f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB; {load}.")
