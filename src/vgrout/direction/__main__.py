"""`python -m vgrout.direction --model M --pairs F`: extract a hack direction stand-alone, and say how good it is."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tabulate import tabulate

from vgrout.cli import cli_exit, parse_args
from vgrout.config.checks import check, flag, refuse, setting
from vgrout.config.run import PLACEBOS
from vgrout.data import organism
from vgrout.direction.controls import CONTROL_SEEDS, CosineToReal, chance_cos, cosine_to_real, haar_like
from vgrout.direction.extract import Direction, default_path, extract, load, model_key, model_name, save
from vgrout.direction.pairs import (
    Detector,
    PairSet,
    handwritten,
    handwritten_placebo,
    load_pairs,
    pairs_from_pool,
)
from vgrout.files import write_atomic
from vgrout.model.policy import Policy, default_device, load_policy


@dataclass(frozen=True)
class Cli:
    """Extract a hack direction from contrastive pairs and say how good it is."""

    model: str
    """Hub id, local model folder, or 'organism'."""
    pairs: Path | None = None
    """Pair file (JSON); none: the organism's run_tests pairs, or the hand-written set."""
    rollouts: Path | None = None
    """Take the pairs from this rollouts.jsonl instead; needs --detector."""
    detector: Detector | None = None
    """The detector that says which rollout is a hack: C, D or E, or 'oracle' (true labels: an upper bound)."""
    shuffle_seed: int | None = None
    """The control: exchange hack and clean in half of the pairs."""
    top_k: int = setting(12, low=1)
    """Axes per module kept in the file."""
    tau_axis: float = setting(0.0, low=0, high=1)
    """Axes with S_i/S_0 below this are zeroed."""
    k: int = setting(5, low=1, high="top_k")
    """Axes per module that a run would use, for the table."""
    drop_bottom_frac: float = setting(0.25, low=0, below=1)
    """Noise floor that a run would use, for the table."""
    compare: tuple[Path, ...] = ()
    """Other direction files of this model: their |cos| with this one is printed."""
    controls: bool = False
    """Extract the placebo and shuffled sets too, draw Haar directions, and print and plot their |cos| with this one."""
    pairs_out: Path | None = None
    """Write the pairs here (JSON), for --vhack-pairs-path: those of --rollouts or --shuffle-seed have no file."""
    out: Path | None = None
    """Where the direction goes; none: where a run with these pairs looks for it."""
    figure: Path | None = None
    """Where the figure (png) goes; none: beside the direction."""
    svd_cache: Path = Path("out/svd_cache")
    """Decomposed weights."""

    def __post_init__(self) -> None:
        check(self)
        refuse(self.pairs is not None and self.rollouts is not None, "--rollouts: not together with --pairs")
        refuse(
            (self.rollouts is None) != (self.detector is None), "--detector: goes with --rollouts, give both or neither"
        )
        local = self.model.startswith((".", "/")) or self.model.count("/") > 1
        refuse(
            local and not (Path(self.model) / "config.json").is_file(),
            f"--model {self.model}: no config.json there; give a Hugging Face model folder or a hub id",
        )
        for path in self.compare:
            refuse(not path.is_file(), f"--compare {path}: no such file")
        for name, suffix in (("pairs_out", ".json"), ("figure", ".png"), ("out", ".safetensors")):
            path = getattr(self, name)
            refuse(path is not None and path.suffix != suffix, f"{flag(name)} {path}: should end in {suffix}")


def main(argv: list[str] | None = None) -> int:
    """0: done. 2: refused, in one line on stderr."""
    return cli_exit(lambda: _command(parse_args(Cli, argv, "python -m vgrout.direction")))


def _command(cli: Cli) -> int:
    pairs = _pairs_of(cli)  # a wrong file is refused before the model is loaded
    model = str(organism.MODEL_DIR) if cli.model == "organism" else cli.model
    device, dtype = default_device()
    policy = load_policy(model, device=device, dtype=dtype, cache_dir=cli.svd_cache)
    if cli.rollouts is not None and cli.detector is not None:
        pairs = pairs_from_pool(cli.rollouts, cli.detector, policy.prompt_text)
    assert pairs is not None
    if cli.shuffle_seed is not None:
        pairs = pairs.shuffled(cli.shuffle_seed)
    if cli.pairs_out is not None:
        # a pair set is known by content and source: the run that loads this file finds the direction by its name
        cli.pairs_out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cli.pairs_out, pairs.to_file().encode())
        pairs = load_pairs(cli.pairs_out)
    direction = extract(policy, pairs, cli.top_k, cli.tau_axis)
    key = model_key(policy, pairs, cli.top_k, cli.tau_axis)
    out = cli.out or default_path(pairs, key, model_name(policy), cli.top_k, cli.tau_axis)
    save(direction, out)
    print(report(direction, cli.k, cli.drop_bottom_frac))
    for path in cli.compare:
        if (close := cosine_to_real(load(path, policy, None).v_grad(), direction.v_grad())) is not None:
            print(f"{path}: {close.line()}")
    controls = compare_controls(policy, pairs, direction, cli) if cli.controls else {}
    if controls:
        print(control_table(controls))
    figure = cli.figure or out.with_suffix(".png")
    draw(direction, cli.k, figure, {name: close[0] for name, close in controls.items()})
    print(f"direction {out}\nfigure    {figure}")
    if cli.pairs_out is not None:
        print(f"pairs     {cli.pairs_out}")
    return 0


def compare_controls(
    policy: Policy, pairs: PairSet, direction: Direction, cli: Cli
) -> dict[str, tuple[CosineToReal, CosineToReal]]:
    """control → |cos| of its v_grad and of its rows V, as erase and route would use them, with the real ones."""

    def used(d: Direction) -> tuple[Any, Any]:  # Directions of 1 and of up to k rows: one k in the type would tie them
        return d.v_grad(), d.select(cli.k, cli.drop_bottom_frac)

    real, found = used(direction), {}
    sets = {f"placebo, {contrast}": placebo for contrast, placebo in _placebos(cli).items()}
    sets |= {f"shuffled, seed {seed}": pairs.shuffled(seed) for seed in CONTROL_SEEDS}
    drawn = {f"Haar, seed {seed}": tuple(haar_like(V, seed) for V in real) for seed in CONTROL_SEEDS}
    extracted = {name: used(extract(policy, other, cli.top_k, cli.tau_axis)) for name, other in sets.items()}
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


def _placebos(cli: Cli) -> dict[str, PairSet]:
    """The sets that `--control placebo_…` would use on this model."""
    if cli.model == "organism":
        return {c: load_pairs(organism.PAIRS_DIR / f"placebo_{c}.json") for c in PLACEBOS}
    return {c: handwritten_placebo(c) for c in PLACEBOS}


def _pairs_of(cli: Cli) -> PairSet | None:
    """None: they come from a rollout log and need the tokenizer's chat template."""
    if cli.rollouts is not None:
        if not cli.rollouts.is_file():
            raise ValueError(f"--rollouts {cli.rollouts}: no such file")
        return None
    if cli.pairs is not None:
        return load_pairs(cli.pairs)
    return load_pairs(organism.PAIRS_DIR / "run_tests.json") if cli.model == "organism" else handwritten()


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


if __name__ == "__main__":
    sys.exit(main())
