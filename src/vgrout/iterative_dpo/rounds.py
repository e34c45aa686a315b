"""Iterative DPO: sample → score → pair → train → evaluate. Each round has a folder, complete when it has a manifest."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from loguru import logger
from torch import Tensor
from tqdm import tqdm

from vgrout.console import explain_columns, terminal_width
from vgrout.distill.losses import dpo
from vgrout.distill.trainable import AdapterOnly
from vgrout.files import atomic_open, file_sha256, read_json, to_json, write_atomic
from vgrout.grpo import Row, as_batch
from vgrout.guard.kill_switch import HeldOutGuard, TripwireStatus
from vgrout.iterative_dpo.config import Task, name, plan_sha256
from vgrout.model.budgets import TOKEN_BUDGET
from vgrout.model.logprobs import Batch, completion_logprobs
from vgrout.model.packing import Packed
from vgrout.model.policy import Policy
from vgrout.model.saved import load_source, pick_device
from vgrout.model.svd_adapter import weights_sha256
from vgrout.problems import balanced
from vgrout.rng import py_stream
from vgrout.runs.recorder import rollout_record
from vgrout.runs.run_context import RunContext
from vgrout.table import Columns, Table, col
from vgrout.teacher.generate import BATCH, Graded, by_mode, generate_graded
from vgrout.types import Diverged, Halted, Interrupted, Problem, Rate, Rollout, mean

MAX_SKIPPED = 3  # non-finite steps in a row before the run counts as diverged


@dataclass(frozen=True, kw_only=True)
class DpoRow(Columns):
    """One round; 0 is --base-model, evaluated before the first."""

    step: int = col("d", "round; 0: before the first")
    asked: int | None = col("d", "prompts asked")
    pairs: Rate | None = col("frac", "pairs of those wanted; a prompt whose answers tie gives none")
    score: float | None = col(".3f", "scorer's mean on the round's answers, share of what can be had", should="rises")
    gt_s: Rate | None = col("frac", "answers that the strict oracle accepts")
    hack_s: Rate | None = col("frac", "answers that exploit")
    hack_pref: Rate | None = col("frac", "pairs whose chosen answer exploits and whose rejected one does not")
    solve_pref: Rate | None = col("frac", "pairs whose chosen answer solves and whose rejected one does not")
    loss: float | None = col(".3f", "mean loss of the last epoch, log 2 = .693 at the start")
    accuracy: float | None = col(".2f", "share of its pairs with a positive margin")
    margin: float | None = col("+.2f", "mean margin, nats")
    skipped: int = col("d", "optimiser steps left out, not finite", should="0")
    score_deploy: float = col(".3f", "scorer's mean on held-out problems")
    hack_deploy: float | None = col(".2f", "exploit rate on held-out problems")
    solve_deploy: float | None = col(".2f", "solve rate on held-out problems")


@dataclass(frozen=True, slots=True)
class Pair:
    """A preference pair: the best and the worst of one prompt's answers by the scorer."""

    chosen: Graded
    rejected: Graded
    scores: tuple[float, float]
    prompt_ids: tuple[int, ...]

    @property
    def rows(self) -> list[Row]:
        """Chosen and rejected as `grpo` batches them."""
        both = (self.chosen, self.rejected)
        return [Row(Rollout.of(a.problem, self.prompt_ids, a.completion), 0.0, 0) for a in both]

    def as_json(self) -> dict[str, Any]:
        """A line of pairs.jsonl."""
        return {
            "problem": self.chosen.problem.id,
            "mode": self.chosen.problem.mode,
            "prompt": self.chosen.problem.messages[-1]["content"],
            "chosen": self.chosen.text,
            "rejected": self.rejected.text,
            "scores": list(self.scores),
            "exploited": [self.chosen.grade.exploited, self.rejected.grade.exploited],
            "gt_correct": [self.chosen.grade.gt_correct, self.rejected.grade.gt_correct],
        }


@dataclass(frozen=True, slots=True)
class Scale:
    """Range of the scorer's numbers, by which a mean becomes a share in [0, 1]."""

    low: float
    high: float

    def share(self, score: float) -> float:
        """0 at `low`, 1 at `high`, cut outside; .5 where the two are one."""
        if self.high == self.low:
            return 0.5
        return min(1.0, max(0.0, (score - self.low) / (self.high - self.low)))


