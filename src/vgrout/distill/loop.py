"""Distillation: answers → loss against the teacher → one step → row; evaluated as the trainer evaluates."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from loguru import logger
from tabulate import tabulate
from tqdm import tqdm

from vgrout.console import Clock, explain_columns, terminal_width
from vgrout.distill.config import Task
from vgrout.distill.methods import METHODS, Graded, Measured, Method
from vgrout.distill.trainable import AdapterOnly, FullModel, Trainable
from vgrout.evaluate import answers
from vgrout.files import to_json, write_atomic
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.saved import load_source, pick_device
from vgrout.model.svd_adapter import weights_sha256
from vgrout.optim import Update
from vgrout.problems import ProblemSplits, balanced, plain
from vgrout.rng import py_stream, torch_stream
from vgrout.rollout import graded, sample_and_submit
from vgrout.runs import checkpoint
from vgrout.runs.recorder import rollout_record
from vgrout.runs.run_context import RunContext
from vgrout.table import Columns, Table, col
from vgrout.types import MODES, Diverged, Eval, Grade, Interrupted, Problem, Rate, Rollout, Ungraded

MAX_SKIPPED = 3  # non-finite steps in a row before the run counts as diverged


@dataclass(frozen=True, kw_only=True)
class DistillRow(Columns):
    """One step of a distillation."""

    n: int = col("d", "answers in the step")
    dropped: int = col("d", "answers that the sandbox could not grade (they are learnt from all the same)")
    gt_s: Rate = col("frac", "answers that the strict oracle accepts")
    hack_s: Rate = col("frac", "answers that exploit")
    ended: Rate = col("frac", "answers that end by themselves")
    loss: float | None = col("+.3f", "loss, the anchor's share included")
    kl: float | None = col(
        ".3f", "KL(student ‖ teacher), nats a token", when="minillm", should="falls; ELSE raise --lr"
    )
    ce: float | None = col(".3f", "cross-entropy on the teacher's answers, nats a token", when="uld", should="falls")
    distance: float | None = col(".3f", "distance at aligned positions, 0 to 2", when="uld")
    aligned: float | None = col(".2f", "share of the student's tokens that are aligned", when="uld")
    anchor: float | None = col(".3f", "language-model loss on the anchor's text, nats a token", when="anchor")
    gn: float | None = col(".1e", "gradient norm before clipping")
    lr: float | None = col(".0e", "learning rate")
    skipped: int = col("d", "1: loss or norm not finite, optimiser not stepped", should="0")
    hack_deploy: float | None = col(".2f", "exploit rate of the student, held-out problems")
    solve_deploy: float | None = col(".2f", "solve rate of the student")
    gen: float = col(".2f", "seconds sampling")
    grade: float = col(".2f", "seconds waiting for grades after sampling ended")
    fb: float = col(".2f", "seconds forward, backward, step")
    eval: float | None = col(".2f", "seconds evaluating")
    sec: float = col(".2f", "seconds in all")


@dataclass
class Distillation:
    """The state of a distillation, loaded and checked."""

    task: Task
    learner: Trainable
    teacher: LanguageModel
    problems: ProblemSplits
    run: RunContext
    method: Method
    rows: list[DistillRow] = field(default_factory=list)
    skipped: int = 0  # non-finite steps in a row

    @property
    def student(self) -> LanguageModel:
        """The student as it is now."""
        return self.learner.lm

    def evaluate(
        self, lm: LanguageModel, problems: Sequence[Problem], n: int, step: int, purpose: str = "eval"
    ) -> Eval:
        """n answers of a model to each problem, counted; `purpose` names the random stream."""
        graded = answers(
            lm,
            self.run.grader,
            problems,
            n,
            max_new=self.task.max_new,
            seed=self.task.cfg.seed,
            step=step,
            purpose=purpose,
        )
        return Eval.of(graded)


# ── loading ────────────────────────────────────────────────────────────────────────────────────────────────────────


def load(task: Task, run: RunContext) -> Distillation:
    """Models, problems and method. Raises ValueError, one line, where they do not fit each other."""
    cfg = task.cfg
    device, dtype = pick_device(cfg.torch_threads(task.small), fp32=cfg.full)
    student = load_source(task.student, "--student", device, dtype, adapter=not cfg.full)
    teacher = load_source(task.teacher, "--teacher", device, dtype)
    method = METHODS[cfg.method](task, student, teacher)

    def fits(p: Problem) -> bool:
        return all(len(lm.render(p.messages)) <= lm.window - task.max_new for lm in (student, teacher))

    parts = {name: tuple(p for p in problems if fits(p)) for name, problems in task.parts.items()}
    for name, problems in parts.items():
        if not problems:
            raise ValueError(f"--max-new {task.max_new}: no prompt of the {name} split fits both models' windows")
    train = list(parts["train"])
    py_stream(cfg.seed, "train-order").shuffle(train)
    splits = ProblemSplits(
        tuple(train[: cfg.n_problems]),
        parts["val"],
        parts["test"],
        sum(map(len, task.parts.values())) - sum(map(len, parts.values())),
    )
    if splits.too_long:
        logger.warning(f"{splits.too_long} problems dropped: prompt longer than a window minus max_new")
    if cfg.full:
        learner: Trainable = FullModel(student, task.opt, cfg.steps)
    else:
        assert isinstance(student, Policy)
        learner = AdapterOnly(student, task.opt, cfg.steps)
    return Distillation(task, learner, teacher, splits, run, method)


def hashes(d: Distillation) -> dict[str, str | None]:
    """sha256 of the base models' weights and of the tokenizers; the adapters' files are `Task.file_hashes`."""
    out: dict[str, str | None] = {}
    for name, lm in (("student", d.student), ("teacher", d.teacher)):
        out[f"{name}_weights"] = weights_sha256(lm.model, lm.adapter if isinstance(lm, Policy) else None)
        out[f"{name}_tokenizer"] = lm.tokenizer_sha256
    return out


def restore(d: Distillation) -> None:
    """Restore rows, weights and optimiser from the last good checkpoint."""
    point, rows = checkpoint.go_back(d.run.path)
    d.rows = [DistillRow.from_json(row) for row in rows]
    d.learner.load_state_dict(point.state["learner"])
    d.skipped = point.state["skipped"]


# ── the loop ───────────────────────────────────────────────────────────────────────────────────────────────────────


def train(d: Distillation) -> None:
    """Every remaining step. Raises Interrupted or Diverged with the run directory up to date."""
    cfg, clock = d.task.cfg, d.run.clock
    has = {cfg.method} | ({"anchor"} if d.task.anchor else set())
    table = Table(has, (), terminal_width(), of=DistillRow)
    explain_columns(table.legend(), str(d.run.log))
    val = balanced(d.problems.val, cfg.eval_n_prompts, 0, "val")
    behaviour = d.method.behaviour_model(d.student, d.teacher)
    for step in tqdm(range(len(d.rows), cfg.steps), disable=None, desc=cfg.run_id, unit="step"):
        clock.reset()
        problems = d.problems.draw(cfg.seed, step, cfg.prompts_per_step)
        answers = collect(d, behaviour, problems, step)
        with clock("fb"):
            measured = d.method.learn(d.learner, answers, step)
            update = d.learner.step() if math.isfinite(measured.loss) else None
        due = cfg.eval_every > 0 and ((step + 1) % cfg.eval_every == 0 or step + 1 == cfg.steps)
        with clock("eval"):
            deploy = d.evaluate(d.student, val, cfg.group, step) if due else None
        d.skipped = 0 if update else d.skipped + 1
        row = as_row(step, answers, measured, update, deploy, clock)
        d.rows.append(row)
        for line in table.lines(row):
            logger.info(line)
        with clock("save"):
            close_step(d, row, answers)
        if d.skipped >= MAX_SKIPPED:
            raise Diverged(f"step {step}: loss or gradient not finite, {MAX_SKIPPED} steps in a row")
        if d.run.stops:
            raise Interrupted(f"interrupted after step {step}")


def collect(d: Distillation, behaviour: LanguageModel, problems: Sequence[Problem], step: int) -> list[Graded]:
    """One step's rollouts, graded."""
    cfg = d.task.cfg
    with d.run.clock("gen"):
        submitted = sample_and_submit(
            behaviour,
            d.run.grader,
            problems,
            cfg.group,
            sampling=d.method.sampling,
            max_new=d.task.max_new,
            stream=torch_stream(cfg.seed, "distill", step),
        )
    out: list[Graded] = []
    with d.run.clock("grade"):
        for s, a in zip(chain(*submitted), chain(*graded(submitted)), strict=True):
            grade = a.grade
            if isinstance(grade, Ungraded):
                logger.warning(f"step {step}, problem {s.problem.id}: not graded: {grade.reason}")
            source = "teacher" if behaviour is d.teacher else "student"
            rollout = Rollout.of(s.problem, s.prompt_ids, s.completion, source=source)
            out.append((rollout, grade if isinstance(grade, Grade) else None))
    return out


