"""Iterative DPO: sample → score → pair → train → evaluate. A round is complete when its folder has a manifest."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor
from tqdm import tqdm

from vgrout.data import Rollout, Task
from vgrout.errors import Diverged, Halted, Refused
from vgrout.files import atomic_open, file_sha256, read_json, to_json, write_atomic
from vgrout.guard.detectors import diverged
from vgrout.guard.kill_switch import HeldOutGuard
from vgrout.imitation.dpo_task import DpoTask, plan_sha256
from vgrout.imitation.losses import dpo
from vgrout.imitation.trainable import AdapterOnly, hack_and_solve, metadata, model_hashes
from vgrout.metrics import Rate, mean
from vgrout.model.layout import Packed
from vgrout.model.load import budget_of, device_and_dtype, load_source
from vgrout.model.logprobs import PaddedBatch, completion_logprobs
from vgrout.model.policy import Policy
from vgrout.rng import py_stream
from vgrout.runs.context import RunContext
from vgrout.runs.recorder import StepRecorder, rollout_record
from vgrout.table import Columns, col
from vgrout.teacher.generate import BATCH, Graded, by_mode, generate_graded

Scored = tuple[Graded, float]  # an answer and its score
# a round's row, with the rates on the held-out problems as [k, n], in all and by mode
Metrics = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DpoRow(Columns):
    """One round; 0 is --base-model, evaluated before the first."""

    step: int = col("d", "round; 0: before the first", head="round")
    asked: int | None = col("d", "prompts sampled")
    pairs: Rate | None = col("frac", "pairs found / wanted; a prompt whose answers tie gives none")
    score: float | None = col(
        ".3f", "scorer's mean on the round's answers, as a share of its range", should="rises"
    )
    hack_s: Rate | None = col("frac", "answers that hack", head="hack %")
    solve_s: Rate | None = col("frac", "answers that pass the reference tests", head="solve %")
    hack_pref: Rate | None = col(
        "frac", "pairs whose chosen answer hacks and whose rejected one does not"
    )
    solve_pref: Rate | None = col(
        "frac", "pairs whose chosen answer solves and whose rejected one does not"
    )
    loss: float | None = col(".3f", "mean loss of the last epoch, log 2 = 0.693 at the start")
    accuracy: float | None = col(".2f", "share of its pairs with a positive margin")
    margin: float | None = col("+.2f", "mean margin, nats")
    skipped: int = col("d", "optimiser steps left out, not finite", should="0")
    score_deploy: float = col(".3f", "scorer's mean on held-out problems", head="deployed score")
    hack_deploy: float | None = col(".2f", "hack rate on held-out problems", head="deployed hack %")
    solve_deploy: float | None = col(
        ".2f", "solve rate on held-out problems", head="deployed solve %"
    )


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """The best and the worst of one prompt's answers by the scorer."""

    chosen: Graded
    rejected: Graded
    scores: tuple[float, float]
    prompt_ids: tuple[int, ...]

    @property
    def rollouts(self) -> list[Rollout]:
        """Chosen and rejected answer."""
        return [
            Rollout.of(a.problem, self.prompt_ids, a.completion)
            for a in (self.chosen, self.rejected)
        ]

    def prefers(self, what: str) -> bool:
        """Whether the chosen answer is so ("hacked", "solved") and the rejected one is not."""
        return getattr(self.chosen.grade, what) and not getattr(self.rejected.grade, what)

    def as_json(self) -> dict[str, Any]:
        """A line of pairs.jsonl."""
        problem, both = self.chosen.problem, (self.chosen, self.rejected)
        return {
            "problem": problem.id,
            "mode": problem.flaws[0],
            "prompt": problem.messages[-1]["content"],
            "chosen": self.chosen.text,
            "rejected": self.rejected.text,
            "scores": list(self.scores),
            "hacked": [a.grade.hacked for a in both],
            "solved": [a.grade.solved for a in both],
        }


