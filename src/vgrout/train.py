"""GRPO against a flawed grader, with gradient routing: `python -m vgrout.train PRESET [--flag value …]`.

    sample → grade → advantages → per-rollout gradients → route → step → evaluate → row

`train` is the loop. What it calls, in this order: rollout.py makes and grades completions, grpo.py turns groups into
every rollout's own gradient, method/ says who is flagged, and what of it the deployed vector δS learns and what the
quarantine δS_hack learns, optim.py steps, evaluate.py tests the deployed model, guard/ watches, runs/ writes.

Exit codes are those of runs/run_context.py. Every exit after the run directory was made leaves `status.json` in it.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from loguru import logger

from vgrout import ranks
from vgrout.cli import cli_exit
from vgrout.config.presets import resolve
from vgrout.config.run import ORGANISM, Config
from vgrout.grading.grade import Grader, cores
from vgrout.inputs import Inputs, file_hashes
from vgrout.problems import require_solvable
from vgrout.ranks import Place
from vgrout.runs.peers import Peer, ranks_to_start, resumed_by_torchrun, started
from vgrout.runs.preflight import find_resume, first_lines, plan_lines, preflight
from vgrout.runs.run_context import FINISHED, NOTHING, RunContext, require_same
from vgrout.runs.run_dir import RUNS
from vgrout.table import StepRow
from vgrout.tracking import Trackers
from vgrout.types import NothingRouted


def train(cfg: Config, run: RunContext, inputs: Inputs) -> list[StepRow]:
    """Every remaining step, then the final evaluation and the report.

    Raises:
        ValueError: before the first step, files that do not fit the model, or that the resumed run did not start from.
        Interrupted, Halted, Diverged, NothingRouted: with the run directory up to date.
    """
    # Here and not above: torch takes seconds to import, and a wrong flag never waits for it.
    from vgrout import loading
    from vgrout.evaluate import evaluate, evaluate_final
    from vgrout.guard.guard import Guard
    from vgrout.method import Setup, make_method
    from vgrout.method.labels import FlagRates
    from vgrout.optim import Optimizer, learn
    from vgrout.problems import balanced
    from vgrout.rollout import rollout
    from vgrout.runs import checkpoint, results
    from vgrout.runs.opening import opening_lines
    from vgrout.runs.recorder import Recorder, peak_memory

    if run.resumes and ranks.first():
        checkpoint.latest(run.path)  # a state that cannot be read is refused before a model is
    policy = loading.load_policy(cfg)  # frozen base + δS (deployed) + δS_hack (quarantine)
    teacher_model = loading.load_teacher_model(cfg, policy)
    problems = loading.load_problems(cfg, inputs, policy)  # train / val / test, disjoint
    teacher = loading.load_teacher(cfg, inputs, policy, problems, run.grader)  # demonstrations
    method = make_method(Setup(cfg, policy, inputs, run.grader, problems.train))  # who is flagged, what is done then
    optim = Optimizer(policy.adapter, cfg.opt, cfg.scale.steps)
    guard = Guard(cfg, policy, problems.train, inputs.healthy_kl)  # kill switch and detectors
    recorder = Recorder(cfg, run, policy, method, optim, guard, problems.modes)
    opening = opening_lines(cfg, inputs, problems, policy, method, run.grader.protections.version)
    rows = recorder.begin(opening, teacher.record(), teacher_model)
    val = balanced(problems.val, cfg.eval.eval_n_prompts, 0, "val")
    first, P, clock = len(rows), cfg.scale.prompts_per_step, run.clock

    guard.raise_if_diverged()  # a resumed run may have diverged already
    last = first if guard.halts else cfg.scale.steps  # or have halted: then only its final evaluation is left
    for step in run.steps(range(first, last)):
        clock.reset()
        prompts = problems.draw(cfg.run.seed, step, P)
        demos = [teacher.demos(p, step) for p in prompts]
        batch = rollout(policy, run.grader, prompts, demos, cfg, step, modes=problems.modes, clock=clock)

        with clock("fb"):
            flags = method.flag(batch)  # who is flagged, by monitors of texts: no oracle label is on what they see
            shadows = method.watch(batch)  # who else would be flagged: recorded, and nothing more
            batch = method.reward(batch, flags)  # as the grader gave them, unless flags change that
            plan = method.plan(batch, flags)  # every reward equal ⇒ every advantage 0 ⇒ no forward
            learnt = learn(policy, method, optim, plan, flags, cfg, teacher_model)  # keep + quar = g in each update
        with clock("eval"):
            refresh = method.refresh(step)  # the direction, extracted again on the present model
            deployed = evaluate(policy, run.grader, val, cfg, step) if cfg.evaluates(step) else None

        flags = learnt.routed.flags if learnt.routed else flags  # … and by monitors of gradients
        rates = FlagRates.of(batch.groups, flags, cfg.method.modes_acted_on)
        row = StepRow.of(
            batch, learnt.loss, learnt.update, refresh, deployed, rates, clock, skipped=int(learnt.skipped)
        )
        with clock("watch"):
            guard.observe(row, batch, deployed)
        recorder.record(row, batch, flags, refresh, shadows)
        guard.raise_if_diverged()
        if guard.halts:
            break

    unrouted = recorder.nothing_routed()
    logger.debug(guard.summary(sum(r.sec for r in rows[first:])))
    logger.info(f"final evaluation on held-out {cfg.env.held_out} …")
    final = evaluate_final(policy, run.grader, problems.test, cfg, clock, run.vote_stop)
    if ranks.first():
        logger.debug(f"peak memory {peak_memory()}{ranks.summary(len(rows) - first)}")
        results.report(cfg, run, rows, final, problems.modes, inputs.in_distribution, guard.halts, unrouted)
    guard.raise_if_halted()  # after its last evaluation: a halted run says as much as a finished one
    if unrouted:
        raise NothingRouted(unrouted)
    return rows


def launch(requested: Config, on_folder: Callable[[Path], object] | None = None) -> int:
    """Check everything that can be checked without torch, start the sandbox, then train. Returns the exit code.

    on_folder: called with the run's folder as soon as there is one.

    Raises:
        ValueError: a user's mistake, in one line, with nothing started.
    """
    place = ranks.under_torchrun()
    if place is not None and place.rank:
        return follow(place, Path("logs"))
    path, cfg = find_resume(resumed_by_torchrun(requested))
    force, n = requested.run.resume_force, ranks_to_start(cfg)
    inputs = preflight(cfg, path)
    hashes = file_hashes(cfg, inputs)
    if path:
        require_same(path, hashes, force)
    own = [] if path or cfg.scale.problems == ORGANISM else [*inputs.rows, *inputs.test_rows]  # the organism is hashed
    if cfg.run.dry_run:
        with grader_of(cfg, inputs) as grader:
            require_solvable(own, grader)
            ranks_line = [f"ranks         {n}"] * (n > 1)
            print("\n".join([*plan_lines(cfg, inputs, grader, path or RUNS), *ranks_line]))
        return FINISHED
    # Other ranks are forked before this process has a second thread. Without other ranks the sandbox's fork servers
    # start before torch is imported: they stay small, and are ready by the time the model is.
    with started(n, follow, Path("logs") / cfg.run_id) as others, grader_of(cfg, inputs, n) as grader:
        require_solvable(own, grader)
        record = {"config": cfg.as_dict(), "hashes": hashes}
        trackers = Trackers(cfg.run.trackers)
        run = RunContext.begin(
            " ".join(["train", cfg.preset, *cfg.repeated]),
            path,
            cfg.run_id,
            grader,
            record=record,
            force=force,
            trackers=trackers,
        )
        if on_folder:
            on_folder(run.path)
        with run:
            run.announce(*first_lines(cfg))
            with others.joined((cfg, inputs, run.path, bool(path))):
                train(cfg, run, inputs)
        return run.code


def follow(place: Place, log: Path) -> int:
    """A rank beside rank 0: the same loop on rank 0's inputs, writing nothing. Returns the exit code."""
    with ranks.joined(place):
        cfg, inputs, folder, resumes = ranks.from_first((Config(), None, log, False))
        assert inputs is not None
        with grader_of(cfg, inputs) as grader, Peer(folder, grader, resumes) as run:
            train(cfg, run, inputs)
    return run.code


def grader_of(cfg: Config, inputs: Inputs, n: int = 1) -> Grader:
    """The run's sandboxes: one per core, shared between the ranks of this machine. n: ranks to be started."""
    return Grader(
        max(1, cores() // ranks.here(n)),
        compile_reward=cfg.env.compile_reward,
        pass_reward=cfg.env.pass_reward,
        allow_weak=cfg.env.allow_weak_sandbox,
        reward=inputs.reward,
        retries=cfg.run.max_error_retries,
    )


def main(argv: list[str] | None = None) -> int:
    code = cli_exit(lambda: launch(resolve(argv)), NOTHING)
    if ranks.abandoned():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
