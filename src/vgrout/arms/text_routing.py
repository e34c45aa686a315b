"""Arms that read: rollouts are flagged by their text before any gradient, and each adapter vector learns from its own
policy's rollouts.

    flagged     paid, and its score above the scorer's threshold
    quarantine  flagged, or sampled with the quarantine on;  learns with it on,   A = R − mean over the group
    kept        the rest;  learns with the quarantine off,   A = R − mean over the group's kept rows

Rollouts sampled with the quarantine on are another policy's as far as δS is concerned: learnt from with it off, they
would be off-policy without a ratio, and their negative advantages push without bound.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from loguru import logger
from torch import Tensor

from vgrout import ranks
from vgrout.arms.base import Arm, Grads, Plan, Provenance, Views, module_sizes
from vgrout.config.run import Config
from vgrout.direction.controls import cosine_to_real
from vgrout.grading.grade import Grader
from vgrout.inputs import Inputs
from vgrout.model.policy import Policy
from vgrout.model.sampling import Sampling
from vgrout.monitors.text_scores import (
    NLL,
    PMI,
    Calibration,
    LinearProbe,
    TextScorer,
    calibrate,
    known_correct_texts,
    quarter,
)
from vgrout.rng import torch_stream
from vgrout.tensor_types import (
    ArmDiag,
    GradRows,
    GroupFlags,
    ModuleGrads,
    RolloutGrads,
    Routed,
    UpdatePart,
    UpdatePlan,
)
from vgrout.types import GroupView, OracleView, Problem

KEPT, QUARANTINE = 0, 1  # the parts of the plan, in this order


class TextRouting(Arm):
    """reader, surprise, pmi: they differ in their scorer. Without one, the control: nothing is flagged (no_gate).

    paid: the reward from which on a rollout counts as paid; only those can be hacks, and reward is visible.
    permute_seed: deal the flags of a step to its paid rollouts at random (random_flags control).
    rebaseline: off: kept rows keep the group's advantages. own: off: rows sampled with the quarantine on that are not
    flagged are kept rows too. Both are there to be ablated.
    penalty: what a flagged row that the deployed model wrote costs there: kept, with advantage −penalty.
    own_modules: the quarantine's alone, which learns nowhere else; empty: every module has both vectors.
    """

    name = "reader"
    grad_rows: GradRows = "group"

    def __init__(
        self,
        sizes: Mapping[str, int],
        scorer: TextScorer | None,
        *,
        paid: float,
        permute_seed: int | None = None,
        rebaseline: bool = True,
        own: bool = True,
        penalty: float = 0.0,
        own_modules: Collection[str] = (),
        device: torch.device | str = "cpu",
        control: str = "none",
    ) -> None:
        super().__init__(sizes, device, control)
        self.scorer, self.paid, self._permute_seed = scorer, paid, permute_seed
        self._rebaseline, self._own, self._penalty, self._steps = rebaseline, own, penalty, 0
        self._own_modules = frozenset(own_modules)

    @classmethod
    def make(
        cls, cfg: Config, policy: Policy, inputs: Inputs, grader: Grader | None, problems: Sequence[Problem]
    ) -> "TextRouting":
        """With its scorer, for whose threshold the base model answers some training prompts first."""
        arm, scorer, provenance = cfg.arm, None, None
        if arm.control not in ("no_gate", "oracle"):
            assert grader is not None
            known = calibrate(
                policy,
                grader,
                problems,
                known_correct_texts(policy, inputs.known_correct, inputs.rows),
                sampling=Sampling(),
                max_new=cfg.scale.max_new,
                paid=cfg.env.pass_reward,
                seed=cfg.run.seed,
                prompts=arm.reader_prompts,
                judged=arm.reader_threshold == "both",
            )
            logger.info(
                f"read before training: {len(known.fit)} texts as the reference, {len(known.judge)} paid answers and "
                f"{len(known.known_correct)} known-correct ones for the threshold"
            )
            scorer, provenance = make_scorer(cfg, policy, inputs, known)
        sizes, block = module_sizes(policy), arm.quarantine_block
        made = cls(
            sizes,
            scorer,
            paid=cfg.env.pass_reward,
            permute_seed=cfg.run.seed if arm.control == "random_flags" else None,
            rebaseline=arm.rebases,
            own=arm.owns,
            penalty=arm.flagged_penalty,
            own_modules=() if block is None else modules_of_block(policy, sizes, block),
            device=policy.adapter.δS.device,
            control=arm.control_name,
        )
        made.name, made.provenance = arm.intervention, provenance
        return made

    def plan(self, views: Sequence[GroupView]) -> UpdatePlan:
        self._require(views)
        flags = self._flags(views)
        kept_rows: list[tuple[int, ...]] = []
        kept_A: list[tuple[float, ...]] = []
        away_rows: list[tuple[int, ...]] = []
        quarantined: list[tuple[bool, ...]] = []
        for view, of_group in zip(views, flags, strict=True):
            flagged = of_group.flagged
            away = tuple(f or (self._own and on) for f, on in zip(flagged, view.quarantine_on, strict=True))
            kept = [b for b in range(len(view)) if not away[b]]
            A = view.advantages_among(kept) if self._rebaseline else view.advantages
            if self._penalty:
                fined = [b for b in range(len(view)) if flagged[b] and view.deployed[b]]
                A = tuple(-self._penalty if b in fined else a for b, a in enumerate(A))
                kept = sorted([*kept, *fined])
            kept_rows.append(tuple(kept))
            kept_A.append(A)
            away_rows.append(tuple(b for b in range(len(view)) if away[b]))
            quarantined.append(away)
        self._steps += 1
        parts = (
            UpdatePart(tuple(kept_rows), tuple(kept_A), deployed=True),
            UpdatePart(tuple(away_rows), tuple(v.advantages for v in views)),
        )
        return UpdatePlan(parts, tuple(flags), tuple(quarantined))

    def route(self, views: Views, grads: Grads, plan: Plan = None, grad_rows: GradRows | None = None) -> Routed:
        self._require(views)
        assert plan is not None
        learnt = [
            self._sum(of_part, i) if _learns(part) else None
            for i, (of_part, part) in enumerate(zip(grads, plan.parts, strict=True))
        ]
        shares = [float(away) for of_group in plan.quarantined for away in of_group]
        diag = ArmDiag(
            routed=sum(shares) / len(shares) if shares else None,
            gate=tuple(tuple(map(float, away)) for away in plan.quarantined),
            flags=plan.flags,
        )
        return Routed(keep=learnt[KEPT], quar=learnt[QUARANTINE], diag=diag, apart=True)

    def state_dict(self) -> dict[str, Tensor]:
        return {"steps": torch.tensor(self._steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if "steps" not in state:
            raise ValueError(f"checkpoint has no state of --intervention {self.name}")
        self._steps = int(state["steps"])

    def _sum(self, groups: Sequence[RolloutGrads], part: int) -> ModuleGrads:
        """One part's gradient; 0 in modules that belong to the other adapter vector alone."""
        out = {m: torch.zeros(r, device=self.device) for m, r in self.sizes.items()}
        for of_group in groups:
            assert of_group.keys() == self.sizes.keys(), sorted(of_group.keys() ^ self.sizes.keys())
            for m, rows in of_group.items():
                if not self._own_modules or (m in self._own_modules) == (part == QUARANTINE):
                    out[m] += rows.sum(0)
        return ranks.total_by_module(out)

    def _flags(self, views: Sequence[GroupView]) -> list[GroupFlags]:
        """Scores of the paid rollouts, and flags among them."""
        paid = [(i, b) for i, view in enumerate(views) for b, r in enumerate(view.rewards) if r >= self.paid]
        scores: dict[tuple[int, int], float] = {}
        flags: set[tuple[int, int]] = set()
        if self.scorer is not None and paid:
            texts = [self.scorer.texts(view) for view in views]
            read = ranks.from_first(self.scorer.scores([texts[i][b] for i, b in paid]).tolist())
            scores = dict(zip(paid, read, strict=True))
            flags = {at for at, score in scores.items() if score > self.scorer.threshold}
        if self._permute_seed is not None:
            generator = torch_stream(self._permute_seed, "mass-matched", self._steps)
            order = torch.randperm(len(paid), generator=generator).tolist()
            flags = {paid[j] for j, source in enumerate(order) if paid[source] in flags}
        return [
            GroupFlags(
                tuple(scores.get((i, b)) for b in range(len(view))), tuple((i, b) in flags for b in range(len(view)))
            )
            for i, view in enumerate(views)
        ]


