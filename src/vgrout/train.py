"""GRPO against a flawed grader, with gradient routing: `vgrout train PRESET [--flag value …]`.

    sample → grade → flag → gradients → route → step → evaluate → record

`train` is the loop. In each step it calls, in this order:

1. rollout.py samples completions and has them graded;
2. method/ lets text monitors flag, and makes the table of rows that are learnt from;
3. grpo.py turns these rows into gradients g [N, R];
4. method/ says what of g the deployed vector δS learns, and what the quarantine δS_hack learns;
5. optim.py steps both vectors;
6. heldout.py evaluates the deployed model on held-out problems;
7. guard/ decides whether the run goes on, and runs/ writes the step.

Exit codes are those of runs/context.py. Every exit after the run directory was made leaves `status.json` in it.
"""

import sys
from functools import partial

from loguru import logger

from vgrout.config.cli import cli_exit, leave
from vgrout.config.presets import resolve
from vgrout.config.run import Config
from vgrout.ground import ranks
from vgrout.ground.io import NothingRouted
from vgrout.ground.metrics import BatchMetrics
from vgrout.ground.table import StepRow
from vgrout.runs.context import NOTHING_STARTED, RunContext
from vgrout.runs.inputs import Inputs
from vgrout.runs.launch import launch


def train(cfg: Config, run: RunContext, inputs: Inputs) -> list[StepRow]:
    """Train for the remaining steps, evaluate at the end, and write the results. Returns a row for each step.

    Raises:
        Refused: before the first step: a file does not fit the model, or is not the one that the resumed run had.
        Interrupted, Halted, Diverged, NothingRouted: with the run directory up to date.
    """
    # These modules import torch, which takes seconds. A wrong flag was refused before, in `launch`.
    run.clock.begin("importing torch")
    from vgrout.ground.rng import seed_global_streams
    from vgrout.guard.guard import Guard
    from vgrout.loop.grpo import policy_gradients
    from vgrout.loop.heldout import answers_of_base, evaluate, evaluate_final
    from vgrout.loop.optim import Optimizer
    from vgrout.loop.rollout import rollout
    from vgrout.method.live_direction import Setup
    from vgrout.method.method import make_method
    from vgrout.model.load import load
    from vgrout.runs import plan, results
    from vgrout.runs.recorder import Recorder, peak_memory
    from vgrout.teacher.demonstrations import Teacher

    clock = run.clock
    grader = run.grader
    clock.begin("loading the model")
    policy = load.run_policy(cfg)  # frozen base + δS (deployed) + δS_hack (quarantine)
    # another model, whose log-probs the loss may ask for; None: it asks for none
    teacher_model = load.run_teacher(cfg, policy)
    splits = inputs.splits(cfg, policy)  # train / val / test problems, disjoint
    # spread evenly over the flaws
    val = splits.balanced("val", cfg.eval.eval_n_prompts)
    # hacks written beforehand, which fill up groups
    demonstrations = Teacher(cfg, inputs.pool, policy, splits.train)
    folder = run.path if ranks.first() else None
    if cfg.own_code:  # classes of somebody's own may draw random numbers while they are made
        seed_global_streams(cfg.run.seed, -1)  # as in a step before the first
    # the monitor and the intervention
    setup = Setup(
        cfg,
        policy,
        pairs=inputs.pairs,
        placebo=inputs.placebo,  # pairs about something else, for --control placebo
        known_correct=inputs.known_correct,  # right answers that monitors may learn from
        problems=splits.train,
        # graded answers of the untrained model, for monitors that learn from right ones
        answers_of_base=partial(answers_of_base, policy, grader, cfg),
        folder=folder,
    )
    method = make_method(setup)
    optim = Optimizer(policy.adapter, cfg.opt, cfg.scale.steps)
    guard = Guard(cfg, policy, splits.train)  # kill switch, and the detectors of guard/detectors.py
    recorder = Recorder(cfg, run, policy, method, optim, guard, splits)
    loaded = plan.loaded_lines(inputs, splits)  # what was read, for the head of the log
    # writes run.json; restores the last checkpoint of a resumed run, and returns its earlier rows
    step_rows = recorder.begin(loaded, demonstrations.record(), teacher_model)
    first = len(step_rows)

    # a resumed run may have diverged already, or have halted: then only its final evaluation is left
    guard.raise_if_diverged()
    last = first if guard.halts else cfg.scale.steps
    for step in run.steps(range(first, last)):  # ends early where someone asked it to stop
        clock.reset()
        if cfg.own_code:
            seed_global_streams(cfg.run.seed, step)
        problems = method.prompted(splits.draw(cfg.run.seed, step, cfg.scale.prompts_per_step))
        demos = [demonstrations.demos(problem, step) for problem in problems]
        batch = rollout(
            policy,
            grader,
            problems,
            demos,
            cfg,
            step,
            flaws=splits.trained_flaws,  # validation may have more
            clock=clock,
        )

        with clock("fb"):  # forward and backward, routing, the step
            # text monitors flag; penalty and screen change rewards; the rows to learn from
            batch = method.flag(batch)
            # g [N, R]: N gradients of rows, or of rows learnt alike
            # measured: the loss's columns of the step's row
            g, measured = policy_gradients(policy, batch, cfg, teacher_model)
            # what δS learns of g, and what δS_hack learns; gradient monitors flag here
            routed = method.route(batch, g)
            # keep → δS, quar → δS_hack
            update = optim.step(routed, measured)
        with clock("eval"):
            refresh = method.refresh(step)  # the direction, extracted again on the present model
            deployed = None  # the evaluation of the deployed model
            if cfg.evaluates(step):
                deployed = evaluate(policy, grader, val, cfg, step, splits.flaws)

        # for the record: flags as they were acted on, also those that came after the gradients
        batch = batch.with_flags(routed.flags)
        # each of these fills its columns
        step_row = StepRow.of(BatchMetrics(batch), update, refresh, deployed, clock)
        with clock("watch"):
            guard.observe(step_row, batch, deployed)
        recorder.record(step_row, batch, refresh)
        guard.raise_if_diverged()
        if guard.halts:
            break

    # why a run that routes has routed nothing, which makes it plain GRPO; "": it has, or does not route
    unrouted = recorder.nothing_routed()
    silent = guard.silent()  # detectors of the guard that could never be measured
    if silent:
        logger.warning(f"detectors that could not have halted this run: {silent}")
    if cfg.own_code:
        seed_global_streams(cfg.run.seed, cfg.scale.steps)
    logger.info(f"final evaluation on held-out {cfg.env.held_out} …")
    # vote_stop: whether any rank was asked to stop
    final = evaluate_final(policy, grader, splits, cfg, clock, run.vote_stop)
    if ranks.first():
        logger.debug(f"peak memory {peak_memory()}")
        results.write(cfg, run, step_rows, final, inputs, splits, guard.halts, unrouted)
    # only now: a halted run is evaluated and written like a finished one
    guard.raise_if_halted()
    if unrouted:
        raise NothingRouted(unrouted)
    return step_rows


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    typed = [word.partition("=")[0] for word in words]
    # where it was not typed, the head of the log says that the intervention is the default
    intervention_named = "--intervention" in typed

    def start() -> int:
        return launch(train, resolve(words), named=intervention_named)

    return cli_exit(start, NOTHING_STARTED)


if __name__ == "__main__":
    leave(main())
