"""How good a direction is: its spectra, what held-out pairs say of it, and how far controls coincide with it."""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from tabulate import tabulate

from vgrout.direction.controls import CONTROL_SEEDS, CosineToReal, cosine_to_real, haar_like
from vgrout.direction.extract import Direction, extract
from vgrout.direction.pairs import PairSet
from vgrout.model.policy import Policy


def compare_controls(
    policy: Policy,
    direction: Direction,
    placebos: Mapping[str, PairSet],
    k: int,
    drop_bottom_frac: float,
) -> dict[str, tuple[CosineToReal, CosineToReal]]:
    """control → |cos| of its v_grad and of its rows V, as route and erase would use them, with the real ones."""

    # Directions of 1 and of up to k rows: one k in the type would tie them
    def used(d: Direction) -> tuple[Any, Any]:
        return d.v_grad(), d.select(k, drop_bottom_frac)

    real, found = used(direction), {}
    meta = direction.meta
    controls = {
        f"placebo, {contrast}": used(extract(policy, pairs, meta.top_k, meta.tau_axis))
        for contrast, pairs in placebos.items()
    } | {f"Haar, seed {seed}": tuple(haar_like(V, seed) for V in real) for seed in CONTROL_SEEDS}
    for name, rows in controls.items():
        v, V = (cosine_to_real(a, b) for a, b in zip(rows, real, strict=True))
        if v is not None and V is not None:
            found[name] = (v, V)
    return found


def control_table(controls: dict[str, tuple[CosineToReal, CosineToReal]]) -> str:
    """What `compare_controls` found, as a GitHub table."""
    rows = [
        {
            "control": name,
            "|cos| of v: median": v.quantile(0.5),
            "95 %": v.quantile(0.95),
            "max": v.quantile(1.0),
            "rms": v.rms,
            "by chance": v.chance,
            "of V: rms": V.rms,
            "by chance ": V.chance,
        }
        for name, (v, V) in controls.items()
    ]
    table = tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3f")
    return f"|cos| with the real direction, over modules\n{table}"


def module_table(direction: Direction, k: int) -> str:
    """Each module's spectrum and held-out checks, then what a random direction would show."""
    rows: list[dict[str, Any]] = [
        {
            "module": m,
            "r": len(a.mean),
            "S_1": a.sv[0].item(),
            "S_i / S_1": " ".join(f"{s:.2f}" for s in (a.sv[1:k] / a.sv[0]).tolist()),
            "held-out cos": a.heldout_cos,
            "held-out inside V": a.heldout_inside,
            "by chance": math.sqrt(len(a.V) / len(a.mean)),  # what a random difference would show
        }
        for m, a in direction.axes.items()
    ]
    meta, n = direction.meta, len(rows)
    one = fmean(1 / math.sqrt(row["r"]) for row in rows)
    table = tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3f")
    return "\n".join(
        (
            table,
            f"pairs {meta.pairs_source} ({meta.n_pairs}, {meta.n_heldout} held out, sha256 {meta.pairs_sha256[:12]})",
            f"held-out difference with v_grad: mean cos {fmean(r['held-out cos'] for r in rows):+.3f}, "
            f"> 0 in {sum(r['held-out cos'] > 0 for r in rows)}/{n} modules. "
            f"SHOULD be well above chance (0 ± {one:.3f}); ELSE the pairs share no direction",
            f"held-out difference inside V: mean {fmean(r['held-out inside V'] for r in rows):.3f}, "
            f"by chance √(k/r) = {fmean(r['by chance'] for r in rows):.3f}",
        )
    )
