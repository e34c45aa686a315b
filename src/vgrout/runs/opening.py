"""What a run says that it has loaded: one line for the console, the rest for the log."""

from collections import Counter
from collections.abc import Iterable

from vgrout.config.run import Config
from vgrout.direction.controls import Provenance
from vgrout.envs.base import Splits
from vgrout.ground.metrics import Rate
from vgrout.method.method import Method
from vgrout.model.policy import Policy
from vgrout.runs.inputs import Inputs
from vgrout.teacher.pools import Pool


def opening_lines(
    cfg: Config,
    inputs: Inputs,
    problems: Splits,
    policy: Policy,
    method: Method,
    grader: str,
) -> list[str]:
    """grader: fingerprint of this run's grader."""
    lines = _problem_lines(cfg, inputs, problems)
    if inputs.pool:
        lines += _pool_lines(inputs.pool, problems, grader)
    lines += inputs.environment.ignored(inputs.pool)
    lines += [f"{head}: {line}" for head, line in inputs.environment.plan() if head == "reward"]
    lines.append(_groups_line(cfg))
    lines.append(_trainable_line(cfg, policy))
    if method.provenance:
        lines.append(_direction_line(cfg, method.provenance))
    return lines


def _problem_lines(cfg: Config, inputs: Inputs, problems: Splits) -> list[str]:
    """How many problems there are, for the console and then for the log."""
    n_train, n_test, n_flaws = len(problems.train), len(problems.test), len(problems.trained_flaws)
    files = [file.name for file in (cfg.problems_path, cfg.test_problems_path) if file]
    if cfg.env.taskset:
        files = [inputs.environment.source]
    by_flaw = _by_flaw(problems, (task.flaws[0] for task in problems.train))
    return [
        f"problems: {n_train} to train on, {n_test} to test · {n_flaws} flaw{'s' * (n_flaws != 1)}",
        f"problems: {n_train} train, {len(problems.val)} val, {n_test} test kept of "
        f"{len(inputs.environment.prompts)} in {' and '.join(files)} ({problems.too_long} too long); train: {by_flaw}",
    ]


def _pool_lines(pool: Pool, problems: Splits, grader: str) -> list[str]:
    """What the demonstrations are, by the labels that came with them."""
    sizes = [len(rows) for rows in pool.demos.values()]
    grades = [demonstration.grade for rows in pool.demos.values() for demonstration in rows]
    hacked = Rate.of(grade.hacked for grade in grades)
    passed = Rate.of(grade.gt_pass for grade in grades)
    another = "" if pool.grader == grader else f", this run has {grader}"
    lines = [
        f"pool: {pool.folder}, {len(sizes)} problems, {len(grades)} rollouts, {min(sizes)} to {max(sizes)} each; "
        f"cached hack rate {hacked.percent} % ({hacked.k}/{hacked.n}), gt_pass {passed.percent} %; labels by "
        f"grader {pool.grader}{another}"
    ]
    if pool.partition:
        lines.append(f"partition: {_by_flaw(problems, pool.partition.values())}")
    return lines


def _by_flaw(problems: Splits, names: Iterable[str]) -> str:
    """How often each flaw is named."""
    count = Counter(names)
    return ", ".join(f"{flaw} {count[flaw]}" for flaw in problems.flaws if count[flaw])


def _groups_line(cfg: Config) -> str:
    """How many of a group's answers are sampled, and how many are demonstrations."""
    group, n_teacher = cfg.scale.group, cfg.n_teacher
    of_flaws = f", of {', '.join(cfg.env.demo_modes)} alone" if cfg.env.demo_modes else ""
    off = cfg.env.teacher_off_step
    until = "" if off is None else f"; none from step {off} on"
    return (
        f"groups: G {group} = G_s {group - n_teacher} live + G_t {n_teacher} cached where covered{of_flaws} (mix "
        f"{cfg.env.mix_ratio:g}){until}"
    )


def _trainable_line(cfg: Config, policy: Policy) -> str:
    """How many numbers learn, and how many do not."""
    adapter = policy.adapter
    quarantine = f", δS_hack {len(adapter):,}" if cfg.method.routes else ""
    if quarantine and cfg.method.quarantine_block is not None:
        quarantine += f" (in {cfg.method.resolved('quarantine')} alone, where δS is not)"
    frozen = sum(p.numel() for p in policy.model.parameters() if not p.requires_grad)
    return f"trainable: δS {len(adapter):,} numbers in {len(adapter.sites)} modules{quarantine}; frozen: {frozen:,}"


def _direction_line(cfg: Config, origin: Provenance) -> str:
    """What the direction was extracted from, and whether it will be again."""
    every = cfg.method.refresh_every
    again = "frozen"
    if every and not cfg.method.haar:
        again = f"extracted again every {every} steps"
    file = f", file {cfg.method.v_hack_path}" if cfg.method.v_hack_path else ""
    return (
        f"direction: {origin.axes} axes in {origin.modules} modules from {origin.pairs} (sha256 "
        f"{origin.pairs_sha256[:12]}){file}; {again}"
    )
