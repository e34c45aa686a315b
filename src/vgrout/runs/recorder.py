"""Recorders: run.json before step 0, then each step's table line, files and checkpoints, and resuming from them.
`StepRecorder` is all trainers', `Recorder` that of `train`."""

import hashlib
import json
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Generic, TypeVar

import torch
from loguru import logger
from torch import Tensor

from vgrout.config.run import Config
from vgrout.envs.base import Splits
from vgrout.ground import ranks
from vgrout.ground.data import Batch, Completion, Flaw, Grade, Refresh, Rollout, Task, Thought
from vgrout.ground.io import Diverged, Json, Refused, printable, quoted, read_json, write_atomic
from vgrout.ground.metrics import flag_rates, students
from vgrout.ground.table import SECONDS, Columns, StepRow, Table, share, whole_run
from vgrout.guard.guard import Guard
from vgrout.loop.optim import Optimizer
from vgrout.method.method import Method
from vgrout.model.policy import DTYPE_NAMES, LanguageModel, Policy
from vgrout.model.svd_adapter import weights_sha256
from vgrout.report.rules import preregistered
from vgrout.runs import checkpoint
from vgrout.runs.context import RunContext
from vgrout.runs.run_dir import require_same, steps_on_disk

OF_THE_RUN = ("began_at", "tracker_id")  # what run.json keeps when a run begins again
RESUMED = ("argv", "git", "versions", "hashes", "ranks")  # what run.json records about each resume

R = TypeVar("R", bound=Columns)


# Characters of rows in an adapter file's head: enough for some 600 steps, so that no save takes longer than then.
ROWS = 2**20


class StepRecorder(Generic[R]):
    """Writes a run's files: `open` once, then `write` and `keep` at every step. `rows` are those so far."""

    def __init__(
        self,
        run: RunContext,
        row: type[R],
        state: Mapping[str, Any],
        every: int = 1,
        keep: int = 1,
        short: bool = True,
    ) -> None:
        """state: what goes into a checkpoint, by `state_dict`. every: steps between checkpoints. keep: how many are
        kept. short: the console gets its few columns, not all."""
        self.run, self.row, self.rows = run, row, list[R]()
        self.state, self.every, self.kept = state, every, keep
        self.short = short

    def open(self, more: Mapping[str, Json], has: set[str], flaws: Sequence[Flaw] = ()) -> None:
        """Write run.json, explain the table; on a resume first restore the last good checkpoint.

        more: entries of run.json besides `RunContext.record`. has, flaws: choose the table's columns.

        Raises:
            Refused: an input has changed since the run started, or no checkpoint can be used.
        """
        run, logged = self.run, steps_on_disk(self.run.path)
        first = read_json(run.path / "run.json") if (run.path / "run.json").exists() else {}
        record: dict[str, Json] = {
            **run.record,
            **more,
            "hashes": run.record["hashes"] | more["hashes"],
        }
        if run.resumes:
            require_same(run.path, record["hashes"])
            self.resume()
            logger.info(f"resumed after step {len(self.rows) - 1}")
            again = {"step": len(self.rows)} | {
                name: record[name] for name in RESUMED if name in record
            }
            resumed = [*first.get("resumed", []), again]
            begun = first.get("begun", first.get("config"))
            record = {**first, "config": record["config"], "begun": begun, "resumed": resumed}
        elif first:  # announced, and maybe begun before
            run.dir.begin_again()
            record |= {name: first[name] for name in OF_THE_RUN if name in first}
        run.dir.write_json("run.json", record)
        run.trackers.start(
            run.path, record["config"], len(self.rows), logged, record.get("tracker_id", "")
        )
        run.started()
        self.table, self.full = Table(has, flaws, self.row, short=True), Table(has, flaws, self.row)
        for line in self.full.legend():
            logger.debug(line)

    def resume(self) -> None:
        """Continue from the last checkpoint that is whole and of this run, with the files cut back to it.

        Raises:
            Refused: there is none; nothing on disk has changed then.
        """
        run, passed_over = self.run.path, list[str]()
        for point in checkpoint.newest_first(run, passed_over):
            try:
                rows = checkpoint.rows_before(run, point.next_step, point.sizes, self.row.from_json)
                if point.state.keys() != self.state.keys():
                    raise Refused(f"it has the parts {', '.join(point.state)}")
                # all at once: ranks that hold one model together exchange while it is restored
                self.restore(*ranks.from_first((point.state, rows)))
                break
            except Refused as e:
                passed_over.append(f"{point.path}: not of this run ({e})")
        else:
            raise checkpoint.none_left(run, passed_over)
        for line in passed_over:
            logger.warning(f"{line}; going back one further")
        checkpoint.rewind(run, point)

    def restore(self, state: Mapping[str, object], rows: Iterable[R]) -> None:
        """Continue from this state and these rows, which rank 0 has read."""
        self.rows[:] = rows
        for name, part in self.state.items():
            part.load_state_dict(state[name])

    def write(
        self,
        row: R,
        rollouts: Sequence[dict[str, object]],
        more: Mapping[str, object] | None = None,
    ) -> None:
        """Write a finished step: the table's line, rollouts.jsonl, steps.jsonl (with `more`), the trackers."""
        # a notebook's bar stands for the few columns
        on_console = None
        if not self.short:
            on_console = self.full
        elif self.run.bars is None:
            on_console = self.table
        for table in (self.table, self.full):
            for line in table.lines(row):
                logger.log("INFO" if table is on_console else "DEBUG", line)
        record = row.as_json() | dict(more or {})
        self.run.dir.append(record, rollouts)
        self.run.trackers.row(record, rollouts)

    def keep(self, step: int, closing: bool) -> None:
        """Save a checkpoint if one is due or the run ends here (`closing`), and write status.json."""
        if closing or (step + 1) % self.every == 0:
            state = {name: part.state_dict() for name, part in self.state.items()}
            checkpoint.save(self.run.path, step + 1, state, self.kept)
        self.run.running(len(self.rows))

    def finish(self, line: str, table: str, record: Mapping[str, object]) -> None:
        """Write summary.md: the line to quote, a table, every step. record: the final numbers, for the trackers. The
        console gets the line alone."""
        write_atomic(
            self.run.path / "summary.md", f"{line}\n\n{table}\n\n{self.full.markdown(self.rows)}\n"
        )
        for text in table.splitlines():
            logger.debug(text)
        self.run.trackers.final(record, None, None, self.rows[-1].step)
        logger.info(f"{line}\nmore: {self.run.path / 'summary.md'}")