class OracleTextRouting(TextRouting):
    """The oracle control: flags are the true labels. An upper bound of what any scorer could do, never a method."""

    sees = OracleView

    def _flags(self, views: Sequence[GroupView]) -> list[GroupFlags]:
        return [GroupFlags((None,) * len(v), v.exploited) for v in views if isinstance(v, OracleView)]


def make_scorer(
    cfg: Config, policy: Policy, inputs: Inputs, known: Calibration
) -> tuple[TextScorer, Provenance | None]:
    """The text score that the arm flags by, and where its direction comes from (None: it has none)."""
    arm, seed = cfg.arm, cfg.run.seed
    match arm.intervention:
        case "surprise":
            return NLL(policy, known, arm.reader_quantile), None
        case "pmi":
            return PMI(policy, known, arm.reader_quantile), None
    pairs = inputs.pairs
    assert pairs is not None
    used = pairs.shuffled(seed) if arm.control == "shuffled" else inputs.placebo if arm.other_pairs else pairs
    assert used is not None, arm.control
    haar = seed if arm.route2_random_v_seed is None else arm.route2_random_v_seed
    probe = LinearProbe(
        policy,
        known,
        arm.reader_quantile,
        used,
        layer=arm.reader_layer or quarter(policy),
        k=arm.reader_k,
        random=torch_stream(haar, "haar", "reader") if arm.haar else None,
    )
    here, real = {"reader": probe.unit[None]}, {"reader": probe.whiten(policy, pairs)[None]}
    return probe, Provenance(
        pairs=used.source,
        pairs_sha256=used.sha256,
        modules=1,
        axes=1,
        cosine_to_real=cosine_to_real(here, real) if arm.haar or arm.other_pairs else None,
    )


def modules_of_block(policy: Policy, modules: Iterable[str], n: int) -> list[str]:
    """The modules of the model's block `n`, from 1. Raises ValueError where it has none."""
    depth = policy.model.config.num_hidden_layers
    inside = [m for m in modules if f".layers.{n - 1}." in f".{m}"]
    if not inside:
        raise ValueError(f"--quarantine-block {n}: the model has {depth} blocks")
    return inside


def _learns(part: UpdatePart) -> bool:
    """Whether a vector gets a gradient at all: one of all zeros would still move it, by its momentum."""
    assert part.rows is not None
    assert part.advantages is not None
    return any(A[b] for rows, A in zip(part.rows, part.advantages, strict=True) for b in rows)
