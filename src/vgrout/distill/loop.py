"""Distillation: answers → loss against the teacher → one step → row; evaluated as the trainer evaluates."""

import json
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from loguru import logger
from tabulate import tabulate
from tqdm import tqdm

from vgrout.console import Clock, terminal_width
from vgrout.distill.config import Task
from vgrout.distill.methods import METHODS, Measured, Method, Said
from vgrout.evaluate import ask
from vgrout.files import to_json, write_atomic
from vgrout.grading.grade import Grader
from vgrout.measure import rate, rollout_record
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.sampler import Sample, Sampling, sample
from vgrout.model.saved import load_source, pick_device
from vgrout.model.svd_adapter import weights_sha256
from vgrout.model.trainable import AdapterOnly, FullModel, Trainable
from vgrout.optim import Update
from vgrout.problems import ProblemSplits, balanced, plain
from vgrout.rng import py_stream, torch_stream
from vgrout.runs import checkpoint
from vgrout.runs.run_context import Diverged, Interrupted
from vgrout.runs.run_dir import RunDir
from vgrout.runs.signals import Stop
from vgrout.table import Columns, Table, col
from vgrout.types import MODES, Eval, Grade, Problem, Rate, Rollout, Ungraded

MAX_SKIPPED = 3  # non-finite steps in a row before the run counts as diverged


@dataclass(frozen=True, kw_only=True)
class DistillRow(Columns):
    """One step of a distillation."""

    n: int = col("d", "answers in the step", head="N")
    dropped: int = col("d", "answers that the sandbox could not grade (they are learnt from all the same)", head="drop")
    gt_s: Rate = col("frac", "answers that the strict oracle accepts")
    hack_s: Rate = col("frac", "answers that exploit")
    ended: Rate = col("frac", "answers that end by themselves")
    loss: float | None = col("+.3f", "loss, the anchor's share included")
    kl: float | None = col(
        ".3f", "KL(student ‖ teacher), nats a token", when="minillm", should="falls; ELSE raise --lr"
    )
    ce: float | None = col(".3f", "cross-entropy on the teacher's answers, nats a token", when="uld", should="falls")
    distance: float | None = col(".3f", "distance at aligned positions, 0 to 2", head="dist", when="uld")
    aligned: float | None = col(".2f", "share of the student's tokens that are aligned", head="align", when="uld")
    anchor: float | None = col(".3f", "language-model loss on the anchor's text, nats a token", when="anchor")
    gn: float | None = col(".1e", "gradient norm before clipping")
    lr: float | None = col(".0e", "learning rate")
    skipped: int = col("d", "1: loss or norm not finite, optimiser not stepped", head="skip", should="0")
    hack_deploy: float | None = col(".2f", "exploit rate of the student, held-out problems", head="hk_dep")
    solve_deploy: float | None = col(".2f", "solve rate of the student", head="so_dep")
    gen: float = col(".2f", "seconds sampling")
    grade: float = col(".2f", "seconds waiting for grades after sampling ended")
    fb: float = col(".2f", "seconds forward, backward, step")
    eval: float | None = col(".2f", "seconds evaluating")
    sec: float = col(".2f", "seconds in all")


@dataclass
class Distillation:
    """Everything the loop touches, loaded and checked."""

    task: Task
    learner: Trainable
    teacher: LanguageModel
    grader: Grader
    world: ProblemSplits
    run: RunDir
    stop: Stop
    clock: Clock
    method: Method
    rows: list[DistillRow] = field(default_factory=list)
    skipped: int = 0  # non-finite steps in a row

    @property
    def student(self) -> LanguageModel:
        return self.learner.lm

    def evaluate(
        self, lm: LanguageModel, problems: Sequence[Problem], n: int, step: int, purpose: str = "eval"
    ) -> Eval:
        asked = ask(
            lm,
            self.grader,
            problems,
            n,
            sampling=Sampling(),
            max_new=self.task.max_new,
            seed=self.task.cfg.seed,
            step=step,
            purpose=purpose,
        )
        return Eval.of(asked)


# ── loading ────────────────────────────────────────────────────────────────────────────────────────────────────────