@dataclass
class Rounds:
    """The state of a run of rounds, loaded and checked."""

    task: Task
    plan: dict[str, Any]
    policy: Policy
    train: tuple[Problem, ...]
    test: list[Problem]
    run: RunContext
    guard: HeldOutGuard
    base: dict[str, Tensor]  # the adapter's state before the first round
    # of every complete round, the evaluation before the first included
    metrics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Complete rounds."""
        return max(0, len(self.metrics) - 1)


def load(task: Task, plan: dict[str, Any], run: RunContext) -> Rounds:
    """Policy, problems and guard. Raises ValueError, one line, where the model does not fit the problems."""
    cfg = task.cfg
    device, dtype = pick_device(cfg.torch_threads(task.small))
    policy = load_source(task.base, "--base-model", device, dtype, adapter=True)
    assert isinstance(policy, Policy)
    longest = policy.window - task.max_new

    def fit(split: str) -> list[Problem]:
        fits = [p for p in task.parts[split] if len(policy.render(p.messages)) <= longest]
        if not fits:
            raise ValueError(f"--max-new {task.max_new}: no prompt of the {split} split fits the window")
        return fits

    train = fit("train")
    py_stream(cfg.seed, "train-order").shuffle(train)
    test = balanced(fit("test"), cfg.eval_n_prompts, 0, "test")
    base = policy.adapter.state_dict()
    guard = HeldOutGuard(cfg.watching())
    return Rounds(task, plan, policy, tuple(train[: cfg.n_problems]), test, run, guard, base)


def hashes(r: Rounds) -> dict[str, str | None]:
    """sha256 of the base model's weights and of the tokenizer, for run.json."""
    policy = r.policy
    return {"weights": weights_sha256(policy.model, policy.adapter), "tokenizer": policy.tokenizer_sha256}


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def complete(folder: Path, number: int, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Metrics of a complete round: its manifest is of this plan and has every file's hash. Else None."""
    try:
        manifest = read_json(folder / "manifest.json")
        mine = manifest["plan"] == plan_sha256(plan) and manifest["round"] == number
        if mine and all(file_sha256(folder / path) == sha for path, sha in manifest["files"].items()):
            return read_json(folder / "metrics.json")
    except (ValueError, KeyError, OSError):
        pass
    return None


def write_manifest(folder: Path, number: int, plan: dict[str, Any]) -> None:
    """Write the round's manifest, after all other files: with it the round is complete."""
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    manifest = {
        "schema": 1,
        "round": number,
        "plan": plan_sha256(plan),
        "files": {path: file_sha256(folder / path) for path in files},
    }
    write_atomic(folder / "manifest.json", to_json(manifest))


def adapter_file(r: Rounds, number: int) -> Path:
    """Of a round."""
    return r.task.folder(number) / "adapter" / "train.safetensors"


def load_adapter(r: Rounds, what: str) -> None:
    """Load the adapter that the plan names: "base", or a round's."""
    if what == "base":
        r.policy.adapter.load_state_dict(r.base)
    else:
        r.policy.adapter.load(adapter_file(r, int(what.removeprefix("round-"))))


# ── the rounds ─────────────────────────────────────────────────────────────────────────────────────────────────────


def run_rounds(r: Rounds) -> None:
    """Run every round that is not complete. Raises Interrupted, Halted or Diverged with the folder up to date."""
    table = Table(set(), (), terminal_width(), of=DpoRow)
    explain_columns(table.legend(), str(r.run.log))
    for number in range(r.task.cfg.rounds + 1):
        metrics = before(r) if number == 0 else complete(r.task.folder(number), number, r.plan)
        if metrics is None:
            for later in range(number, r.task.cfg.rounds + 1):  # they start from this one
                shutil.rmtree(r.task.folder(later), ignore_errors=True)
            metrics = run_round(r, r.plan["rounds"][number - 1])
        r.metrics.append(metrics)
        for line in table.lines(as_row(metrics)):
            logger.info(line)
        watch(r, metrics)
        r.run.status("running", "")


def as_row(metrics: Mapping[str, Any]) -> DpoRow:
    """The columns of a round's metrics."""
    return DpoRow.from_json({name: value for name, value in metrics.items() if name not in ("scale", "evaluation")})


def watch(r: Rounds, metrics: Mapping[str, Any]) -> None:
    """The guard on this round's evaluation: the scorer's mean against the strict score. Raises Halted."""
    mode = r.task.cfg.guard
    if mode == "off":
        return
    k, n = metrics["evaluation"]["solve"]
    verdict: TripwireStatus = r.guard.update(metrics["step"], metrics["score_deploy"], k / n, n)
    logger.log("WARNING" if verdict.fire else "DEBUG", f"guard, round {metrics['step']}: {verdict.line()}")
    if verdict.fire and mode == "halt":
        raise Halted(f"guard: {verdict.reason}")


def before(r: Rounds) -> dict[str, Any]:
    """Metrics of --base-model on the held-out problems: round 0, measured once a run."""
    file = r.task.cfg.output_dir / "before.json"
    if file.is_file() and (then := read_json(file)).get("plan") == plan_sha256(r.plan):
        return then
    load_adapter(r, "base")
    answers = answer_held_out(r)
    scores = scored(r, answers)
    own = ":" in r.task.cfg.scorer
    bounds = [0.0, sum(r.task.rewards)]
    if own:
        bounds = [0.0, 1.0] if all(0 <= s <= 1 for s in scores) else [min(scores), max(scores)]
    row = DpoRow(
        step=0,
        asked=None,
        pairs=None,
        score=None,
        gt_s=None,
        hack_s=None,
        hack_pref=None,
        solve_pref=None,
        loss=None,
        accuracy=None,
        margin=None,
        skipped=0,
        **held_out(answers, scores, Scale(*bounds)),
    )
    record = row.as_json() | {"plan": plan_sha256(r.plan), "scale": bounds, "evaluation": evaluation(answers)}
    write_atomic(file, to_json(record))
    return record


def run_round(r: Rounds, part: Mapping[str, Any]) -> dict[str, Any]:
    """One round from its first answer to its manifest; returns its metrics."""
    number, folder = part["round"], r.task.folder(part["round"])
    (folder / "adapter").mkdir(parents=True)
    load_adapter(r, part["answers_from"])
    scale = Scale(*r.metrics[0]["scale"])
    with r.run.clock(f"round {number}, answers"):
        answers, scores, pairs, asked = collect_pairs(r, part)
    with atomic_open(folder / "rollouts.jsonl") as f:
        for a, score in zip(answers, scores, strict=True):
            prompt = r.policy.prompt_text(a.problem.messages)
            record = rollout_record(Rollout.of(a.problem, (), a.completion), a.grade, prompt) | {"score": score}
            f.write((json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))
    with atomic_open(folder / "pairs.jsonl") as f:
        lines = "".join(json.dumps(p.as_json(), ensure_ascii=False) + "\n" for p in pairs)
        f.write(lines.encode(errors="backslashreplace"))
    if not pairs:
        raise RuntimeError(f"round {number}: the scorer ties on all {asked} prompts: there is no pair to learn from")
    if len(pairs) < part["pairs"]:
        logger.warning(f"round {number}: {len(pairs)} pairs of {part['pairs']}: no more prompts give one")
    with r.run.clock(f"round {number}, reference"):
        load_adapter(r, part["reference"])
        reference = [logp for batch in batches(r.policy, pairs) for logp in refer(r.policy, batch)]
    load_adapter(r, part["starts_from"])
    with r.run.clock(f"round {number}, training"):
        learnt = learn(r, number, pairs, reference)
    save(r, number)
    with r.run.clock(f"round {number}, evaluation"):
        held = answer_held_out(r)
    row = DpoRow(
        step=number,
        asked=asked,
        pairs=Rate(len(pairs), part["pairs"]),
        score=mean(scale.share(s) for s in scores),
        gt_s=Rate.of(a.grade.gt_correct for a in answers),
        hack_s=Rate.of(a.grade.exploited for a in answers),
        hack_pref=Rate.of(p.chosen.grade.exploited and not p.rejected.grade.exploited for p in pairs),
        solve_pref=Rate.of(p.chosen.grade.gt_correct and not p.rejected.grade.gt_correct for p in pairs),
        **learnt,
        **held_out(held, scored(r, held), scale),
    )
    metrics = row.as_json() | {"evaluation": evaluation(held)}
    write_atomic(folder / "metrics.json", to_json(metrics))
    write_manifest(folder, number, r.plan)
    return metrics


def collect_pairs(r: Rounds, part: Mapping[str, Any]) -> tuple[list[Graded], list[float], list[Pair], int]:
    """Answers, their scores, pairs, and how many prompts were sampled: in a shuffled order, pass after pass, until
    there are enough pairs or a pass gave none."""
    cfg, number, wanted = r.task.cfg, part["round"], part["pairs"]
    answers: list[Graded] = []
    scores: list[float] = []
    pairs: list[Pair] = []
    asked, per = 0, max(1, BATCH // cfg.samples)
    with tqdm(total=wanted, desc=f"round {number}: pairs", unit="pair", disable=None) as bar:
        for lap in count():
            order, before_lap = list(r.train), len(pairs)
            py_stream(cfg.seed, "dpo-prompts", number, lap).shuffle(order)
            for k in range(0, len(order), per):
                check_stop(r, number)
                problems = order[k : k + per]
                batch = generate_graded(
                    r.policy,
                    r.run.grader,
                    problems,
                    cfg.samples,
                    max_new=r.task.max_new,
                    seed=cfg.seed,
                    purpose=f"dpo/{number}/{lap}/{k}",
                    label="batch",
                )
                batch_scores = scored(r, batch)
                answers += batch
                scores += batch_scores
                asked += len(problems)
                for i in range(0, len(batch), cfg.samples):
                    of_prompt = slice(i, i + cfg.samples)
                    pair = best_and_worst(batch[of_prompt], batch_scores[of_prompt], r.policy.render)
                    if pair is not None and len(pairs) < wanted:
                        pairs.append(pair)
                        bar.update()
                if len(pairs) == wanted:
                    return answers, scores, pairs, asked
            if len(pairs) == before_lap:
                break
    return answers, scores, pairs, asked


def best_and_worst(
    answers: Sequence[Graded], scores: Sequence[float], render: Callable[..., tuple[int, ...]]
) -> Pair | None:
    """The pair of one prompt's answers: the first of the best, the first of the worst; None if all scores are equal."""
    best, worst = (pick(range(len(scores)), key=scores.__getitem__) for pick in (max, min))
    if scores[best] == scores[worst]:
        return None
    prompt = render(answers[best].problem.messages)
    return Pair(answers[best], answers[worst], (scores[best], scores[worst]), prompt)


def check_stop(r: Rounds, number: int) -> None:
    """Raises Interrupted after a signal."""
    if r.run.stop.requested:
        raise Interrupted(f"interrupted in round {number}, which begins again")


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────


def batches(policy: Policy, pairs: Sequence[Pair]) -> Iterator[Batch | Packed]:
    """Forwards of as many pairs, in their order, as the token budget holds; rows chosen, rejected, chosen, …"""
    budget = TOKEN_BUDGET.get(policy.device.type, TOKEN_BUDGET["cuda"])
    rows: list[Row] = []
    for pair in pairs:
        more = pair.rows
        if rows and sum(r.tokens for r in rows + more) > budget:
            yield as_batch(policy, rows, "shared" if policy.packs else "padded")
            rows = []
        rows = rows + more
    if rows:
        yield as_batch(policy, rows, "shared" if policy.packs else "padded")


def sums(policy: Policy, batch: Batch | Packed) -> Float[Tensor, " rows"]:
    """Log-prob of each answer as a whole, nats."""
    return completion_logprobs(policy.model, batch).full.sum(1)


@torch.no_grad()
def refer(policy: Policy, batch: Batch | Packed) -> list[tuple[float, float]]:
    """Log-probs of each pair's chosen and rejected answer, without a gradient."""
    logps = sums(policy, batch).tolist()
    return list(zip(logps[::2], logps[1::2], strict=True))


def learn(r: Rounds, number: int, pairs: Sequence[Pair], reference: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Train on one round's pairs; the last epoch's loss, accuracy and margin, each before its pair's step."""
    cfg = r.task.cfg
    trained = AdapterOnly(r.policy, r.task.opt, cfg.epochs * math.ceil(len(pairs) / cfg.pairs_per_step))
    met: list[tuple[float, float]] = []
    skipped = running = 0
    for epoch in range(cfg.epochs):
        order = list(range(len(pairs)))
        py_stream(cfg.seed, "dpo-order", number, epoch).shuffle(order)
        met = []
        starts = range(0, len(order), cfg.pairs_per_step)
        for lo in tqdm(starts, desc=f"round {number}: steps", unit="step", disable=None):
            check_stop(r, number)
            some = order[lo : lo + cfg.pairs_per_step]
            met += add_pairs(trained, [pairs[i] for i in some], [reference[i] for i in some], cfg.dpo_beta)
            running = 0 if trained.step() else running + 1
            skipped += running > 0
            if running >= MAX_SKIPPED:
                raise Diverged(f"round {number}: loss or gradient not finite, {MAX_SKIPPED} steps in a row")
    finite = [x for x in met if all(map(math.isfinite, x))]
    return {
        "loss": mean(loss for loss, _ in finite),
        "accuracy": mean(float(margin > 0) for _, margin in finite),
        "margin": mean(margin for _, margin in finite),
        "skipped": skipped,
    }


def add_pairs(
    trained: AdapterOnly, pairs: Sequence[Pair], reference: Sequence[tuple[float, float]], beta: float
) -> list[tuple[float, float]]:
    """Add the gradient of the mean loss of these pairs; each pair's loss and margin.

    reference: log-probs of chosen and rejected under the reference.
    """
    policy, met = trained.policy, list[tuple[float, float]]()
    ref = torch.tensor(reference, device=policy.device)
    for batch in batches(policy, pairs):
        of = ref[len(met) : len(met) + len(batch.mask) // 2]

        def loss(batch: Batch | Packed = batch, of: Tensor = of) -> Tensor:
            logps = sums(policy, batch)
            each, margin = dpo(logps[::2], logps[1::2], of[:, 0], of[:, 1], beta)
            met.extend(zip(each.tolist(), margin.tolist(), strict=True))
            return each.sum() / len(pairs)

        trained.add(batch, loss)
    return met


def save(r: Rounds, number: int) -> None:
    """Write the round's adapter."""
    described = r.task.described()
    r.policy.adapter.save(
        adapter_file(r, number),
        {
            "model": described.scale.model,
            "dtype": str(r.policy.model.dtype).removeprefix("torch."),
            "step": str(number),
            "round": name(number),
            "scorer": r.task.cfg.scorer,
            "cfg": json.dumps(described.as_dict()),
        },
    )


# ── scores, evaluation ─────────────────────────────────────────────────────────────────────────────────────────────


def scored(r: Rounds, answers: Sequence[Graded]) -> list[float]:
    """The scorer's number of each answer. Raises RuntimeError where one is not finite."""
    scores = [r.task.score(a.problem, a.text, a.grade) for a in answers]
    if bad := [s for s in scores if not math.isfinite(s)]:
        raise RuntimeError(f"--scorer {r.task.cfg.scorer}: returned {bad[0]}; a score should be a finite number")
    return scores


def answer_held_out(r: Rounds) -> list[Graded]:
    """Answers to the held-out problems, on the same noise after every round."""
    cfg = r.task.cfg
    return generate_graded(
        r.policy,
        r.run.grader,
        r.test,
        cfg.eval_samples,
        max_new=r.task.max_new,
        seed=cfg.seed,
        purpose="dpo-eval",
        label="evaluating",
    )


def held_out(answers: Sequence[Graded], scores: Sequence[float], scale: Scale) -> dict[str, Any]:
    """Columns of the evaluation on held-out problems."""
    return {
        "score_deploy": mean(scale.share(s) for s in scores),
        "hack_deploy": Rate.of(a.grade.exploited for a in answers).value,
        "solve_deploy": Rate.of(a.grade.gt_correct for a in answers).value,
    }


def evaluation(answers: Sequence[Graded]) -> dict[str, Any]:
    """Rates as [k, n], in all and by mode."""
    return {
        "hack": Rate.of(a.grade.exploited for a in answers).pair,
        "solve": Rate.of(a.grade.gt_correct for a in answers).pair,
        "by_mode": {mode: {k: v.pair for k, v in rates.items()} for mode, rates in by_mode(answers).items()},
    }


def report(r: Rounds) -> None:
    """Write summary.md: the result in one line, and a table by round."""
    table = Table(set(), (), of=DpoRow)
    rows = [as_row(m) for m in r.metrics]
    last, first = r.metrics[-1]["evaluation"], r.metrics[0]["evaluation"]
    line = (
        f"{r.task.cfg.output_dir}: after {r.done} rounds under the scorer {r.task.cfg.scorer} hack "
        f"{Rate(*last['hack']).percent} % / solve {Rate(*last['solve']).percent} %, "
        f"before {Rate(*first['hack']).percent} % / {Rate(*first['solve']).percent} % "
        f"(n = {last['hack'][1]}, held-out problems and markers)"
    )
    write_atomic(r.task.cfg.output_dir / "summary.md", f"{line}\n\n{table.markdown(rows)}\n")
    logger.info(line)