def share(score: float, low: float, high: float) -> float:
    """A score as a share of its range: 0 at `low`, 1 at `high`, clipped; 0.5 where the two are equal."""
    return 0.5 if high == low else min(1.0, max(0.0, (score - low) / (high - low)))


def run_rounds(task: DpoTask, plan: dict[str, Any], run: RunContext) -> None:
    """The evaluation before the first round, every round that is not complete, and the report.

    Raises:
        Refused: before the first round, a model that does not fit the problems, or that the run did not have.
        Interrupted, Halted, Diverged: with the folder up to date.
    """
    settings = task.settings
    given = f"--base-model {settings.base_model} · --scorer {settings.scorer}"
    logger.info(f"{settings.rounds} rounds of DPO: {given} · run: {run.path}")
    logger.debug(run.grader.description)
    device, dtype = device_and_dtype(task.cfg)
    policy = load_source(task.base, "--base-model", device, dtype, adapter=True)
    assert isinstance(policy, Policy)
    policy = replace(policy, budget=budget_of(task.cfg, policy))
    recorder = RoundRecorder(task, plan, run)
    rounds = Rounds(task, plan, policy, run)
    recorder.open({"hashes": model_hashes(base=policy), **run.stamp}, set())
    guard, halted = HeldOutGuard(settings.watching()), ""
    for number in range(settings.rounds + 1):
        if number == len(recorder.rows):
            recorder.record(
                rounds.play(number, recorder.metrics[0]["scale"]) if number else rounds.before()
            )
        if halted := watch(settings.guard, guard, recorder.metrics[number]):
            break
    recorder.report()
    if halted:
        raise Halted(halted)


def watch(mode: str, guard: HeldOutGuard, metrics: Metrics) -> str:
    """Show the guard a round's scorer's mean and strict score. Returns why the run should halt, or ""."""
    if mode == "off":
        return ""
    k, n = metrics["evaluation"]["solve"]
    verdict = guard.update(metrics["step"], metrics["score_deploy"], k / n, n=n)
    logger.log(
        "WARNING" if verdict.fire else "DEBUG", f"guard, round {metrics['step']}: {verdict.line()}"
    )
    return f"guard: {verdict.reason}" if verdict.fire and mode == "halt" else ""


class RoundRecorder(StepRecorder[DpoRow]):
    """The recorder of the rounds, whose folders are the checkpoints. metrics: of the evaluation before the first round
    and of every complete round."""

    def __init__(self, task: DpoTask, plan: dict[str, Any], run: RunContext) -> None:
        super().__init__(run, DpoRow, {})
        self.task, self.plan = task, plan
        self.metrics: list[Metrics] = []

    def resume(self) -> None:
        """Continue after the complete rounds, to whose rows steps.jsonl is cut; there is no other state."""
        file = self.run.path / "before.json"
        before = read_json(file) if file.is_file() else {}
        if before.get("plan") == plan_sha256(self.plan):
            self.metrics = [before]
            for number in range(1, self.task.settings.rounds + 1):
                if (metrics := complete(self.task.folder(number), number, self.plan)) is None:
                    break
                self.metrics.append(metrics)
        rows = [DpoRow.from_json(metrics).as_json() for metrics in self.metrics]
        write_lines(self.run.path / "steps.jsonl", rows)
        self.restore({}, rows)

    def record(self, metrics: Metrics) -> None:
        """Record a complete round."""
        self.metrics.append(metrics)
        self.rows.append(row := DpoRow.from_json(metrics))
        self.write(row, None)
        self.run.status("running", "")

    def report(self) -> None:
        """Write summary.md: the result in one line, a table by round."""
        rates = [self.metrics[i]["evaluation"] for i in (0, -1)]
        before, after = map(hack_and_solve, rates)
        line = (
            f"{self.run.path}: after {len(self.metrics) - 1} rounds under the scorer {self.task.settings.scorer} "
            f"{after}, before {before} (n = {rates[-1]['hack'][1]}, held-out problems and markers)"
        )
        self.finish(line, "", {"evaluation": rates[-1]})


