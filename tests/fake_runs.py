"""Run directories with known numbers, written by hand: only what a report reads."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from vgrout.config.presets import parse
from vgrout.config.run import Config
from vgrout.modes import DEALT

SIDES = ("base", "train", "deploy", "plain")
TIMES = {"sec": 1.0, "gen": 0.25, "grade": 0.25, "fb": 0.25, "eval": 0.25}
STEPS = 12


@cache
def _config(*argv: str) -> Config:
    return parse(list(argv))


def fake_run(
    root: Path,
    *flags: str,
    seed: int = 41,
    hack: float = 0.5,
    solve: float = 0.5,
    onset: int = 99,
    n: int = 60,
    state: str = "finished",
    cos: float | None = None,
    problems: bool = False,
    preset: str = "mini",
    row: dict[str, Any] | None = None,
    **final: Any,
) -> Path:
    """A finished run of 12 steps, every side and mode at the same rates; the students exploit from `onset` on.

    problems: write final.jsonl too, one answer a problem, the first of each mode's n/6 exploited or else solved.
    """
    cfg = _config(preset, *flags)
    cfg = replace(cfg, run=replace(cfg.run, seed=seed))
    path = root / f"{len(list(root.glob('*/run.json'))):03d}_{cfg.run_id}"
    path.mkdir(parents=True)
    close = None if cos is None else {"median": cos, "p95": 2 * cos, "max": 3 * cos, "rms": cos, "chance_rms": 0.1}
    record = {
        "config": cfg.as_dict(),
        "control": cfg.method.control_name,
        "direction": {"pairs": final.pop("pairs", "run_tests.json"), "cos_with_real": close},
        "hashes": {"hypotheses": final.pop("hypotheses", None), "base_weights": final.pop("weights", "0" * 64)}
        | final.pop("hashes", {}),
    }
    rates = {f"hack_{s}": hack for s in SIDES} | {f"solve_{s}": solve for s in SIDES}
    mode = {"in_dist": None, "n": n // 6} | {f"{s}_hack": hack for s in SIDES} | {f"{s}_solve": solve for s in SIDES}
    deploy: dict[str, Any] = {
        "arm": cfg.method.intervention,
        "control": cfg.method.control_name,
        "seed": cfg.run.seed,
        "steps": cfg.scale.steps,
        "eval_n": n,
        **rates,
        "by_mode": dict.fromkeys(DEALT, mode),
        "gate": None,
        **final,
    }
    rows = [
        {"step": t, "hack_s": [8 * (t >= onset), 8], "gt_s": [8 * (t < onset), 8], **TIMES, **(row or {})}
        for t in range(STEPS)
    ]
    files = {"run.json": record, "per_mode_deploy.json": deploy, "status.json": {"state": state}}
    for name, data in files.items():
        (path / name).write_text(json.dumps(data))
    (path / "steps.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if problems:
        answers = [
            {"side": side, "problem": 100 * i + k, "mode": m, "reward": 1.0}
            | {"exploited": k < round(hack * n / 6), "gt_correct": k >= n // 6 - round(solve * n / 6)}
            for side in ("base", "deployed", "plain")
            for i, m in enumerate(DEALT)
            for k in range(n // 6)
        ]
        (path / "final.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    return path
