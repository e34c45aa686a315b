"""One estimator for every method: fixed held-out problems, a random stream of its own, the policy as one of its sides.
Commands ask it about saved adapters and bare models.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from vgrout.config.groups import Sampling
from vgrout.config.run import Config
from vgrout.envs.base import Grader, Splits, without_hint
from vgrout.ground import ranks
from vgrout.ground.console import Clock
from vgrout.ground.data import Completion, GradedAnswer, Message, Side, Task, Verdict
from vgrout.ground.errors import Interrupted
from vgrout.ground.metrics import Eval, Final, spaced
from vgrout.ground.thoughts import to_grade
from vgrout.ground.torch_rng import torch_stream
from vgrout.loop.generation import sample_and_grade, with_thought
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
    return sample_and_grade(
        lm,
        grader,
        problems,
        n,
        sampling=cfg.sampling,
        max_new=cfg.scale.max_new,
        stream=torch_stream(cfg.run.seed, purpose, step),
        on_completion=on_completion,
    )


def answers_of_base(
    policy: Policy, grader: Grader, cfg: Config, problems: Sequence[Task]
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


def evaluate_final(
    policy: Policy,
    grader: Grader,
    splits: Splits,
    cfg: Config,
    clock: Clock,
    stop: Callable[[], bool],
) -> Final:
    """All four sides on the same held-out test problems. Equal sides are sampled once: without a quarantine `trained`
    is `deployed`, and where no prompt has a hint `plain` is, too. The base comes first, so that a broken adapter
    cannot disturb it.

    Raises:
        Interrupted: `stop` returned True between two sides.
    """
    problems = splits.balanced("test", cfg.eval.final_n_prompts)

    def sampled(side: Side, problems: Sequence[Task], label: str = "") -> list[GradedAnswer]:
        if stop():
            raise Interrupted("interrupted before the final evaluation was done")
        n, step = cfg.eval.final_samples, cfg.scale.steps
        with (
            clock(f"final evaluation, {side}{label}", total=n * len(problems)) as count,
            as_side(policy, side),
        ):
            return answers(policy, grader, problems, n, cfg, step, "final", count)

    base, deployed = sampled("base", problems), sampled("deployed", problems)
    trained = sampled("trained", problems) if policy.adapter.δS_hack.any() else deployed
    bare = deployed
    if any(problem.plain != problem.messages for problem in problems):
        bare = sampled("deployed", [without_hint(p) for p in problems], " without a hint")
    return Final.of(splits.flaws, base=base, trained=trained, deployed=deployed, plain=bare)


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
    sampled: dict[str, tuple[Side, Sequence[Task]]] = {
        "base": ("base", problems),
        "deployed": ("deployed", problems),
    }
    if any(problem.plain != problem.messages for problem in problems):
        sampled["plain"] = ("deployed", [without_hint(problem) for problem in problems])
    scored: dict[str, Eval] = {}
    n = len(sampled) * len(problems) * samples
    step = cfg.scale.steps
    with tqdm(total=n, desc="evaluating", unit="answer", disable=None) as bar:
        for name, (side, given) in sampled.items():
            with as_side(policy, side):
                graded = answers(policy, grader, given, samples, cfg, step, "final", bar.update)
            scored[name] = Eval.of(graded, flaws)
    return scored


def answers_to(
    messages: tuple[Message, ...],
    problem: Task | None,
    policy: Policy,
    side: Side,
    cfg: Config,
    n: int,
    grader: Grader | None,
) -> list[tuple[Completion, Verdict | None]]:
    """n answers by one of a run's models, each with its verdict; None: the prompt is no problem, or nothing grades it.

    Every model gets the same random numbers: what differs is the model.
    """
    stream = torch_stream(cfg.run.seed, "sample-command", 0)
    max_new = cfg.scale.max_new
    given: list[tuple[Completion, Verdict | None]] = []
    with as_side(policy, side):
        if problem is None or grader is None:
            prompt = policy.render(messages)
            in_thought = policy.opens_thought(messages)
            (completions,) = sampler.sample(policy, [prompt], n, cfg.sampling, max_new, stream)
            for completion in completions:
                given.append((with_thought(policy, completion, in_thought), None))
            return given
        graded = sample_and_grade(
            policy,
            grader,
            [problem],
            n,
            sampling=cfg.sampling,
            max_new=max_new,
            stream=stream,
        )
        for answer in graded:
            given.append((answer.completion, answer.grade))
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
            answer, _ = to_grade(None, completion.text, in_thought)
            of_prompt.append(answer)
        texts.append(of_prompt)
    return texts
