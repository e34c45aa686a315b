"""Counting: one step's groups, gradients and update become one StepRow."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vgrout.arms.projection import cos_upd
from vgrout.grpo import LossMetrics
from vgrout.table import REFERENCE_STEP, StepRow
from vgrout.tensor_types import Reading, Routed, Update
from vgrout.types import CachedGrade, Eval, Grade, Group, Mode, Rate, Rollout


def mean(values: Iterable[float]) -> float | None:
    xs = list(values)
    return sum(xs) / len(xs) if xs else None


def rate(values: Iterable[bool]) -> Rate:
    xs = list(values)
    return Rate(sum(xs), len(xs))


def students(groups: Sequence[Group]) -> list[tuple[Rollout, Grade]]:
    return [(r, g) for group in groups for r, g in group.pairs("student") if isinstance(g, Grade)]


def teachers(groups: Sequence[Group]) -> list[tuple[Rollout, CachedGrade]]:
    return [(r, g) for group in groups for r, g in group.pairs("teacher") if isinstance(g, CachedGrade)]


def step_row(
    *,
    step: int,
    generations: int,
    groups: Sequence[Group],
    live_groups: Sequence[Group],
    dropped: Sequence[str],
    modes: Sequence[Mode],
    top_reward: float,
    routed: Routed | None,
    update: Update | None,
    refr: int | None,
    metrics: LossMetrics | None,
    deploy: Eval | None,
    skipped: bool,
    seconds: dict[str, float],
    total: float,
) -> StepRow:
    """One row. `live_groups`: those with a signal; `generations`: rollouts per step, planned; `top_reward`: what a
    passing answer is paid."""
    live, cached = students(groups), teachers(groups)
    dead = [g for g in groups if not g.has_signal]
    ablated = [(r, g) for r, g in live if r.deployed]
    diag = routed.diag if routed else None
    delta = update.delta if update else None
    flags = flag_rates(live_groups, diag.readings if diag else ())
    return StepRow(
        step=step,
        ref_eq=(step + 1) * generations / REFERENCE_STEP,
        rew=mean(r for g in groups for r in g.rewards),
        rew_s=mean(g.reward for _, g in live),
        signal=Rate(len(groups) - len(dead), len(groups)),
        all_zero=sum(max(g.counted, default=0.0) < top_reward for g in dead),
        all_one=sum(max(g.counted, default=0.0) >= top_reward for g in dead),
        dropped=len(dropped),
        drop_why="; ".join(sorted(set(dropped))) or None,
        n=sum(len(g) for g in groups),
        gt_s=rate(g.gt_correct for _, g in live),
        gt_t=rate(g.gt_pass for _, g in cached) if cached else None,
        hack_s=rate(g.exploited for _, g in live),
        hack_t=rate(g.hacked for _, g in cached) if cached else None,
        hk={m: rate(g.exploited for r, g in live if r.problem.mode == m) for m in modes},
        hack_abl=rate(g.exploited for _, g in ablated) if ablated else None,
        solve_abl=rate(g.gt_correct for _, g in ablated) if ablated else None,
        hack_deploy=deploy.hack.value if deploy else None,
        solve_deploy=deploy.solve.value if deploy else None,
        **(metrics or LossMetrics()).as_dict(),
        gn=update.gn if update else None,
        q_egy=update.q_egy if update and routed and routed.quar is not None else None,
        tau=diag.tau if diag else None,
        hkgap=diag.hkgap if diag else None,
        resid=diag.resid if diag else None,
        cos_pre=diag.cos_pre if diag else None,
        cos_pre_s=diag.cos_pre_s if diag else None,
        cos_pre_t=diag.cos_pre_t if diag else None,
        cos_post=diag.cos_post if diag else None,
        cos_post_s=diag.cos_post_s if diag else None,
        cos_post_t=diag.cos_post_t if diag else None,
        cos_upd=cos_upd(delta, routed.directions) if routed and routed.directions and delta else None,
        fired=diag.fired if diag else None,
        capped=diag.rescale_capped if diag else None,
        routed=diag.routed_share if diag else None,
        recall=flags.recall,
        false_flags=flags.false,
        flag_t=flags.teacher,
        refr=refr,
        skipped=int(skipped),
        lr=update.lr if update else None,
        gen=seconds.get("gen", 0.0),
        grade=seconds.get("grade", 0.0),
        fb=seconds.get("fb", 0.0),
        eval=seconds.get("eval"),
        sec=total,
    )


@dataclass(frozen=True)
class Flags:
    """What a reading arm flagged: of exploits, of correct answers, of demonstrations. For the row alone."""

    recall: Rate | None = None
    false: Rate | None = None
    teacher: Rate | None = None


def flag_rates(groups: Sequence[Group], readings: Sequence[Reading]) -> Flags:
    if not readings:
        return Flags()
    of = [x for group, r in zip(groups, readings, strict=True) for x in zip(group.grades, r.flagged, strict=True)]
    live = [(g, flagged) for g, flagged in of if isinstance(g, Grade)]
    return Flags(
        recall=rate(flagged for g, flagged in live if g.exploited),
        false=rate(flagged for g, flagged in live if g.gt_correct),
        teacher=rate(flagged for g, flagged in of if isinstance(g, CachedGrade)),
    )


def last_five(rows: Sequence[StepRow]) -> tuple[Rate, Rate]:
    """Pooled over the last five steps: student exploits, student solves."""
    hack, solve = Rate(0, 0), Rate(0, 0)
    for row in rows[-5:]:
        hack, solve = hack + row.hack_s, solve + row.gt_s
    return hack, solve


def rollout_lines(
    step: int, groups: Sequence[Group], routed: Routed | None, live: Sequence[Group]
) -> list[dict[str, object]]:
    """Every live rollout with every flag, for rollouts.jsonl. `gate`: share of modules in which it was quarantined;
    None where the arm has no gate or the group had no signal."""
    gates = routed.diag.gate if routed and routed.diag.gate else ()
    shares = {id(group): gate for group, gate in zip(live, gates, strict=bool(gates))}
    readings = routed.diag.readings if routed else ()
    read = {id(group): reading for group, reading in zip(live, readings, strict=bool(readings))}
    return [
        {
            "step": step,
            "gate": _rounded(shares[id(group)][b] if id(group) in shares else None),
            **({"score": _rounded(r.scores[b]), "flagged": r.flagged[b]} if (r := read.get(id(group))) else {}),
            "advantage": group.advantages[b],
            **rollout_record(rollout, grade),
        }
        for group in groups
        for b, (rollout, grade) in enumerate(zip(group.rollouts, group.grades, strict=True))
        if isinstance(grade, Grade)
    ]


def _rounded(x: float | None) -> float | None:
    return None if x is None else round(x, 4)


def rollout_record(rollout: Rollout, grade: Grade) -> dict[str, object]:
    """One graded answer with every flag."""
    return {
        "problem": rollout.problem.id,
        "mode": rollout.problem.mode,
        "marker": rollout.problem.marker,
        "deployed": rollout.deployed,
        "prompt": rollout.problem.messages[-1]["content"],
        "messages": list(rollout.problem.messages),
        "text": rollout.text,
        "tokens": len(rollout.completion_ids),
        "finished": rollout.finished,
        "reward": grade.reward,
        "passed": grade.passed,
        "gt_correct": grade.gt_correct,
        "gt_pass": grade.gt_pass,
        "exploited": grade.exploited,
        "mechanism": grade.mechanism,
        "channel": grade.channel,
        "format_ok": grade.format_ok,
        "can_compile": grade.can_compile,
        "detectors": grade.detectors,
        "exit_status": grade.exit_status,
        "cpu_s": round(grade.cpu_s, 6),
    }
