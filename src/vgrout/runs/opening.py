"""What a run has loaded, how much of it is used, what is trained: one line for the console, the rest for the log."""

from collections import Counter
from collections.abc import Iterable

from vgrout.config.run import Config
from vgrout.inputs import Inputs
from vgrout.method import Method
from vgrout.model.policy import Policy
from vgrout.problems import ProblemSplits, partition_decides
from vgrout.runs.preflight import reward_line
from vgrout.teacher.pools import Pool
from vgrout.types import MODES, Mode, Rate


def opening_lines(
    cfg: Config, inputs: Inputs, problems: ProblemSplits, policy: Policy, method: Method, grader: str
) -> list[str]:
    """grader: fingerprint of this run's grader."""
    pool = inputs.pool
    return [
        f"problems: {len(problems.train)} to train on, {len(problems.test)} to test · "
        f"{len(problems.modes)} flaw{'s' * (len(problems.modes) != 1)}",
        _problems(cfg, inputs, problems),
        *(_pool(cfg, pool, inputs, grader) if pool else ["pool: none"]),
        *([f"reward: {reward_line(inputs)}"] if inputs.reward else []),
        _groups(cfg),
        _trainable(cfg, policy),
        _direction(cfg, inputs, method),
    ]


def _by_mode(modes: Iterable[Mode]) -> str:
    count = Counter(modes)
    return ", ".join(f"{m} {count[m]}" for m in MODES if count[m])


def _problems(cfg: Config, inputs: Inputs, splits: ProblemSplits) -> str:
    n = len(inputs.rows) + len(inputs.test_rows)
    return (
        f"problems: {len(splits.train)} train, {len(splits.val)} val, {len(splits.test)} test kept of {n} in "
        f"{cfg.problems_path.name}{f' and {cfg.test_problems_path.name}' if cfg.test_problems_path else ''} "
        f"({splits.too_long} too long); train: {_by_mode(p.mode for p in splits.train)}"
    )


def _pool(cfg: Config, pool: Pool, inputs: Inputs, grader: str) -> list[str]:
    sizes = [len(rows) for rows in pool.demos.values()]
    a_prompt = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    grades = [d.grade for rows in pool.demos.values() for d in rows]
    hacked, passed = Rate.of(g.hacked for g in grades), Rate.of(g.gt_pass for g in grades)
    lines = [
        f"pool: {pool.folder}, {len(sizes)} problems, {len(grades)} rollouts, {a_prompt} a prompt; cached hack rate "
        f"{hacked.percent} % ({hacked.k}/{hacked.n}), gt_pass {passed.percent} %; labels by grader {pool.grader}"
        + ("" if pool.grader == grader else f", this run has {grader} (--regrade-pool compares them)")
    ]
    if pool.partition:
        lines.append(f"partition: {_by_mode(pool.partition.values())}")
        if partition_decides(inputs.rows, pool.partition) and cfg.env.env_mode != "own":
            lines.append(f"--env-mode {cfg.env.env_mode}: not read, the pool's partition says which grader checks what")
    return lines


def _groups(cfg: Config) -> str:
    G, G_t = cfg.scale.group, cfg.n_teacher
    if not G_t:
        return f"groups: G {G} = G_s {G} live + G_t 0 (nothing is mixed in)"
    off = cfg.env.teacher_off_step
    modes = f", of {', '.join(cfg.env.demo_modes)} alone" if cfg.env.demo_modes else ""
    until = "" if off is None else f"; none from step {off} on"
    return (
        f"groups: G {G} = G_s {G - G_t} live + G_t {G_t} cached where covered{modes} (mix {cfg.env.mix_ratio:g}){until}"
    )


def _trainable(cfg: Config, policy: Policy) -> str:
    adapter = policy.adapter
    n = adapter.δS.numel()
    base = sum(p.numel() for p in policy.model.parameters() if not p.requires_grad)
    line = f"trainable: δS {n:,} numbers in {len(adapter.by_module(adapter.δS.detach()))} modules"
    if cfg.method.routes:
        line += f", δS_hack {adapter.δS_hack.numel():,}"
        if cfg.method.quarantine_block is not None:
            line += f" (in {cfg.method.quarantine} alone, where δS is not)"
    return f"{line}; frozen: {base:,} weights"


def _direction(cfg: Config, inputs: Inputs, method: Method) -> str:
    origin = method.provenance
    if origin is None:
        return "direction: none is read"
    n = f"{len(inputs.pairs)} pairs" if inputs.pairs else "pairs not here"
    every = cfg.method.vhack_refresh_every
    if cfg.method.starts_on_pairs:
        again = "where the quarantine starts"
    else:
        again = f"extracted again every {every} steps" if every and not cfg.method.haar else "frozen"
    file = f", file {cfg.method.v_hack_path}" if cfg.method.v_hack_path else ""
    return (
        f"direction: {origin.axes} axes in {origin.modules} modules from {origin.pairs} ({n}, sha256 "
        f"{origin.pairs_sha256[:12]}){file}; {again}"
    )