class Recorder(StepRecorder[StepRow]):
    """Records a run: `begin` once, then `record` at every step. Rank 0 writes; the others keep the rows alone."""

    def __init__(
        self,
        cfg: Config,
        run: RunContext,
        policy: Policy,
        method: Method,
        optim: Optimizer,
        guard: Guard,
        problems: Splits,
    ) -> None:
        state = {"adapter": policy.adapter, "optim": optim, "method": method, "watch": guard}
        short = cfg.run.columns == "main"
        super().__init__(
            run, StepRow, state, cfg.run.checkpoint_every, cfg.run.checkpoint_keep, short
        )
        self.cfg, self.policy, self.method, self.guard = cfg, policy, method, guard
        self.problems = problems

    def begin(
        self,
        opening: Sequence[str],
        pool: dict[str, object] | None,
        teacher_model: LanguageModel | None,
    ) -> list[StepRow]:
        """Write run.json; on a resume restore the last good checkpoint. Returns the rows so far.

        opening: lines on what was loaded; the first is shown, the log has all. pool: the demonstrations, for run.json.

        Raises:
            Refused: an input has changed since the run started, or no checkpoint can be used.
        """
        cfg, run = self.cfg, self.run
        if not ranks.first():
            restored = not run.resumes
            while not restored:
                with suppress(Refused):  # on rank 0 too, which goes back one further
                    self.restore(*ranks.from_first(({}, [])))
                    restored = True
            return self.rows
        provenance = self.method.provenance
        logger.debug(f"argv: {' '.join(sys.argv)}")  # shown at the end of the log as well
        logger.info(opening[0])
        for line in opening[1:]:
            logger.debug(line)
        hashes = {
            "base_weights": weights_sha256(self.policy.model, self.policy.adapter),
            "teacher_weights": weights_sha256(teacher_model.model, None) if teacher_model else None,
            "tokenizer": self.policy.tokenizer_sha256,
        }
        if not run.resumes:
            # a resumed run takes V from its checkpoint
            V = self.method.direction.state_dict() if self.method.direction else {}
            hashes["direction"] = tensor_hash(*V.values()) if V else None
            hashes["preregistered"] = preregistered()
        record = {
            "hashes": hashes,
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "attention": self.policy.attention(),
            "dtype": DTYPE_NAMES[self.policy.model.dtype],
            "ranks": ranks.size(),
            "monitor": cfg.method.monitor_title or cfg.method.monitor_name,
            "control": cfg.method.control_name,
            "control_what": cfg.method.control_what,
            "direction": provenance.as_json() if provenance else None,
            **run.stamp,
            "pool": pool,
            "flaws": {
                name: {"code": flaw.code, "should": flaw.should, "pattern": flaw.pattern}
                for name, flaw in self.problems.flaws.items()
            },
        }
        flaws = self.problems.trained_flaws
        self.open(record, columns_for(cfg, flaws) | self.method.measures, flaws)
        self.shown: set[str] = set()  # what of the answers the log has shown, once each
        return self.rows

    def record(self, row: StepRow, batch: Batch, refresh: Refresh) -> None:
        """Write the table's line, steps.jsonl, rollouts.jsonl, and the checkpoints that are due."""
        cfg, run, step, earlier = self.cfg, self.run, row.step, list(self.rows)
        self.rows.append(row)
        run.vote_stop()
        self._require_alike(step)
        if not ranks.first():
            return
        with run.clock("save"):
            for warning in warnings(cfg, earlier, row):
                logger.warning(f"step {step}: {warning}")
            extra: dict[str, object] = {}
            if self.guard.readings:
                extra["watch"] = self.guard.readings
            if refresh.overlap is not None:
                extra["refresh"] = asdict(refresh)
            of_shadows: dict[str, object] = {}
            for name in self.method.shadows:
                rates = flag_rates([(group, group.shadows[name]) for group in batch.groups])
                of_shadows[name] = share("recall", rates["recall"]) | share(
                    "false_flags", rates["false_flags"]
                )
            if of_shadows:
                extra["shadow"] = of_shadows
            self.write(row, rollout_lines(batch, self.policy), extra)
            run.show_step(row.hack_s, row.solve_s)
            if refresh.overlap is not None:
                logger.log(
                    "WARNING" if refresh.overlap < ROTATED else "DEBUG",
                    f"step {step}: direction extracted again, overlap with the last {refresh.overlap:.2f}, "
                    f"{refresh.modules} modules, {refresh.axes} axes. SHOULD: near 1; ELSE (< {ROTATED}) it "
                    "rotated away",
                )
            self._log_answers(step, students(batch.groups))
            closing = step + 1 == cfg.scale.steps or run.stops or self.guard.ends
            if row.hack_s.k and not any(r.hack_s.k for r in earlier):
                self._save_adapter("first_hack.safetensors")
            if row.hack_deploy is not None and cfg.eval.save_eval_ckpts:
                self._save_adapter(f"ckpt_step{step + 1:04d}.safetensors")
            if (step + 1) % 25 == 0 or closing:
                self._save_adapter("train.safetensors")
            self.keep(step, closing)

    def _log_answers(self, step: int, answers: Sequence[tuple[Rollout, Grade]]) -> None:
        """Log the first prompt, the first hack of each kind, and every 20 steps the end of one answer."""
        if not answers:
            return
        rollout, grade = answers[0]
        if not self.shown:
            self.shown.add("a prompt")
            ids = [*rollout.prompt_ids, *rollout.ids]
            text = quoted(str(self.policy.tok.decode(ids, skip_special_tokens=False)))
            logger.debug(f"first prompt with its first completion, special tokens visible:\n{text}")
        for r, g in answers:
            if g.mechanism and g.mechanism not in self.shown:
                self.shown.add(g.mechanism)
                should = self.problems.flaws[g.mechanism].should
                logger.debug(
                    f"first {g.mechanism} hack, step {step}. "
                    f"SHOULD: {should}; ELSE the grader is wrong:\n{quoted(r.text)}"
                )
        if step < 3 or step % 20 == 0:
            n, ended = len(answers), sum(r.whole for r, _ in answers)
            tail = printable(rollout.text[-160:]).replace("\n", "⏎")
            logger.debug(
                f"step {step}: {ended}/{n} answers ended, {n - ended}/{n} cut; "
                f"one ends: …{tail} [{grade.status}]"
            )

    def nothing_routed(self) -> str:
        """Why a routing run was in fact plain GRPO; "": it routed, or has nothing to route. Asked after the last step.
        Under a control that is a possible outcome, and a warning."""
        method = self.cfg.method
        if not method.routes or self.policy.adapter.δS_hack.any():
            return ""
        # a KL alone, without rewards that differ, gives nothing to route
        learnt = sum(
            row.gn is not None and row.signal.k > 0 and not row.skipped for row in self.rows
        )
        n = len(self.rows)
        # it may have found nothing to flag
        of_texts = method.spec.reads_flags and not method.flags_by_gradient
        control = method.control_name
        if control != "none" or of_texts or not learnt:
            why = f"control: {control}" if control != "none" else f"monitor: {method.monitor_name}"
            why = why if learnt else "no step had a signal, so nothing was learnt either"
            logger.warning(f"nothing was routed in {n} steps ({why})")
            return ""
        hacks, _ = whole_run(self.rows, students=True)
        return (
            f"--intervention {method.intervention} routed nothing in {n} steps, {learnt} of them with a gradient: the "
            f"quarantine is 0, so this was plain GRPO. Student hacks {hacks.k}/{hacks.n}, demonstrations "
            f"{'mixed in' if self.cfg.mixes else 'none'}; look at tau, hkgap, fired and routed in "
            "steps.jsonl"
        )

    def _require_alike(self, step: int) -> None:
        """Raises Diverged where the ranks' adapters are no longer the same to the last bit."""
        if ranks.size() == 1:
            return
        adapter = self.policy.adapter
        digests = ranks.gather(lambda: tensor_hash(adapter.δS, adapter.δS_hack))
        if unlike := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise Diverged(
                f"step {step}: the adapter of rank {', '.join(map(str, unlike))} is no longer that of rank 0; "
                "ranks need the same software on like processors"
            )

    def _save_adapter(self, name: str) -> None:
        """Save one vector: the file *is* the deployed model. The format's metadata are strings; hack_rate and pass_rate
        are over all rows so far, like HACK_RATE and PASS_RATE in the tail."""
        cfg, rows = self.cfg, self.rows
        hack, solve = whole_run(rows)
        self.policy.adapter.save(
            self.run.path / name,
            {
                "model": cfg.scale.model,
                "dtype": str(self.policy.model.dtype).removeprefix("torch."),
                "step": str(len(rows)),
                "hack_rate": str(hack.value),
                "pass_rate": str(solve.value),
                "rows": rows_as_json(rows),
                "control": cfg.method.control_name,
                "cfg": json.dumps(cfg.as_dict()),
            },
        )


