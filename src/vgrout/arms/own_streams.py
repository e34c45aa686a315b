"""Arms that read: rollouts are flagged before any gradient, and each knob learns from its own policy's rollouts.

    flagged     paid, and its score above the reader's threshold
    quarantine  flagged, or sampled with the quarantine on;  learns under both knobs, A = R − mean over the group
    kept        the rest;  learns with the quarantine off,   A = R − mean over the group's kept rows

Rollouts sampled with the quarantine on are another policy's as far as δS is concerned: learnt from with it off, they
would be off-policy without a ratio, and their negative advantages push without bound.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from vgrout.arms.base import Arm, Provenance
from vgrout.config.run import ArmConfig
from vgrout.direction.controls import cosine_to_real
from vgrout.direction.pairs import PairSet
from vgrout.model.policy import Policy
from vgrout.monitors.text_scores import NLL, PMI, Calibration, LinearProbe, TextScorer, quarter
from vgrout.rng import torch_stream
from vgrout.tensor_types import ArmDiag, ModuleGrads, Per, Reading, RolloutGrads, Routed, Stream
from vgrout.types import GroupView, OracleView

KEPT, QUARANTINE = 0, 1  # the streams, in this order


class OwnStreams(Arm):
    """Base and, without a reader, the control: nothing is flagged, the streams alone are apart (no gate).

    paid: the reward from which on an answer counts as paid; only those can be hacks, and reward is visible.
    permute_seed: deal the flags of a step to its paid rollouts at random (mass-matched control).
    rebaseline: off: kept rows keep the group's advantages. own: off: rows sampled with the quarantine on that are not
    flagged are kept rows too. Both are there to be ablated.
    penalty: what a flagged row that the deployed model wrote costs there: kept, with advantage −penalty.
    own_modules: the quarantine's alone, which learns nowhere else; empty: every module has both knobs.
    """

    name = "reader"
    per: Per = "group"

    def __init__(
        self,
        sizes: Mapping[str, int],
        reader: TextScorer | None,
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
        self.reader, self.paid, self._permute_seed = reader, paid, permute_seed
        self._rebaseline, self._own, self._penalty, self._steps = rebaseline, own, penalty, 0
        self._own_modules = frozenset(own_modules)
        super().__init__(sizes, device, control)

    def reset(self) -> None:
        super().reset()
        self._learns = [False, False]
        self._readings: list[Reading] = []
        self._quarantined: list[tuple[bool, ...]] = []
        self._knobs: list[ModuleGrads] = [
            {m: torch.zeros(r, device=self.device) for m, r in self.sizes.items()} for _ in (KEPT, QUARANTINE)
        ]

    def plan(self, views: Sequence[GroupView]) -> Sequence[Stream]:
        self.reset()
        assert all(type(v) is self.sees for v in views), f"{type(self).__name__} sees a {self.sees.__name__}"
        self._readings = self._read(views)
        kept_rows: list[tuple[int, ...]] = []
        quar_rows: list[tuple[int, ...]] = []
        kept_A: list[tuple[float, ...]] = []
        for view, reading in zip(views, self._readings, strict=True):
            away = tuple(f or (self._own and on) for f, on in zip(reading.flagged, view.quarantine_on, strict=True))
            kept = [b for b in range(len(view)) if not away[b]]
            A = view.advantages_among(kept) if self._rebaseline else view.advantages
            if self._penalty:
                fined = [b for b in range(len(view)) if reading.flagged[b] and view.deployed[b]]
                A = tuple(-self._penalty if b in fined else a for b, a in enumerate(A))
                kept = sorted([*kept, *fined])
            kept_rows.append(tuple(kept))
            kept_A.append(A)
            quar_rows.append(tuple(b for b in range(len(view)) if away[b]))
            self._quarantined.append(away)
        quar_A = [v.advantages for v in views]
        self._learns = [_any(kept_rows, kept_A), _any(quar_rows, quar_A)]
        self._steps += 1
        return Stream(tuple(kept_rows), tuple(kept_A), deployed=True), Stream(tuple(quar_rows), tuple(quar_A))

    def observe(self, g_b: RolloutGrads, view: GroupView, per: Per = "rollout", stream: int = 0) -> None:
        assert g_b.keys() == self.sizes.keys(), sorted(g_b.keys() ^ self.sizes.keys())
        for m, rows in g_b.items():
            if not self._own_modules or (m in self._own_modules) == (stream == QUARANTINE):
                self._knobs[stream][m] += rows.sum(0)

    def route(self) -> Routed:
        diag = ArmDiag(
            routed_share=_mean([float(x) for away in self._quarantined for x in away]),
            gate=tuple(tuple(map(float, away)) for away in self._quarantined),
            readings=tuple(self._readings),
        )
        knobs = [g if learns else None for g, learns in zip(self._knobs, self._learns, strict=True)]
        routed = Routed(keep=knobs[KEPT], quar=knobs[QUARANTINE], diag=diag, apart=True)
        self.reset()
        return routed

    def state_dict(self) -> dict[str, Tensor]:
        return {"steps": torch.tensor(self._steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if "steps" not in state:
            raise ValueError(f"checkpoint has no state of --intervention {self.name}")
        self._steps = int(state["steps"])

    def _read(self, views: Sequence[GroupView]) -> list[Reading]:
        """Scores of the paid rollouts, and flags among them."""
        paid = [(i, b) for i, view in enumerate(views) for b, r in enumerate(view.rewards) if r >= self.paid]
        scores: dict[tuple[int, int], float] = {}
        flags: set[tuple[int, int]] = set()
        if self.reader is not None and paid:
            texts = [self.reader.texts(view) for view in views]
            scores = dict(zip(paid, self.reader.scores([texts[i][b] for i, b in paid]).tolist(), strict=True))
            flags = {at for at, score in scores.items() if score > self.reader.threshold}
        if self._permute_seed is not None:
            generator = torch_stream(self._permute_seed, "mass-matched", self._steps)
            order = torch.randperm(len(paid), generator=generator).tolist()
            flags = {paid[j] for j, source in enumerate(order) if paid[source] in flags}
        return [
            Reading(
                tuple(scores.get((i, b)) for b in range(len(view))), tuple((i, b) in flags for b in range(len(view)))
            )
            for i, view in enumerate(views)
        ]


class OracleStreams(OwnStreams):
    """The oracle control: flags are the true labels. An upper bound of what any reader could do, never a method."""

    sees = OracleView

    def _read(self, views: Sequence[GroupView]) -> list[Reading]:
        return [Reading((None,) * len(v), v.exploited) for v in views if isinstance(v, OracleView)]


def block(policy: Policy, modules: Iterable[str], n: int) -> list[str]:
    """The modules of the model's block `n`, from 1. Raises ValueError where it has none."""
    depth = policy.model.config.num_hidden_layers
    inside = [m for m in modules if f".layers.{n - 1}." in f".{m}"]
    if not inside:
        raise ValueError(f"--quarantine-block {n}: the model has {depth} blocks")
    return inside


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _any(rows: Sequence[Sequence[int]], A: Sequence[Sequence[float]]) -> bool:
    """Whether a knob gets a gradient at all: one of all zeros would still move it, by its momentum."""
    return any(of[b] for group, of in zip(rows, A, strict=True) for b in group)


