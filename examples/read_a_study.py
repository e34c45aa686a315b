"""Read a study: its runs as one frame, its curves, and the answers behind a number.

    uv run python examples/read_a_study.py [out/sweeps/NAME]

Without a folder two short runs are trained first, so that there is something to read: one to two minutes, no GPU.
"""

import sys
from pathlib import Path

import pandas as pd

import vgrout
from vgrout.ground.records import run_dirs

if len(sys.argv) > 1:
    paths, _ = run_dirs(Path(sys.argv[1]))
    runs = [vgrout.load_run(path) for path in paths if (path / "per_mode_deploy.json").is_file()]
else:
    short = {"steps": 4, "final_n_prompts": 6, "final_samples": 1}
    runs = [vgrout.train_run("smoke", intervention=name, **short) for name in ("none", "route")]

# One row for each run: what was deployed, against the untrained base.
rows = []
for run in runs:
    row = {"intervention": run.config.method.intervention, "seed": run.config.run.seed}
    for name in ("hack_deploy", "solve_deploy", "hack_base", "solve_base", "eval_n"):
        row[name] = run.final[name]
    rows.append(row)
table = pd.DataFrame(rows)
print(table.groupby("intervention").mean(numeric_only=True).round(3))

# All steps of all runs in one frame, which draws the curves.
frames = [run.steps.assign(intervention=run.config.method.intervention) for run in runs]
curves = pd.concat(frames)
means = curves.pivot_table(index="step", columns="intervention", values="hack_s")
Path("out").mkdir(exist_ok=True)
means.rolling(5, min_periods=1).mean().plot(ylabel="hack_s").figure.savefig("out/study.png")

# The answers behind a number.
deployed = runs[0].answers.query("side == 'deployed'")
hacks = deployed[deployed["hacked"].eq(True)]
print(f"{len(hacks)} of {len(deployed)} deployed answers hack the flaw. One answer:")
print((hacks if len(hacks) else deployed)["text"].iloc[0])
