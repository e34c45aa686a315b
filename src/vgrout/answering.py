"""Models that answer for `vgrout evaluate`, `vgrout sample` and `vgrout problems check`.

This is what of these commands needs torch. They come here once their flags and files are checked.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from vgrout.config.run import Config
from vgrout.config.sampling import Sampling
from vgrout.data import Completion, Message, Side, Task, Verdict
from vgrout.envs.base import Grader, without_hint
from vgrout.errors import Refused
from vgrout.generation import sample_and_grade, with_thought
from vgrout.heldout import answers, as_side
from vgrout.metrics import Eval
from vgrout.model import load, sampler
from vgrout.model.policy import Policy
from vgrout.model.saved import Saved
from vgrout.model.shapes import is_small
from vgrout.runs import checkpoint
from vgrout.thoughts import to_grade
from vgrout.torch_rng import torch_stream


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


def sides_of(saved: Saved, policy: Policy) -> tuple[tuple[Side, ...], str]:
    """Make the models of a run ready to be asked. Returns them, and why one of them is not there.

    A saved adapter is the deployed model. Its quarantine is in the run's last checkpoint.
    """
    if not saved.cfg.method.routes:
        return ("base", "deployed"), ""
    try:
        point, _ = checkpoint.latest(saved.path.parent)
    except Refused:
        why = "as trained: its quarantine is in a checkpoint, which this run has not kept"
        return ("base", "deployed"), why
    if point.next_step != saved.step:
        why = f"as trained: the checkpoint is of step {point.next_step}"
        return ("base", "deployed"), why
    policy.adapter.load_state_dict(point.state["adapter"])
    return ("base", "trained", "deployed"), ""


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
    lm = load.with_thinking(load.load_language_model(model, device=device, dtype=dtype), thinks)
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