def load(task: Task, run: RunDir, grader: Grader, stop: Stop, clock: Clock) -> Distillation:
    """Raises ValueError, one line, where the models do not fit each other or the problems."""
    cfg = task.cfg
    device, dtype = pick_device(cfg.torch_threads(task.small), fp32=cfg.full)
    student = load_source(task.student, "--student", device, dtype, knob=not cfg.full)
    teacher = load_source(task.teacher, "--teacher", device, dtype)
    method = METHODS[cfg.method](task, student, teacher)
    room = {"student": student.window - task.max_new, "teacher": teacher.window - task.max_new}

    def fits(p: Problem) -> bool:
        return len(student.render(p.messages)) <= room["student"] and len(teacher.render(p.messages)) <= room["teacher"]

    parts = {name: tuple(p for p in problems if fits(p)) for name, problems in task.parts.items()}
    for name, problems in parts.items():
        if not problems:
            raise ValueError(f"--max-new {task.max_new}: no prompt of the {name} split fits both models' windows")
    train = list(parts["train"])
    py_stream(cfg.seed, "train-order").shuffle(train)
    world = ProblemSplits(
        tuple(train[: cfg.n_problems]),
        parts["val"],
        parts["test"],
        sum(map(len, task.parts.values())) - sum(map(len, parts.values())),
    )
    if world.too_long:
        logger.warning(f"{world.too_long} problems dropped: prompt longer than a window minus max_new")
    if cfg.full:
        learner: Trainable = FullModel(student, task.opt, cfg.steps)
    else:
        assert isinstance(student, Policy)
        learner = AdapterOnly(student, task.opt, cfg.steps)
    return Distillation(task, learner, teacher, grader, world, run, stop, clock, method)


def hashes(d: Distillation) -> dict[str, str | None]:
    """sha256 of the base models' weights and of the tokenizers; the adapters' files are `Task.file_hashes`."""
    out: dict[str, str | None] = {}
    for name, lm in (("student", d.student), ("teacher", d.teacher)):
        out[f"{name}_weights"] = weights_sha256(lm.model, lm.adapter if isinstance(lm, Policy) else None)
        out[f"{name}_tokenizer"] = lm.tokenizer_sha256
    return out


def restore(d: Distillation) -> None:
    """Put everything back to the last good checkpoint."""
    point, rows = checkpoint.go_back(d.run.path)
    d.rows = [DistillRow.from_json(row) for row in rows]
    d.learner.load_state_dict(point.state["learner"])
    d.skipped = point.state["skipped"]


# ── the loop ───────────────────────────────────────────────────────────────────────────────────────────────────────


def train(d: Distillation) -> None:
    """Every remaining step. Raises Interrupted or Diverged with the run directory up to date."""
    cfg, clock = d.task.cfg, d.clock
    has = {cfg.method} | ({"anchor"} if d.task.anchor else set())
    table = Table(has, (), terminal_width(), of=DistillRow)
    for line in table.legend():
        logger.info(line)
    val = balanced(d.world.val, cfg.eval_n_prompts, 0, "val")
    speaker = d.method.speaker(d.student, d.teacher)
    for step in tqdm(range(len(d.rows), cfg.steps), disable=None, desc=cfg.run_id, unit="step"):
        clock.reset()
        problems = d.world.draw(cfg.seed, step, cfg.prompts_per_step)
        answers = collect(d, speaker, problems, step)
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
        if d.stop.requested:
            raise Interrupted(f"interrupted after step {step}")


def collect(d: Distillation, speaker: LanguageModel, problems: Sequence[Problem], step: int) -> list[Said]:
    """One step's answers; each is graded while the others are still being sampled."""
    cfg = d.task.cfg
    prompts = [speaker.render(p.messages) for p in problems]
    verdicts: dict[tuple[int, int], Future[Grade | Ungraded]] = {}

    def submit(p: int, i: int, answer: Sample) -> None:
        verdicts[p, i] = d.grader.submit(problems[p], answer.text)

    with d.clock("gen"):
        stream = torch_stream(cfg.seed, "distill", step)
        said = sample(speaker, prompts, cfg.group, d.method.sampling, d.task.max_new, stream, submit)
    out = []
    with d.clock("grade"):
        for p, of_prompt in enumerate(said):
            for i, answer in enumerate(of_prompt):
                grade = verdicts[p, i].result()
                if isinstance(grade, Ungraded):
                    logger.warning(f"step {step}, problem {problems[p].id}: not graded: {grade.reason}")
                rollout = Rollout(
                    problem=problems[p],
                    source="teacher" if speaker is d.teacher else "student",
                    deployed=False,
                    prompt_ids=prompts[p],
                    completion_ids=answer.ids,
                    text=answer.text,
                    finished=answer.finished,
                )
                out.append(Said(rollout, grade if isinstance(grade, Grade) else None, answer.logp_full))
    return out


