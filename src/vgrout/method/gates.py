"""Monitors that read gradients: per module, the share of each rollout's gradient that is flagged.

M modules, N rollouts of one step. `cos` holds g_b · v / ‖g_b‖, `nonzero` marks rollouts with a gradient (the rest have
no cosine and are flagged nowhere). Gates see cosines and known hacks only.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vgrout import ranks
from vgrout.config.run import Config
from vgrout.direction.extract import Direction
from vgrout.method.base import Monitor, Refresh, Setup, StepGrads, Views, unscored
from vgrout.method.controls import permuted
from vgrout.method.live_direction import LiveDirection
from vgrout.method.projection import fraction_of_modules, mean_over_modules
from vgrout.rng import torch_stream
from vgrout.tensor_types import Directions, RolloutGrads
from vgrout.types import GroupFlags, GroupView

DECAY = 0.9  # of the running means of a τ gate, per step


@dataclass(frozen=True, slots=True)
class Shares:
    """What a monitor flags of a step's gradients, over all its N rollouts, group after group."""

    rows: RolloutGrads  # g_b of this rank's rollouts, in every module of `of`
    length: dict[str, Float[Tensor, " N"]]  # ‖g_b‖
    of: dict[str, Float[Tensor, " N"]]  # the share of each rollout's gradient that is flagged
    per_rollout: Float[Tensor, " N"]  # mean over the modules in which it has a gradient
    sizes: list[int]  # rollouts of each group
    fired: float | None  # share of modules that flagged something
    overall: float | None  # mean share over rollouts and modules; None: no gradient
    readings: dict[str, float | None]  # what was measured, by column

    @property
    def flags(self) -> tuple[GroupFlags, ...]:
        """One a group: a rollout is flagged where more than half of it is."""
        shares = [tuple(part.tolist()) for part in self.per_rollout.split(self.sizes)]
        return tuple(GroupFlags(of, tuple(x > 0.5 for x in of)) for of in shares)


class GradientMonitor(Monitor):
    """Decides after the backward, by each rollout's gradient and a direction v of one row a module.

    `flag` gives what is known before: demonstrations, and what the weak detector flags.
    """

    rounds = True  # a vote of the modules is a majority; else their mean
    gate: "TauGate | BandGate"

    def __init__(self, cfg: Config, direction: LiveDirection) -> None:
        method = cfg.method
        self.direction, self.provenance = direction, direction.provenance
        self._whole = method.gate_vote == "rollout" or method.changes_rewards
        self._teacher_only = method.known_hacks_teacher_only
        self._shuffle_seed = cfg.run.seed if method.random_flags else None
        self.follow()

    @classmethod
    def make(cls, setup: Setup) -> "GradientMonitor":
        return cls(
            setup.cfg,
            LiveDirection.make(setup, mean_axis, keeps_modules=True, signed=setup.cfg.method.monitor_spec.signs_random),
        )

    def flag(self, views: Views, step: int) -> list[GroupFlags]:
        return [unscored(known_hacks(view, self._teacher_only)) for view in views]

    def read(self, step: StepGrads, number: int) -> Shares:
        """The shares of one step's rollouts; `step.rows` has one row a rollout. number: of the step."""
        V, device = self.direction.V, self.direction.device
        rows = {m: torch.cat([of_group[m] for of_group in step.rows]) for m in (step.total if self._whole else V)}
        norms = torch.stack([of.norm(dim=1) for of in rows.values()])
        dots = torch.stack([(rows[m] * V[m]).sum(1) for m in V])
        norms, dots = ranks.total(norms), ranks.total(dots)  # one rank's numbers and the others' zeros
        length = dict(zip(rows, norms, strict=True))
        norms = torch.stack([length[m] for m in V])
        nonzero = norms > 0
        cos = torch.where(nonzero, dots / norms, 0.0)
        known = [hack for view in step.views for hack in known_hacks(view, self._teacher_only)]
        share = self.gate(cos, nonzero, torch.tensor(known, device=device))
        if self._shuffle_seed is not None:
            stream = torch_stream(self._shuffle_seed, "mass-matched", number)
            share = torch.where(nonzero, permuted(share, nonzero.any(0), stream), 0.0)
        per_rollout = share.sum(0) / nonzero.sum(0).clamp(min=1)
        if self._whole:
            per_rollout = (per_rollout > 0.5).to(share) if self.rounds else per_rollout
            share = torch.where(nonzero, per_rollout, 0.0)
        return Shares(
            rows=rows,
            length=length,
            of=dict.fromkeys(rows, per_rollout) if self._whole else dict(zip(V, share, strict=True)),
            per_rollout=per_rollout,
            sizes=[len(view) for view in step.views],
            fired=fraction_of_modules([f.any() for f in share]),
            overall=(share.sum() / nonzero.sum()).item() if nonzero.any() else None,
            readings={name: mean_over_modules(list(values)) for name, values in self.readings().items()},
        )

    def refresh(self, step: int) -> Refresh:
        before = self.direction.latest
        refreshed = self.direction.refresh(step)
        if self.direction.latest is not before:
            self.follow()
        return refreshed

    def follow(self) -> None:
        """v was extracted, or extracted again."""

    def readings(self) -> dict[str, Float[Tensor, " M"]]:
        """What it measured, for the columns of these names."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        return self.direction.state_dict() | {f"gate/{name}": value for name, value in self.gate.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.direction.load_state_dict({k: v for k, v in state.items() if k.startswith("V/")})
        try:
            self.gate.load_state_dict({k.removeprefix("gate/"): v for k, v in state.items() if k.startswith("gate/")})
        except KeyError as missing:
            raise ValueError(f"checkpoint has no state {missing} for --monitor {self.name}") from None


def mean_axis(cfg: Config, direction: Direction) -> Directions:
    """v alone, k = 1."""
    return direction.v_grad()


class Gate(GradientMonitor):
    """τ gate: flags known hacks whatever their gradient, the others above a threshold (`TauGate`)."""

    name = "gate"
    measures = frozenset({"gate"})

    def __init__(self, cfg: Config, direction: LiveDirection) -> None:
        self._tau = TauGate(len(direction.V), device=direction.device, apart=cfg.method.gate_modules == "apart")
        self.gate = self._tau
        super().__init__(cfg, direction)

    def readings(self) -> dict[str, Float[Tensor, " M"]]:
        return {"tau": self._tau.tau, "hkgap": self._tau.gap}


class Band(GradientMonitor):
    """Pair band: flags softly, by where the cosine lies between the pairs' sides (`BandGate`). Reads no label."""

    name = "band"
    rounds = False

    def follow(self) -> None:
        lo, hi = self.direction.latest.band(self.direction.V)
        self.gate = BandGate(lo.to(self.direction.device), hi.to(self.direction.device))


