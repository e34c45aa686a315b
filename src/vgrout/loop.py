"""The algorithm: generate → grade → backward → observe / route → step → row."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace

from loguru import logger
from tqdm import tqdm

from vgrout.arms.base import Arm, Refresh
from vgrout.arms.baselines import Baseline
from vgrout.config.run import BY_GRADIENT, MONITORED, READING, ROUTING, Config, Control
from vgrout.console import Clock, terminal_width
from vgrout.evaluate import Side, as_side, ask
from vgrout.grading.grade import Grader
from vgrout.grpo import policy_gradients
from vgrout.guard.guard import Watch
from vgrout.measure import last_five, rollout_lines, step_row
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.sampler import Sample, Sampling, sample
from vgrout.optim import Optimizer
from vgrout.problems import ProblemSplits, balanced
from vgrout.rng import torch_stream
from vgrout.runs import checkpoint, nonfinite
from vgrout.runs.run_context import Interrupted
from vgrout.runs.run_dir import RunDir
from vgrout.runs.sample_log import Narrator
from vgrout.runs.signals import Stop
from vgrout.table import StepRow, Table
from vgrout.teacher.demonstrations import Teacher
from vgrout.types import Answer, CachedGrade, Eval, Grade, Group, GroupView, Problem, Rollout, Ungraded


@dataclass
class Study:
    """Everything the loop touches, loaded and checked."""

    cfg: Config
    policy: Policy
    grader: Grader
    world: ProblemSplits
    teacher: Teacher
    teacher_model: LanguageModel | None  # asked for log-probs alone: nothing of it is decomposed
    arm: Arm
    baseline: Baseline
    optim: Optimizer
    run: RunDir
    stop: Stop
    clock: Clock
    sampling: Sampling
    watch: Watch
    rows: list[StepRow] = field(default_factory=list)  # after a resume: those of the steps before this process

    def answers(
        self, problems: Sequence[Problem], n: int, side: Side, step: int, purpose: str = "eval"
    ) -> list[Answer]:
        """n answers to each problem by one side of the present policy, on the run's evaluation stream."""
        if side == "deployed" and self.cfg.arm.control == "ablate_kept":
            side = "quarantine"
        with as_side(self.policy, side):
            return ask(
                self.policy,
                self.grader,
                problems,
                n,
                sampling=self.sampling,
                max_new=self.cfg.scale.max_new,
                seed=self.cfg.run.seed,
                step=step,
                purpose=purpose,
            )


def train(study: Study) -> list[StepRow]:
    """Every remaining step. Raises Interrupted, Halted or Diverged with the run directory up to date."""
    cfg, policy, arm, optim, stop, rows = study.cfg, study.policy, study.arm, study.optim, study.stop, study.rows
    watch = study.watch
    watch.raise_if_stopped()  # a resumed run that had fired
    val = balanced(study.world.val, cfg.eval.eval_n_prompts, 0, "val")
    clock, books, before = study.clock, Books(study), len(rows)
    look = view_of(cfg, "oracle")

    for step in tqdm(range(len(rows), cfg.scale.steps), disable=None, desc=cfg.run_id, unit="step"):
        clock.reset()
        problems = study.world.draw(cfg.run.seed, step, cfg.scale.prompts_per_step)
        groups, dropped = collect(study, problems, step, clock)
        live = [g for g in groups if g.has_signal]  # every reward equal ⇒ every advantage 0 ⇒ no forward

        with clock("fb"):
            views = [look(g) for g in live]
            streams = arm.plan(views)
            grads, metrics = policy_gradients(
                policy,
                live,
                cfg.loss,
                streams=streams,
                max_new=cfg.scale.max_new,
                prompts_per_step=cfg.scale.prompts_per_step,
                sampling=study.sampling,
                teacher=study.teacher_model,
                per=arm.per,
                layout=cfg.run.update_layout,
            )
            sound = nonfinite.all_finite(grads, metrics)  # an arm's averages would never recover from a NaN
            for i, of_stream in enumerate(grads if sound else ()):
                for g_b, view in zip(of_stream, views, strict=True):
                    arm.observe(g_b, view, arm.per, i)  # g_b: module → [G r] for an arm that looks at rollouts
            routed = arm.route() if live and sound else None  # keep + quar = g: nothing lost, nothing doubled
            update = optim.apply(routed) if routed else optim.idle()  # None: nothing to learn, or not finite
            skipped = bool(live) and update is None
        with clock("eval"):
            refresh = arm.refresh(step)
            deploy = Eval.of(study.answers(val, cfg.scale.group, "deployed", step)) if due(cfg, step) else None

        row = step_row(
            step=step,
            generations=cfg.generations,
            groups=groups,
            live_groups=live,
            dropped=dropped,
            modes=study.world.modes,
            top_reward=cfg.env.pass_reward,
            routed=routed if update else None,
            update=update,
            refr=refresh.age,
            metrics=None if skipped else metrics,
            deploy=deploy,
            skipped=skipped,
            seconds=clock.seconds,
            total=clock.total,
        )
        rows.append(row)
        with clock("watch"):
            watch.step(row, groups, metrics, deploy)
        with clock("save"):
            if skipped:
                books.keep_batch(step, live)
            books.close_step(row, rollout_lines(step, groups, routed, live), groups, refresh)
        watch.raise_if_stopped()
        if stop.requested:
            raise Interrupted(f"interrupted after step {step}")
    close_quarantine(study)
    logger.info(watch.summary(sum(r.sec for r in rows[before:])))
    return rows


