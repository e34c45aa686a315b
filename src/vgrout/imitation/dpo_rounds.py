"""Iterative DPO: sample → score → pair → train → evaluate. A round is complete when its folder has a manifest."""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from loguru import logger
from torch import Tensor
from tqdm import tqdm

from vgrout.files import atomic_open, file_sha256, read_json, to_json, write_atomic
from vgrout.grpo import Row, as_batch
from vgrout.guard.detectors import diverged
from vgrout.guard.kill_switch import HeldOutGuard
from vgrout.imitation.dpo_config import Task, plan_sha256
from vgrout.imitation.loading import fitting_splits, metadata, model_hashes
from vgrout.imitation.losses import dpo
from vgrout.imitation.trainable import AdapterOnly
from vgrout.model.logprobs import Batch, completion_logprobs
from vgrout.model.memory import TOKEN_BUDGET
from vgrout.model.packing import Packed
from vgrout.model.policy import Policy, pick_device
from vgrout.model.saved import load_source
from vgrout.problems import balanced
from vgrout.rng import py_stream
from vgrout.runs.recorder import rollout_record
from vgrout.runs.run_context import RunContext
from vgrout.runs.steps import StepRecorder
from vgrout.table import Columns, col
from vgrout.teacher.generate import BATCH, Graded, by_mode, generate_graded
from vgrout.types import Diverged, Halted, Problem, Rate, Rollout, mean


@dataclass(frozen=True, kw_only=True)
class DpoRow(Columns):
    """One round; 0 is --base-model, evaluated before the first."""

    step: int = col("d", "round; 0: before the first", head="round")
    asked: int | None = col("d", "prompts sampled")
    pairs: Rate | None = col("frac", "pairs found / wanted; a prompt whose answers tie gives none")
    score: float | None = col(".3f", "scorer's mean on the round's answers, as a share of its range", should="rises")
    hack_s: Rate | None = col("frac", "answers that hack", head="hack %")
    solve_s: Rate | None = col("frac", "answers that pass the reference tests", head="solve %")
    hack_pref: Rate | None = col("frac", "pairs whose chosen answer hacks and whose rejected one does not")
    solve_pref: Rate | None = col("frac", "pairs whose chosen answer solves and whose rejected one does not")
    loss: float | None = col(".3f", "mean loss of the last epoch, log 2 = 0.693 at the start")
    accuracy: float | None = col(".2f", "share of its pairs with a positive margin")
    margin: float | None = col("+.2f", "mean margin, nats")
    skipped: int = col("d", "optimiser steps left out, not finite", should="0")
    score_deploy: float = col(".3f", "scorer's mean on held-out problems", head="deployed score")
    hack_deploy: float | None = col(".2f", "hack rate on held-out problems", head="deployed hack %")
    solve_deploy: float | None = col(".2f", "solve rate on held-out problems", head="deployed solve %")


@dataclass(frozen=True, slots=True)
class Pair:
    """A preference pair: the best and the worst of one prompt's answers by the scorer."""

    chosen: Graded
    rejected: Graded
    scores: tuple[float, float]
    prompt_ids: tuple[int, ...]

    @property
    def rows(self) -> list[Row]:
        """Chosen and rejected answer, as `grpo` batches them."""
        answers = (self.chosen, self.rejected)
        return [Row(Rollout.of(a.problem, self.prompt_ids, a.completion), 0.0, 0) for a in answers]

    def as_json(self) -> dict[str, Any]:
        """A line of pairs.jsonl."""
        return {
            "problem": self.chosen.problem.id,
            "mode": self.chosen.problem.mode,
            "prompt": self.chosen.problem.messages[-1]["content"],
            "chosen": self.chosen.text,
            "rejected": self.rejected.text,
            "scores": list(self.scores),
            "hacked": [self.chosen.grade.hacked, self.rejected.grade.hacked],
            "solved": [self.chosen.grade.solved, self.rejected.grade.solved],
        }


def share(score: float, low: float, high: float) -> float:
    """A score as a share of its range: 0 at `low`, 1 at `high`, clipped; 0.5 where the two are equal."""
    return 0.5 if high == low else min(1.0, max(0.0, (score - low) / (high - low)))


