"""A pretrained model on cores: our step against TRL's, and our sampling against transformers'.

Every contestant has a process of its own, so that its peak is its own; TRL has this one. A reward
by which any model's answers differ gives all groups a signal: ours leaves out those without, TRL
does not.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import rig, trl_peer
from benchmarks.measure import Figure, Ratio, interleaved, page, peak_bytes
from benchmarks.step import parts
from vgrout.config.presets import resolve
from vgrout.config.settings import Sampling
from vgrout.ground import embedded
from vgrout.ground.machine import cores
from vgrout.model.load.load import run_policy
from vgrout.model.policy import DTYPES, Policy

LOAD = rig.Load(group=rig.G, prompts=rig.P, prompt=128, answer=96)
STEP_GOALS = {"none": 8, "route2": 6}
GIB = 2**30
Dtype = Literal["auto", "fp32", "bf16"]  # auto: each contestant's default, which for TRL is fp32


def command(model: Path, dtype: Dtype, intervention: str) -> list[str]:
    """The organism's problems for another model, whose answers differ in reward."""
    return rig.command(
        intervention,
        f"--model={model}",
        f"--problems={embedded.PROBLEMS}",
        f"--max-new={LOAD.answer}",
        "--reward=benchmarks.rig:differing",
        f"--dtype={dtype}",
    )


def run(model: Path, dtype: Dtype, quick: bool = False) -> str:
    """All figures of one dtype, which TRL has too; of the defaults the steps alone."""
    rounds = 1 if quick else 3
    # its decomposed weights take minutes: they stay in out/svd_cache
    with rig.workplace(stay=True):
        with ExitStack() as ends:
            figures, note = against_trl(model, dtype, rounds, ends)
        if dtype != "auto":
            policy = run_policy(resolve(command(model, dtype, "none")))
            figures.append(of_sampling(policy, rounds))
    return page(figures, note)


def against_trl(
    model: Path, dtype: Dtype, blocks: int, ends: ExitStack
) -> tuple[list[Figure], str]:
    """Seconds of a step, taken in turns, and each process's peak. Our runs end with `ends`."""
    trl_peer.libraries()
    problems = rig.problems(command(model, dtype, "none"), blocks + 1)
    ours: dict[str, rig.Turns] = {}
    for name in STEP_GOALS:
        trainer = rig.Turns(name, command(model, dtype, name))
        ours[name] = ends.enter_context(closing(trainer))
    seconds: dict[str, list[float]] = {name: [] for name in ours}
    for trainer in ours.values():
        trainer.take(1)

    def our_turn() -> None:
        for name, trainer in ours.items():
            seconds[name].append(trainer.take(1))

    peer_dtype = "fp32" if dtype == "auto" else dtype
    torch.set_num_threads(cores())
    peer_model = trl_peer.Model(model, DTYPES[peer_dtype], LOAD.answer)
    theirs, note = trl_peer.measure(problems, blocks, 1, our_turn, choose=False, model=peer_model)
    peaks = {"TRL": peak_bytes()}
    figures: list[Figure] = []
    for name, goal in STEP_GOALS.items():
        ratio = Ratio.of(theirs, seconds[name])
        figures.append(ratio.at_least(f"{name}, {dtype}: a step", f"TRL, {peer_dtype}", goal))
    for name, trainer in ours.items():
        peaks[name] = trainer.peak
        figures.append(parts(name, trainer.path, seconds[name]))
    for name, against, goal in (("none", "TRL", 1.0), ("route2", "none", 1.3)):
        share = peaks[name] / peaks[against]
        figure = f"{share:.2f} × ({peaks[name] / GIB:.1f} GiB of {peaks[against] / GIB:.1f})"
        figures.append(
            Figure(f"{name}, {dtype}: peak", against, figure, f"≤ {goal:g} ×", share <= goal)
        )
    return figures, note


def of_sampling(policy: Policy, rounds: int, load: rig.Load = LOAD) -> Figure:
    """Sampling, on merged weights, against `generate`."""
    with torch.no_grad():
        policy.adapter.δS.fill_(1e-9)
    policy.adapter.merge()
    ours, theirs = rig.sampler(policy, load), generating(policy, load)
    seconds = interleaved({"ours": ours, "generate": theirs}, rounds, "sampling")
    ratio = Ratio.of(seconds["generate"], seconds["ours"])
    return ratio.at_least("sampling, time", "transformers.generate", 2)


def generating(policy: Policy, load: rig.Load) -> Callable[[], None]:
    """The sampler's work by transformers: one batch, as TRL calls it."""
    groups = rig.noise_groups(policy.model.config.vocab_size, 1, load.prompts, load.prompt, 1)
    prompts = torch.tensor([g.rollouts[0].prompt_ids for g in groups])
    ids = prompts.repeat_interleave(load.group, dim=0)
    sampling = Sampling()
    settings: dict[str, Any] = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_new_tokens": load.answer,
        "max_new_tokens": load.answer,
        "pad_token_id": policy.pad_id,
    }

    @torch.no_grad()
    def run() -> None:
        mask = torch.ones_like(ids)
        policy.model.generate(input_ids=ids, attention_mask=mask, **settings)  # ty: ignore

    return run
