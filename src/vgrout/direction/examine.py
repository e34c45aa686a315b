"""How good a direction is: its table, its controls, its figure."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tabulate import tabulate

from vgrout.direction.controls import CONTROL_SEEDS, CosineToReal, chance_cos, cosine_to_real, haar_like
from vgrout.direction.extract import Direction, extract
from vgrout.direction.pairs import PairSet
from vgrout.model.policy import Policy


def compare_controls(
    policy: Policy,
    direction: Direction,
    pairs: PairSet,
    placebos: Mapping[str, PairSet],
    k: int,
    drop_bottom_frac: float,
) -> dict[str, tuple[CosineToReal, CosineToReal]]:
    """control → |cos| of its v_grad and of its rows V, as erase and route would use them, with the real ones."""

    def used(d: Direction) -> tuple[Any, Any]:  # Directions of 1 and of up to k rows: one k in the type would tie them
        return d.v_grad(), d.select(k, drop_bottom_frac)

    real, found = used(direction), {}
    sets = {f"placebo, {contrast}": placebo for contrast, placebo in placebos.items()}
    sets |= {f"shuffled, seed {seed}": pairs.shuffled(seed) for seed in CONTROL_SEEDS}
    drawn = {f"Haar, seed {seed}": tuple(haar_like(V, seed) for V in real) for seed in CONTROL_SEEDS}
    extracted = {
        name: used(extract(policy, other, direction.meta.top_k, direction.meta.tau_axis))
        for name, other in sets.items()
    }
    for name, rows in (extracted | drawn).items():
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


def report(direction: Direction, k: int, drop_bottom_frac: float) -> str:
    """Per-module table of spectra and held-out checks, then what a random direction would show."""
    kept = direction.select(k, drop_bottom_frac)
    lo, hi = direction.band(v := direction.v_grad())
    band = dict(zip(v, (hi - lo).tolist(), strict=True))
    rows: list[dict[str, Any]] = []
    for m, a in direction.axes.items():
        power = a.sv**2 / (a.sv**2).sum()
        rows.append(
            {
                "module": m,
                "r": len(a.mean),
                "S_1": a.sv[0].item(),
                "S_i / S_1": " ".join(f"{s:.2f}" for s in (a.sv[1:k] / a.sv[0]).tolist()),
                "power of S_1": power[0].item(),
                "axes used": len(kept.get(m, ())),
                "held-out cos": a.heldout_cos,
                "held-out inside V": a.heldout_inside,
                "by chance": chance_cos(len(a.V), len(a.mean)),
                "band": band.get(m, 0.0),
            }
        )
    meta, n = direction.meta, len(rows)
    axes = sum(map(len, kept.values()))
    one = fmean(1 / math.sqrt(row["r"]) for row in rows)
    table = tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3f")
    return "\n".join(
        (
            table,
            f"pairs {meta.pairs_source} ({meta.n_pairs}, {meta.n_heldout} held out, sha256 {meta.pairs_sha256[:12]})",
            f"a run uses {axes} axes in {len(kept)} of {n} modules (--v-hack-k {k}, noise floor {drop_bottom_frac:g})",
            f"held-out difference with v_grad: mean cos {fmean(r['held-out cos'] for r in rows):+.3f}, "
            f"> 0 in {sum(r['held-out cos'] > 0 for r in rows)}/{n} modules. "
            f"SHOULD be well above chance (0 ± {one:.3f}); ELSE the pairs share no direction",
            f"held-out difference inside V: mean {fmean(r['held-out inside V'] for r in rows):.3f}, "
            f"by chance √(k/r) = {fmean(r['by chance'] for r in rows):.3f} "
            "(gradients are not isotropic: --shuffle-seed gives the fairer bar)",
            f"pair band hi − lo: mean {fmean(band.values()):+.3f}, "
            f"positive in {sum(b > 0 for b in band.values())}/{n} modules",
        )
    )


def draw(direction: Direction, k: int, path: Path, controls: dict[str, CosineToReal] | None = None) -> None:
    """A png: spectra and held-out cosines of all modules, and the |cos| of controls with the real direction."""
    # matplotlib takes half a second to import, and the trainer imports this module
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15 if controls else 10, 4), layout="constrained")
    left, right, *third = figure.subplots(1, 3 if controls else 2)
    kinds = {"attention": ("C0", "o", "-"), "MLP": ("C1", "^", "--")}
    names = list(direction.axes)
    for kind, (colour, marker, style) in kinds.items():
        own = [m for m in names if m.endswith(("gate_proj", "up_proj", "down_proj")) == (kind == "MLP")]
        if not own:
            continue
        spectra = torch.stack([direction.axes[m].sv / direction.axes[m].sv[0] for m in own])
        x = range(1, spectra.shape[1] + 1)
        left.plot(x, spectra.T, style, color=colour, alpha=0.15, linewidth=0.8)
        left.plot(x, spectra.median(0).values, style, color=colour, linewidth=2, label=f"{kind}, median of {len(own)}")
        right.plot(
            [names.index(m) for m in own],
            [direction.axes[m].heldout_cos for m in own],
            marker,
            color=colour,
            markersize=4,
            label=kind,
        )
    left.axvline(k + 0.5, color="0.4", linewidth=0.8, linestyle=":", label=f"a run uses the first {k}")
    left.set(xlabel="axis i", ylabel="S_i / S_1", ylim=(0, 1.02), title="Singular values of the pairs' differences")
    chance = torch.tensor([1 / math.sqrt(len(a.mean)) for a in direction.axes.values()])
    right.fill_between(
        range(len(names)), -2 * chance, 2 * chance, step="mid", color="0.85", linewidth=0, label="chance, ± 2/√r"
    )
    right.axhline(0, color="0.4", linewidth=0.8)
    right.set(xlabel="module, in the model's order", ylabel="cosine with v_grad", title="Pairs that were held out")
    for axis in third:
        for row, close in enumerate(reversed((controls or {}).values())):
            cos, chance = sorted(close.cos.values()), close.chance
            axis.plot(cos, [row] * len(cos), "|", color="C0", markersize=9, alpha=0.6, label="a module" * (not row))
            axis.plot(close.quantile(0.5), row, "D", color="black", markersize=5, label="median" * (not row))
            axis.plot([chance] * 2, [row - 0.4, row + 0.4], ":", color="C3", label="chance (rms)" * (not row))
        axis.set_yticks(range(len(controls or {})), list(reversed(controls or {})))
        axis.set(xlabel="|cos| with the real direction", xlim=(-0.02, 1.02), title="How contaminated are the controls?")
    for axis in (left, right, *third):
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
