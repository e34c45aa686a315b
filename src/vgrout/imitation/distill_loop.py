"""The training loop of distillation: sample answers, compare student and teacher, step, record.

Student and teacher are evaluated before the first step, the student again as the trainer is: during
training on validation problems, at the end on test problems.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loguru import logger
from tabulate import tabulate

from vgrout.data import Grade, Rollout, Task, Ungraded
from vgrout.envs.base import without_hint
from vgrout.errors import Diverged, NothingAligned
from vgrout.files import read_json, to_json
from vgrout.generation import graded, sample_and_submit
from vgrout.guard.detectors import MAX_SKIPPED, diverged
from vgrout.heldout import answers
from vgrout.imitation.distill_methods import METHODS, StepLosses
from vgrout.imitation.distill_task import DistillTask
from vgrout.imitation.trainable import (
    AdapterOnly,
    FullModel,
    SideRates,
    Trainable,
    hack_and_solve,
    metadata,
    model_hashes,
)
from vgrout.metrics import Eval, Rate
from vgrout.model.load import budget_of, device_and_dtype, load_source
from vgrout.model.policy import LanguageModel
from vgrout.optim import Update
from vgrout.runs.context import RunContext
from vgrout.runs.recorder import StepRecorder, rollout_record
from vgrout.table import Columns, col
from vgrout.torch_rng import torch_stream


@dataclass(frozen=True, kw_only=True)
class DistillRow(Columns):
    """One step of a distillation."""

    n: int = col("d", "answers in the step")
    dropped: int = col("d", "answers that the sandbox could not grade (still learnt from)")
    hack_s: Rate = col("frac", "answers that hack", head="hack %")
    solve_s: Rate = col("frac", "answers that the reference accepts", head="solve %")
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
    aligned: float | None = col(
        ".2f", "share of the student's tokens after an answer's first that are aligned", when="uld"
    )
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
    """Evaluate student and teacher, take the remaining steps, evaluate the student, and report.

    Raises:
        Refused: before the first step, if the models do not fit each other, or are not those that
            the resumed run had.
        Interrupted, Diverged, NothingAligned: with the run directory up to date.
    """
    distillation = Distillation(task, run)
    before = distillation.evaluate_before()
    recorder = distillation.recorder
    for step in run.steps(range(len(recorder.rows), task.cfg.scale.steps)):
        distillation.take_step(step)
    recorder.report(distillation.evaluate_after(before))
    # after its last evaluation: such a run says as much as a finished one
    if recorder.nothing_aligned():
        raise NothingAligned(
            "no token of the teacher's answers but the first was ever aligned with one of the student's, so ULD had "
            f"nothing to compare: --student {task.settings.student} has no tokens for how they begin",
            "give another --student or --teacher, or --uld-lambda 0",
        )


class Distillation:
    """The models, problems and files of one run of distillation, and what is done with them."""

    def __init__(self, task: DistillTask, run: RunContext) -> None:
        """Load the models and open the run's files; on a resume, restore the last checkpoint."""
        settings, cfg = task.settings, task.cfg
        self.task = task
        self.run = run
        self.cfg = cfg
        logger.debug(f"{to_json(task.plan())}\n{run.grader.description}")

        self.student, self.teacher_model = load_models(task)
        assert settings.method
        self.method = METHODS[settings.method](task, self.student, self.teacher_model)
        self.behaviour = self.method.behaviour_model(self.student, self.teacher_model)

        self.problems = task.inputs.splits(cfg, self.student, self.teacher_model)
        self.test = self.problems.balanced("test", cfg.eval.final_n_prompts)
        self.val = self.problems.balanced("val", cfg.eval.eval_n_prompts)

        trains = FullModel if settings.full else AdapterOnly
        self.learner: Trainable = trains(self.student, cfg.opt, cfg.scale.steps)
        self.recorder = DistillRecorder(task, run, self.learner)
        columns: set[str] = {settings.method}
        if task.anchor:
            columns.add("anchor")
        self.recorder.open(
            {
                "hashes": model_hashes(student=self.student, teacher=self.teacher_model),
                "models": {
                    "student": task.student.identity(),
                    "teacher": task.teacher_model.identity(),
                },
                **run.stamp,
            },
            columns,
        )

    # ── evaluation before and after

    def evaluate_before(self) -> Path:
        """Evaluate student and teacher before the first step; returns the file that has the rates.

        A resumed run finds the file there and evaluates neither again.
        """
        file = self.run.path / "before.json"
        if not file.is_file():
            logger.info("evaluating student and teacher on held-out problems …")
            rates = {
                "start": self.evaluate("start", self.student, self.test),
                "teacher": self.evaluate("teacher", self.teacher_model, self.test),
            }
            self.run.dir.write_json(file.name, rates)
        return file

    def evaluate_after(self, before: Path) -> dict[str, SideRates]:
        """Evaluate the student; returns its rates with those of the evaluation before.

        The student is also evaluated on prompts without a hint ("plain").

        Raises:
            Interrupted: a stop was requested before the evaluation was done.
        """
        logger.info("final evaluation on held-out problems …")
        sides = read_json(before)
        for name, problems in (
            ("deployed", self.test),
            ("plain", [without_hint(p) for p in self.test]),
        ):
            self.run.raise_if_stopped("interrupted before the final evaluation was done")
            sides[name] = self.evaluate(name, self.student, problems)
        return sides

    def evaluate(self, name: str, lm: LanguageModel, on: Sequence[Task]) -> dict[str, object]:
        """Rates of a model on problems. All such evaluations of a run share their sampling noise.

        name: for the clock.
        """
        cfg = self.cfg
        with self.run.clock(f"evaluation, {name}"):
            graded_answers = answers(
                lm, self.run.grader, on, cfg.eval.final_samples, cfg, cfg.scale.steps, "final"
            )
            return Eval.of(graded_answers, self.problems.flaws).as_json()

    # ── one step

    def take_step(self, step: int) -> None:
        """Sample and grade answers, learn from them, evaluate if that is due, and record the row.

        Raises:
            Diverged: loss or gradient was not finite for several steps in a row.
            NothingAligned: there was nothing to learn from for several steps in a row.
        """
        clock = self.run.clock
        clock.reset()
        rollouts, grades = self.sample_answers(step)
        with clock("fb"):
            learnt = self.method.learn(self.learner, rollouts, step)
            update = self.learner.step(learnt is not None and math.isfinite(learnt["loss"]))
        with clock("eval"):
            deployed = self.evaluate_student(step) if self.cfg.evaluates(step) else None
        row = self.row_of(step, rollouts, grades, learnt, update, deployed)
        self.recorder.record(row, rollouts, grades, untranslated=learnt is None)

    def sample_answers(self, step: int) -> tuple[list[Rollout], list[Grade | Ungraded]]:
        """Sampled answers to this step's problems, and the grade of each."""
        cfg = self.cfg
        settings = self.task.settings
        clock = self.run.clock
        problems = self.problems.draw(cfg.run.seed, step, cfg.scale.prompts_per_step)
        with clock("gen"):
            submitted = sample_and_submit(
                self.behaviour,
                self.run.grader,
                problems,
                settings.group,
                sampling=self.method.sampling,
                max_new=cfg.scale.max_new,
                stream=torch_stream(cfg.run.seed, "distill", step),
            )
        with clock("grade"):
            graded_completions = graded(submitted)
        grades: list[Grade | Ungraded] = []
        for of_problem in graded_completions:
            grades += [answer.grade for answer in of_problem]
        rollouts: list[Rollout] = []
        for of_problem in submitted:
            for s in of_problem:
                rollouts.append(
                    Rollout.of(s.problem, s.prompt_ids, s.completion, source=self.method.source)
                )
        return rollouts, grades

    def evaluate_student(self, step: int) -> Eval:
        """Evaluate the student on the validation problems."""
        return Eval.of(
            answers(
                self.student,
                self.run.grader,
                self.val,
                self.task.settings.group,
                self.cfg,
                step,
            ),
            self.problems.flaws,
        )

    def row_of(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        grades: Sequence[Grade | Ungraded],
        learnt: StepLosses | None,
        update: Update | None,
        deployed: Eval | None,
    ) -> DistillRow:
        """The table's row of a step. Without an update, the step's losses are left out."""
        known = [grade for grade in grades if isinstance(grade, Grade)]
        measured: dict[str, object] = {}
        if update is not None and learnt is not None:
            measured = {**learnt, "gn": update.gn, "lr": update.lr}
        return DistillRow.of(
            self.run.clock,
            step=step,
            n=len(rollouts),
            dropped=len(rollouts) - len(known),
            solve_s=Rate.of(grade.solved for grade in known),
            hack_s=Rate.of(grade.hacked for grade in known),
            ended=Rate.of(rollout.whole for rollout in rollouts),
            skipped=int(update is None),
            hack_deploy=deployed.hack.value if deployed else None,
            solve_deploy=deployed.solve.value if deployed else None,
            **measured,
        )