def as_row(
    step: int, answers: Sequence[Graded], m: Measured, update: Update | None, deploy: Eval | None, clock: Clock
) -> DistillRow:
    """The step's row. update None: it was skipped."""
    graded = [grade for _, grade in answers if grade is not None]
    fine = update is not None
    return DistillRow(
        step=step,
        n=len(answers),
        dropped=len(answers) - len(graded),
        gt_s=Rate.of(g.gt_correct for g in graded),
        hack_s=Rate.of(g.exploited for g in graded),
        ended=Rate.of(rollout.finished for rollout, _ in answers),
        loss=m.loss if fine else None,
        kl=m.kl if fine else None,
        ce=m.ce if fine else None,
        distance=m.distance if fine else None,
        aligned=m.aligned,
        anchor=m.anchor if fine else None,
        gn=update.gn if update else None,
        lr=update.lr if update else None,
        skipped=int(not fine),
        hack_deploy=deploy.hack.value if deploy else None,
        solve_deploy=deploy.solve.value if deploy else None,
        gen=clock.seconds.get("gen", 0.0),
        grade=clock.seconds.get("grade", 0.0),
        fb=clock.seconds.get("fb", 0.0),
        eval=clock.seconds.get("eval"),
        sec=clock.total,
    )


def close_step(d: Distillation, row: DistillRow, answers: Sequence[Graded]) -> None:
    """Write the row, the answers, and what is due: adapter, checkpoint, status."""
    cfg, run, step = d.task.cfg, d.run, row.step
    lines = [
        {"step": step, **rollout_record(rollout, grade, d.student.prompt_text(rollout.problem.messages))}
        for rollout, grade in answers
        if grade is not None
    ]
    run.dir.append(row.as_json(), lines)
    closing = step + 1 == cfg.steps or run.agree() or d.skipped >= MAX_SKIPPED
    if row.hack_deploy is not None:
        save(d, f"ckpt_step{step + 1:04d}")
    if closing:
        save(d, "train")
    if closing or (step + 1) % cfg.checkpoint_every == 0:
        state = {"learner": d.learner.state_dict(), "skipped": d.skipped}
        checkpoint.save(run.path, step + 1, state, cfg.checkpoint_keep)
    run.status("running", "")