# hkgap of the first step with a signal from here on, below which a run is warned
SETTLED, APART = 9, 0.2
SWALLOWED = 0.5  # realised share below which a run is warned, once
ROTATED = 0.2  # overlap of a direction with the one before it, below which it is another one


def warnings(cfg: Config, earlier: Sequence[StepRow], row: StepRow) -> Iterator[str]:
    """What a run is warned of after a step; of rounding and of the gate once."""

    def swallowed(r: StepRow) -> bool:
        return r.realised is not None and r.realised < SWALLOWED

    if row.skipped:
        yield "loss or gradient not finite, optimiser not stepped"
    if swallowed(row) and not any(map(swallowed, earlier)):
        yield (
            f"{row.realised:.2f} of the adapter's change is in the weights, the rest is lost to their rounding; raise "
            "--lr, or start again with --dtype fp32"
        )
    method, gap = cfg.method, row.hkgap
    told = any(r.hkgap is not None for r in earlier[SETTLED:])
    if gap is None or told or len(earlier) < SETTLED:
        return
    by_all = method.resolved("gate_vote") == "rollout"
    if by_all and row.voting is not None and row.voting <= 0.5:
        yield (
            f"{row.voting:.0%} of the modules have a threshold: too few for a majority of all, so of the policy's own "
            "answers only those that the weak detector knows are flagged; under --gate-vote abstain the others do "
            "not vote"
        )
    elif gap < APART and method.quarantine_block is not None and method.control_name == "none":
        yield (
            f"hkgap {gap:.2f}: along the direction known hacks hardly differ from other answers, so hacks may be "
            "learnt; give pairs by each flaw that is demonstrated (--vhack-pairs-path)"
        )