def known_hacks(view: GroupView, teacher_only: bool) -> list[bool]:
    """Demonstrations, and students that the weak detector flags (unless `teacher_only`)."""
    return [
        source == "teacher" or (flag and not teacher_only)
        for source, flag in zip(view.sources, view.detector, strict=True)
    ]


class TauGate:
    """Known hacks are always routed, the others when their cosine exceeds τ, the midpoint of two running means.

    The means are of the cosines of known hacks and of the rest, per module: exponential, DECAY per step, corrected
    for their start (as in Adam), so the first step has a threshold too. A module that has not seen both kinds has none;
    with `apart`, neither has one whose known hacks do not lie above the rest.
    """

    def __init__(self, n_modules: int, device: torch.device | str = "cpu", *, apart: bool = False) -> None:
        self.apart = apart
        # row 0 known hacks, row 1 the rest; mean = total / weight
        self._total = torch.zeros(2, n_modules, dtype=torch.float64, device=device)
        self._weight = torch.zeros(2, n_modules, dtype=torch.float64, device=device)

    @property
    def means(self) -> Float[Tensor, "2 M"]:
        """Running means of known hacks and of the rest; NaN where none was seen yet."""
        return self._total / self._weight

    @property
    def tau(self) -> Float[Tensor, " M"]:
        """NaN in modules without a threshold."""
        return self.means.mean(0)

    @property
    def gap(self) -> Float[Tensor, " M"]:
        """mean(known hacks) - mean(rest): positive where the direction tells them apart."""
        hacks, rest = self.means
        return hacks - rest

    def __call__(
        self, cos: Float[Tensor, "M N"], nonzero: Bool[Tensor, "M N"], known: Bool[Tensor, " N"]
    ) -> Float[Tensor, "M N"]:
        """Moves the running means by this step's rollouts, then decides: 1 routed, 0 kept. cos: with v, in rows that
        have a gradient. known: known hacks."""
        for i, rows in enumerate((nonzero & known, nonzero & ~known)):
            n = rows.sum(1)
            mean = torch.where(rows, cos, 0.0).double().sum(1) / n.clamp(min=1)
            step = (1 - DECAY) * (n > 0)
            self._total[i] += step * (mean - self._total[i])
            self._weight[i] += step * (1 - self._weight[i])
        over = cos > self.tau[:, None].to(cos.dtype)  # False against NaN: nothing but known hacks is routed
        if self.apart:
            over &= (self.gap > 0)[:, None]
        return (nonzero & (known | over)).to(cos.dtype)

    def state_dict(self) -> dict[str, Tensor]:
        return {"total": self._total.clone(), "weight": self._weight.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where `state` has other modules, KeyError where it is another monitor's."""
        for name, own in (("total", self._total), ("weight", self._weight)):
            if state[name].shape != own.shape:
                raise ValueError(f"gate state {name!r} is {tuple(state[name].shape)}, this run has {tuple(own.shape)}")
            own.copy_(state[name])


class BandGate:
    """Soft share f = clamp((cos - lo) / (hi - lo), 0, 1); lo, hi: mean cosine of the pairs' clean and hack sides.

    Uses no label of any rollout. A module whose hack side is not above its clean side has no band and routes nothing.
    """

    def __init__(self, lo: Float[Tensor, " M"], hi: Float[Tensor, " M"]) -> None:
        self.lo, self.hi = lo, hi

    @property
    def has_band(self) -> Bool[Tensor, " M"]:
        return self.hi > self.lo

    def __call__(
        self, cos: Float[Tensor, "M N"], nonzero: Bool[Tensor, "M N"], _known: Bool[Tensor, " N"] | None = None
    ) -> Float[Tensor, "M N"]:
        """The share of each row, from 0 to 1."""
        width = torch.where(self.has_band, self.hi - self.lo, 1.0)[:, None]
        share = ((cos - self.lo[:, None]) / width).clamp(0, 1)
        return torch.where(nonzero & self.has_band[:, None], share, 0.0)

    def state_dict(self) -> dict[str, Tensor]:
        return {"lo": self.lo.clone(), "hi": self.hi.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state["lo"].shape != self.lo.shape:
            raise ValueError(f"band state is {tuple(state['lo'].shape)}, this run has {tuple(self.lo.shape)}")
        self.lo, self.hi = state["lo"].to(self.lo), state["hi"].to(self.hi)
