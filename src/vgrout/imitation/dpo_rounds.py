"""Rounds of iterative DPO: sample answers, score them, make pairs, train, evaluate.

A round is a step of the run: once its folder is complete, its row and a checkpoint are written.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from operator import itemgetter

import torch
from loguru import logger
from torch import Tensor

from vgrout.ground.console import progress
from vgrout.ground.data import Graded, Rollout, Task
from vgrout.ground.io import Diverged, Halted, Refused, read_json, write_json_lines
from vgrout.ground.metrics import Eval, Rate, mean
from vgrout.ground.rng import py_stream
from vgrout.ground.table import Columns, col
from vgrout.guard.detectors import diverged
from vgrout.guard.kill_switch import HeldOutGuard
from vgrout.imitation.losses import dpo
from vgrout.imitation.tasks import DpoTask, Plan, folder_name
from vgrout.imitation.trainable import AdapterOnly, hack_and_solve, metadata, model_hashes
from vgrout.loop.generation import BATCH, generate_graded
from vgrout.model.layout import Packed
from vgrout.model.load.load import budget_of, device_and_dtype, load_source
from vgrout.model.logprobs import PaddedBatch, completion_logprobs
from vgrout.model.policy import Policy
from vgrout.runs.context import RunContext
from vgrout.runs.recorder import StepRecorder, rollout_record

Scored = tuple[Graded, float]  # an answer and its score


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
        return [Rollout.of(self.prompt_ids, a.completion) for a in both]

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
    rounds = Rounds(task, plan, run)
    for number in range(len(rounds.recorder.rows), settings.rounds + 1):
        if rounds.halts:
            break
        rounds.play(number)
    rounds.report()
    if rounds.halts:
        raise Halted(f"guard: {', '.join(rounds.guard.fired.values())}")


class Rounds:
    """Evaluates --base-model and plays the rounds, all with one policy that changes adapters."""

    def __init__(self, task: DpoTask, plan: Plan, run: RunContext) -> None:
        """Load the model and open the run's files; on a resume, restore the last checkpoint."""
        device, dtype = device_and_dtype(task.cfg)
        policy = load_source(task.base, "--base-model", device, dtype, adapter=True)
        assert isinstance(policy, Policy)
        self.policy = replace(
            policy,
            budget=budget_of(task.cfg, policy),
            thinking=task.cfg.env.thinking,
            preserve_thinking=task.cfg.env.preserve_thinking,
        )
        self.base = policy.adapter.state_dict()
        problems = task.inputs.splits(task.cfg, policy)
        self.train = problems.train
        self.test = problems.balanced("test", task.settings.eval_n_prompts)
        self.flaws = problems.flaws
        self.task = task
        self.plan = plan
        self.run = run
        # counts rounds; round 0, before any training, is its baseline
        self.guard = HeldOutGuard(min_steps=0, decline_patience=2)
        self.recorder = StepRecorder(run, DpoRow, {"guard": self.guard})
        self.recorder.open({"hashes": model_hashes(base=policy), **run.stamp}, set())

    @property
    def halts(self) -> bool:
        """Whether the guard ends the run."""
        return self.task.settings.guard == "halt" and self.guard.should_halt()

    def play(self, number: int) -> None:
        """Play a round, from its first answer to its row. Round 0 is the evaluation of --base-model.

        Raises:
            Refused: the scorer ties on every prompt, so that there is no pair.
            Interrupted, Diverged: the round begins again when the run is resumed.
        """
        before = self.run.path / "before.json"
        if number:
            folder = self.run.path / folder_name(number)
            shutil.rmtree(folder, ignore_errors=True)  # what is left of one that was interrupted
            (folder / "adapter").mkdir(parents=True)
            file = folder / "metrics.json"
            scale = read_json(before)["scale"]
            columns = self.learn_from_answers(number, scale)
        else:
            file, scale, columns = before, None, {"skipped": 0}
            self.load("base")
        with self.run.clock(f"round {number}, evaluation"):
            # with the same noise after every round
            held_out = self.answer(self.test, self.task.settings.eval_samples, "dpo-eval")
        if scale is None:
            scale = self.range_of_scores([score for _, score in held_out])
        evaluation = Eval.of([answer for answer, _ in held_out], self.flaws)
        row = DpoRow.of(
            step=number,
            score_deploy=mean(share(score, *scale) for _, score in held_out),
            hack_deploy=evaluation.hack.value,
            solve_deploy=evaluation.solve.value,
            **columns,
        )
        metrics = row.as_json() | {"evaluation": evaluation.as_json()}
        if file == before:
            metrics["scale"] = scale
        self.run.dir.write_json(str(file.relative_to(self.run.path)), metrics)
        self.watch(row, evaluation.solve)
        self.recorder.rows.append(row)
        self.recorder.write(row, [])
        self.recorder.keep(number, closing=True)

    def range_of_scores(self, scores: Sequence[float]) -> list[float]:
        """Lowest and highest score: the grader's bounds, or what the user's own function gave.

        An own function whose scores are all within [0, 1] has that range.
        """
        env = self.task.cfg.env
        if ":" not in self.task.settings.scorer and self.task.cfg.of_code:
            return [0.0, env.compile_reward + env.pass_reward]
        if all(0 <= score <= 1 for score in scores):
            return [0.0, 1.0]
        return [min(scores), max(scores)]

    def watch(self, row: DpoRow, solve: Rate) -> None:
        """Show the guard a round's scorer's mean and strict score, if any answer was graded."""
        if self.task.settings.guard == "off" or solve.value is None or row.score_deploy is None:
            return
        verdict = self.guard.update(row.step, row.score_deploy, solve.value, n=solve.n)
        level = "WARNING" if verdict.fire else "DEBUG"
        logger.log(level, f"guard, round {row.step}: {verdict.line()}")

    def learn_from_answers(self, number: int, scale: Sequence[float]) -> dict[str, object]:
        """Sample a round's answers, train on their pairs and save the adapter.

        Returns the columns of its row that say so. scale: the scorer's lowest and highest score.
        """
        task, clock = self.task, self.run.clock
        planned = self.plan["rounds"][number - 1]
        folder = self.run.path / planned["folder"]
        self.load(planned["answers_from"])
        with clock(f"round {number}, answers"):
            answers, pairs = self.collect_pairs(number, planned["pairs"])
        lines: list[dict[str, object]] = []
        for answer, score in answers:
            prompt = self.policy.prompt_text(answer.problem.messages)
            record = rollout_record(answer.problem, answer.completion, answer.grade, prompt)
            lines.append(record | {"score": score})
        write_json_lines(folder / "rollouts.jsonl", lines)
        write_json_lines(folder / "pairs.jsonl", [pair.as_json() for pair in pairs])
        asked = len(answers) // task.settings.samples
        if not pairs:
            raise Refused(
                f"--scorer {task.settings.scorer}: ties on all {asked} prompts of round {number}, "
                "so there is no pair to learn from; give another scorer, or more --samples"
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
        return {
            "asked": asked,
            "pairs": Rate(len(pairs), planned["pairs"]),
            "score": mean(share(score, *scale) for _, score in answers),
            "solve_s": Rate.of(answer.grade.solved for answer, _ in answers),
            "hack_s": Rate.of(answer.grade.hacked for answer, _ in answers),
            "hack_pref": Rate.of(pair.prefers("hacked") for pair in pairs),
            "solve_pref": Rate.of(pair.prefers("solved") for pair in pairs),
            **learnt,
        }

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

    def collect_pairs(self, number: int, wanted: int) -> tuple[list[Scored], list[PreferencePair]]:
        """Sample answers and pair them until there are as many pairs as the round's plan wants.

        Prompts are taken in a shuffled order, pass after pass. Fewer pairs come back if a whole
        pass gives none.
        """
        settings = self.task.settings
        n = settings.samples
        at_once = max(1, BATCH // n)  # prompts
        answers: list[Scored] = []
        pairs: list[PreferencePair] = []
        for lap in count():
            before_lap = len(pairs)
            order = list(self.train)
            py_stream(settings.seed, "dpo-prompts", number, lap).shuffle(order)
            for k in range(0, len(order), at_once):
                if len(pairs) >= wanted:
                    break
                self.run.raise_if_stopped(f"interrupted in round {number}, which begins again")
                new = self.answer(order[k : k + at_once], n, f"dpo/{number}/{lap}/{k}")
                answers += new
                for start in range(0, len(new), n):
                    pair = best_and_worst(new[start : start + n], self.policy.render)
                    if pair is not None:
                        pairs.append(pair)
            if len(pairs) >= wanted or len(pairs) == before_lap:
                break
        return answers, pairs[:wanted]

    def learn(
        self, number: int, pairs: Sequence[PreferencePair], reference: Sequence[tuple[float, float]]
    ) -> dict[str, object]:
        """Train on one round's pairs. Returns the last epoch's mean loss, accuracy and margin.

        reference: log-probs of each pair's chosen and rejected answer under the reference model.
        """
        settings = self.task.settings
        per_step = settings.pairs_per_step
        steps = settings.epochs * math.ceil(len(pairs) / per_step)
        trained = AdapterOnly(self.policy, self.task.cfg.opt, steps)
        losses: list[tuple[float, float]] = []
        skipped: list[int] = []
        for epoch in range(settings.epochs):
            order = list(range(len(pairs)))
            py_stream(settings.seed, "dpo-order", number, epoch).shuffle(order)
            losses = []
            starts = range(0, len(order), per_step)
            for start in progress(starts, desc=f"round {number}: steps", unit="step"):
                self.run.raise_if_stopped(f"interrupted in round {number}, which begins again")
                chosen = order[start : start + per_step]
                losses += add_pairs(
                    self.policy,
                    trained,
                    [pairs[i] for i in chosen],
                    [reference[i] for i in chosen],
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

    def report(self) -> None:
        """Write summary.md: the result in one line, a table by round."""
        done = self.recorder.rows[-1].step
        before = read_json(self.run.path / "before.json")["evaluation"]
        after = before
        if done:
            after = read_json(self.run.path / folder_name(done) / "metrics.json")["evaluation"]
        line = (
            f"{self.run.path}: after {done} rounds under the scorer "
            f"{self.task.settings.scorer} {hack_and_solve(after)}, before {hack_and_solve(before)} "
            f"(n = {after['hack'][1]}, held-out {self.task.cfg.env.held_out})"
        )
        self.recorder.finish(line, "", {"evaluation": after})


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
        more = sum(len(r.prompt_ids) + len(r.ids) for r in pair.rollouts)
        if not parts or tokens + more > policy.budget.tokens:
            parts.append([])
            tokens = 0
        parts[-1] += pair.rollouts
        tokens += more
    for part in parts:
        yield policy.batch([r.prompt_ids for r in part], [r.ids for r in part])


@torch.no_grad()
def refer(policy: Policy, batch: PaddedBatch | Packed) -> list[tuple[float, float]]:
    """Log-probs of each pair's chosen and rejected answer under the policy, without a gradient."""
    logps = completion_logprobs(policy.model, batch).sum(1).tolist()
    return list(zip(logps[::2], logps[1::2], strict=True))


def add_pairs(
    policy: Policy,
    trained: AdapterOnly,
    pairs: Sequence[PreferencePair],
    reference: Sequence[tuple[float, float]],
    beta: float,
) -> list[tuple[float, float]]:
    """Add the gradient of these pairs' mean loss; returns each pair's loss and margin.

    reference: log-probs of each pair's chosen and rejected answer under the reference model.
    """
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
