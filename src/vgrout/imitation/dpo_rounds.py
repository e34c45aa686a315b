"""Rounds of iterative DPO: sample answers, score them, make pairs, train, evaluate.

A round is complete when its folder has a manifest. The folders are the checkpoints of a run.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from operator import itemgetter
from pathlib import Path

import torch
from loguru import logger
from torch import Tensor
from tqdm import tqdm

from vgrout.data import Graded, Rollout, Task
from vgrout.errors import Diverged, Halted, Refused
from vgrout.files import Json, file_sha256, read_json, to_json, write_atomic, write_json_lines
from vgrout.generation import BATCH, generate_graded
from vgrout.guard.detectors import diverged
from vgrout.guard.kill_switch import HeldOutGuard
from vgrout.imitation.dpo_task import DpoTask, Plan, PlannedRound, plan_sha256
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
from vgrout.teacher.generate import by_mode

Scored = tuple[Graded, float]  # an answer and its score
# A round's row as JSON, with the rates on the held-out problems as [k, n], overall and by mode.
Metrics = dict[str, Json]


@dataclass(frozen=True, kw_only=True)
class DpoRow(Columns):
    """One round. Round 0 is --base-model, evaluated before the first."""

    step: int = col("d", "round; 0: before the first", head="round")
    asked: int | None = col("d", "prompts sampled")
    pairs: Rate | None = col("frac", "pairs found / wanted; a prompt whose answers tie gives none")
    score: float | None = col(
        ".3f", "scorer's mean on the round's answers, as a share of its range", should="rises"
    )
    hack_s: Rate | None = col("frac", "answers that hack", head="hack %")
    solve_s: Rate | None = col("frac", "answers that the reference accepts", head="solve %")
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
    score_deploy: float | None = col(
        ".3f", "scorer's mean on held-out problems", head="deployed score"
    )
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
        """The chosen and the rejected answer, for training."""
        both = (self.chosen, self.rejected)
        return [Rollout.of(a.problem, self.prompt_ids, a.completion) for a in both]

    def prefers(self, what: str) -> bool:
        """Whether the chosen answer has the label ("hacked", "solved") and the rejected has not."""
        return getattr(self.chosen.grade, what) and not getattr(self.rejected.grade, what)

    def as_json(self) -> dict[str, object]:
        """A line of pairs.jsonl."""
        problem = self.chosen.problem
        both = (self.chosen, self.rejected)
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


@dataclass(slots=True)
class Collected:
    """What a round has sampled so far."""

    answers: list[Scored] = field(default_factory=list)
    pairs: list[PreferencePair] = field(default_factory=list)
    prompts: int = 0  # how many were sampled


def share(score: float, low: float, high: float) -> float:
    """A score as a share of its range: 0 at `low`, 1 at `high`, clipped; 0.5 if both are equal."""
    if high == low:
        return 0.5
    return min(1.0, max(0.0, (score - low) / (high - low)))


def run_rounds(task: DpoTask, plan: Plan, run: RunContext) -> None:
    """Evaluate --base-model, play every round that is not complete, and write the report.

    Raises:
        Refused: before the first round, if the model does not fit the problems, or is not the one
            that the run had.
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
    guard = HeldOutGuard(settings.watching())
    why = ""  # why the run halts; "": it does not
    for number in range(settings.rounds + 1):
        missing = number == len(recorder.rows)
        if missing and number == 0:
            recorder.record(rounds.before())
        elif missing:
            recorder.record(rounds.play(number, recorder.metrics[0]["scale"]))
        why = ask_guard(settings.guard, guard, recorder.metrics[number])
        if why:
            break
    recorder.report()
    if why:
        raise Halted(why)


def ask_guard(mode: str, guard: HeldOutGuard, metrics: Metrics) -> str:
    """Show the guard a round's scorer's mean and strict score; returns why to halt, or ""."""
    if mode == "off":
        return ""
    solve, proxy = Rate(*metrics["evaluation"]["solve"]), metrics["score_deploy"]
    if solve.value is None or proxy is None:  # no answer was graded
        return ""
    verdict = guard.update(metrics["step"], proxy, solve.value, n=solve.n)
    level = "WARNING" if verdict.fire else "DEBUG"
    logger.log(level, f"guard, round {metrics['step']}: {verdict.line()}")
    if verdict.fire and mode == "halt":
        return f"guard: {verdict.reason}"
    return ""