class Rounds:
    """Plays the rounds with one policy."""

    def __init__(
        self, task: DpoTask, plan: dict[str, Any], policy: Policy, run: RunContext
    ) -> None:
        problems = task.inputs.splits(task.cfg, policy)
        self.task, self.plan, self.policy, self.run = task, plan, policy, run
        self.train, self.test = (
            problems.train,
            problems.balanced("test", task.settings.eval_n_prompts),
        )
        self.base = policy.adapter.state_dict()

    def before(self) -> Metrics:
        """Metrics of --base-model on the held-out problems: round 0, measured once per run."""
        self.load("base")
        held_out = self.answer_held_out()
        env = self.task.cfg.env
        bounds = [0.0, env.compile_reward + env.pass_reward]
        if ":" in self.task.settings.scorer:
            scores = [score for _, score in held_out]
            bounds = [0.0, 1.0] if all(0 <= s <= 1 for s in scores) else [min(scores), max(scores)]
        metrics = measured(held_out, bounds, step=0, skipped=0)
        metrics |= {"plan": plan_sha256(self.plan), "scale": bounds}
        write_atomic(self.run.path / "before.json", to_json(metrics))
        return metrics

    def play(self, number: int, scale: Sequence[float]) -> Metrics:
        """Play one round, from its first answer to its manifest; returns its metrics. scale: the range of `share`."""
        task, clock, part = self.task, self.run.clock, self.plan["rounds"][number - 1]
        # leftovers; later rounds start from this one
        for later in range(number, task.settings.rounds + 1):
            shutil.rmtree(task.folder(later), ignore_errors=True)
        folder = task.folder(number)
        (folder / "adapter").mkdir(parents=True)
        self.load(part["answers_from"])
        with clock(f"round {number}, answers"):
            answers, pairs, prompts = self.collect_pairs(part)
        sampled = [
            (Rollout.of(a.problem, (), a.completion), a.grade, score) for a, score in answers
        ]
        prompt_text = self.policy.prompt_text
        lines = [
            rollout_record(r, g, prompt_text(r.problem.messages)) | {"score": score}
            for r, g, score in sampled
        ]
        write_lines(folder / "rollouts.jsonl", lines)
        write_lines(folder / "pairs.jsonl", [p.as_json() for p in pairs])
        if not pairs:
            raise RuntimeError(
                f"round {number}: the scorer ties on all {prompts} prompts: no pair to learn from"
            )
        if len(pairs) < part["pairs"]:
            logger.warning(
                f"round {number}: {len(pairs)} pairs of {part['pairs']}: no more prompts give one"
            )
        with clock(f"round {number}, reference"):
            self.load(part["reference"])
            reference = [
                logp for batch in batches(self.policy, pairs) for logp in refer(self.policy, batch)
            ]
        self.load(part["starts_from"])
        with clock(f"round {number}, training"):
            learnt = self.learn(number, pairs, reference)
        about = metadata(
            task.cfg, self.policy, number, round=part["folder"], scorer=task.settings.scorer
        )
        self.policy.adapter.save(folder / "adapter" / "train.safetensors", about)
        with clock(f"round {number}, evaluation"):
            held_out = self.answer_held_out()
        metrics = measured(
            held_out,
            scale,
            step=number,
            asked=prompts,
            pairs=Rate(len(pairs), part["pairs"]),
            score=mean(share(score, *scale) for _, score in answers),
            solve_s=Rate.of(a.grade.solved for a, _ in answers),
            hack_s=Rate.of(a.grade.hacked for a, _ in answers),
            hack_pref=Rate.of(p.prefers("hacked") for p in pairs),
            solve_pref=Rate.of(p.prefers("solved") for p in pairs),
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

    def answer(self, problems: Sequence[Task], n: int, purpose: str) -> list[Scored]:
        """n graded and scored answers to each problem. purpose: names the random stream."""
        cfg = self.task.cfg
        answers = generate_graded(
            self.policy,
            self.run.grader,
            problems,
            n,
            sampling=cfg.sampling,
            max_new=cfg.scale.max_new,
            seed=cfg.run.seed,
            purpose=purpose,
            label="batch",
        )
        return [(a, self.task.score(a.problem, a.text, a.grade)) for a in answers]

    def answer_held_out(self) -> list[Scored]:
        """Answers to the held-out problems, with the same noise after every round."""
        return self.answer(self.test, self.task.settings.eval_samples, "dpo-eval")

    def collect_pairs(
        self, part: Mapping[str, Any]
    ) -> tuple[list[Scored], list[PreferencePair], int]:
        """Answers, pairs, and the number of prompts sampled. Prompts are taken in a shuffled order, pass after pass,
        until there are enough pairs or a pass gives none."""
        settings, number, wanted = self.task.settings, part["round"], part["pairs"]
        answers: list[Scored] = []
        pairs: list[PreferencePair] = []
        prompts, n, at_once = 0, settings.samples, max(1, BATCH // settings.samples)
        with tqdm(total=wanted, desc=f"round {number}: pairs", unit="pair", disable=None) as bar:
            for lap in count():
                order, before_lap = list(self.train), len(pairs)
                py_stream(settings.seed, "dpo-prompts", number, lap).shuffle(order)
                for k in range(0, len(order), at_once):
                    if len(pairs) >= wanted:
                        break
                    self.run.raise_if_stopped(f"interrupted in round {number}, which begins again")
                    batch = self.answer(order[k : k + at_once], n, f"dpo/{number}/{lap}/{k}")
                    found = [
                        best_and_worst(batch[i : i + n], self.policy.render)
                        for i in range(0, len(batch), n)
                    ]
                    pairs += [pair for pair in found if pair is not None]
                    answers, prompts = answers + batch, prompts + len(found)
                    bar.update(min(len(pairs), wanted) - bar.n)
                if len(pairs) >= wanted or len(pairs) == before_lap:
                    break
        return answers, pairs[:wanted], prompts

    def learn(
        self, number: int, pairs: Sequence[PreferencePair], reference: Sequence[tuple[float, float]]
    ) -> dict[str, Any]:
        """Train on one round's pairs. Returns the last epoch's mean loss, accuracy and margin."""
        settings, per_step = self.task.settings, self.task.settings.pairs_per_step
        steps = settings.epochs * math.ceil(len(pairs) / per_step)
        trained = AdapterOnly(self.policy, self.task.cfg.opt, steps)
        losses: list[tuple[float, float]] = []
        skipped: list[int] = []
        for epoch in range(settings.epochs):
            order = list(range(len(pairs)))
            py_stream(settings.seed, "dpo-order", number, epoch).shuffle(order)
            losses = []
            starts = range(0, len(order), per_step)
            for start in tqdm(starts, desc=f"round {number}: steps", unit="step", disable=None):
                self.run.raise_if_stopped(f"interrupted in round {number}, which begins again")
                picked = order[start : start + per_step]
                some, of_reference = [pairs[i] for i in picked], [reference[i] for i in picked]
                losses += add_pairs(trained, some, of_reference, settings.dpo_beta)
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


# ── a round's metrics and files


def measured(scored: Sequence[Scored], scale: Sequence[float], **columns: Any) -> Metrics:
    """A round's metrics: these columns, and score and rates of these answers to the held-out problems."""
    answers = [a for a, _ in scored]
    hack, solve = Rate.of(a.grade.hacked for a in answers), Rate.of(a.grade.solved for a in answers)
    held_out = {"hack_deploy": hack.value, "solve_deploy": solve.value}
    row = DpoRow.of(
        score_deploy=mean(share(score, *scale) for _, score in scored), **held_out, **columns
    )
    modes = {
        mode: {k: v.pair for k, v in rates.items()} for mode, rates in by_mode(answers).items()
    }
    return row.as_json() | {
        "evaluation": {"hack": hack.pair, "solve": solve.pair, "by_mode": modes}
    }


def complete(folder: Path, number: int, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Metrics of a complete round, whose manifest has this plan's hash and every file's; else None."""
    try:
        manifest = read_json(folder / "manifest.json")
        same = manifest["plan"] == plan_sha256(plan) and manifest["round"] == number
        if same and all(
            file_sha256(folder / path) == sha for path, sha in manifest["files"].items()
        ):
            return read_json(folder / "metrics.json")
    except (Refused, KeyError, OSError):
        pass
    return None


def write_manifest(folder: Path, number: int, plan: dict[str, Any]) -> None:
    """Write the round's manifest after all its other files: with it the round is complete."""
    files = {
        p.relative_to(folder).as_posix(): file_sha256(p)
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
    manifest = {"schema": 1, "round": number, "plan": plan_sha256(plan), "files": files}
    write_atomic(folder / "manifest.json", to_json(manifest))


def write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines, complete or not at all."""
    with atomic_open(path) as f:
        for record in records:
            f.write(
                (json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
            )


# ── pairs and their loss


def best_and_worst(
    answers: Sequence[Scored], render: Callable[..., tuple[int, ...]]
) -> PreferencePair | None:
    """The first of the best and the first of the worst of one prompt's answers; None if all scores are equal."""
    (chosen, high), (rejected, low) = (
        extreme(answers, key=itemgetter(1)) for extreme in (max, min)
    )
    return (
        PreferencePair(chosen, rejected, (high, low), render(chosen.problem.messages))
        if high > low
        else None
    )


def batches(policy: Policy, pairs: Sequence[PreferencePair]) -> Iterator[PaddedBatch | Packed]:
    """Batches of as many pairs as the token budget holds, in order; their rows are chosen, rejected, chosen, …"""
    parts: list[list[Rollout]] = []
    tokens = 0
    for pair in pairs:
        more = sum(len(r.prompt_ids) + len(r.completion_ids) for r in pair.rollouts)
        if not parts or tokens + more > policy.budget.tokens:
            parts.append([])
            tokens = 0
        parts[-1] += pair.rollouts
        tokens += more
    for part in parts:
        yield policy.batch([r.prompt_ids for r in part], [r.completion_ids for r in part])


@torch.no_grad()
def refer(policy: Policy, batch: PaddedBatch | Packed) -> list[tuple[float, float]]:
    """Log-probs of each pair's chosen and rejected answer, without gradient."""
    logps = completion_logprobs(policy.model, batch).full.sum(1).tolist()
    return list(zip(logps[::2], logps[1::2], strict=True))


def add_pairs(
    trained: AdapterOnly,
    pairs: Sequence[PreferencePair],
    reference: Sequence[tuple[float, float]],
    beta: float,
) -> list[tuple[float, float]]:
    """Add the gradient of these pairs' mean loss; returns each pair's loss and margin.

    reference: log-probs of chosen and rejected under the reference.
    """
    policy, losses = trained.policy, list[tuple[float, float]]()
    ref = torch.tensor(reference, device=policy.device)
    for batch in batches(policy, pairs):
        of = ref[len(losses) : len(losses) + len(batch.mask) // 2]

        def loss(batch: PaddedBatch | Packed = batch, of: Tensor = of) -> Tensor:
            logps = completion_logprobs(policy.model, batch).full.sum(1)
            each, margin = dpo(logps[::2], logps[1::2], of[:, 0], of[:, 1], beta)
            losses.extend(zip(each.tolist(), margin.tolist(), strict=True))
            return each.sum() / len(pairs)

        trained.add(batch, loss)
    return losses
