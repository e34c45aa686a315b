"""What is claimed of a GPU, measured on one.

Update and sampler run at Qwen3-4B's shapes with random weights. A step of `fast` is timed beside
TRL's, where TRL is installed; with vLLM too, where that is. Then come the claims: seconds of update and
sampling, peak memory against the plan, lengths that were not warmed up on, how often the host waits,
CUDA graphs and packed attention against their plain forms, and attention's kernels. `mini` is run on
the GPU, on the CPU, and killed and resumed.
"""

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer

from benchmarks import rig
from benchmarks.gpu_peer import Contestant, argument
from benchmarks.measure import Figure, Ratio, page
from benchmarks.rig import Load, sampler, timed
from vgrout.config.settings import OptConfig
from vgrout.ground import embedded
from vgrout.ground.data import Group
from vgrout.ground.io import Refused
from vgrout.ground.tensor_types import Routed
from vgrout.loop.optim import Optimizer
from vgrout.model.load.load import as_language_model, pick_device, room_on_gpu
from vgrout.model.load.memory import CONTEXT, GIB, MemoryPlan, Step
from vgrout.model.load.source import shapes_of
from vgrout.model.logprobs import foreign
from vgrout.model.policy import Policy
from vgrout.model.svd_adapter import SvdAdapter

ROOT = Path(__file__).parents[1]
Part = Literal["all", "steps", "claims"]

QWEN3_4B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
FAST = Load(group=8, prompts=4, prompt=700, answer=512)
FULL = Load(group=6, prompts=43, prompt=500, answer=1024)
QUICK = Load(group=4, prompts=1, prompt=256, answer=64)
# Goals, for `fast` on an H100 or H200: the most seconds of a step, and how many times as fast as TRL at least.
STEP_SECONDS = {"none": 4.0, "route2": 4.7}
TIMES_TRL = {"transformers": 10, "vLLM": 1.5}
FULL_RATE = 12_000  # tokens / s that sampling `full`'s 258 rows should reach
# Of TRL: as many rows a forward as memory allows with activations kept, and with them computed again.
TRL_ROWS = {False: 8, True: 32}
TRL_SECONDS = 300  # for one way of setting it
MINI = [
    "mini",
    "--intervention=none",
    "--dtype=fp32",
    "--steps=4",
    "--checkpoint-every=2",
    "--eval-ablate-every=0",
    "--final-n-prompts=6",
    "--final-samples=1",
    "--allow-weak-sandbox",
]
# how often the host may wait in a step, beside for an event a token: tests/test_pretended_gpu.py
WAITS = {"sampling": 8, "update": 30}
KERNELS = ("math", "flash", "memory-efficient", "cuDNN", "none")  # in torch's numbering


def orthogonal(W: Float[Tensor, "d_out d_in"]) -> tuple[Tensor, Tensor, Tensor]:
    """Random orthogonal bases in the shapes of W's SVD.

    Work and memory of a run are the same, and 252 decompositions of minutes each are spared.
    """
    r = min(W.shape)
    U, Vh = (torch.linalg.qr(torch.randn(d, r, device=W.device))[0].to(W.dtype) for d in W.shape)
    return U, torch.ones(r, device=W.device), Vh.mT.contiguous()


def random_policy(shape: dict[str, Any], device: str, dtype: torch.dtype) -> Policy:
    """A policy on random weights."""
    model = rig.random_model(device=device, dtype=dtype, **shape)
    model.set_attn_implementation("sdpa")
    tokenizer: Any = AutoTokenizer.from_pretrained(embedded.MODEL_DIR)
    lm = as_language_model(model, tokenizer)
    return Policy(**vars(lm), adapter=SvdAdapter(model, None, decompose=orthogonal))


def planned(policy: Policy, load: Load) -> MemoryPlan:
    """The plan of a run of route2 with this load, in the memory that this process may have."""
    shapes = shapes_of(policy.model.config.to_dict())
    assert shapes is not None
    step = Step(
        shapes,
        device="cuda",
        size=policy.model.dtype.itemsize,
        quarantined=1,
        by_rollout=True,
        group=load.group,
        prompts=load.prompts,
        prompt_tokens=load.prompt,
        max_new=load.answer,
    )
    return step.plan(room_on_gpu())


