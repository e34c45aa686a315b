"""Checks of the shipped organism: file hashes, the first losses of training from its seed, and its pool's labels."""

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vgrout.data.language import MODES, Shares
from vgrout.data.organism import COMPILE_REWARD, PASS_REWARD, Files
from vgrout.files import read_json
from vgrout.grading.grade import Grader
from vgrout.organism.build import losses_of
from vgrout.organism.start import of_manifest
from vgrout.problems import load_problems
from vgrout.teacher.pools import load_pool, regraded, write_pool

TOLERANCE = 0.02  # nats; other processors and thread counts sum in another order, a wrong corpus differs by tenths


def check_training(folder: Path, steps: int | None = None) -> list[str]:
    """Faults of the first training steps, run again with the shipped tokenizer, against the recorded losses.

    steps: how many, at most those recorded.

    Raises:
        ValueError: the pretrained model that was tuned is not here, or has changed since.
    """
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    recorded: list[float] = manifest["first_losses"][:steps]
    stored = manifest["shares"]
    shares = Shares(**stored | {"modes": tuple(stored.get("modes", MODES))})
    start, seed = of_manifest(manifest), manifest["seed"]
    losses = losses_of(start.begin(seed, shares, folder), start, seed, shares, len(recorded), "first steps")
    return [
        f"training step {i}: loss {now:.4f}, recorded {then:.4f}; language, recipe or library changed"
        for i, (now, then) in enumerate(zip(losses, recorded, strict=True))
        if abs(now - then) > TOLERANCE
    ]


def regrade(folder: Path, track: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> list[str]:
    """Grade the pool with today's grader, and write its labels, pool.json and manifest.json again. Returns a line for
    each rollout whose labels have changed.

    Raises:
        RuntimeError: an answer could not be graded; nothing has been written.
    """
    files = Files(folder)
    pool, problems = load_pool(files.pool), {p.id: p for p in load_problems(files.problems)}
    with Grader(compile_reward=COMPILE_REWARD, pass_reward=PASS_REWARD) as grader:
        now = regraded(pool, {i: problems[i] for i in pool.demos}, grader, track)
    if now.ungraded:
        raise RuntimeError(f"{files.pool}: {now.ungraded} rollouts could not be graded; nothing is written")
    records = {}
    for i, demos in now.pool.demos.items():
        with gzip.open(files.pool / f"prompt_{i:04d}.jsonl.gz", "rt", encoding="utf-8", newline="\n") as f:
            of_today = zip(f, (d.grade for d in demos), strict=True)
            records[i] = [
                json.loads(line) | {"reward": g.reward, "hacked": g.hacked, "gt_pass": g.gt_pass, "fmt_ok": g.format_ok}
                for line, g in of_today
            ]
    card = read_json(files.pool / "pool.json")
    meta = {k: v for k, v in card.items() if k not in ("problems", "rollouts", "sha256")} | {"grader": now.pool.grader}
    fresh, old = folder / "pool.new", folder / "pool.old"
    write_pool(fresh, records, pool.partition, meta)
    os.replace(files.pool, old)
    os.replace(fresh, files.pool)
    shutil.rmtree(old)
    files.seal()
    return list(now.changes)