def rows_as_json(rows: Sequence[StepRow]) -> str:
    """The rows of steps.jsonl as one JSON list, without their seconds, so that the adapter file is the same to the last
    byte after a kill and a resume. Of a run whose rows have more characters than `ROWS` only the last ones."""
    lines: list[str] = []
    size = 0
    for row in reversed(rows):
        timeless = {name: value for name, value in row.as_json().items() if name not in SECONDS}
        lines.append(json.dumps(timeless, ensure_ascii=False, allow_nan=False))
        size += len(lines[-1]) + 2
        if size > ROWS:
            break
    return f"[{', '.join(reversed(lines))}]"


def peak_memory() -> str:
    host = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of host memory"
    if not torch.cuda.is_available():
        return host
    return f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB on the GPU, {host}"


def tensor_hash(*tensors: Tensor) -> str:
    """sha256 of the tensors' bytes."""
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(x.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def columns_for(cfg: Config, flaws: Sequence[Flaw]) -> set[str]:
    """What this run can measure, which decides on its table's columns."""
    method = cfg.method
    flagging = method.spec.reads_flags
    has = {
        "teacher": cfg.mixes,
        "modes": len(flaws) > 1,
        "ablated": method.ablate_frac > 0,
        "route": method.routes,
        "resid": method.flags_by_gradient and method.routes,
        "direction": method.has_direction,
        "whole": method.routes and flagging,
        "flags": flagging,
        "blind": flagging and bool(method.modes_acted_on),
        "halves": bool(cfg.env.report_detectors),
        "beta": cfg.loss.beta > 0,
        "drops": cfg.loss.drops,
        "thinking": cfg.env.thinking,
    }
    return {name for name, yes in has.items() if yes}


def rollout_lines(batch: Batch, lm: LanguageModel) -> list[dict[str, object]]:
    """Every student rollout with every flag, for rollouts.jsonl. `p_idx`: the step's prompt, `gi`: the rollout of this
    prompt. `gate`: share of modules in which it was quarantined; None where none can be, or the group had no signal.
    `shadow`: flag and score by each monitor in shadow. lm: renders the prompts."""
    lines: list[dict[str, object]] = []
    for group in batch.groups:
        prompt, flags = lm.prompt_text(group.problem.messages), group.flags
        for b, (rollout, grade) in enumerate(zip(group.rollouts, group.grades, strict=True)):
            if not isinstance(grade, Grade):
                continue
            head: dict[str, object] = {"step": batch.step, "p_idx": group.index, "gi": b}
            head["gate"] = round(flags.shares[b], 4) if flags and flags.shares else None
            head |= flags.record_of(b) if flags else {}
            if group.shadows:
                head["shadow"] = {name: of.record_of(b) for name, of in group.shadows.items()}
            record = rollout_record(group.problem, rollout, grade, prompt, rollout.deployed)
            lines.append(head | {"advantage": group.advantages[b]} | record)
    return lines


def rollout_record(
    problem: Task, completion: Completion, grade: Grade, prompt: str, deployed: bool = False
) -> dict[str, object]:
    """One graded answer with every flag. prompt: as the model read it, special tokens included."""
    return {
        "problem_id": problem.id,
        "env_mode": problem.flaws[0],
        **problem.notes,
        "deployed": deployed,
        "prompt": prompt,
        "messages": list(problem.messages),
        **thought_record(completion.thought),
        "text": completion.answer,
        "tokens": len(completion.ids),
        "finished": completion.whole,
        "reward": grade.reward,
        "passed": grade.passed,
        "solved": grade.solved,
        "hacked": grade.hacked,
        "mechanism": grade.mechanism,
        "exit_status": grade.status,
        **details_record(grade),
    }


def thought_record(thought: Thought) -> dict[str, object]:
    """A thought and its tokens, as files have them before `text`, the answer; {}: there is none."""
    if not thought.text:
        return {}
    return {"thought": thought.text, "thought_tokens": thought.tokens}


def details_record(grade: Grade) -> dict[str, object]:
    """The environment's own of a grade, as files have it."""
    out: dict[str, object] = {}
    for name, value in grade.details.items():
        out[name] = round(value, 6) if isinstance(value, float) else value
    return out