def with_budget(policy: Policy, load: Load) -> Policy:
    """The policy with as wide forward passes, and as many rows at once, as a run would have here."""
    return replace(policy, budget=planned(policy, load).budget)


def attempted(what: str, measured: Callable[[], Figure | list[Figure]]) -> list[Figure]:
    """What `measured` returns; if it fails, one figure that says why.

    The figures are also printed on standard error, as JSON lines, as soon as they are there.
    """
    try:
        made = measured()
        figures = made if isinstance(made, list) else [made]
    except Exception as e:
        why = " ".join(str(e).split())[-200:]
        figures = [Figure(what, "", f"failed: {type(e).__name__}: {why}", "a figure", False)]
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a fault on the GPU ends all that follows
            torch.cuda.empty_cache()
    for figure in figures:
        print(json.dumps(asdict(figure), ensure_ascii=False), file=sys.stderr, flush=True)
    return figures


def measure(policy: Policy, load: Load, rounds: int) -> list[Figure]:
    """Update and sampling of one load; what each claim on them is worth on this device."""
    kernels_taken = policy.attention()

    def update(name: str, by_rollout: bool) -> Figure:
        run = rig.update(policy, noise(policy, load), by_rollout)
        run()
        seconds = statistics.median(timed(run) for _ in range(rounds))
        rate = load.answers * (load.prompt + load.answer) / seconds
        figure = f"{rate:,.0f} tokens / s, {seconds:.2f} s"
        return Figure(f"update, {name}, {kernels_taken['update']}", "", figure)

    def sampling(name: str, graphs: bool) -> Figure:
        run = sampler(replace(policy, graphs=graphs), load)
        run()
        seconds = statistics.median(timed(run) for _ in range(rounds))
        token_ms = seconds / load.answer * 1e3
        rate = load.answers * load.answer / seconds
        figure = f"{rate:,.0f} tokens / s, {token_ms:.1f} ms a token of each row"
        return Figure(f"sampling, {name}", "", figure)

    # first: nothing is held yet that a run would not hold
    figures = attempted("peak of a step, route2", lambda: fits_plan(policy, load))
    figures += attempted("update, none", lambda: update("none", by_rollout=False))
    figures += attempted("update, route2", lambda: update("route2", by_rollout=True))
    figures += attempted("sampling", lambda: sampling(kernels_taken["decode"], graphs=False))
    figures += attempted("sampling, CUDA graphs", lambda: sampling("CUDA graphs", graphs=True))
    figures += attempted("new lengths", lambda: new_lengths(policy, load, rounds))
    checks: tuple[Callable[[Policy, Load], Figure | list[Figure]], ...] = (
        same_logits,
        same_gradients,
        host_waits,
        kernels,
        nan_under_a_mask,
        plans_of_cudnn,
    )
    for check in checks:
        figures += attempted(check.__name__, partial(check, policy, load))
    return figures


def steps(policy: Policy, load: Load, rounds: int, peers: Mapping[str, float]) -> list[Figure]:
    """Seconds of a step without grading, against TRL's; goals are those of `fast`.

    peers: seconds of TRL's step, by what it samples with.
    """
    draw = sampler(policy, load)
    draw()
    sampling = statistics.median(timed(draw) for _ in range(rounds))
    figures: list[Figure] = []
    for name, by_rollout in (("none", False), ("route2", True)):
        update = rig.update(policy, noise(policy, load), by_rollout)
        update()
        learning = statistics.median(timed(update) for _ in range(rounds))
        step, most = sampling + learning, STEP_SECONDS[name]
        shown = f"{step:.2f} s: sampling {sampling:.2f}, update {learning:.2f}"
        what = f"a step, {name}"
        figures.append(Figure(what, "nothing is graded", shown, f"≤ {most:g} s", step <= most))
        for peer, seconds in peers.items():
            ratio = Ratio.of([seconds], [step])
            figures.append(ratio.at_least(what, f"TRL with {peer}", TIMES_TRL[peer]))
    if load != FAST:
        figures = [replace(figure, goal="", reached=None) for figure in figures]
    return figures


