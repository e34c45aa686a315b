"""`python -m vgrout.results [DIR]`: finished runs below DIR as tables over seeds. Unfinished ones are named."""

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tabulate import tabulate

from vgrout.config import ARM_NAME, CONTROLS
from vgrout.nouns import MODES
from vgrout.run_dir import read_json
from vgrout.step_row import LEARNED, first_hacks

PHASES = ("gen", "grade", "fb", "eval")
CONTROLS_CAPTION = (
    "arms and controls: mean and 95 % interval over seeds (Student's t); differences seed by seed from the same arm "
    "without a control; |cos| of a control's direction with the real one, over modules"
)


@dataclass(frozen=True)
class Finished:
    """One finished run, as its files have it."""

    path: Path
    final: dict[str, Any]
    rows: list[dict[str, Any]]
    record: dict[str, Any]  # run.json
    seconds: float  # start of the first step to the end of the final evaluation

    @property
    def config(self) -> dict[str, Any]:
        return self.record["config"]

    @property
    def likeness(self) -> dict[str, Any] | None:
        """|cos| of a control's direction with the real one."""
        return (self.record.get("direction") or {}).get("cos_with_real")

    @property
    def cell(self) -> tuple[str, ...]:
        """What must be equal for two runs to differ by seed alone."""
        c = self.config
        rest = {g: {k: v for k, v in c[g].items() if k not in ("seed", "out_tag")} for g in c if isinstance(c[g], dict)}
        arm = c["arm"]
        variant = [
            *(["pair band"] if arm["route2_gate"] == "pairs" and self.final["control"] != "oracle" else []),
            *([f"{arm['rollout_ablate_frac']:g} deployed"] if arm["rollout_ablate_frac"] else []),
        ]
        name = self.final["arm"] + (f" ({', '.join(variant)})" if variant else "")
        name += f" · {self.final['control']}" if self.final["control"] != "none" else ""
        if str((self.record.get("direction") or {}).get("pairs", "")).startswith("oracle:"):
            name += " (pairs chosen by the oracle)"
        return name, self.loss, str(self.final["steps"]), json.dumps({**rest, "run": {}}, sort_keys=True)

    @property
    def loss(self) -> str:
        """Its name; GRPO by its own normaliser and standard deviation is another loss than the default."""
        loss = self.config["loss"]
        biased = loss["loss"] == "grpo" and not loss["unbiased"]
        return loss["loss"] + (" biased" if biased else "")

    @property
    def onset(self) -> int | None:
        return first_hacks([tuple(row["hack_s"]) for row in self.rows])

    def step_mean(self, column: str) -> float | None:
        """Over the steps that measured it; None where none did."""
        values = [x for row in self.rows if (x := row.get(column)) is not None]
        return statistics.mean(values) if values else None

    def learned(self, side: str) -> int:
        return sum((m[f"{side}_hack"] or 0) >= LEARNED for m in self.final["by_mode"].values())


def load(root: Path, tag: str) -> tuple[list[Finished], list[str]]:
    """Finished runs whose id ends with `tag`, and the names of the others."""
    found, left_out = [], []
    for path in sorted(p.parent for p in root.glob("*/run.json") if p.parent.name.endswith(tag)):
        status = read_json(path / "status.json") if (path / "status.json").is_file() else {"state": "unknown"}
        if status["state"] != "finished":
            left_out.append(f"{path.name} ({status['state']})")
            continue
        lines = (path / "steps.jsonl").read_text(encoding="utf-8").splitlines()
        started = (path / "run.json").stat().st_mtime
        found.append(
            Finished(
                path=path,
                final=read_json(path / "per_mode_deploy.json"),
                rows=[json.loads(line) for line in lines],
                record=read_json(path / "run.json"),
                seconds=(path / "per_mode_deploy.json").stat().st_mtime - started,
            )
        )
    return found, left_out


def spread(values: Iterable[float | None], scale: float = 100.0) -> str:
    """mean ± standard deviation (lowest – highest); one value is printed as one value."""
    xs = [scale * v for v in values if v is not None]
    if not xs:
        return "·"
    if len(xs) == 1:
        return f"{xs[0]:.1f}"
    return f"{statistics.mean(xs):.1f} ± {statistics.stdev(xs):.1f} ({min(xs):.0f}–{max(xs):.0f})"


