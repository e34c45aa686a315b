"""What a run's method is built from, and its direction.

The direction is loaded or extracted, replaced by a control, and extracted again as the model moves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout.config.run import Config
from vgrout.direction.controls import Provenance, cosine_to_real, haar_like, overlap
from vgrout.direction.extract import Direction, extract, obtain
from vgrout.direction.pairs import KnownCorrect, PairSet
from vgrout.ground.data import GradedAnswer, Refresh, Task
from vgrout.ground.io import Diverged, Refused
from vgrout.ground.tensor_types import Directions, Gradient, Spans
from vgrout.method.projection import cos_pre
from vgrout.model.policy import Policy


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run's method is built from.

    pairs, placebo: of the direction, and of a placebo control. problems: of training. answers_of_base: graded answers
    of the untrained model to problems, a group to each. folder: the run's; None on ranks that do not write.
    """

    cfg: Config
    policy: Policy
    pairs: PairSet | None = None
    placebo: PairSet | None = None
    known_correct: Sequence[KnownCorrect] = ()
    problems: Sequence[Task] = ()
    answers_of_base: Callable[[Sequence[Task]], list[GradedAnswer]] | None = None
    folder: Path | None = None

    @property
    def spans(self) -> Spans:
        """Adapted module → its part of a gradient, in the model's order."""
        return self.policy.adapter.spans

    @property
    def device(self) -> torch.device:
        return self.policy.adapter.δS.device


Pick = Callable[[Config, Direction], Directions]  # V of a direction


def first_axes(cfg: Config, direction: Direction) -> Directions:
    """The first k axes of each module."""
    return direction.select(cfg.method.v_hack_k, cfg.method.v_hack_drop_bottom_frac)


def mean_axis(cfg: Config, direction: Direction) -> Directions:
    """v alone, k = 1."""
    return direction.v_grad()