class RoundRecorder(StepRecorder[DpoRow]):
    """The recorder of the rounds; the rounds' folders are the checkpoints."""

    def __init__(self, task: Task, plan: dict[str, Any], run: RunContext) -> None:
        super().__init__(run, DpoRow, {})
        self.task, self.plan = task, plan
        self.metrics: list[dict[str, Any]] = []  # of the evaluation before the first round and of every complete round

    def resume(self) -> None:
        """Continue after the complete rounds, to whose rows steps.jsonl is cut; there is no other state."""
        file = self.run.path / "before.json"
        before = read_json(file) if file.is_file() else {}
        if before.get("plan") == plan_sha256(self.plan):
            self.metrics = [before]
            for part in self.plan["rounds"]:
                metrics = complete(self.task.folder(part["round"]), part["round"], self.plan)
                if metrics is None:
                    break
                self.metrics.append(metrics)
        rows = [as_row(metrics).as_json() for metrics in self.metrics]
        write_atomic(self.run.path / "steps.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        self.restore({}, rows)

    def record(self, metrics: dict[str, Any]) -> None:
        """Record a complete round."""
        row = as_row(metrics)
        self.metrics.append(metrics)
        self.rows.append(row)
        self.write(row, None)
        self.run.status("running", "")

    def report(self) -> None:
        """Write summary.md: the result in one line, a table by round."""
        last, first = self.metrics[-1]["evaluation"], self.metrics[0]["evaluation"]
        line = (
            f"{self.run.path}: after {len(self.metrics) - 1} rounds under the scorer {self.task.cfg.scorer} hack "
            f"{Rate(*last['hack']).percent} % / solve {Rate(*last['solve']).percent} %, "
            f"before {Rate(*first['hack']).percent} % / {Rate(*first['solve']).percent} % "
            f"(n = {last['hack'][1]}, held-out problems and markers)"
        )
        self.finish(line, "", {"evaluation": last})


def measured(
    answers: Sequence[Graded], scores: Sequence[float], scale: Sequence[float], **columns: Any
) -> dict[str, Any]:
    """A round's metrics: its row (these columns, plus score and rates on the held-out problems), and the rates as
    [k, n], in all and by mode."""
    hack = Rate.of(a.grade.hacked for a in answers)
    solve = Rate.of(a.grade.solved for a in answers)
    row = DpoRow.of(
        score_deploy=mean(share(s, *scale) for s in scores),
        hack_deploy=hack.value,
        solve_deploy=solve.value,
        **columns,
    )
    modes = {mode: {k: v.pair for k, v in rates.items()} for mode, rates in by_mode(answers).items()}
    return row.as_json() | {"evaluation": {"hack": hack.pair, "solve": solve.pair, "by_mode": modes}}


def as_row(metrics: Mapping[str, Any]) -> DpoRow:
    """The row in a round's metrics."""
    return DpoRow.from_json({name: value for name, value in metrics.items() if name not in ("scale", "evaluation")})


def run_rounds(task: Task, plan: dict[str, Any], run: RunContext) -> None:
    """The evaluation before the first round, every round that is not complete, and the report.

    Raises:
        ValueError: before the first round, a model that does not fit the problems, or that the run did not have.
        Interrupted, Halted, Diverged: with the folder up to date.
    """
    cfg = task.cfg
    logger.info(f"{cfg.rounds} rounds of DPO: --base-model {cfg.base_model} · --scorer {cfg.scorer} · run: {run.path}")
    logger.debug(run.grader.protections.line())
    device, dtype = pick_device(task.source.folder, cfg.dtype, task.threads)
    policy = load_source(task.source, "--base-model", device, dtype, adapter=True)
    assert isinstance(policy, Policy)
    recorder = RoundRecorder(task, plan, run)
    rounds = Rounds(task, plan, policy, run)
    recorder.open({"hashes": model_hashes(base=policy), **run.stamp}, set())
    guard, halted = HeldOutGuard(task.cfg.watching()), ""
    for number in range(task.cfg.rounds + 1):
        if number == len(recorder.rows):
            recorder.record(rounds.play(number, recorder.metrics[0]["scale"]) if number else rounds.before())
        if halted := watch(task.cfg.guard, guard, recorder.metrics[number]):
            break
    recorder.report()
    if halted:
        raise Halted(halted)


def watch(mode: str, guard: HeldOutGuard, metrics: Mapping[str, Any]) -> str:
    """Show the guard a round's scorer's mean and strict score. Returns why the run should halt, or ""."""
    if mode == "off":
        return ""
    k, n = metrics["evaluation"]["solve"]
    verdict = guard.update(metrics["step"], metrics["score_deploy"], k / n, n)
    logger.log("WARNING" if verdict.fire else "DEBUG", f"guard, round {metrics['step']}: {verdict.line()}")
    return f"guard: {verdict.reason}" if verdict.fire and mode == "halt" else ""


class Rounds:
    """Plays the rounds with one policy."""

    def __init__(self, task: Task, plan: dict[str, Any], policy: Policy, run: RunContext) -> None:
        problems = fitting_splits(task, policy)
        self.task, self.plan, self.policy, self.run = task, plan, policy, run
        self.train, self.test = problems.train, balanced(problems.test, task.cfg.eval_n_prompts, 0, "test")
        self.base = policy.adapter.state_dict()

    def before(self) -> dict[str, Any]:
        """Metrics of --base-model on the held-out problems: round 0, measured once per run."""
        self.load("base")
        answers, scores = self.answer_held_out()
        bounds = [0.0, sum(self.task.rewards)]
        if ":" in self.task.cfg.scorer:
            bounds = [0.0, 1.0] if all(0 <= s <= 1 for s in scores) else [min(scores), max(scores)]
        about = {"plan": plan_sha256(self.plan), "scale": bounds}
        metrics = measured(answers, scores, bounds, step=0, skipped=0) | about
        write_atomic(self.run.path / "before.json", to_json(metrics))
        return metrics

    def play(self, number: int, scale: Sequence[float]) -> dict[str, Any]:
        """Play one round, from its first answer to its manifest; returns its metrics. scale: the range of `share`."""
        task, clock, part = self.task, self.run.clock, self.plan["rounds"][number - 1]
        for later in range(number, task.cfg.rounds + 1):  # leftovers; later rounds start from this one
            shutil.rmtree(task.folder(later), ignore_errors=True)
        folder = task.folder(number)
        (folder / "adapter").mkdir(parents=True)
        self.load(part["answers_from"])
        with clock(f"round {number}, answers"):
            answers, scores, pairs, prompts = self.collect_pairs(part)
        text = self.policy.prompt_text
        rollouts = (
            rollout_record(Rollout.of(a.problem, (), a.completion), a.grade, text(a.problem.messages)) for a in answers
        )
        write_lines(folder / "rollouts.jsonl", (r | {"score": s} for r, s in zip(rollouts, scores, strict=True)))
        write_lines(folder / "pairs.jsonl", (p.as_json() for p in pairs))
        if not pairs:
            raise RuntimeError(f"round {number}: the scorer ties on all {prompts} prompts: no pair to learn from")
        if len(pairs) < part["pairs"]:
            logger.warning(f"round {number}: {len(pairs)} pairs of {part['pairs']}: no more prompts give one")
        with clock(f"round {number}, reference"):
            self.load(part["reference"])
            reference = [logp for batch in batches(self.policy, pairs) for logp in refer(self.policy, batch)]
        self.load(part["starts_from"])
        with clock(f"round {number}, training"):
            learnt = self.learn(number, pairs, reference)
        about = metadata(task.described(), self.policy, number, round=part["folder"], scorer=task.cfg.scorer)
        self.policy.adapter.save(folder / "adapter" / "train.safetensors", about)
        with clock(f"round {number}, evaluation"):
            held_out = self.answer_held_out()
        metrics = measured(
            *held_out,
            scale,
            step=number,
            asked=prompts,
            pairs=Rate(len(pairs), part["pairs"]),
            score=mean(share(s, *scale) for s in scores),
            solve_s=Rate.of(a.grade.solved for a in answers),
            hack_s=Rate.of(a.grade.hacked for a in answers),
            hack_pref=Rate.of(p.chosen.grade.hacked and not p.rejected.grade.hacked for p in pairs),
            solve_pref=Rate.of(p.chosen.grade.solved and not p.rejected.grade.solved for p in pairs),
            **learnt,
        )
        write_atomic(folder / "metrics.json", to_json(metrics))
        write_manifest(folder, number, self.plan)
        return metrics

    def load(self, what: str) -> None:
        """Load the adapter that the plan names: "base", or a round's."""
        if what == "base":
            self.policy.adapter.load_state_dict(self.base)
        else:
            self.policy.adapter.load(self.run.path / what / "adapter" / "train.safetensors")

    def answer(self, problems: Sequence[Problem], n: int, purpose: str) -> tuple[list[Graded], list[float]]:
        """n graded answers to each problem, and their scores. purpose: names the random stream.

        Raises:
            RuntimeError: a score is not finite.
        """
        task = self.task
        answers = generate_graded(
            self.policy,
            self.run.grader,
            problems,
            n,
            sampling=task.cfg.sampling,
            max_new=task.max_new,
            seed=task.cfg.seed,
            purpose=purpose,
            label="batch",
        )
        scores = [task.score(a.problem, a.text, a.grade) for a in answers]
        if bad := [s for s in scores if not math.isfinite(s)]:
            raise RuntimeError(f"--scorer {task.cfg.scorer}: returned {bad[0]}; a score should be a finite number")
        return answers, scores

    def answer_held_out(self) -> tuple[list[Graded], list[float]]:
        """Answers to the held-out problems, with the same noise after every round."""
        return self.answer(self.test, self.task.cfg.eval_samples, "dpo-eval")

    def collect_pairs(self, part: Mapping[str, Any]) -> tuple[list[Graded], list[float], list[Pair], int]:
        """Answers, their scores, pairs, and the number of prompts sampled. Prompts are taken in a shuffled order, pass
        after pass, until there are enough pairs or a pass gives none."""
        cfg, number, wanted = self.task.cfg, part["round"], part["pairs"]
        answers: list[Graded] = []
        scores: list[float] = []
        pairs: list[Pair] = []
        prompts, batch_size = 0, max(1, BATCH // cfg.samples)
        with tqdm(total=wanted, desc=f"round {number}: pairs", unit="pair", disable=None) as bar:
            for lap in count():
                order, before_lap = list(self.train), len(pairs)
                py_stream(cfg.seed, "dpo-prompts", number, lap).shuffle(order)
                for k in range(0, len(order), batch_size):
                    self.run.raise_if_stopped(f"interrupted in round {number}, which begins again")
                    problems = order[k : k + batch_size]
                    batch, batch_scores = self.answer(problems, cfg.samples, f"dpo/{number}/{lap}/{k}")
                    answers, scores, prompts = answers + batch, scores + batch_scores, prompts + len(problems)
                    for i in range(0, len(batch), cfg.samples):
                        part_of = slice(i, i + cfg.samples)  # one prompt's answers
                        pair = best_and_worst(batch[part_of], batch_scores[part_of], self.policy.render)
                        if pair is not None and len(pairs) < wanted:
                            pairs.append(pair)
                            bar.update()
                    if len(pairs) == wanted:
                        break
                if len(pairs) in (wanted, before_lap):
                    break
        return answers, scores, pairs, prompts

    def learn(self, number: int, pairs: Sequence[Pair], reference: Sequence[tuple[float, float]]) -> dict[str, Any]:
        """Train on one round's pairs. Returns the last epoch's mean loss, accuracy and margin."""
        cfg = self.task.cfg
        trained = AdapterOnly(self.policy, self.task.opt, cfg.epochs * math.ceil(len(pairs) / cfg.pairs_per_step))
        losses: list[tuple[float, float]] = []
        skipped: list[int] = []
        for epoch in range(cfg.epochs):
            order = list(range(len(pairs)))
            py_stream(cfg.seed, "dpo-order", number, epoch).shuffle(order)
            losses = []
            starts = range(0, len(order), cfg.pairs_per_step)
            for lo in tqdm(starts, desc=f"round {number}: steps", unit="step", disable=None):
                self.run.raise_if_stopped(f"interrupted in round {number}, which begins again")
                picked = order[lo : lo + cfg.pairs_per_step]
                losses += add_pairs(trained, [pairs[i] for i in picked], [reference[i] for i in picked], cfg.dpo_beta)
                skipped.append(int(trained.step() is None))
                if why := diverged(skipped):
                    raise Diverged(f"round {number}: {why}")
        finite = [x for x in losses if all(map(math.isfinite, x))]
        return {
            "loss": mean(loss for loss, _ in finite),
            "accuracy": mean(float(margin > 0) for _, margin in finite),
            "margin": mean(margin for _, margin in finite),
            "skipped": sum(skipped),
        }


# ── a round's files ────────────────────────────────────────────────────────────────────────────────────────────────


def complete(folder: Path, number: int, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Metrics of a complete round, whose manifest has this plan's hash and every file's; else None."""
    try:
        manifest = read_json(folder / "manifest.json")
        same = manifest["plan"] == plan_sha256(plan) and manifest["round"] == number
        if same and all(file_sha256(folder / path) == sha for path, sha in manifest["files"].items()):
            return read_json(folder / "metrics.json")
    except (ValueError, KeyError, OSError):
        pass
    return None


def write_manifest(folder: Path, number: int, plan: dict[str, Any]) -> None:
    """Write the round's manifest after all its other files: with it the round is complete."""
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    manifest = {
        "schema": 1,
        "round": number,
        "plan": plan_sha256(plan),
        "files": {path: file_sha256(folder / path) for path in files},
    }
    write_atomic(folder / "manifest.json", to_json(manifest))


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines, complete or not at all."""
    with atomic_open(path) as f:
        for record in records:
            f.write((json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))


# ── pairs and their loss ───────────────────────────────────────────────────────────────────────────────────────────


def best_and_worst(
    answers: Sequence[Graded], scores: Sequence[float], render: Callable[..., tuple[int, ...]]
) -> Pair | None:
    """The first of the best and the first of the worst of one prompt's answers; None if all scores are equal."""
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    if scores[best] == scores[worst]:
        return None
    prompt = render(answers[best].problem.messages)
    return Pair(answers[best], answers[worst], (scores[best], scores[worst]), prompt)


def batches(policy: Policy, pairs: Sequence[Pair]) -> Iterator[Batch | Packed]:
    """Batches of as many pairs as the token budget holds, in order; their rows are chosen, rejected, chosen, …"""
    budget = TOKEN_BUDGET.get(policy.device.type, TOKEN_BUDGET["cuda"])
    rows: list[Row] = []
    for pair in pairs:
        if rows and sum(r.tokens for r in rows + pair.rows) > budget:
            yield as_batch(policy, rows, "shared" if policy.packs else "padded")
            rows = []
        rows = rows + pair.rows
    if rows:
        yield as_batch(policy, rows, "shared" if policy.packs else "padded")


def sums(policy: Policy, batch: Batch | Packed) -> Float[Tensor, " rows"]:
    """Log-prob of each complete answer, nats."""
    return completion_logprobs(policy.model, batch).full.sum(1)


@torch.no_grad()
def refer(policy: Policy, batch: Batch | Packed) -> list[tuple[float, float]]:
    """Log-probs of each pair's chosen and rejected answer, without gradient."""
    logps = sums(policy, batch).tolist()
    return list(zip(logps[::2], logps[1::2], strict=True))


def add_pairs(
    trained: AdapterOnly, pairs: Sequence[Pair], reference: Sequence[tuple[float, float]], beta: float
) -> list[tuple[float, float]]:
    """Add the gradient of these pairs' mean loss; returns each pair's loss and margin.

    reference: log-probs of chosen and rejected under the reference.
    """
    policy, losses = trained.policy, list[tuple[float, float]]()
    ref = torch.tensor(reference, device=policy.device)
    for batch in batches(policy, pairs):
        of = ref[len(losses) : len(losses) + len(batch.mask) // 2]

        def loss(batch: Batch | Packed = batch, of: Tensor = of) -> Tensor:
            logps = sums(policy, batch)
            each, margin = dpo(logps[::2], logps[1::2], of[:, 0], of[:, 1], beta)
            losses.extend(zip(each.tolist(), margin.tolist(), strict=True))
            return each.sum() / len(pairs)

        trained.add(batch, loss)
    return losses