# 97.5 % quantiles of Student's t for 1 … 30 degrees of freedom
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def interval(values: Iterable[float | None]) -> tuple[float, float, float] | None:
    """Mean and its 95 % interval by Student's t over seeds; None below two of them."""
    xs = [v for v in values if v is not None]
    if len(xs) < 2:
        return None
    half = (_T[len(xs) - 2] if len(xs) <= len(_T) + 1 else 1.96) * statistics.stdev(xs) / math.sqrt(len(xs))
    mean = statistics.mean(xs)
    return mean, mean - half, mean + half


def with_interval(values: Iterable[float | None], low: float = 0.0) -> str:
    """Percent, `mean [low, high]`, the interval cut at [low, 100]; of one seed its value without an interval."""
    xs = [100 * v for v in values if v is not None]
    if (found := interval(xs)) is None:
        return f"{xs[0]:.1f} (one seed)" if xs else "·"
    return f"{found[0]:.1f} [{max(found[1], low):.1f}, {min(found[2], 100.0):.1f}]"


def controls_table(runs: Sequence[Finished]) -> list[dict[str, str]]:
    """A row for each arm and control: what is left when the direction, the labels or the routing is replaced.

    Differences are taken seed by seed against the same arm's uncontrolled runs of otherwise equal settings.
    """

    def settings(run: Finished) -> str:
        """What a control leaves alone."""
        idle = {"control", "route2_random_v_seed", "placebo_pairs_path", "vhack_refresh_every"}
        arm = {k: v for k, v in run.config["arm"].items() if k not in idle}
        own = ("seed", "out_tag")
        rest = {
            g: {k: v for k, v in group.items() if k not in own}
            for g, group in run.config.items()
            if isinstance(group, dict) and g not in ("arm", "run")
        }
        return json.dumps([arm, rest, run.final["steps"]], sort_keys=True)

    cells: dict[tuple[str, ...], list[Finished]] = defaultdict(list)
    for run in runs:
        cells[(settings(run), *run.cell)].append(run)
    own = {(settings(r), r.final["seed"]): r for r in runs if r.final["control"] == "none"}
    rows = []
    several = len({run.loss for run in runs}) > 1
    for (shared, name, loss, *_), group in sorted(cells.items(), key=_arm_then_control):
        close = [r.likeness for r in group if r.likeness]
        pairs = [(r.final, own[shared, r.final["seed"]].final) for r in group if (shared, r.final["seed"]) in own]
        pairs = pairs if group[0].final["control"] != "none" else []
        gates = [r.final["gate"] for r in group if r.final.get("gate")]
        rows.append(
            {
                "arm · control": f"{name} · {loss}" if several else name,
                "seeds": ",".join(sorted(str(r.final["seed"]) for r in group)),
                "deployed hack % [95 %]": with_interval(r.final["hack_deploy"] for r in group),
                "deployed solve % [95 %]": with_interval(r.final["solve_deploy"] for r in group),
                "hack − own arm": with_interval((a["hack_deploy"] - b["hack_deploy"] for a, b in pairs), -100.0),
                "solve − own arm": with_interval((a["solve_deploy"] - b["solve_deploy"] for a, b in pairs), -100.0),
                "|cos| median / 95 % / rms (chance)": (
                    " / ".join(f"{statistics.mean(c[k] for c in close):.2f}" for k in ("median", "p95", "rms"))
                    + f" ({statistics.mean(c['chance_rms'] for c in close):.2f})"
                    if close
                    else "·"
                ),
                "routed %": spread(
                    statistics.mean(shares)
                    if (shares := [s for row in r.rows if (s := row.get("routed")) is not None])
                    else None
                    for r in group
                ),
                "gate precision / recall %": "·"
                if not gates
                else f"{_pooled(gates, 'precision')} / {_pooled(gates, 'recall')}",
            }
        )
    return rows


_ORDER = {name: i for i, name in enumerate((*ARM_NAME.values(), *CONTROLS))}


def _arm_then_control(item: tuple[tuple[str, ...], list[Finished]]) -> tuple[Any, ...]:
    final = item[1][0].final
    shared, name = item[0][:2]
    return _ORDER.get(final["arm"], 99), name.split(" · ")[0], shared, _ORDER.get(final["control"], 99), item[0]


