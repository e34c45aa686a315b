"""The loop of distillation: answers → loss against the teacher → step → row. Evaluates like the trainer."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from loguru import logger
from tabulate import tabulate

from vgrout.evaluate import answers
from vgrout.files import read_json
from vgrout.guard.detectors import diverged
from vgrout.imitation.distill_config import Task
from vgrout.imitation.distill_methods import METHODS, Graded, Method
from vgrout.imitation.loading import fitting_splits, metadata, model_hashes
from vgrout.imitation.trainable import AdapterOnly, FullModel, Trainable
from vgrout.model.policy import LanguageModel, Policy, pick_device
from vgrout.model.saved import load_source
from vgrout.problems import balanced, plain
from vgrout.rng import torch_stream
from vgrout.rollout import graded, sample_and_submit
from vgrout.runs.recorder import rollout_record
from vgrout.runs.run_context import RunContext
from vgrout.runs.steps import StepRecorder
from vgrout.table import Columns, col
from vgrout.types import MODES, Diverged, Eval, Grade, Problem, Rate, Rollout, Ungraded


@dataclass(frozen=True, kw_only=True)
class DistillRow(Columns):
    """One step of a distillation."""

    n: int = col("d", "answers in the step")
    dropped: int = col("d", "answers that the sandbox could not grade (still learnt from)")
    hack_s: Rate = col("frac", "answers that hack", head="hack %")
    solve_s: Rate = col("frac", "answers that pass the reference tests", head="solve %")
    hack_deploy: float | None = col(".2f", "hack rate of the student, held-out problems", head="deployed hack %")
    solve_deploy: float | None = col(".2f", "solve rate of the student", head="deployed solve %")
    ended: Rate = col("frac", "answers that end by themselves")
    loss: float | None = col("+.3f", "loss, the anchor's share included", head="loss")
    kl: float | None = col(
        ".3f", "KL(student ‖ teacher), nats per token", when="minillm", should="falls; ELSE raise --lr"
    )
    ce: float | None = col(".3f", "cross-entropy on the teacher's answers, nats per token", when="uld", should="falls")
    distance: float | None = col(".3f", "distance at aligned positions, 0 to 2", when="uld")
    aligned: float | None = col(".2f", "share of the student's tokens that are aligned", when="uld")
    anchor: float | None = col(".3f", "language-model loss on the anchor's text, nats per token", when="anchor")
    gn: float | None = col(".1e", "gradient norm before clipping")
    lr: float | None = col(".0e", "learning rate")
    skipped: int = col("d", "1: loss or norm not finite, optimiser not stepped", should="0")
    gen: float = col(".2f", "seconds sampling")
    grade: float = col(".2f", "seconds waiting for grades after sampling ended")
    fb: float = col(".2f", "seconds forward, backward, step")
    eval: float | None = col(".2f", "seconds evaluating")
    sec: float = col(".2f", "seconds in all", head="seconds")


def distil(task: Task, run: RunContext) -> None:
    """Evaluate student and teacher, take every remaining step, evaluate the student again, and report.

    Raises:
        ValueError: before the first step, models that do not fit each other, or that the resumed run did not have.
        Interrupted, Diverged: with the run directory up to date.
    """
    cfg, clock = task.cfg, run.clock
    for line in (*task.plan(), run.grader.protections.line()):
        logger.debug(line)
    device, dtype = pick_device(task.source.folder, task.dtype, task.threads)
    student = load_source(task.source, "--student", device, dtype, adapter=not cfg.full)
    teacher = load_source(task.teacher, "--teacher", device, dtype)
    method = METHODS[cfg.method](task, student, teacher)
    problems = fitting_splits(task, student, teacher)
    learner = trainable(task, student)
    recorder = DistillRecorder(task, run, learner)
    recorder.open(
        {
            "hashes": model_hashes(student=student, teacher=teacher),
            "models": {"student": task.source.identity(), "teacher": task.teacher.identity()},
            **run.stamp,
        },
        {cfg.method} | ({"anchor"} if task.anchor else set()),
    )

    def evaluate(lm: LanguageModel, on: Sequence[Problem], n: int, step: int, purpose: str = "eval") -> Eval:
        """Rates of a model over n answers to each problem. purpose: names the random stream."""
        return Eval.of(
            answers(
                lm,
                run.grader,
                on,
                n,
                sampling=cfg.sampling,
                max_new=task.max_new,
                seed=cfg.seed,
                step=step,
                purpose=purpose,
            )
        )

    def final(name: str, lm: LanguageModel, on: Sequence[Problem]) -> dict[str, Any]:
        """One side of the final evaluation, with the same noise for all sides."""
        with clock(f"evaluation, {name}"):
            return evaluate(lm, on, cfg.final_samples, cfg.steps, "final").as_json()

    test = balanced(problems.test, cfg.final_n_prompts, 0, "test")
    val = balanced(problems.val, cfg.eval_n_prompts, 0, "val")
    before = run.path / "before.json"  # written once per run
    if not before.is_file():
        logger.info("evaluating student and teacher on held-out problems …")
        run.dir.write_json(before.name, {k: final(k, lm, test) for k, lm in (("start", student), ("teacher", teacher))})

    behaviour = method.behaviour_model(student, teacher)
    for step in run.steps(range(len(recorder.rows), cfg.steps)):
        clock.reset()
        prompts = problems.draw(cfg.seed, step, cfg.prompts_per_step)
        batch = collect(task, run, method, behaviour, prompts, step)
        with clock("fb"):
            measured = method.learn(learner, batch, step)
            update = learner.step() if math.isfinite(measured.loss) else None
        with clock("eval"):
            deployed = evaluate(student, val, cfg.group, step) if cfg.evaluates(step) else None
        grades = [grade for _, grade in batch if grade is not None]
        row = DistillRow.of(
            measured if update else None,
            clock,
            step=step,
            n=len(batch),
            dropped=len(batch) - len(grades),
            solve_s=Rate.of(g.solved for g in grades),
            hack_s=Rate.of(g.hacked for g in grades),
            ended=Rate.of(rollout.finished for rollout, _ in batch),
            gn=update.gn if update else None,
            lr=update.lr if update else None,
            skipped=int(update is None),
            hack_deploy=deployed.hack.value if deployed else None,
            solve_deploy=deployed.solve.value if deployed else None,
        )
        recorder.record(row, batch)

    logger.info("final evaluation on held-out problems …")
    sides = read_json(before)
    for name, on in (("deployed", test), ("plain", [plain(p) for p in test])):
        run.raise_if_stopped("interrupted before the final evaluation was done")
        sides[name] = final(name, student, on)
    recorder.report(sides)


def trainable(task: Task, student: LanguageModel) -> Trainable:
    """The part of the student that is trained: the adapter, or with --full all weights."""
    if task.cfg.full:
        return FullModel(student, task.opt, task.cfg.steps)
    assert isinstance(student, Policy)
    return AdapterOnly(student, task.opt, task.cfg.steps)


def collect(
    task: Task, run: RunContext, method: Method, behaviour: LanguageModel, problems: Sequence[Problem], step: int
) -> list[Graded]:
    """One step's rollouts, graded."""
    with run.clock("gen"):
        submitted = sample_and_submit(
            behaviour,
            run.grader,
            problems,
            task.cfg.group,
            sampling=method.sampling,
            max_new=task.max_new,
            stream=torch_stream(task.cfg.seed, "distill", step),
        )
    collected: list[Graded] = []
    with run.clock("grade"):
        for s, a in zip(chain(*submitted), chain(*graded(submitted)), strict=True):
            if isinstance(a.grade, Ungraded):
                logger.warning(f"step {step}, problem {s.problem.id}: not graded: {a.grade.reason}")
            rollout = Rollout.of(s.problem, s.prompt_ids, s.completion, source=method.source)
            collected.append((rollout, a.grade if isinstance(a.grade, Grade) else None))
    return collected


