"""The training loop of distillation: sample answers, compare student and teacher, step, record.

Student and teacher are evaluated before the first step, the student again as the trainer is: during
training on validation problems, at the end on test problems.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loguru import logger

from vgrout.envs.base import without_hint
from vgrout.ground.data import Task, Ungraded
from vgrout.ground.io import Diverged, Json, NothingAligned, read_json, to_json
from vgrout.ground.metrics import Eval, Rate
from vgrout.ground.rng import torch_stream
from vgrout.ground.table import Columns, col, markdown
from vgrout.guard.detectors import diverged
from vgrout.imitation.distill_methods import METHODS
from vgrout.imitation.tasks import DistillTask
from vgrout.imitation.trainable import (
    AdapterOnly,
    FullModel,
    hack_and_solve,
    metadata,
    model_hashes,
)
from vgrout.loop.generation import graded, sample_and_submit
from vgrout.loop.heldout import answers
from vgrout.model.load.load import budget_of, device_and_dtype, load_source
from vgrout.model.policy import LanguageModel
from vgrout.runs.context import RunContext
from vgrout.runs.recorder import StepRecorder, rollout_record


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
    for step in run.steps(range(len(distillation.recorder.rows), task.cfg.scale.steps)):
        distillation.take_step(step)
    distillation.report(before | distillation.evaluate_after())
    # after its last evaluation: such a run says as much as a finished one
    if distillation.nothing_aligned():
        raise NothingAligned(
            "no token of the teacher's answers but the first was ever aligned with one of the "
            "student's, so ULD had nothing to compare: "
            f"--student {task.settings.student} has no tokens for how they begin",
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

        device, dtype = device_and_dtype(cfg)
        student = load_source(task.student, "--student", device, dtype, adapter=not settings.full)
        teacher_model = load_source(task.teacher_model, "--teacher", device, dtype)
        # that holds while both are in memory
        budget = budget_of(cfg, student, beside=task.teacher_model.numbers, full=settings.full)
        asked = {"thinking": cfg.env.thinking, "preserve_thinking": cfg.env.preserve_thinking}
        self.student = replace(student, budget=budget, **asked)
        self.teacher_model = replace(teacher_model, budget=budget, **asked)
        self.method = METHODS[settings.method](task, self.student, self.teacher_model)
        self.problems = task.inputs.splits(cfg, self.student, self.teacher_model)
        self.test = self.problems.balanced("test", cfg.eval.final_n_prompts)
        self.val = self.problems.balanced("val", cfg.eval.eval_n_prompts)

        trains = FullModel if settings.full else AdapterOnly
        self.learner = trains(self.student, cfg.opt, cfg.scale.steps)
        self.recorder = StepRecorder(
            run,
            DistillRow,
            {"learner": self.learner},
            every=cfg.run.checkpoint_every,
            keep=cfg.run.checkpoint_keep,
        )
        hashes = model_hashes(student=self.student, teacher=self.teacher_model)
        columns: set[str] = {settings.method}
        if task.anchor:
            columns.add("anchor")
        self.recorder.open({"hashes": hashes, "models": task.models(), **run.stamp}, columns)

    # ── evaluations

    def evaluate_before(self) -> dict[str, Json]:
        """Rates of student and teacher before the first step; a resumed run reads them."""
        file = self.run.path / "before.json"
        if not file.is_file():
            logger.info("evaluating student and teacher on held-out problems …")
            rates = {
                "start": self.evaluate("start", self.student, self.test),
                "teacher": self.evaluate("teacher", self.teacher_model, self.test),
            }
            self.run.dir.write_json(file.name, rates)
        return read_json(file)

    def evaluate_after(self) -> dict[str, Json]:
        """Rates of the student, and on prompts without a hint ("plain").

        Raises:
            Interrupted: a stop was requested before the evaluation was done.
        """
        logger.info("final evaluation on held-out problems …")
        rates: dict[str, Json] = {}
        plain = [without_hint(p) for p in self.test]
        for name, problems in (("deployed", self.test), ("plain", plain)):
            self.run.raise_if_stopped("interrupted before the final evaluation was done")
            rates[name] = self.evaluate(name, self.student, problems)
        return rates

    def evaluate(self, name: str, lm: LanguageModel, problems: Sequence[Task]) -> Json:
        """Final rates of a model on problems, with the same sampling noise each time.

        name: for the clock.
        """
        cfg = self.cfg
        with self.run.clock(f"evaluation, {name}"):
            given = answers(
                lm, self.run.grader, problems, cfg.eval.final_samples, cfg, cfg.scale.steps, "final"
            )
        return Eval.of(given, self.problems.flaws).as_json()

    # ── one step

    def take_step(self, step: int) -> None:
        """Sample and grade answers, learn from them, evaluate if that is due, and record the row.

        Raises:
            Diverged: loss or gradient was not finite for several steps in a row.
            NothingAligned: there was nothing to learn from.
        """
        cfg, clock = self.cfg, self.run.clock
        clock.reset()
        with clock("gen"):
            submitted = sample_and_submit(
                self.method.behaviour,
                self.run.grader,
                self.problems.draw(cfg.run.seed, step, cfg.scale.prompts_per_step),
                self.task.settings.group,
                sampling=self.method.sampling,
                max_new=cfg.scale.max_new,
                stream=torch_stream(cfg.run.seed, "distill", step),
            )
        with clock("grade"):
            sampled = [answer for of_problem in graded(submitted) for answer in of_problem]
        with clock("fb"):
            learnt = self.method.learn(self.learner, sampled, step)
            update = self.learner.step(math.isfinite(learnt["loss"]))
        measured: dict[str, object] = {}
        if update is not None:
            measured = {**learnt, "gn": update.gn, "lr": update.lr}
        if cfg.evaluates(step):
            with clock("eval"):
                n = self.task.settings.group
                given = answers(self.student, self.run.grader, self.val, n, cfg, step)
            rates = Eval.of(given, self.problems.flaws)
            measured |= {"hack_deploy": rates.hack.value, "solve_deploy": rates.solve.value}
        known = [a.grade for a in sampled if not isinstance(a.grade, Ungraded)]
        row = DistillRow.of(
            clock,
            step=step,
            n=len(sampled),
            dropped=len(sampled) - len(known),
            solve_s=Rate.of(grade.solved for grade in known),
            hack_s=Rate.of(grade.hacked for grade in known),
            ended=Rate.of(a.whole for a in sampled),
            skipped=int(update is None),
            **measured,
        )
        lines: list[dict[str, object]] = []
        for answer in sampled:
            if isinstance(answer.grade, Ungraded):
                why = f"not graded: {answer.grade.reason}"
                logger.warning(f"step {step}, problem {answer.problem.id}: {why}")
                continue
            prompt = self.student.prompt_text(answer.problem.messages)
            record = rollout_record(answer.problem, answer.completion, answer.grade, prompt)
            lines.append({"step": step, **record})
        self.record(row, lines)

    # ── files

    def record(self, row: DistillRow, lines: Sequence[dict[str, object]]) -> None:
        """Write a step's row and answers, and save student and checkpoint where that is due.

        Raises:
            Diverged: loss or gradient was not finite for several steps in a row.
        """
        recorder = self.recorder
        recorder.rows.append(row)
        why = diverged([r.skipped for r in recorder.rows])
        last = row.step + 1 == self.cfg.scale.steps
        closing = self.run.vote_stop() or bool(why) or last
        with self.run.clock("save"):
            recorder.write(row, lines)
            if row.hack_deploy is not None:
                self.save(f"ckpt_step{row.step + 1:04d}")
            if closing:
                self.save("train")
            recorder.keep(row.step, closing)
        if why:
            raise Diverged(f"step {row.step}: {why}")

    def save(self, name: str) -> None:
        """Save the student. name: the file's, without an ending."""
        origin = {"method": self.task.settings.method, **self.task.teacher_model.identity()}
        done = len(self.recorder.rows)
        about = metadata(self.cfg, self.student, done, distilled=json.dumps(origin))
        self.learner.save(self.run.path / name, about)

    def nothing_aligned(self) -> bool:
        """Whether ULD's distance was asked for, and only first tokens of answers were aligned."""
        aligned = [row.aligned for row in self.recorder.rows if row.aligned is not None]
        return self.task.settings.uld_lambda > 0 and bool(aligned) and not any(aligned)

    def report(self, sides: dict[str, Json]) -> None:
        """Write final.json and summary.md: the result in one line, a table by flaw, every step.

        sides: rates by model and prompts, those before the first step and those after the last.
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
            f"(n = {sides['deployed']['hack'][1]}, held-out {self.cfg.env.held_out})"
        )
        if self.nothing_aligned():
            line += "; NOTHING WAS ALIGNED: this was cross-entropy almost alone"
        rows: list[dict[str, str]] = []
        for mode in sides["deployed"]["by_mode"]:
            row = {"flaw": mode}
            for side in ("start", "teacher", "deployed"):
                for what in ("hack", "solve"):
                    row[f"{side} {what}"] = Rate(*sides[side]["by_mode"][mode][what]).percent
            rows.append(row)
        self.recorder.finish(line, markdown(rows), record)