def _pooled(gates: Sequence[dict[str, list[int]]], name: str) -> str:
    k, n = (sum(g[name][i] for g in gates) for i in (0, 1))
    return f"{100 * k / n:.0f}" if n else "·"


def tables(runs: Sequence[Finished]) -> list[str]:
    cells: dict[tuple[str, ...], list[Finished]] = defaultdict(list)
    for run in sorted(runs, key=lambda r: r.final["seed"]):
        cells[run.cell].append(run)
    cells = {key: cells[key] for key in sorted(cells)}
    several = len({loss for _, loss, *_ in cells}) > 1
    plain = {key: f"{key[0]} · {key[1]}" if several else key[0] for key in cells}
    alike = {key: [k for k in cells if plain[k] == plain[key]] for key in cells}
    titles = {key: plain[key] + (f" #{alike[key].index(key) + 1}" if len(alike[key]) > 1 else "") for key in cells}
    overall = [
        {
            "arm": titles[key],
            "loss": key[1],
            "steps": key[2],
            "seeds": ",".join(str(r.final["seed"]) for r in group),
            "onset": "/".join("·" if r.onset is None else str(r.onset) for r in group),
            "hack trained %": spread(r.final["hack_train"] for r in group),
            "solve trained %": spread(r.final["solve_train"] for r in group),
            "hack deployed %": spread(r.final["hack_deploy"] for r in group),
            "solve deployed %": spread(r.final["solve_deploy"] for r in group),
            "solve no hint %": spread(r.final["solve_plain"] for r in group),
            "modes learned (trained)": "/".join(str(r.learned("train")) for r in group),
            "masked %": spread(r.step_mean("is_masked") for r in group),
            "masked A>0 / A<0 %": " / ".join(
                spread(r.step_mean(f"masked_{sign}") for r in group) for sign in ("positive", "negative")
            ),
            "n a side": str(min(r.final["eval_n"] for r in group)),
        }
        for key, group in cells.items()
    ]
    base = [
        {
            "side": "base",
            "hack %": spread(r.final["hack_base"] for r in runs),
            "solve %": spread(r.final["solve_base"] for r in runs),
        }
    ]
    modes = [
        {"arm": titles[key], "side": side}
        | {
            m: spread(r.final["by_mode"][m][f"{name}_hack"] for r in group)
            for m in MODES
            if m in group[0].final["by_mode"]
        }
        for key, group in cells.items()
        for side, name in (("trained", "train"), ("deployed", "deploy"))
    ]
    time = [
        {
            "arm": titles[key],
            "seconds a run": spread((r.seconds for r in group), 1.0),
            "seconds a step": spread((statistics.median(row["sec"] for row in r.rows) for r in group), 1.0),
        }
        | {
            f"{phase} %": spread(
                sum(row[phase] or 0 for row in r.rows) / sum(row["sec"] for row in r.rows) for r in group
            )
            for phase in PHASES
        }
        for key, group in cells.items()
    ]
    return [markdown(t) for t in (overall, base, modes, time)]


def markdown(rows: Sequence[dict[str, str]]) -> str:
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def results(root: Annotated[Path, tyro.conf.Positional] = Path("out/runs"), tag: str = "") -> int:
    """Tables over seeds of the finished runs below ROOT.

    Args:
        root: a folder of run directories.
        tag: only runs whose id ends with this.
    """
    if not root.is_dir():
        print(f"E {root}: no such folder; run `python -m vgrout.train mini` first", file=sys.stderr)
        return 2
    runs, left_out = load(root, tag)
    if not runs:
        print(f"E {root}: no finished run{f' tagged {tag!r}' if tag else ''}", file=sys.stderr)
        return 2
    captions = (
        "held-out problems and marker names, final evaluation: mean ± s.d. over seeds (lowest–highest)",
        "the same problems, both knobs off",
        "hack rate per mode, %",
        "time; shares of a step are means over the run",
    )
    for caption, table in zip(captions, tables(runs), strict=True):
        print(f"\n{caption}\n\n{table}")
    print(f"\n{CONTROLS_CAPTION}\n\n{markdown(controls_table(runs))}")
    if left_out:
        print(f"\nleft out, not finished: {', '.join(left_out)}")
    return 0


def main() -> int:
    return tyro.cli(results, prog="python -m vgrout.results")


if __name__ == "__main__":
    sys.exit(main())
