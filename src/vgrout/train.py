"""GRPO against a flawed grader, with gradient routing: `vgrout train PRESET [--flag value …]`.

    sample → grade → flag → gradients → route → step → evaluate → row

`train` is the loop. What it calls, in this order: rollout.py samples and grades completions, method/ says what text
monitors flag and which rows are learnt from, grpo.py turns these rows into gradients g [N, R], method/ says what of g
the deployed vector δS learns and what the quarantine δS_hack learns, optim.py steps, heldout.py tests the deployed
model, guard/ watches, runs/ writes.

Exit codes are those of runs/context.py. Every exit after the run directory was made leaves `status.json` in it.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from loguru import logger

from vgrout import console, ranks
from vgrout.cli import cli_exit, spelled
from vgrout.config.presets import resolve
from vgrout.config.run import Config
from vgrout.cores import cores
from vgrout.envs.base import Grader
from vgrout.errors import NothingRouted
from vgrout.inputs import Inputs, file_hashes, require_own_labels
from vgrout.metrics import BatchMetrics
from vgrout.runs.context import FINISHED, NOTHING, RUNS, RunContext, leave, require_same
from vgrout.runs.peers import Peer, require_torchrun, resumed_by_torchrun
from vgrout.runs.preflight import (
    beside_documents,
    brought,
    find_resume,
    first_lines,
    plan_lines,
    preflight,
)
from vgrout.table import StepRow
from vgrout.tracking import Trackers


def train(cfg: Config, run: RunContext, inputs: Inputs) -> list[StepRow]:
    """Every remaining step, then the final evaluation and the report.

    Raises:
        Refused: before the first step, files that do not fit the model, or that the resumed run did not start from.
        Interrupted, Halted, Diverged, NothingRouted: with the run directory up to date.
    """
    # here and not above: it takes seconds, and a wrong flag never waits for it
    run.clock.begin("importing torch")
    from vgrout.grpo import policy_gradients
    from vgrout.guard.guard import Guard
    from vgrout.heldout import evaluate, evaluate_final
    from vgrout.method import Setup, make_method
    from vgrout.model import load
    from vgrout.optim import Optimizer, Update
    from vgrout.rollout import rollout
    from vgrout.runs import checkpoint, results
    from vgrout.runs.preflight import opening_lines
    from vgrout.runs.recorder import Recorder, peak_memory
    from vgrout.teacher.demonstrations import Teacher

    if run.resumes and ranks.first():
        # an unreadable checkpoint is refused before the model is loaded
        checkpoint.latest(run.path)
    run.clock.begin("loading the model")
    policy = load.run_policy(cfg)  # frozen base + δS (deployed) + δS_hack (quarantine)
    teacher_model = load.run_teacher(cfg, policy)
    problems = inputs.splits(cfg, policy)  # train / val / test, disjoint
    teacher = Teacher.of_run(cfg, inputs.pool, policy, problems.train)  # demonstrations
    folder = run.path if ranks.first() else None
    method = make_method(Setup(cfg, policy, inputs, problems.train, run.grader, folder))
    optim = Optimizer(policy.adapter, cfg.opt, cfg.scale.steps)
    guard = Guard(cfg, policy, problems.train, inputs.healthy_kl)  # kill switch and detectors
    recorder = Recorder(cfg, run, policy, method, optim, guard, problems)
    opening = opening_lines(cfg, inputs, problems, policy, method, run.grader.version)
    rows = recorder.begin(opening, teacher.record(), teacher_model)
    val = problems.balanced("val", cfg.eval.eval_n_prompts)
    first, P, clock = len(rows), cfg.scale.prompts_per_step, run.clock

    # a resumed run may have diverged already, or have halted: then only its final evaluation is left
    guard.raise_if_diverged()
    last = first if guard.halts else cfg.scale.steps
    for step in run.steps(range(first, last)):
        clock.reset()
        prompts = problems.draw(cfg.run.seed, step, P)
        demos = [teacher.demos(p, step) for p in prompts]
        batch = rollout(
            policy, run.grader, prompts, demos, cfg, step, flaws=problems.trained_flaws, clock=clock
        )

        with clock("fb"):
            # what text monitors flag; penalty changes rewards; the rows to learn from
            batch = method.flag(batch)
            updates: list[Update] = []
            logp_old = ()  # log-probs under the policy that sampled, from the first update on
            for _ in range(cfg.loss.updates_per_batch):
                # g [N, R]: N gradients of rows, or of rows learnt alike
                gradients = policy_gradients(policy, batch, cfg, teacher_model, logp_old)
                logp_old = gradients.logp_old
                # gradient monitors flag here, and gates choose shares; keep + quar = Σ g, asserted
                routed = method.route(batch, gradients.g)
                # keep → δS, quar → δS_hack
                updates.append(optim.step(routed, gradients.metrics, again=bool(updates)))
                if not updates[-1].stepped:
                    break
            update = Update.of_batch(updates)
        with clock("eval"):
            refresh = method.refresh(step)  # the direction, extracted again on the present model
            deployed = None
            if cfg.evaluates(step):
                deployed = evaluate(policy, run.grader, val, cfg, step, problems.flaws)

        # what was acted on: a gradient monitor has decided only now
        batch = batch.with_flags(update.routed.flags)
        row = StepRow.of(BatchMetrics(batch), update, refresh, deployed, clock)
        with clock("watch"):
            guard.observe(row, batch, deployed)
        recorder.record(row, batch, refresh)
        guard.raise_if_diverged()
        if guard.halts:
            break

    unrouted = recorder.nothing_routed()
    logger.debug(guard.summary())
    if guard.silent():
        logger.warning(f"detectors that could not have halted this run: {guard.silent()}")
    logger.info(f"final evaluation on held-out {cfg.env.held_out} …")
    final = evaluate_final(policy, run.grader, problems, cfg, clock, run.vote_stop)
    if ranks.first():
        logger.debug(f"peak memory {peak_memory()}{ranks.summary(len(rows) - first)}")
        results.write(cfg, run, rows, final, inputs, problems, guard.halts, unrouted)
    # after its last evaluation: a halted run says as much as a finished one
    guard.raise_if_halted()
    if unrouted:
        raise NothingRouted(unrouted)
    return rows


def launch(
    requested: Config, on_run: Callable[[RunContext], object] | None = None, *, named: bool = True
) -> int:
    """Check everything that can be checked without torch, start the sandbox, then train. Returns the exit code.

    on_run: called with the run as soon as it has a folder. named: somebody chose the intervention.

    Raises:
        Refused: a user's mistake, in one line, with nothing started.
    """
    require_torchrun()
    console.setup(None)  # what is said before the run has a log
    if not ranks.first():
        return FINISHED if requested.run.dry_run else follow()
    path, cfg = find_resume(resumed_by_torchrun(requested))
    inputs = preflight(cfg, path)
    hashes = file_hashes(cfg, inputs)
    if path:
        require_same(path, hashes)
    # The sandbox starts before torch is imported: its fork servers stay small, and are ready by the
    # time the model is.
    with grader_of(cfg, inputs) as grader:
        if not path:
            inputs.environment.check(grader)
            require_own_labels(cfg, inputs, grader)
        if cfg.run.dry_run:
            print_plan(cfg, inputs, grader, path, named=named or bool(path))
            return FINISHED
        run = RunContext.begin(
            " ".join(["train", cfg.preset, *cfg.repeated]),
            path,
            cfg.run_id,
            grader,
            record={
                "config": cfg.as_dict(),
                "beside_documents": beside_documents(cfg.method),
                "hashes": hashes,
            },
            trackers=Trackers(cfg.run.trackers),
            given=cfg.run.output_dir,
        )
        if on_run:
            on_run(run)
        with run:
            run.announce(*first_lines(cfg, named=named or bool(path)))
            if cfg.guard_warning:
                logger.warning(cfg.guard_warning)
            for line in brought(cfg.method):
                logger.debug(f"method: {line}")
            with ranks.joined():
                ranks.from_first((cfg, inputs, run.resumes))
                train(cfg, run, inputs)
        return run.code


def print_plan(
    cfg: Config, inputs: Inputs, grader: Grader, path: Path | None, *, named: bool
) -> None:
    """Print what --dry-run shows. path: the folder of the run that is resumed. named: as in `launch`."""
    there = path or cfg.run.output_dir or RUNS
    plan = plan_lines(cfg, inputs, grader, there, named=named, resumes=bool(path))
    print(spelled("\n".join(plan)))


def follow() -> int:
    """A rank beside rank 0: the same loop on rank 0's inputs, writing nothing. Returns the exit code."""
    logger.remove()  # rank 0 logs
    with ranks.joined():
        cfg, inputs, resumes = ranks.from_first((Config(), None, False))
        assert inputs is not None
        with grader_of(cfg, inputs) as grader, Peer(grader, resumes) as run:
            train(cfg, run, inputs)
    return run.code


def grader_of(cfg: Config, inputs: Inputs) -> Grader:
    """What grades this run's answers. Its workers are this machine's cores, divided among the ranks on it."""
    workers = max(1, cores() // ranks.here())
    return inputs.environment.grader(workers, cfg.run.max_error_retries)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    named = any(word.partition("=")[0] == "--intervention" for word in words)
    return cli_exit(lambda: launch(resolve(words), named=named), NOTHING)


if __name__ == "__main__":
    leave(main())
