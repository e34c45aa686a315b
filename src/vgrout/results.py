"""`python -m vgrout.results [DIR]`: finished runs below DIR as tables over seeds. Unfinished ones are named."""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tabulate import tabulate

from vgrout.nouns import MODES
from vgrout.run_dir import read_json
from vgrout.step_row import LEARNED, first_hacks

PHASES = ("gen", "grade", "fb", "eval")


@dataclass(frozen=True)
class Finished:
    """One finished run, as its files have it."""

    path: Path
    final: dict[str, Any]
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    seconds: float  # start of the first step to the end of the final evaluation

    @property
    def cell(self) -> tuple[str, ...]:
        """What must be equal for two runs to differ by seed alone."""
        c = self.config
        rest = {g: {k: v for k, v in c[g].items() if k not in ("seed", "out_tag")} for g in c if isinstance(c[g], dict)}
        name = f"{self.final['arm']}" + (f" · {self.final['control']}" if self.final["control"] != "none" else "")
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
                config=read_json(path / "run.json")["config"],
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
    return [tabulate(t, headers="keys", tablefmt="github", disable_numparse=True) for t in (overall, base, modes, time)]


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
    if left_out:
        print(f"\nleft out, not finished: {', '.join(left_out)}")
    return 0


def main() -> int:
    return tyro.cli(results, prog="python -m vgrout.results")


if __name__ == "__main__":
    sys.exit(main())