def make_streams(
    cfg: ArmConfig,
    policy: Policy,
    pairs: PairSet | None,
    placebo: PairSet | None,
    background: Calibration | None,
    *,
    paid: float,
    seed: int,
) -> OwnStreams:
    """The arm that `cfg` names. `background`: what its reader is set up by; None where nothing is read."""
    reader: TextScorer | None = None
    origin = None
    if background is not None and cfg.intervention != "reader":
        reader = (NLL if cfg.intervention == "surprise" else PMI)(policy, background, cfg.reader_quantile)
    elif background is not None:
        assert pairs is not None
        used = pairs.shuffled(seed) if cfg.control == "shuffled" else placebo if cfg.other_pairs else pairs
        assert used is not None, cfg.control
        haar = seed if cfg.route2_random_v_seed is None else cfg.route2_random_v_seed
        reader = LinearProbe(
            policy,
            background,
            cfg.reader_quantile,
            used,
            layer=cfg.reader_layer or quarter(policy),
            k=cfg.reader_k,
            random=torch_stream(haar, "haar", "reader") if cfg.haar else None,
        )
        here, real = {"reader": reader.unit[None]}, {"reader": reader.whiten(policy, pairs)[None]}
        origin = Provenance(
            pairs=used.source,
            pairs_sha256=used.sha256,
            modules=1,
            axes=1,
            cosine_to_real=cosine_to_real(here, real) if cfg.haar or cfg.other_pairs else None,
        )
    adapter = policy.adapter
    sizes = {m: part.numel() for m, part in adapter.by_module(adapter.δS.detach()).items()}
    kind = OracleStreams if cfg.control == "oracle" else OwnStreams
    arm = kind(
        sizes,
        reader,
        paid=paid,
        permute_seed=seed if cfg.control == "mass_matched" else None,
        rebaseline=cfg.rebases,
        own=cfg.owns,
        penalty=cfg.flagged_penalty,
        own_modules=() if cfg.quarantine_block is None else block(policy, sizes, cfg.quarantine_block),
        device=adapter.δS.device,
        control=cfg.control_name,
    )
    arm.name, arm.origin = cfg.intervention, origin
    return arm