def save(d: Distillation, name: str) -> None:
    """Write the student as it is; `name` is without an ending."""
    described = d.task.described()
    d.learner.save(
        d.run.path / name,
        {
            "model": described.scale.model,
            "dtype": str(d.student.model.dtype).removeprefix("torch."),
            "step": str(len(d.rows)),
            "distilled": json.dumps({"method": d.task.cfg.method, **d.task.teacher.identity()}),
            "cfg": json.dumps(described.as_dict()),
        },
    )


# ── before and after ───────────────────────────────────────────────────────────────────────────────────────────────


def evaluate_before(d: Distillation) -> dict[str, Any]:
    """Student and teacher before the first step, on the final evaluation's problems and noise; once a run."""
    file = d.run.path / "before.json"
    if file.is_file():
        return json.loads(file.read_text(encoding="utf-8"))
    logger.info("student and teacher on held-out problems and markers, before the first step …")
    cfg = d.task.cfg
    test = balanced(d.problems.test, cfg.final_n_prompts, 0, "test")
    before: dict[str, Any] = {}
    for name, lm in (("start", d.student), ("teacher", d.teacher)):
        with d.run.clock(f"evaluation, {name}"):
            before[name] = d.evaluate(lm, test, cfg.final_samples, cfg.steps, "final").as_json()
    d.run.dir.write_json(file.name, before)
    return before


def evaluate_after(d: Distillation, before: dict[str, Any]) -> dict[str, Any]:
    """The final student with and without the hint in its prompts, added to `before`."""
    cfg = d.task.cfg
    test = balanced(d.problems.test, cfg.final_n_prompts, 0, "test")
    sides = dict(before)
    for name, problems in (("deployed", test), ("plain", [plain(p) for p in test])):
        if d.run.stop.requested:
            raise Interrupted("interrupted before the final evaluation was done")
        with d.run.clock(f"evaluation, {name}"):
            sides[name] = d.evaluate(d.student, problems, cfg.final_samples, cfg.steps, "final").as_json()
    return sides


def report(d: Distillation, sides: dict[str, Any]) -> None:
    """Write final.json and summary.md: the result in one line, a table by mode, every step."""
    cfg, run = d.task.cfg, d.run
    record: dict[str, Any] = {
        "schema": "distill_v1",
        "run": cfg.run_id,
        "seed": cfg.seed,
        "steps": cfg.steps,
        "method": cfg.method,
    }
    record |= {"student": d.task.student.given, "teacher": d.task.teacher.given, "sides": sides, **run.stamp}
    run.dir.write_json("final.json", record)
    now, then, goal = (sides[s] for s in ("deployed", "start", "teacher"))
    line = (
        f"{cfg.run_id}: hack {Rate(*now['hack']).percent} % / solve {Rate(*now['solve']).percent} %, "
        f"before {Rate(*then['hack']).percent} % / {Rate(*then['solve']).percent} %, "
        f"teacher {Rate(*goal['hack']).percent} % / {Rate(*goal['solve']).percent} % "
        f"(n = {now['hack'][1]}, held-out problems and markers)"
    )
    rows = [
        {"mode": m}
        | {
            f"{s} {what}": Rate(*sides[s]["by_mode"][m][what]).percent
            for s in ("start", "teacher", "deployed")
            for what in ("hack", "solve")
        }
        for m in MODES
        if m in now["by_mode"]
    ]
    table = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)
    steps = Table({cfg.method, *(["anchor"] if d.task.anchor else [])}, (), of=DistillRow)
    write_atomic(run.path / "summary.md", f"{line}\n\n{table}\n\n{steps.markdown(d.rows)}\n")
    for text in (*table.splitlines(), line):
        logger.info(text)
    logger.debug(to_json(record))
