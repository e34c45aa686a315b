"""One estimator for every method: fixed held-out problems, a random stream of its own, the policy as one of its sides.
Commands ask it about saved adapters and bare models.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vgrout.config.run import Config
from vgrout.config.settings import Sampling
from vgrout.envs.base import Grader, Splits, without_hint
from vgrout.ground import ranks
from vgrout.ground.console import Clock
from vgrout.ground.data import Completion, GradedAnswer, Message, Side, Task, Verdict
from vgrout.ground.io import Interrupted
from vgrout.ground.metrics import Eval, Final, spaced
from vgrout.ground.rng import torch_stream
from vgrout.ground.thoughts import to_grade
from vgrout.loop.generation import graded, sample_and_submit
from vgrout.model.load import load
from vgrout.model.load.saved import Saved
from vgrout.model.load.source import is_small
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.sampling import sampler

# answers of an evaluation whose KL is measured, and how many in one forward
KL_ANSWERS, KL_BATCH = 32, 8


def as_side(policy: Policy, side: Side) -> AbstractContextManager[None]:
    """The policy as one of its sides: base = adapter off, trained = δS and δS_hack on, deployed = quarantine off."""
    return {
        "base": policy.adapter.reference,
        "trained": nullcontext,
        "deployed": policy.adapter.deployed,
    }[side]()


def answers(
    lm: LanguageModel,
    grader: Grader,
    problems: Sequence[Task],
    n: int,
    cfg: Config,
    step: int,
    purpose: str = "eval",
    on_completion: Callable[[], object] | None = None,
) -> list[GradedAnswer]:
    """n graded completions of each problem by the model as it is, in the order of the problems, then of their samples.

    The stream depends on (seed, purpose, step) only: sides share their noise, so their difference is less noisy than
    either, and training never sees it.
    """
    submitted = sample_and_submit(
        lm,
        grader,
        problems,
        n,
        sampling=cfg.sampling,
        max_new=cfg.scale.max_new,
        stream=torch_stream(cfg.run.seed, purpose, step),
        on_completion=on_completion,
    )
    return [answer for of_problem in graded(submitted) for answer in of_problem]


def answers_of_base(
    policy: Policy,
    grader: Grader,
    cfg: Config,
    problems: Sequence[Task],
) -> list[GradedAnswer]:
    """A group of graded answers of the untrained model to each problem."""
    with as_side(policy, "base"):
        return answers(policy, grader, problems, cfg.scale.group, cfg, 0, "known-correct")


def evaluate(
    policy: Policy,
    grader: Grader,
    problems: Sequence[Task],
    cfg: Config,
    step: int,
    flaws: Iterable[str],
) -> Eval:
    """The deployed model during training: G completions of each held-out problem, and the KL to the base. flaws: all
    that there are, in the order of the tables."""
    with as_side(policy, "deployed"):
        given = answers(policy, grader, problems, cfg.scale.group, cfg, step)
        return replace(Eval.of(given, flaws), kl=kl_to_base(policy, given))


def kl_to_base(policy: Policy, given: Sequence[GradedAnswer]) -> float | None:
    """Mean over the tokens of at most KL_ANSWERS of these answers, nats; None without answers. Exact at each position,
    so few answers suffice: the standard deviation over seeds of 32 answers' mean is a tenth of it on the organism."""
    some = spaced(given, KL_ANSWERS)
    batches = [some[i : i + KL_BATCH] for i in range(0, len(some), KL_BATCH)]

    def kl(part: Sequence[GradedAnswer]) -> torch.Tensor:
        return policy.kl_to_base(
            [policy.render(a.problem.messages) for a in part], [a.ids for a in part]
        ).cpu()

    tokens = ranks.merged(lambda: {i: kl(batches[i]) for i in ranks.own([1] * len(batches))})
    return float(torch.cat([tokens[i] for i in range(len(batches))]).mean()) if tokens else None


