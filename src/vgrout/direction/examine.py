"""How good a direction is: spectra, held-out pairs, and a comparison with control directions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from tabulate import tabulate

from vgrout.direction.controls import CONTROL_SEEDS, CosineToReal, cosine_to_real, haar_like
from vgrout.direction.extract import Direction, extract
from vgrout.direction.pairs import PairSet
from vgrout.model.policy import Policy
from vgrout.tensor_types import Directions


@dataclass(frozen=True, slots=True)
class ControlCosines:
    """|cos| of a control with the real direction, for both uses of a direction."""

    v: CosineToReal  # of the mean difference v_grad, which route2 uses
    V: CosineToReal  # of the rows V, which route and erase use


def compare_controls(
    policy: Policy,
    direction: Direction,
    placebos: Mapping[str, PairSet],
    k: int,
    drop_bottom_frac: float,
) -> dict[str, ControlCosines]:
    """Compare placebo and random directions with a real one, by the control's name.

    placebos: pair sets by contrast. k, drop_bottom_frac: as for `Direction.select`. A control
    without a module in common with the real direction is left out.
    """
    real_v, real_V = direction.v_grad(), direction.select(k, drop_bottom_frac)
    found: dict[str, ControlCosines] = {}

    def compare(name: str, v: Directions, V: Directions) -> None:
        cos_v, cos_V = cosine_to_real(v, real_v), cosine_to_real(V, real_V)
        if cos_v is not None and cos_V is not None:
            found[name] = ControlCosines(cos_v, cos_V)

    for contrast, pairs in placebos.items():
        placebo = extract(policy, pairs, direction.meta.top_k, direction.meta.tau_axis)
        compare(f"placebo, {contrast}", placebo.v_grad(), placebo.select(k, drop_bottom_frac))
    for seed in CONTROL_SEEDS:
        compare(f"Haar, seed {seed}", haar_like(real_v, seed), haar_like(real_V, seed))
    return found


def control_table(controls: dict[str, ControlCosines]) -> str:
    """What `compare_controls` found, as a GitHub table."""
    rows: list[dict[str, object]] = []
    for name, control in controls.items():
        rows.append(
            {
                "control": name,
                "|cos| of v: median": control.v.quantile(0.5),
                "95 %": control.v.quantile(0.95),
                "max": control.v.quantile(1.0),
                "rms": control.v.rms,
                "by chance": control.v.chance,
                "of V: rms": control.V.rms,
                "by chance ": control.V.chance,
            }
        )
    table = tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3f")
    return f"|cos| with the real direction, over modules\n{table}"


def module_table(direction: Direction, k: int) -> str:
    """Each module's spectrum and held-out checks, with what a random direction would show.

    k: how many singular values are shown.
    """
    rows: list[dict[str, object]] = []
    cosines: list[float] = []
    insides: list[float] = []
    insides_by_chance: list[float] = []
    cosines_by_chance: list[float] = []
    for module, axes in direction.axes.items():
        r = len(axes.mean)
        inside_by_chance = math.sqrt(len(axes.V) / r)  # for a random difference
        relative = (axes.sv[1:k] / axes.sv[0]).tolist()
        rows.append(
            {
                "module": module,
                "r": r,
                "S_1": axes.sv[0].item(),
                "S_i / S_1": " ".join(f"{s:.2f}" for s in relative),
                "held-out cos": axes.heldout_cos,
                "held-out inside V": axes.heldout_inside,
                "by chance": inside_by_chance,
            }
        )
        cosines.append(axes.heldout_cos)
        insides.append(axes.heldout_inside)
        insides_by_chance.append(inside_by_chance)
        cosines_by_chance.append(1 / math.sqrt(r))
    table = tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3f")
    positive = sum(cos > 0 for cos in cosines)
    meta = direction.meta
    lines = [
        table,
        f"pairs {meta.pairs_source} ({meta.n_pairs}, {meta.n_heldout} held out, "
        f"sha256 {meta.pairs_sha256[:12]})",
        f"held-out difference with v_grad: mean cos {fmean(cosines):+.3f}, "
        f"> 0 in {positive}/{len(rows)} modules. "
        f"SHOULD be well above chance (0 ± {fmean(cosines_by_chance):.3f}); ELSE the pairs share no direction",
        f"held-out difference inside V: mean {fmean(insides):.3f}, "
        f"by chance √(k/r) = {fmean(insides_by_chance):.3f}",
    ]
    return "\n".join(lines)