def rate_of_full(policy: Policy) -> Figure:
    """Tokens / s in which the rows of a step of `full` are sampled."""
    seconds = timed(sampler(with_budget(policy, FULL), FULL))
    rate = FULL.answers * FULL.answer / seconds
    shown = f"{rate:,.0f} tokens / s, {seconds:.0f} s"
    goal = f"≥ {FULL_RATE:,}"
    return Figure(f"sampling, {FULL.answers} rows", "", shown, goal, rate >= FULL_RATE)


def trl(load: Load, shape: dict[str, int]) -> tuple[list[Figure], dict[str, float]]:
    """TRL's step in each way that it is set; and by what it samples with, the seconds of its fastest.

    Each has a process and the card to itself.
    """
    figures: list[Figure] = []
    fastest: dict[str, float] = {}

    def measured(contestant: Contestant, sampling: str) -> Figure:
        seconds, peak = in_own_process(contestant)
        fastest[sampling] = min(seconds, fastest.get(sampling, math.inf))
        return Figure(str(contestant), "", f"{seconds:.2f} s a step, peak {peak / GIB:.1f} GiB")

    for sampling, library in (("transformers", "trl"), ("vLLM", "vllm")):
        missing = [name for name in ("trl", library) if find_spec(name) is None]
        if missing:
            figures.append(Figure(f"TRL with {sampling}", "", f"{missing[0]} is not installed"))
            continue
        for checkpointing, rows in TRL_ROWS.items():
            contestant = Contestant(
                shape,
                load,
                rows=min(rows, load.answers),
                checkpointing=checkpointing,
                vllm=sampling == "vLLM",
            )
            figures += attempted(str(contestant), partial(measured, contestant, sampling))
    return figures, fastest