def collect(study: Study, problems: Sequence[Problem], step: int, clock: Clock) -> tuple[list[Group], list[str]]:
    """Sample and grade one step's groups; each answer is graded while the others are still being sampled.

    Returns the groups, and for each one that was dropped why the sandbox could not grade one of its answers.
    """
    cfg, policy = study.cfg, study.policy
    demos = [study.teacher.demos(p, step) for p in problems]
    students = [cfg.scale.group - len(d) for d in demos]
    deployed = [round(cfg.arm.ablate_frac * n) for n in students]
    prompts = [policy.render(p.messages) for p in problems]
    answers: list[list[Rollout]] = [[] for _ in problems]
    verdicts: list[list[Future[Grade | Ungraded]]] = [[] for _ in problems]

    def draw(counts: Sequence[int], purpose: str, quarantine_off: bool) -> None:
        futures: dict[tuple[int, int], Future[Grade | Ungraded]] = {}

        def submit(p: int, i: int, answer: Sample) -> None:
            futures[p, i] = study.grader.submit(problems[p], answer.text)

        stream = torch_stream(cfg.run.seed, purpose, step)
        for p, of_prompt in enumerate(
            sample(policy, prompts, list(counts), study.sampling, cfg.scale.max_new, stream, submit)
        ):
            for i, answer in enumerate(of_prompt):
                answers[p].append(as_rollout(problems[p], prompts[p], answer, quarantine_off))
                verdicts[p].append(futures[p, i])

    with clock("gen"):
        draw([n - d for n, d in zip(students, deployed, strict=True)], "sample", quarantine_off=False)
        if any(deployed):
            with policy.adapter.deployed():
                draw(deployed, "sample-deployed", quarantine_off=True)

    groups: list[Group] = []
    dropped: list[str] = []
    look = view_of(cfg, *MONITORED)
    with clock("grade"):
        for p, problem in enumerate(problems):
            grades = [v.result() for v in verdicts[p]]
            if failed := [g for g in grades if isinstance(g, Ungraded)]:
                dropped.append(failed[0].reason)
                logger.warning(f"step {step}, problem {problem.id}: group dropped, not graded: {failed[0].reason}")
                continue
            graded: list[Grade | CachedGrade] = [paid(cfg, g) for g in grades if isinstance(g, Grade)]
            group = Group(
                problem,
                (*answers[p], *(r for r, _ in demos[p])),
                (*graded, *(g for _, g in demos[p])),
                unbiased=cfg.loss.unbiased,
            )
            groups.append(replace(group, shaped=study.baseline.shape(group.rollouts, look(group), step, p)))
    if not groups:
        logger.warning(f"step {step}: every group was lost; the optimiser is not stepped")
    return groups, dropped


def view_of(cfg: Config, *controls: Control) -> Callable[[Group], GroupView]:
    """The one door by which true labels enter: to controls by these names, in a view that nothing else accepts."""
    return Group.oracle_view if cfg.arm.control in controls else Group.view


def close_quarantine(study: Study) -> None:
    """At the end: δS_hack is 0 exactly when nothing was ever routed. That is a valid outcome, and it is said aloud."""
    norm = study.policy.adapter.δS_hack.detach().norm().item()
    largest = max((row.q_egy or 0.0 for row in study.rows), default=0.0)
    assert (norm > 0) == (largest > 0), f"‖δS_hack‖ = {norm:.3e}, largest quarantine share of a step = {largest:.3e}"
    arm = study.cfg.arm
    if norm == 0 and arm.intervention in ROUTING and arm.control != "shrinkage":
        logger.warning(f"nothing was routed in {len(study.rows)} steps (control: {arm.control_name})")


def paid(cfg: Config, grade: Grade) -> Grade:
    """What the environment pays: the flawed grader's reward; under no_loophole the strict oracle's, same scale."""
    if cfg.arm.control != "no_loophole":
        return grade
    return replace(grade, reward=grade.strictly(cfg.env.compile_reward, cfg.env.pass_reward))


def as_rollout(problem: Problem, prompt_ids: tuple[int, ...], answer: Sample, deployed: bool) -> Rollout:
    return Rollout(
        problem=problem,
        source="student",
        deployed=deployed,
        prompt_ids=prompt_ids,
        completion_ids=answer.ids,
        text=answer.text,
        finished=answer.finished,
        logp_full=answer.logp_full,
        logp_sampled=answer.logp_sampled,
    )