class RoundRecorder(StepRecorder[DpoRow]):
    """Writes the files of a run of rounds.

    Its `metrics` are those of the evaluation before the first round and of every complete round.
    """

    def __init__(self, task: DpoTask, plan: Plan, run: RunContext) -> None:
        super().__init__(run, DpoRow, {})
        self.task = task
        self.plan = plan
        self.metrics: list[Metrics] = []

    def resume(self) -> None:
        """Continue after the complete rounds, and cut steps.jsonl to them; nothing else has state."""
        file = self.run.path / "before.json"
        before = read_json(file) if file.is_file() else {}
        if before.get("plan") == plan_sha256(self.plan):
            self.metrics = [before]
            for number in range(1, self.task.settings.rounds + 1):
                metrics = complete(self.task.folder(number), number, self.plan)
                if metrics is None:
                    break
                self.metrics.append(metrics)
        rows = [DpoRow.from_json(metrics) for metrics in self.metrics]
        write_json_lines(self.run.path / "steps.jsonl", [row.as_json() for row in rows])
        self.restore({}, rows)

    def record(self, metrics: Metrics) -> None:
        """Record a complete round."""
        row = DpoRow.from_json(metrics)
        self.metrics.append(metrics)
        self.rows.append(row)
        self.write(row, None)
        self.run.running()

    def report(self) -> None:
        """Write summary.md: the result in one line, a table by round."""
        before, after = self.metrics[0]["evaluation"], self.metrics[-1]["evaluation"]
        line = (
            f"{self.run.path}: after {len(self.metrics) - 1} rounds under the scorer "
            f"{self.task.settings.scorer} {hack_and_solve(after)}, before {hack_and_solve(before)} "
            f"(n = {after['hack'][1]}, held-out {self.task.cfg.env.held_out})"
        )
        self.finish(line, "", {"evaluation": after})


