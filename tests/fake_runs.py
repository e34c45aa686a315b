"""Run directories with known numbers, written by hand: only what a report reads."""

import json
from dataclasses import replace
from functools import cache

from vgrout.config.presets import resolve
from vgrout.envs.code.modes import DEALT
from vgrout.ground.metrics import Rate
from vgrout.ground.table import share
from vgrout.report.load import SIDES, conditions, load

STEPS = 12


@cache
def _config(*argv):
    return resolve(list(argv))


def fake_run(
    root,
    *flags,
    seed=41,
    hack=0.5,
    solve=0.5,
    onset=99,
    n=60,
    state="finished",
    cos=None,
    preset="mini",
    row=None,
    modes=None,
    **final,
):
    """A finished run of 12 steps, every side and mode at the same rates; the students hack from `onset` on. Of n
    held-out problems, each answered once, a mode's first are hacked and its last are solved.

    modes: what per_mode_deploy.json has for single modes, where it differs.
    """
    cfg = _config(preset, *flags)
    cfg = replace(cfg, run=replace(cfg.run, seed=seed))
    path = root / f"{len(list(root.glob('*/run.json'))):03d}_{cfg.run_id}"
    path.mkdir(parents=True)
    close = (
        None
        if cos is None
        else {"median": cos, "p95": 2 * cos, "max": 3 * cos, "rms": cos, "chance_rms": 0.1}
    )
    record = {
        "config": cfg.as_dict(),
        "direction": {"pairs": final.pop("pairs", "run_tests.json"), "cos_with_real": close},
        "hashes": {"base_weights": final.pop("weights", "0" * 64)} | final.pop("hashes", {}),
    }
    rates = {f"hack_{s}": hack for s in SIDES} | {f"solve_{s}": solve for s in SIDES}
    deploy = {"seed": cfg.run.seed, "eval_n": n, **rates, **final}
    mode = {
        f"{side}_{what}": deploy[f"{what}_{side}"] for side in SIDES for what in ("hack", "solve")
    }
    deploy.setdefault(
        "by_mode",
        {m: {"in_dist": None, "n": n // 6} | mode | (modes or {}).get(m, {}) for m in DEALT},
    )
    rows = [
        {
            "step": t,
            **share("hack_s", Rate(8 * (t >= onset), 8)),
            **share("solve_s", Rate(8 * (t < onset), 8)),
        }
        | (row or {})
        for t in range(STEPS)
    ]
    files = {"run.json": record, "per_mode_deploy.json": deploy, "status.json": {"state": state}}
    for name, data in files.items():
        (path / name).write_text(json.dumps(data))
    (path / "steps.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    answers = [answer for side in SIDES for answer in _answers(side, deploy["by_mode"], n // 6)]
    (path / "final.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    return path


def found(*sources):
    """What a report makes of them."""
    return conditions(load(sources)[0])


def _answers(side, by_mode, n):
    """As many hacks and solutions as all modes together should have; what rounding leaves is carried on."""
    out, hacks, solves = [], 0.0, 0.0
    for i, (mode, rates) in enumerate(by_mode.items()):
        more_hacks, more_solves = n * rates[f"{side}_hack"], n * rates[f"{side}_solve"]
        hacked, solved = (
            round(hacks + more_hacks) - round(hacks),
            round(solves + more_solves) - round(solves),
        )
        hacks, solves = hacks + more_hacks, solves + more_solves
        out += [
            {
                "side": SIDES[side],
                "problem_id": 100 * i + k,
                "env_mode": mode,
                "marker": "m",
                "text": "",
                "reward": 1.0,
            }
            | {"hacked": k < hacked, "solved": k >= n - solved}
            for k in range(n)
        ]
    return out
