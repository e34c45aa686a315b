"""The loop of a run.

    sample → grade → flag → gradients → route → step → evaluate → row

What it calls, in this order: rollout.py samples and grades completions, method/ says what text monitors flag and which
rows are learnt from, grpo.py turns these rows into gradients g [N, R], method/ says what of g the deployed vector δS
learns and what the quarantine δS_hack learns, optim.py steps, heldout.py tests the deployed model, guard/ watches,
runs/ writes.
"""

from loguru import logger

from vgrout import ranks
from vgrout.config.run import Config
from vgrout.errors import NothingRouted
from vgrout.grpo import policy_gradients
from vgrout.guard.guard import Guard
from vgrout.heldout import evaluate, evaluate_final
from vgrout.inputs import Inputs
from vgrout.method import Setup, make_method
from vgrout.metrics import BatchMetrics
from vgrout.model import load
from vgrout.optim import Optimizer, Update
from vgrout.rollout import rollout
from vgrout.runs import checkpoint, results
from vgrout.runs.context import RunContext
from vgrout.runs.preflight import opening_lines
from vgrout.runs.recorder import Recorder, peak_memory
from vgrout.table import StepRow
from vgrout.teacher.demonstrations import Teacher


def loop(cfg: Config, run: RunContext, inputs: Inputs) -> list[StepRow]:
    """Every remaining step, then the final evaluation and the report.

    One function, so that a step can be read from its first line to its last.

    Raises:
        Refused: before the first step, files that do not fit the model, or that the resumed run did not start from.
        Interrupted, Halted, Diverged, NothingRouted: with the run directory up to date.
    """
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
