"""The loop of distillation: answers → loss against the teacher → step → row. Evaluates like the trainer."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from loguru import logger
from tabulate import tabulate

from vgrout.data import Grade, Rollout, Task, Ungraded
from vgrout.envs.base import without_hint
from vgrout.errors import Diverged
from vgrout.files import read_json, to_json
from vgrout.guard.detectors import diverged
from vgrout.heldout import answers
from vgrout.imitation.distill_methods import METHODS
from vgrout.imitation.distill_task import DistillTask
from vgrout.imitation.trainable import (
    AdapterOnly,
    FullModel,
    Trainable,
    hack_and_solve,
    metadata,
    model_hashes,
)
from vgrout.metrics import Eval, Rate
from vgrout.model.load import budget_of, device_and_dtype, load_source
from vgrout.model.policy import LanguageModel
from vgrout.rng import torch_stream
from vgrout.rollout import graded, sample_and_submit
from vgrout.runs.context import RunContext
from vgrout.runs.recorder import StepRecorder, rollout_record
from vgrout.table import Columns, col


@dataclass(frozen=True, kw_only=True)
class DistillRow(Columns):
    """One step of a distillation."""

    n: int = col("d", "answers in the step")
    dropped: int = col("d", "answers that the sandbox could not grade (still learnt from)")
    hack_s: Rate = col("frac", "answers that hack", head="hack %")
    solve_s: Rate = col("frac", "answers that pass the reference tests", head="solve %")
    hack_deploy: float | None = col(
        ".2f", "hack rate of the student, held-out problems", head="deployed hack %"
    )
    solve_deploy: float | None = col(".2f", "solve rate of the student", head="deployed solve %")
    ended: Rate = col("frac", "answers that end by themselves")
    loss: float | None = col("+.3f", "loss, the anchor's share included", head="loss")
    kl: float | None = col(
        ".3f",
        "KL(student ‖ teacher), nats per token",
        when="minillm",
        should="falls; ELSE raise --lr",
    )
    ce: float | None = col(
        ".3f", "cross-entropy on the teacher's answers, nats per token", when="uld", should="falls"
    )
    distance: float | None = col(".3f", "distance at aligned positions, 0 to 2", when="uld")
    aligned: float | None = col(".2f", "share of the student's tokens that are aligned", when="uld")
    anchor: float | None = col(
        ".3f", "language-model loss on the anchor's text, nats per token", when="anchor"
    )
    gn: float | None = col(".1e", "gradient norm before clipping")
    lr: float | None = col(".0e", "learning rate")
    skipped: int = col("d", "1: loss or norm not finite, optimiser not stepped", should="0")
    gen: float = col(".2f", "seconds sampling")
    grade: float = col(".2f", "seconds waiting for grades after sampling ended")
    fb: float = col(".2f", "seconds forward, backward, step")
    eval: float | None = col(".2f", "seconds evaluating")
    sec: float = col(".2f", "seconds in all", head="seconds")


def distil(task: DistillTask, run: RunContext) -> None:
    """Evaluate student and teacher, take every remaining step, evaluate the student again, and report.

    Raises:
        Refused: before the first step, models that do not fit each other, or that the resumed run did not have.
        Interrupted, Diverged: with the run directory up to date.
    """
    settings, cfg, clock = task.settings, task.cfg, run.clock
    seed, max_new, steps = cfg.run.seed, cfg.scale.max_new, cfg.scale.steps
    logger.debug(f"{to_json(task.plan())}\n{run.grader.description}")
    device, dtype = device_and_dtype(cfg)
    student = load_source(task.student, "--student", device, dtype, adapter=not settings.full)
    teacher = load_source(task.teacher, "--teacher", device, dtype)
    budget = budget_of(cfg, student, beside=task.teacher.numbers, full=settings.full)
    student, teacher = replace(student, budget=budget), replace(teacher, budget=budget)
    assert settings.method
    method = METHODS[settings.method](task, student, teacher)
    problems = task.inputs.splits(cfg, student, teacher)
    learner = (FullModel if settings.full else AdapterOnly)(student, cfg.opt, steps)
    recorder = DistillRecorder(task, run, learner)
    recorder.open(
        {
            "hashes": model_hashes(student=student, teacher=teacher),
            "models": {"student": task.student.identity(), "teacher": task.teacher.identity()},
            **run.stamp,
        },
        {settings.method} | ({"anchor"} if task.anchor else set()),
    )

    def final(name: str, lm: LanguageModel, on: Sequence[Task]) -> dict[str, Any]:
        """One side of the final evaluation, with the same noise for all sides."""
        with clock(f"evaluation, {name}"):
            return Eval.of(
                answers(lm, run.grader, on, cfg.eval.final_samples, cfg, steps, "final"),
                problems.flaws,
            ).as_json()

    test = problems.balanced("test", cfg.eval.final_n_prompts)
    val = problems.balanced("val", cfg.eval.eval_n_prompts)
    before = run.path / "before.json"  # written once per run
    if not before.is_file():
        logger.info("evaluating student and teacher on held-out problems …")
        run.dir.write_json(
            before.name,
            {k: final(k, lm, test) for k, lm in (("start", student), ("teacher", teacher))},
        )

    behaviour = method.behaviour_model(student, teacher)
    for step in run.steps(range(len(recorder.rows), steps)):
        clock.reset()
        prompts = problems.draw(seed, step, cfg.scale.prompts_per_step)
        with clock("gen"):
            submitted = sample_and_submit(
                behaviour,
                run.grader,
                prompts,
                settings.group,
                sampling=method.sampling,
                max_new=max_new,
                stream=torch_stream(seed, "distill", step),
            )
        with clock("grade"):
            grades = [a.grade for a in chain(*graded(submitted))]
        rollouts = [
            Rollout.of(s.problem, s.prompt_ids, s.completion, source=method.source)
            for s in chain(*submitted)
        ]
        with clock("fb"):
            learnt = method.learn(learner, rollouts, step)
            update = learner.step(math.isfinite(learnt["loss"]))
        with clock("eval"):
            due = cfg.evaluates(step)
            deployed = (
                Eval.of(
                    answers(student, run.grader, val, settings.group, cfg, step), problems.flaws
                )
                if due
                else None
            )
        known = [g for g in grades if isinstance(g, Grade)]
        row = DistillRow.of(
            clock,
            step=step,
            n=len(rollouts),
            dropped=len(rollouts) - len(known),
            solve_s=Rate.of(g.solved for g in known),
            hack_s=Rate.of(g.hacked for g in known),
            ended=Rate.of(r.finished for r in rollouts),
            **(learnt | {"gn": update.gn, "lr": update.lr} if update else {}),
            skipped=int(update is None),
            hack_deploy=deployed.hack.value if deployed else None,
            solve_deploy=deployed.solve.value if deployed else None,
        )
        recorder.record(row, rollouts, grades)

    logger.info("final evaluation on held-out problems …")
    sides = read_json(before)
    for name, on in (("deployed", test), ("plain", [without_hint(p) for p in test])):
        run.raise_if_stopped("interrupted before the final evaluation was done")
        sides[name] = final(name, student, on)
    recorder.report(sides)


class DistillRecorder(StepRecorder[DistillRow]):
    """The recorder of a distillation."""

    def __init__(self, task: DistillTask, run: RunContext, learner: Trainable) -> None:
        every, keep = task.cfg.run.checkpoint_every, task.cfg.run.checkpoint_keep
        super().__init__(run, DistillRow, {"learner": learner}, every, keep)
        self.task, self.learner = task, learner

    def record(
        self, row: DistillRow, rollouts: Sequence[Rollout], grades: Sequence[Grade | Ungraded]
    ) -> None:
        """Write the row, its answers, and what is due of student and checkpoint. Raises Diverged."""
        run, step = self.run, row.step
        self.rows.append(row)
        why = diverged([r.skipped for r in self.rows])
        closing = run.vote_stop() or bool(why) or step + 1 == self.task.cfg.scale.steps
        lines = []
        for rollout, grade in zip(rollouts, grades, strict=True):
            if isinstance(grade, Ungraded):
                logger.warning(
                    f"step {step}, problem {rollout.problem.id}: not graded: {grade.reason}"
                )
            else:
                prompt = self.learner.lm.prompt_text(rollout.problem.messages)
                lines.append({"step": step, **rollout_record(rollout, grade, prompt)})
        with run.clock("save"):
            self.write(row, lines)
            if row.hack_deploy is not None:
                self.save(f"ckpt_step{step + 1:04d}")
            if closing:
                self.save("train")
            self.keep(step, closing)
        if why:
            raise Diverged(f"step {step}: {why}")

    def save(self, name: str) -> None:
        """Save the student. name: the file's, without an ending."""
        origin = json.dumps({"method": self.task.settings.method, **self.task.teacher.identity()})
        about = metadata(self.task.cfg, self.learner.lm, len(self.rows), distilled=origin)
        self.learner.save(self.run.path / name, about)

    def report(self, sides: dict[str, Any]) -> None:
        """Write final.json and summary.md: the result in one line, a table by flaw, every step."""
        settings = self.task.settings
        record: dict[str, Any] = {"schema": "distill_v1", "run": settings.run_id}
        record |= {
            name: getattr(settings, name)
            for name in ("seed", "steps", "method", "student", "teacher")
        }
        record |= {"sides": sides, **self.run.stamp}
        self.run.dir.write_json("final.json", record)
        both = {side: hack_and_solve(rates) for side, rates in sides.items()}
        line = (
            f"{settings.run_id}: {both['deployed']}, before {both['start']}, teacher {both['teacher']} "
            f"(n = {sides['deployed']['hack'][1]}, held-out problems and markers)"
        )
        heads = [
            (side, what) for side in ("start", "teacher", "deployed") for what in ("hack", "solve")
        ]
        rows = [
            {"flaw": m}
            | {f"{s} {what}": Rate(*sides[s]["by_mode"][m][what]).percent for s, what in heads}
            for m in sides["deployed"]["by_mode"]
        ]
        self.finish(
            line, tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True), record
        )