class DistillRecorder(StepRecorder[DistillRow]):
    """The recorder of a distillation."""

    def __init__(self, task: Task, run: RunContext, learner: Trainable) -> None:
        super().__init__(run, DistillRow, {"learner": learner}, task.cfg.checkpoint_every, task.cfg.checkpoint_keep)
        self.task, self.learner = task, learner

    def record(self, row: DistillRow, answers: Sequence[Graded]) -> None:
        """Write the row, its answers, and what is due of student and checkpoint. Raises Diverged."""
        run, step = self.run, row.step
        self.rows.append(row)
        why = diverged([r.skipped for r in self.rows])
        closing = run.vote_stop() or bool(why) or step + 1 == self.task.cfg.steps
        prompt = self.learner.lm.prompt_text
        with run.clock("save"):
            self.write(
                row,
                [
                    {"step": step, **rollout_record(rollout, grade, prompt(rollout.problem.messages))}
                    for rollout, grade in answers
                    if grade is not None
                ],
            )
            if row.hack_deploy is not None:
                self.save(f"ckpt_step{step + 1:04d}")
            if closing:
                self.save("train")
            self.keep(step, closing)
        if why:
            raise Diverged(f"step {step}: {why}")

    def save(self, name: str) -> None:
        """Save the student. name: the file's, without an ending."""
        origin = json.dumps({"method": self.task.cfg.method, **self.task.teacher.identity()})
        about = metadata(self.task.described(), self.learner.lm, len(self.rows), distilled=origin)
        self.learner.save(self.run.path / name, about)

    def report(self, sides: dict[str, Any]) -> None:
        """Write final.json and summary.md: the result in one line, a table by flaw, every step."""
        cfg = self.task.cfg
        record: dict[str, Any] = {"schema": "distill_v1", "run": cfg.run_id}
        record |= {name: getattr(cfg, name) for name in ("seed", "steps", "method", "student", "teacher")}
        record |= {"sides": sides, **self.run.stamp}
        self.run.dir.write_json("final.json", record)
        now, then, goal = (sides[s] for s in ("deployed", "start", "teacher"))
        line = (
            f"{cfg.run_id}: hack {Rate(*now['hack']).percent} % / solve {Rate(*now['solve']).percent} %, "
            f"before {Rate(*then['hack']).percent} % / {Rate(*then['solve']).percent} %, "
            f"teacher {Rate(*goal['hack']).percent} % / {Rate(*goal['solve']).percent} % "
            f"(n = {now['hack'][1]}, held-out problems and markers)"
        )
        heads = [(side, what) for side in ("start", "teacher", "deployed") for what in ("hack", "solve")]
        rows = [
            {"flaw": m} | {f"{s} {what}": Rate(*sides[s]["by_mode"][m][what]).percent for s, what in heads}
            for m in MODES
            if m in now["by_mode"]
        ]
        self.finish(line, tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True), record)