class LiveDirection:
    """Holds orthonormal hack-ward rows V [k, r] for some modules; the others have no direction.

    pick: chooses V from a direction.
    again: extracts a direction on the present model, every --vhack-refresh-every steps; None: V is frozen.
    keeps_modules: the set of modules stays as it was first, and one for which no new v is found keeps its old one.
    signed: under the control haar the direction is still extracted again, because the pair band follows it.

    Under the control haar V is random rows in the shape of the extracted ones, which stay as they are. If `signed`,
    each is signed so that the pairs' hack side lies above, which favours the control.
    """

    provenance: Provenance | None = None

    def __init__(
        self,
        cfg: Config,
        spans: Spans,
        direction: Direction,
        pick: Pick,
        *,
        again: Callable[[], Direction] | None = None,
        device: torch.device | str = "cpu",
        keeps_modules: bool = False,
        signed: bool = False,
    ) -> None:
        self.spans = spans
        self.device = torch.device(device)
        self._keeps_modules = keeps_modules
        self._pick: Callable[[Direction], Directions] = partial(pick, cfg)
        if cfg.method.direction_is == "random":
            seed = cfg.method.route2_random_v_seed
            if seed is None:
                seed = cfg.run.seed
            rows = haar_like(self._pick(direction), seed)
            if signed:
                self._pick = lambda direction: direction.signed(rows)
            else:
                again = None  # nothing here would follow it
                self._pick = lambda _: rows
        self._again = again
        self._every = cfg.method.refresh_every if again else 0
        self.V: Directions = {}
        self.latest = direction
        self._take(direction)

    @classmethod
    def make(
        cls,
        setup: Setup,
        pick: Pick,
        *,
        keeps_modules: bool = False,
        signed: bool = False,
    ) -> "LiveDirection":
        """Loaded, or extracted on the spot. Under a control whose direction is not the real one, the real one is
        obtained too, to say in `provenance` how far they coincide."""
        cfg = setup.cfg
        method = cfg.method
        policy = setup.policy
        pairs = setup.pairs
        placebo = method.direction_is == "placebo pairs"
        if pairs is None and placebo:
            raise Refused(f"--control {method.control}: needs the pairs; give --vhack-pairs-path")
        if pairs is None and method.refresh_every and not method.haar:
            raise Refused(
                "--vhack-refresh-every: needs the pairs; give --vhack-pairs-path, or 0 for a frozen direction"
            )
        top_k = method.v_hack_extract_top_k
        tau_axis = method.v_hack_tau_axis
        real = direction = obtain(policy, pairs, method.v_hack_path, top_k, tau_axis)
        if placebo:
            pairs = setup.placebo
            direction = obtain(policy, pairs, None, top_k, tau_axis)
        again = None
        if pairs is not None:
            again = partial(extract, policy, pairs, top_k, tau_axis)
        live = cls(
            cfg,
            setup.spans,
            direction,
            pick,
            again=again,
            device=setup.device,
            keeps_modules=keeps_modules,
            signed=signed,
        )
        to_real = None
        if method.direction_is:
            real_V = pick(cfg, real)
            to_real = cosine_to_real(live.V, real_V)
        live.provenance = Provenance(
            pairs=direction.meta.pairs_source,
            pairs_sha256=direction.meta.pairs_sha256,
            modules=len(live.V),
            axes=live.axes,
            cosine_to_real=to_real,
        )
        return live

    def refresh(self, step: int) -> Refresh:
        """After the optimiser of step `step` (from 0): extract V again on the present model where that is due."""
        done = step + 1
        age = done % self._every if self._every else done
        shared = None
        if self._again and age == 0:
            before = self.V
            try:
                direction = self._again()
                self._take(direction)
            except Refused as e:  # the pairs are the same as before: it is the model
                raise Diverged(
                    f"step {step}: the policy has collapsed: no direction can be extracted on it ({e})"
                ) from e
            shared = overlap(self.V, before)
        return Refresh(age, shared, len(self.V), self.axes)

    @property
    def axes(self) -> int:
        """How many rows V has in all modules."""
        return sum(len(rows) for rows in self.V.values())

    def state_dict(self) -> dict[str, Tensor]:
        return {f"V/{m}": rows.clone() for m, rows in self.V.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises Refused where `state` is of another model."""
        V = {key[2:]: rows for key, rows in state.items() if key.startswith("V/")}
        self.V = self._fitting(V, "checkpoint's direction")

    def diagnose(
        self,
        g: Float[Tensor, "3 R"],
        kept: Float[Tensor, "3 R"],
    ) -> dict[str, float | None]:
        """Measure how much of g, and of its kept part, points along V, by the table's columns.

        g, kept: sums over all rows, over the policy's own, over the demonstrations.
        """

        def cosine(of_rows: Gradient) -> float | None:
            return cos_pre(of_rows, self.V, self.spans)

        total, students, teachers = g
        kept_total, kept_students, kept_teachers = kept
        return {
            "cos_pre": cosine(total),
            "cos_pre_s": cosine(students),
            "cos_pre_t": cosine(teachers),
            "cos_post": cosine(kept_total),
            "cos_post_s": cosine(kept_students),
            "cos_post_t": cosine(kept_teachers),
        }

    def _take(self, direction: Direction) -> None:
        """Choose V from this direction, and remember it as the latest."""
        V = self._fitting(self._pick(direction), "direction")
        if self._keeps_modules and self.V:
            found = V
            V = {m: found.get(m, old) for m, old in self.V.items()}
        self.V = V
        self.latest = direction

    def _fitting(self, V: Directions, what: str) -> Directions:
        """The rows on this device, in the model's order, whatever the file's.

        Raises:
            Refused: a module is not the model's, or its rows have another length.
        """
        for m, rows in V.items():
            r = None  # the model has no such module
            if m in self.spans:
                span = self.spans[m]
                r = span.stop - span.start
            if rows.shape[1] != r:
                raise Refused(f"{what} has {m} {[*rows.shape]}, r is {r} here")
        return {m: V[m].to(self.device) for m in self.spans if m in V}