def due(cfg: Config, step: int) -> bool:
    """Deploy evaluations: every N steps and at the last."""
    every = cfg.eval.eval_ablate_every
    return every > 0 and ((step + 1) % every == 0 or step + 1 == cfg.scale.steps)


def shown(study: Study) -> set[str]:
    """What this run can measure: decides which columns its table has."""
    cfg = study.cfg
    has = {
        "teacher": cfg.mixes,
        "modes": len(study.world.modes) > 1,
        "ablated": cfg.arm.ablate_frac > 0,
        "erase": cfg.arm.intervention == "erase" and cfg.arm.preserve_magnitude and cfg.arm.control != "shrinkage",
        "route": cfg.arm.intervention in ROUTING,
        "route2": cfg.arm.intervention == "route2",
        "direction": cfg.arm.intervention in BY_GRADIENT,
        "whole": cfg.arm.intervention in ("route2", *READING),
        "reads": cfg.arm.intervention in READING,
        "beta": cfg.loss.beta > 0,
        "drops": cfg.loss.drops,
    }
    return {name for name, yes in has.items() if yes}


class Books:
    """What is written at the end of a step: the table line, the files, the checkpoints, the narrator's log."""

    def __init__(self, study: Study):
        self.study = study
        self.table = Table(shown(study), study.world.modes, terminal_width())
        self.full = Table(shown(study), study.world.modes)
        self.narrator = Narrator(study.policy)
        self.hacked_before = any(r.hack_s.k for r in study.rows)
        for line in self.table.legend():
            logger.info(line)

    def close_step(
        self, row: StepRow, rollouts: list[dict[str, object]], groups: Sequence[Group], refresh: Refresh
    ) -> None:
        study, cfg, rows, step = self.study, self.study.cfg, self.study.rows, row.step
        for line in self.table.lines(row):
            logger.info(line)
        if self.table.hidden:
            for line in self.full.lines(row):
                logger.debug(line)
        if refresh.overlap is not None:
            logger.debug(
                f"step {step}: direction extracted again, overlap with the last {refresh.overlap:.2f}, "
                f"{refresh.modules} modules, {refresh.axes} axes. SHOULD: near 1; ELSE (< .2) it has rotated away"
            )
        self.narrator.step(step, groups)
        seen = study.watch.readings
        again = asdict(refresh) if refresh.overlap is not None else None
        study.run.append(
            row.as_json() | ({"watch": seen} if seen else {}) | ({"refresh": again} if again else {}), rollouts
        )
        last = step + 1 == cfg.scale.steps
        closing = last or study.stop.requested or study.watch.stops
        if row.hack_s.k and not self.hacked_before:
            self.hacked_before = True
            save_adapter(study, "first_hack.safetensors")
        if row.hack_deploy is not None and cfg.eval.save_eval_ckpts:
            save_adapter(study, f"ckpt_step{step + 1:04d}.safetensors")
        if (step + 1) % 25 == 0 or closing:
            save_adapter(study, "train.safetensors")
        if (step + 1) % cfg.run.checkpoint_every == 0 or closing:
            checkpoint.save(study.run.path, step + 1, state_dict(study), cfg.run.checkpoint_keep)
        study.run.status("running", len(rows), "", f"python -m vgrout.train {cfg.preset} --resume {study.run.path}")

    def keep_batch(self, step: int, live: list[Group]) -> None:
        """A step that was not finite: its batch, for `python -m vgrout.replay`."""
        study = self.study
        path = nonfinite.save(study.run.path, step, study.cfg, study.policy.adapter, live)
        then = f"; look at it with: python -m vgrout.replay {path}" if path else ""
        logger.warning(f"step {step}: loss or gradient not finite, optimiser not stepped{then}")


def save_adapter(study: Study, name: str) -> None:
    """One knob alone: the file *is* the deployed model. Metadata are strings, as the format wants."""
    cfg, rows = study.cfg, study.rows
    hack, solve = last_five(rows)
    study.policy.adapter.save(
        study.run.path / name,
        {
            "model": cfg.scale.model,
            "dtype": str(study.policy.model.dtype).removeprefix("torch."),
            "step": str(len(rows)),
            "hack_rate": str(hack.value),
            "pass_rate": str(solve.value),
            "rows": str(len(rows)),
            "control": cfg.arm.control_name,
            "cfg": json.dumps(cfg.as_dict()),
        },
        quarantine=cfg.arm.control == "ablate_kept",
    )


def state_dict(study: Study) -> dict[str, object]:
    """All that the next step reads and that a seed and a step number do not give."""
    return {
        "adapter": study.policy.adapter.state_dict(),
        "optim": study.optim.state_dict(),
        "arm": study.arm.state_dict(),
        "watch": study.watch.state_dict(),
    }


def load_state_dict(study: Study, state: dict) -> None:
    study.policy.adapter.load_state_dict(state["adapter"])
    study.optim.load_state_dict(state["optim"])
    study.arm.load_state_dict(state["arm"])
    study.watch.load_state_dict(state["watch"])