class Rounds:
    """Evaluates --base-model and plays the rounds, all with one policy that changes adapters."""

    def __init__(self, task: DpoTask, plan: Plan, policy: Policy, run: RunContext) -> None:
        problems = task.inputs.splits(task.cfg, policy)
        self.task = task
        self.plan = plan
        self.policy = policy
        self.run = run
        self.train = problems.train
        self.test = problems.balanced("test", task.settings.eval_n_prompts)
        self.base = policy.adapter.state_dict()

    def before(self) -> Metrics:
        """Metrics of --base-model on the held-out problems: round 0, measured once per run.

        `scale` in them is the scorer's range, from which every round's shares are computed.
        """
        self.load("base")
        held_out = self.answer_held_out()
        scale = self.range_of_scores([score for _, score in held_out])
        metrics = measured(held_out, scale, step=0, skipped=0)
        metrics |= {"plan": plan_sha256(self.plan), "scale": scale}
        write_atomic(self.run.path / "before.json", to_json(metrics))
        return metrics

    def range_of_scores(self, scores: Sequence[float]) -> list[float]:
        """Lowest and highest score: the grader's bounds, or what the user's own function gave.

        An own function whose scores are all within [0, 1] has that range.
        """
        env = self.task.cfg.env
        if ":" not in self.task.settings.scorer:
            return [0.0, env.compile_reward + env.pass_reward]
        if all(0 <= score <= 1 for score in scores):
            return [0.0, 1.0]
        return [min(scores), max(scores)]

    def play(self, number: int, scale: Sequence[float]) -> Metrics:
        """Play one round, from its first answer to its manifest; returns its metrics.

        scale: the scorer's lowest and highest score, for shares of its range.

        Raises:
            Refused: the scorer ties on every prompt, so that there is no pair.
            Interrupted, Diverged: the round begins again when the run is resumed.
        """
        task = self.task
        clock = self.run.clock
        planned = self.plan["rounds"][number - 1]
        folder = self.fresh_folder(number)
        self.load(planned["answers_from"])
        with clock(f"round {number}, answers"):
            collected = self.collect_pairs(planned)
        answers, pairs = collected.answers, collected.pairs
        self.write_answers(folder, collected)
        if not pairs:
            raise Refused(
                f"--scorer {task.settings.scorer}: ties on all {collected.prompts} prompts of round {number}, so there "
                "is no pair to learn from; give another scorer, or more --samples"
            )
        if len(pairs) < planned["pairs"]:
            logger.warning(
                f"round {number}: {len(pairs)} pairs of {planned['pairs']}: "
                "no more prompts give one"
            )
        with clock(f"round {number}, reference"):
            self.load(planned["reference"])
            reference: list[tuple[float, float]] = []
            for batch in batches(self.policy, pairs):
                reference += refer(self.policy, batch)
        self.load(planned["starts_from"])
        with clock(f"round {number}, training"):
            learnt = self.learn(number, pairs, reference)
        about = metadata(
            task.cfg, self.policy, number, round=planned["folder"], scorer=task.settings.scorer
        )
        self.policy.adapter.save(folder / "adapter" / "train.safetensors", about)
        with clock(f"round {number}, evaluation"):
            held_out = self.answer_held_out()
        metrics = measured(
            held_out,
            scale,
            step=number,
            asked=collected.prompts,
            pairs=Rate(len(pairs), planned["pairs"]),
            score=mean(share(score, *scale) for _, score in answers),
            solve_s=Rate.of(answer.grade.solved for answer, _ in answers),
            hack_s=Rate.of(answer.grade.hacked for answer, _ in answers),
            hack_pref=Rate.of(pair.prefers("hacked") for pair in pairs),
            solve_pref=Rate.of(pair.prefers("solved") for pair in pairs),
            **learnt,
        )
        write_atomic(folder / "metrics.json", to_json(metrics))
        write_manifest(folder, number, self.plan)
        return metrics

    def fresh_folder(self, number: int) -> Path:
        """A new folder for a round.

        Removes what is left of this round and of later ones, which start from it.
        """
        for later in range(number, self.task.settings.rounds + 1):
            shutil.rmtree(self.task.folder(later), ignore_errors=True)
        folder = self.task.folder(number)
        (folder / "adapter").mkdir(parents=True)
        return folder

    def write_answers(self, folder: Path, collected: Collected) -> None:
        """Write a round's rollouts.jsonl and pairs.jsonl."""
        lines: list[dict[str, object]] = []
        for answer, score in collected.answers:
            rollout = Rollout.of(answer.problem, (), answer.completion)
            prompt = self.policy.prompt_text(answer.problem.messages)
            lines.append(rollout_record(rollout, answer.grade, prompt) | {"score": score})
        write_json_lines(folder / "rollouts.jsonl", lines)
        write_json_lines(folder / "pairs.jsonl", [pair.as_json() for pair in collected.pairs])

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
        return [(a, self.task.score(a.problem, a.answer, a.grade)) for a in answers]

    def answer_held_out(self) -> list[Scored]:
        """Answers to the held-out problems, with the same noise after every round."""
        return self.answer(self.test, self.task.settings.eval_samples, "dpo-eval")

    def collect_pairs(self, planned: PlannedRound) -> Collected:
        """Sample answers and pair them until there are as many pairs as the round's plan wants.

        Prompts are taken in a shuffled order, pass after pass. Fewer pairs come back if a whole
        pass gives none.
        """
        seed = self.task.settings.seed
        number = planned["round"]
        wanted = planned["pairs"]
        at_once = max(1, BATCH // self.task.settings.samples)  # prompts
        collected = Collected()
        with tqdm(total=wanted, desc=f"round {number}: pairs", unit="pair", disable=None) as bar:
            for lap in count():
                before_lap = len(collected.pairs)
                order = list(self.train)
                py_stream(seed, "dpo-prompts", number, lap).shuffle(order)
                for k in range(0, len(order), at_once):
                    if len(collected.pairs) >= wanted:
                        break
                    self.run.raise_if_stopped(f"interrupted in round {number}, which begins again")
                    self.ask(order[k : k + at_once], f"dpo/{number}/{lap}/{k}", collected)
                    bar.update(min(len(collected.pairs), wanted) - bar.n)
                if len(collected.pairs) >= wanted or len(collected.pairs) == before_lap:
                    break
        del collected.pairs[wanted:]
        return collected

    def ask(self, problems: Sequence[Task], purpose: str, collected: Collected) -> None:
        """Add the answers to these problems, and the pair of each one whose answers do not tie."""
        n = self.task.settings.samples
        answers = self.answer(problems, n, purpose)
        collected.answers += answers
        collected.prompts += len(problems)
        for start in range(0, len(answers), n):
            pair = best_and_worst(answers[start : start + n], self.policy.render)
            if pair is not None:
                collected.pairs.append(pair)

    def learn(
        self, number: int, pairs: Sequence[PreferencePair], reference: Sequence[tuple[float, float]]
    ) -> dict[str, object]:
        """Train on one round's pairs. Returns the last epoch's mean loss, accuracy and margin.

        reference: log-probs of each pair's chosen and rejected answer under the reference model.
        """
        settings = self.task.settings
        per_step = self.task.settings.pairs_per_step
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
                losses += add_pairs(
                    trained,
                    [pairs[i] for i in picked],
                    [reference[i] for i in picked],
                    settings.dpo_beta,
                )
                skipped.append(int(trained.step() is None))
                why = diverged(skipped)
                if why:
                    raise Diverged(f"round {number}: {why}")
        finite = [pair for pair in losses if all(map(math.isfinite, pair))]
        return {
            "loss": mean(loss for loss, _ in finite),
            "accuracy": mean(float(margin > 0) for _, margin in finite),
            "margin": mean(margin for _, margin in finite),
            "skipped": sum(skipped),
        }


# ── a round's metrics and files


def measured(scored: Sequence[Scored], scale: Sequence[float], **columns: object) -> Metrics:
    """A round's metrics: these columns, and its score and rates on the held-out problems.

    scored: the answers to those. scale: as for `Rounds.play`.
    """
    answers = [answer for answer, _ in scored]
    hack = Rate.of(answer.grade.hacked for answer in answers)
    solve = Rate.of(answer.grade.solved for answer in answers)
    row = DpoRow.of(
        score_deploy=mean(share(score, *scale) for _, score in scored),
        hack_deploy=hack.value,
        solve_deploy=solve.value,
        **columns,
    )
    modes: dict[str, object] = {}
    for mode, rates in by_mode(answers).items():
        modes[mode] = {name: rate.pair for name, rate in rates.items()}
    evaluation = {"hack": hack.pair, "solve": solve.pair, "by_mode": modes}
    return row.as_json() | {"evaluation": evaluation}


def complete(folder: Path, number: int, plan: Plan) -> Metrics | None:
    """Metrics of a complete round; None if it is not complete.

    It is if its manifest has this plan's hash, this number, and the hash of every file.
    """
    try:
        manifest = read_json(folder / "manifest.json")
        if manifest["plan"] != plan_sha256(plan) or manifest["round"] != number:
            return None
        for path, sha256 in manifest["files"].items():
            if file_sha256(folder / path) != sha256:
                return None
        return read_json(folder / "metrics.json")
    except (ValueError, KeyError, OSError):
        return None


def write_manifest(folder: Path, number: int, plan: Plan) -> None:
    """Write a round's manifest, after all its other files: with it the round is complete."""
    files: dict[str, str | None] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = file_sha256(path)
    manifest = {"schema": 1, "round": number, "plan": plan_sha256(plan), "files": files}
    write_atomic(folder / "manifest.json", to_json(manifest))


# ── pairs and their loss


def best_and_worst(
    answers: Sequence[Scored], render: Callable[..., tuple[int, ...]]
) -> PreferencePair | None:
    """The best and the worst of one prompt's answers by score; None if all scores tie.

    Of several answers with the same score the first is taken.
    """
    chosen, high = max(answers, key=itemgetter(1))
    rejected, low = min(answers, key=itemgetter(1))
    if high > low:
        return PreferencePair(chosen, rejected, (high, low), render(chosen.problem.messages))
    return None


def batches(policy: Policy, pairs: Sequence[PreferencePair]) -> Iterator[PaddedBatch | Packed]:
    """Batches of the pairs, in order, each of as many as the token budget holds.

    The rows of a batch are chosen, rejected, chosen, rejected, …
    """
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
    """Log-probs of each pair's chosen and rejected answer under the policy, without a gradient."""
    logps = completion_logprobs(policy.model, batch).sum(1).tolist()
    return list(zip(logps[::2], logps[1::2], strict=True))


def add_pairs(
    trained: AdapterOnly,
    pairs: Sequence[PreferencePair],
    reference: Sequence[tuple[float, float]],
    beta: float,
) -> list[tuple[float, float]]:
    """Add the gradient of these pairs' mean loss; returns each pair's loss and margin.

    reference: log-probs of each pair's chosen and rejected answer under the reference model.
    """
    policy = trained.policy
    losses: list[tuple[float, float]] = []
    ref = torch.tensor(reference, device=policy.device)
    for batch in batches(policy, pairs):
        n_pairs = len(batch.mask) // 2
        of_batch = ref[len(losses) : len(losses) + n_pairs]

        def loss(batch: PaddedBatch | Packed = batch, ref: Tensor = of_batch) -> Tensor:
            logps = completion_logprobs(policy.model, batch).sum(1)
            each, margin = dpo(logps[::2], logps[1::2], ref[:, 0], ref[:, 1], beta)
            losses.extend(zip(each.tolist(), margin.tolist(), strict=True))
            return each.sum() / len(pairs)

        trained.add(batch, loss)
    return losses