def in_own_process(contestant: Contestant) -> tuple[float, int]:
    """Seconds of TRL's step, and the most bytes that it holds of the card.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_peer", argument(contestant)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TRL_SECONDS, cwd=ROOT, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    said = json.loads(done.stdout.splitlines()[-1])
    return statistics.median(said["seconds"]), said["peak"]


def noise(policy: Policy, load: Load, **other: int) -> list[Group]:
    """Groups of random tokens of this load, with other numbers where they are given."""
    load = replace(load, **other)
    vocabulary = policy.model.config.vocab_size
    return rig.noise_groups(vocabulary, load.group, load.prompts, load.prompt, load.answer)


def fits_plan(policy: Policy, load: Load) -> Figure:
    """The most that the GPU holds in two steps of route2 on both sets of weights, by the plan."""
    memory = planned(policy, load)
    update = rig.update(policy, noise(policy, load), True)
    draw = sampler(policy, load)
    optim = Optimizer(policy.adapter, OptConfig(), 2)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        draw()
        made = update()
        assert made.g is not None
        optim.step(Routed(made.g.sum(0), made.g.sum(0)), made.metrics)
        with policy.adapter.deployed():
            pass
    peak = torch.cuda.max_memory_allocated()
    of_plan = memory.peak - CONTEXT["cuda"]
    return Figure(
        "peak of a step, route2",
        f"plan: {of_plan / GIB:.2f} GiB, forwards of {memory.budget.tokens:,} tokens",
        f"{peak / of_plan:.2f} × ({peak / GIB:.2f} GiB)",
        "within 10 %",
        abs(peak / of_plan - 1) <= 0.1,
    )


def same_logits(policy: Policy, load: Load) -> Figure:
    """Logits of decoding with CUDA graphs against those without, on the same tokens.

    Compared is the norm of a row's difference over the row's norm.
    """
    groups, rows = noise(policy, load, group=1), load.prompts * load.group
    prompts = [g.rollouts[0].prompt_ids for g in groups]
    tokens = torch.tensor([g.rollouts[0].ids for g in groups], device=policy.device)
    prompt_of_row = [row // load.group for row in range(rows)]
    none = foreign(policy.model)
    # others' logits are so low that a norm would be infinite
    own = slice(None) if none is None else ~none
    differences: list[float] = []
    with torch.no_grad():
        plain = replace(policy, graphs=False).decoder()
        graphs = replace(policy, graphs=True).decoder()
        for decoder in (plain, graphs):
            decoder.prefill(prompts, rows, load.answer)
            decoder.keep(prompt_of_row)
        # past a graph's third use, and past a block of 128 positions
        for t in range(min(load.answer, 160)):
            want = plain.step(tokens[prompt_of_row, t])[:, own].float()
            got = graphs.step(tokens[prompt_of_row, t])[:, own].float()
            relative = (got - want).norm(dim=-1) / want.norm(dim=-1)
            differences.append(float(relative.max()))
    most = 1e-3 if policy.model.dtype.itemsize >= 4 else 1e-1
    captured = getattr(graphs, "captures", False)
    figure = f"relative difference {max(differences):.0e}"
    return Figure(
        "logits, CUDA graphs",
        "the same step without",
        figure if captured else f"{figure}, no graph captured",
        f"≤ {most:g}",
        captured and max(differences) <= most,
    )


def same_gradients(policy: Policy, load: Load) -> Figure:
    """Gradients of packed rows by this device's kernel, against those of padded rows by SDPA.

    An infinity or a NaN in either misses the goal.
    """
    groups = noise(policy, load, prompts=1)
    packed = rig.update(policy, groups, False)().g
    padded = rig.update(replace(policy, packs=False), groups, False)().g
    difference = math.nan
    if packed is not None and padded is not None:
        difference = float((packed - padded).norm() / padded.norm())
    most = 1e-4 if policy.model.dtype.itemsize >= 4 else 5e-2
    return Figure(
        "gradients, packed",
        "padded rows, SDPA",
        f"relative difference {difference:.0e}",
        f"≤ {most:g}",
        difference <= most,
    )


def new_lengths(policy: Policy, load: Load, rounds: int, by: str = "") -> list[Figure]:
    """The first call on lengths that no call has had, against the second.

    The first one pays for plans, compilations and a cold allocator. by: a note on what is measured;
    with one there is no goal.
    """
    ratios: dict[str, list[float]] = {"update": [], "sampling": []}
    for i in range(1, rounds + 1):
        prompt = load.prompt - min(7 * i, load.prompt // 2)
        other = replace(load, prompt=prompt, answer=load.answer - i)
        update = rig.update(policy, noise(policy, other), False)
        draw = sampler(policy, other)
        ratios["update"].append(timed(update) / timed(update))
        ratios["sampling"].append(timed(draw) / timed(draw))
    figures: list[Figure] = []
    for what, of_rounds in ratios.items():
        median = statistics.median(of_rounds)
        name, figure = f"{what}, new lengths{by}", f"{median:.2f} ×"
        if by:
            figures.append(Figure(name, "the same again", figure))
        else:
            figures.append(Figure(name, "the same again", figure, "≤ 1.3 ×", median <= 1.3))
    return figures


def plans_of_cudnn(policy: Policy, load: Load) -> list[Figure]:
    """New lengths under cuDNN's attention, which plans for each: pick_device turns it off."""
    small = replace(load, prompt=load.prompt // 2, answer=min(load.answer, 32))
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        return new_lengths(policy, small, 1, ", cuDNN")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)


def host_waits(policy: Policy, load: Load) -> list[Figure]:
    """How often torch says that the host waits for the GPU, in sampling and in an update.

    Of the event that it waits for once a token, torch says nothing. The update has one gradient for
    each group.
    """
    sampling = waits(sampler(policy, load))
    update = waits(rig.update(policy, noise(policy, load), False))
    figures: list[Figure] = []
    for what, n, most in (
        ("sampling", sampling, WAITS["sampling"]),
        ("update", update, WAITS["update"]),
    ):
        tokens = f"{load.answer} tokens"
        figures.append(Figure(f"host waits, {what}", tokens, str(n), f"≤ {most}", n <= most))
    return figures