def answers_by_side(
    policy: Policy,
    grader: Grader,
    cfg: Config,
    problems: Sequence[Task],
    n: int,
    phase: Callable[[str, int], AbstractContextManager[Callable[[], object]]],
) -> dict[str, list[GradedAnswer]]:
    """n answers of each side to the same problems. The base comes first, so that a broken adapter cannot disturb it.

    Equal sides are sampled once: without a quarantine `trained` is left out, which is `deployed`, and where no prompt
    has a hint `plain` is, too.

    phase: (side, number of answers) → a context in which they are sampled. What it gives is called after each.
    """
    asked: dict[str, tuple[Side, Sequence[Task]]] = {
        "base": ("base", problems),
        "deployed": ("deployed", problems),
    }
    if policy.adapter.δS_hack.any():
        asked["trained"] = ("trained", problems)
    if any(problem.plain != problem.messages for problem in problems):
        asked["plain"] = ("deployed", [without_hint(problem) for problem in problems])
    given: dict[str, list[GradedAnswer]] = {}
    for name, (side, tasks) in asked.items():
        with phase(name, n * len(tasks)) as count, as_side(policy, side):
            given[name] = answers(policy, grader, tasks, n, cfg, cfg.scale.steps, "final", count)
    return given


def evaluate_final(
    policy: Policy,
    grader: Grader,
    splits: Splits,
    cfg: Config,
    clock: Clock,
    stop: Callable[[], bool],
) -> Final:
    """All four sides on the same held-out test problems.

    Raises:
        Interrupted: `stop` returned True between two sides.
    """

    def phase(side: str, total: int) -> AbstractContextManager[Callable[[], object]]:
        if stop():
            raise Interrupted("interrupted before the final evaluation was done")
        return clock(f"final evaluation, {side}", total=total)

    problems = splits.balanced("test", cfg.eval.final_n_prompts)
    given = answers_by_side(policy, grader, cfg, problems, cfg.eval.final_samples, phase)
    deployed = given["deployed"]
    return Final.of(
        splits.flaws,
        base=given["base"],
        trained=given.get("trained", deployed),
        deployed=deployed,
        plain=given.get("plain", deployed),
    )


# ── saved adapters and bare models, for `vgrout evaluate`, `sample` and `problems check`


def policy_of(saved: Saved) -> Policy:
    """The model with a saved adapter. Raises Refused, one line, for files that do not fit one another."""
    if is_small(saved.model):
        torch.set_num_threads(1)  # for matrices this small a second thread only costs
    return load.load_saved(saved)


def score(
    policy: Policy,
    grader: Grader,
    cfg: Config,
    problems: Sequence[Task],
    samples: int,
    flaws: Sequence[str],
) -> dict[str, Eval]:
    """Rates of the untrained model, of the deployed one, and of the deployed one without hints, if there are any.

    Answers are drawn from the same streams as in the run's final evaluation.
    """

    @contextmanager
    def bar(side: str, total: int) -> Generator[Callable[[], object]]:
        with tqdm(total=total, desc=f"evaluating {side}", unit="answer", disable=None) as shown:
            yield shown.update

    given = answers_by_side(policy, grader, cfg, problems, samples, bar)
    return {side: Eval.of(of_side, flaws) for side, of_side in given.items()}


def answers_to(
    task: Any,
    policy: Policy,
    side: Side,
    cfg: Config,
    n: int,
    grader: Grader | None,
) -> list[tuple[Completion, Verdict | None]]:
    """n answers by one of a run's models, each with its verdict; None: nothing grades it. task: it has messages.

    Every model gets the same random numbers: what differs is the model.
    """
    with as_side(policy, side):
        (submitted,) = sample_and_submit(
            policy,
            grader,
            [task],
            n,
            sampling=cfg.sampling,
            max_new=cfg.scale.max_new,
            stream=torch_stream(cfg.run.seed, "sample-command", 0),
        )
    given: list[tuple[Completion, Verdict | None]] = []
    for one in submitted:
        given.append((one.rollout, one.verdict.result() if one.verdict else None))
    return given


def texts_of_model(
    model: str | Path,
    prompts: Sequence[tuple[Message, ...]],
    n: int,
    *,
    max_new: int,
    thinks: bool,
) -> list[list[str]]:
    """n answers of a bare model to each prompt, without their thoughts."""
    device, dtype = load.pick_device(model, "auto")
    lm = replace(load.load_language_model(model, device=device, dtype=dtype), thinking=thinks)
    rendered = [lm.render(messages) for messages in prompts]
    stream = torch_stream(0, "check", 0)
    sampled = sampler.sample(lm, rendered, n, Sampling(), max_new, stream)
    texts: list[list[str]] = []
    for messages, completions in zip(prompts, sampled, strict=True):
        in_thought = lm.opens_thought(messages)
        of_prompt: list[str] = []
        for completion in completions:
            of_prompt.append(to_grade(completion.text, in_thought, lm.marks))
        texts.append(of_prompt)
    return texts