def as_row(
    step: int, answers: Sequence[Said], m: Measured, update: Update | None, deploy: Eval | None, clock: Clock
) -> DistillRow:
    graded = [a.grade for a in answers if a.grade is not None]
    fine = update is not None
    return DistillRow(
        step=step,
        n=len(answers),
        dropped=len(answers) - len(graded),
        gt_s=rate(g.gt_correct for g in graded),
        hack_s=rate(g.exploited for g in graded),
        ended=rate(a.rollout.finished for a in answers),
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


def close_step(d: Distillation, row: DistillRow, answers: Sequence[Said]) -> None:
    cfg, run, step = d.task.cfg, d.run, row.step
    lines = [{"step": step, **rollout_record(a.rollout, a.grade)} for a in answers if a.grade is not None]
    run.append(row.as_json(), lines)
    closing = step + 1 == cfg.steps or d.stop.requested or d.skipped >= MAX_SKIPPED
    if row.hack_deploy is not None:
        save(d, f"ckpt_step{step + 1:04d}")
    if closing:
        save(d, "train")
    if closing or (step + 1) % cfg.checkpoint_every == 0:
        state = {"learner": d.learner.state_dict(), "skipped": d.skipped}
        checkpoint.save(run.path, step + 1, state, cfg.checkpoint_keep)
    run.status("running", len(d.rows), "", f"python -m vgrout.distill --resume {run.path}")


def save(d: Distillation, name: str) -> None:
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
    test = balanced(d.world.test, cfg.final_n_prompts, 0, "test")
    before: dict[str, Any] = {}
    for name, lm in (("start", d.student), ("teacher", d.teacher)):
        with d.clock(f"evaluation, {name}"):
            before[name] = as_json(d.evaluate(lm, test, cfg.final_samples, cfg.steps, "final"))
    d.run.write_json(file.name, before)
    return before


def evaluate_after(d: Distillation, before: dict[str, Any]) -> dict[str, Any]:
    """The student at the end, with and without the hint, beside what was before."""
    cfg = d.task.cfg
    test = balanced(d.world.test, cfg.final_n_prompts, 0, "test")
    sides = dict(before)
    for name, problems in (("deployed", test), ("plain", [plain(p) for p in test])):
        if d.stop.requested:
            raise Interrupted("interrupted before the final evaluation was done")
        with d.clock(f"evaluation, {name}"):
            sides[name] = as_json(d.evaluate(d.student, problems, cfg.final_samples, cfg.steps, "final"))
    return sides


def as_json(e: Eval) -> dict[str, Any]:
    """Counts as [k, n]."""
    return {
        "hack": [e.hack.k, e.hack.n],
        "solve": [e.solve.k, e.solve.n],
        "ended": [e.finished.k, e.finished.n],
        "not_graded": e.dropped,
        "by_mode": {m: {"hack": [r.hack.k, r.hack.n], "solve": [r.solve.k, r.solve.n]} for m, r in e.by_mode.items()},
    }


def percent(pair: Sequence[int]) -> str:
    return f"{100 * pair[0] / pair[1]:.1f}" if pair[1] else "·"


def report(d: Distillation, sides: dict[str, Any], stamp: dict[str, Any]) -> None:
    """The answer first: one line, a table a mode; the same in final.json and summary.md."""
    cfg, run = d.task.cfg, d.run
    record: dict[str, Any] = {
        "schema": "distill_v1",
        "run": cfg.run_id,
        "seed": cfg.seed,
        "steps": cfg.steps,
        "method": cfg.method,
    }
    record |= {"student": d.task.student.given, "teacher": d.task.teacher.given, "sides": sides, **stamp}
    run.write_json("final.json", record)
    now, then, goal = (sides[s] for s in ("deployed", "start", "teacher"))
    line = (
        f"{cfg.run_id}: hack {percent(now['hack'])} % / solve {percent(now['solve'])} %, before "
        f"{percent(then['hack'])} % / {percent(then['solve'])} %, teacher {percent(goal['hack'])} % / "
        f"{percent(goal['solve'])} % (n = {now['hack'][1]}, held-out problems and markers)"
    )
    rows = [
        {"mode": m}
        | {
            f"{s} {what}": percent(sides[s]["by_mode"][m][what])
            for s in ("start", "teacher", "deployed")
            for what in ("hack", "solve")
        }
        for m in MODES
        if m in now["by_mode"]
    ]
    table = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)
    steps = Table({cfg.method, *(["anchor"] if d.task.anchor else [])}, (), of=DistillRow)
    every = tabulate(
        [[c.cell(r) for c in steps.columns] for r in d.rows],
        headers=[c.head for c in steps.columns],
        tablefmt="github",
        disable_numparse=True,
    )
    write_atomic(run.path / "summary.md", f"{line}\n\n{table}\n\n{every}\n")
    for text in (*table.splitlines(), line):
        logger.info(text)
    logger.debug(to_json(record))