def waits(run: Callable[[], object]) -> int:
    """Torch's warnings that the host waits for the GPU, in one call."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        run()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in said)


def kernels(policy: Policy, load: Load) -> Figure:
    """Which kernel SDPA takes; the math kernel would keep every score."""
    c = policy.model.config
    H, K, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    rows, tokens = load.prompts * load.group, load.prompt

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device=policy.device, dtype=policy.model.dtype)

    q, k = zeros(rows, K, H // K, D), zeros(rows, K, tokens, D)
    x = zeros(1, H, tokens, D)
    calls: dict[str, tuple[Any, ...]] = {
        "decoding": (q, k, k),
        "decoding, padded": (q, k, k, zeros(rows, 1, 1, tokens)),
        "prompts, update": (x, x, x, zeros(1, 1, tokens, tokens)),
    }
    taken = {what: KERNELS[torch._fused_sdp_choice(*call)] for what, call in calls.items()}
    figure = "; ".join(f"{what}: {kernel}" for what, kernel in taken.items())
    return Figure("SDPA's kernels", "", figure, "not math", "math" not in taken.values())


def nan_under_a_mask(policy: Policy, load: Load) -> Figure:
    """NaNs in the gradient of cuDNN's attention, in the case in which it makes them.

    They come where a length is 64 more than a multiple of 128, and every logit far below zero.
    """
    n, D = 704, policy.model.config.head_dim
    like: dict[str, Any] = {"device": policy.device, "dtype": policy.model.dtype}
    q, k, v = torch.randn(3, 1, 1, n, D, **like).mul_(0.1)
    q[..., 0], k[..., 0] = 1, -120 * D**0.5
    q.requires_grad_()
    later = torch.full((n, n), -torch.inf, **like).triu(1)

    def bad_gradients(cudnn: bool) -> int:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=later)
        (grad,) = torch.autograd.grad(attended.sum(), q)
        return int((~grad.isfinite()).sum())

    with_cudnn = bad_gradients(cudnn=True)
    without = bad_gradients(cudnn=False)
    figure = f"{without}; {with_cudnn} with it"
    return Figure("NaN gradients, 704 tokens", "with cuDNN", figure, "0", without == 0)


@cache
def mini(tag: str, cpu: bool = False, kill: bool = False) -> list[dict[str, Any]]:
    """Rows of a run of `mini`. kill: kill it after its first checkpoint, and resume it.

    Raises:
        RuntimeError: it failed; with its log.
    """
    command = [sys.executable, "-m", "vgrout.train"]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}
    with open(f"{tag}.log", "w", encoding="utf-8") as log:
        how: dict[str, Any] = {"env": os.environ | hidden, "stdout": log, "stderr": log}
        process = subprocess.Popen([*command, *MINI, f"--out-tag=_{tag}"], **how)
        if kill:
            manifests = f"*_{tag}/resume/step_*/manifest.json"
            while process.poll() is None and not any(Path("out/runs").glob(manifests)):
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
    same = 0
    differences: list[float] = []  # of the gradients' norms, relative
    for a, b in zip(here, other, strict=False):
        same += a["hack_s"] == b["hack_s"] and a["rew"] == b["rew"]
        if a["gn"] and b["gn"]:
            differences.append(abs(a["gn"] - b["gn"]) / a["gn"])
    n = max(len(here), len(other))
    figure = f"{same} of {n} steps alike; norms within {max(differences, default=math.nan):.0e}"
    return Figure("mini, fp32, rows", against, figure, "all alike", same == n)


def run(quick: bool = False, part: Part = "all") -> str:
    """All figures, or a part of them. Raises Refused, one line, where there is no GPU."""
    if not torch.cuda.is_available():
        raise Refused(
            "gpu: this machine has no CUDA device that torch can use; run this bench on one with "
            "60 GB"
        )
    device, dtype = pick_device(embedded.MODEL_DIR, "bf16")
    load = QUICK if quick else FAST
    rounds = 2 if quick else 5
    gpu = torch.cuda.get_device_properties(0)
    policies: list[Policy] = []

    def load_weights() -> list[Figure]:
        made = random_policy(QWEN3_4B, device.type, dtype)
        policies.append(with_budget(made, load))
        return []

    figures: list[Figure] = []
    peers: dict[str, float] = {}
    with rig.workplace():
        if part != "claims":
            of_trl, peers = trl(load, QWEN3_4B)
            figures += of_trl
        if part != "steps":
            figures += attempted(
                "mini on the CPU", lambda: same_rows("the same on the CPU", "cpu", cpu=True)
            )
            figures += attempted(
                "mini, killed", lambda: same_rows("killed and resumed", "kill", kill=True)
            )
        figures += attempted("random weights", load_weights)
        for policy in policies:  # none, if that failed
            if part != "claims":
                figures += attempted("a step", lambda p=policy: steps(p, load, rounds, peers))
                if not quick:
                    figures += attempted("full", lambda p=policy: rate_of_full(p))
            if part != "steps":
                figures += measure(policy, load, rounds)
    return page(figures, f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB; {load}.")