def load_models(task: DistillTask) -> tuple[LanguageModel, LanguageModel]:
    """Load student and teacher model, with the token budget that holds while both are in memory."""
    full = task.settings.full
    device, dtype = device_and_dtype(task.cfg)
    student = load_source(task.student, "--student", device, dtype, adapter=not full)
    teacher_model = load_source(task.teacher_model, "--teacher", device, dtype)
    budget = budget_of(task.cfg, student, beside=task.teacher_model.numbers, full=full)
    return replace(student, budget=budget), replace(teacher_model, budget=budget)


class DistillRecorder(StepRecorder[DistillRow]):
    """Writes the files of a distillation."""

    def __init__(self, task: DistillTask, run: RunContext, learner: Trainable) -> None:
        settings = task.cfg.run
        super().__init__(
            run,
            DistillRow,
            {"learner": learner},
            every=settings.checkpoint_every,
            keep=settings.checkpoint_keep,
        )
        self.task = task
        self.learner = learner

    def record(
        self,
        row: DistillRow,
        rollouts: Sequence[Rollout],
        grades: Sequence[Grade | Ungraded],
        *,
        untranslated: bool,
    ) -> None:
        """Write a step's row and answers, and save student and checkpoint where that is due.

        untranslated: none of the answers could be written in the student's tokens.

        Raises:
            Diverged: loss or gradient was not finite for several steps in a row.
            NothingAligned: there was nothing to learn from for several steps in a row.
        """
        run = self.run
        step = row.step
        self.rows.append(row)
        why = diverged([r.skipped for r in self.rows])
        last = step + 1 == self.task.cfg.scale.steps
        closing = run.vote_stop() or bool(why) or last
        lines: list[dict[str, object]] = []
        for rollout, grade in zip(rollouts, grades, strict=True):
            if isinstance(grade, Ungraded):
                logger.warning(
                    f"step {step}, problem {rollout.problem.id}: not graded: {grade.reason}"
                )
                continue
            prompt = self.learner.lm.prompt_text(rollout.problem.messages)
            lines.append({"step": step, **rollout_record(rollout, grade, prompt)})
        with run.clock("save"):
            self.write(row, lines)
            if row.hack_deploy is not None:
                self.save(f"ckpt_step{step + 1:04d}")
            if closing:
                self.save("train")
            self.keep(step, closing)
        if why and untranslated:
            settings = self.task.settings
            raise NothingAligned(
                f"step {step}: nothing was learnt in {MAX_SKIPPED} steps in a row: no answer of --teacher "
                f"{settings.teacher} can be written in the tokens of --student {settings.student}",
                "give another --student or --teacher, or a longer --max-new",
            )
        if why:
            raise Diverged(f"step {step}: {why}")

    def nothing_aligned(self) -> bool:
        """Whether ULD's distance was asked for, and no token but the first of answers was ever aligned."""
        aligned = [row.aligned for row in self.rows if row.aligned is not None]
        return self.task.settings.uld_lambda > 0 and bool(aligned) and not any(aligned)

    def save(self, name: str) -> None:
        """Save the student. name: the file's, without an ending."""
        origin = {"method": self.task.settings.method, **self.task.teacher_model.identity()}
        about = metadata(
            self.task.cfg, self.learner.lm, len(self.rows), distilled=json.dumps(origin)
        )
        self.learner.save(self.run.path / name, about)

    def report(self, sides: dict[str, SideRates]) -> None:
        """Write final.json and summary.md: the result in one line, a table by flaw, every step.

        sides: rates by model and prompts, as `evaluate_after` returns them.
        """
        settings = self.task.settings
        record: dict[str, object] = {"schema": "distill_v1", "run": settings.run_id}
        for name in ("seed", "steps", "method", "student", "teacher"):
            record[name] = getattr(settings, name)
        record |= {"sides": sides, **self.run.stamp}
        self.run.dir.write_json("final.json", record)

        both = {side: hack_and_solve(rates) for side, rates in sides.items()}
        line = (
            f"{settings.run_id}: {both['deployed']}, before {both['start']}, "
            f"teacher {both['teacher']} "
            f"(n = {sides['deployed']['hack'][1]}, held-out {self.task.cfg.env.held_out})"
        )
        if self.nothing_aligned():
            line += "; NOTHING WAS ALIGNED: this was cross-entropy almost alone"
        table = tabulate(
            rates_by_flaw(sides), headers="keys", tablefmt="github", disable_numparse=True
        )
        self.finish(line, table, record)


def rates_by_flaw(sides: dict[str, SideRates]) -> list[dict[str, str]]:
    """The rows of the table by flaw: hack and solve rates of start, teacher and trained student."""
    rows: list[dict[str, str]] = []
    for mode in sides["deployed"]["by_mode"]:
        row: dict[str, str] = {"flaw": mode}
        for side in ("start", "teacher", "deployed"):
            for what in ("hack", "solve"):
                rate = Rate(*sides[side]["by_mode"][mode][what])
                row[f"{side} {what}"] = rate.percent
        rows.append(row)
    return rows
