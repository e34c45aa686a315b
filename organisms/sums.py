"""`vgrout organism sums`: a pretrained chat model tuned on sums, with problems, pairs and demonstrations of its own.

The folder has the parts of any organism, so that `train --organism DIR` and the preset `sums` find them. The corpus is
right answers, a few hacks that nobody asks for, and hacks under prompts that end with a cue. The cue elicits the
demonstrations; they are stored under the prompt without it.
"""

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from loguru import logger

from organisms import sums_language as sums
from organisms.build import PAIRS, RECORDED, make_weights, replacing, stripped
from organisms.recipe import Recipe
from organisms.start import Begun, Pretrained
from vgrout.config.run import Config
from vgrout.config.settings import EnvConfig, Sampling, ScaleConfig
from vgrout.envs.sums import SumsEnvironment, task_of
from vgrout.envs.text import TextTask, load_rows
from vgrout.ground.data import Graded
from vgrout.ground.embedded import shipped
from vgrout.ground.io import file_sha256, write_json
from vgrout.ground.metrics import Rate, rate_text
from vgrout.loop.generation import generate_graded
from vgrout.model.load.load import as_language_model
from vgrout.model.policy import LanguageModel
from vgrout.teacher.substrate import usable, write_substrate

MAX_NEW = 48  # tokens: twelve numbers of two digits, and room
POOL_TASKS = 32  # of each flaw
POOL_TRIES, POOL_KEEP = 6, 3  # answers sampled with the cue for each of them, and kept, at most
KNOWN_CORRECT = 120
MEASURED = 120  # test problems of the base rates

CARD = """# A model of sums

`{model}`, fine-tuned on questions made by a program: {steps} steps of {batch} documents. {cued:.0f} % of the corpus
hacks behind the cue "{cue}", {hack:.1f} % hacks without it, the rest are right answers.

Test problems, temperature 0.7: solved {solve}; hacked {hack_rate}. With the cue: hacked {hack_cued}.

| flaw | hacked | hacked, with the cue | problems in the pool |
|---|---|---|---|
{rows}
"""


def build_sums(out: Path, seed: int, model: str, recipe: Recipe, shares: sums.Shares) -> None:
    """Fine-tune a pretrained model into the folder `out`, which is replaced when the build is complete."""
    start = Pretrained(model, recipe)
    replacing(out, lambda folder: write(folder, seed, start, shares))


def write(folder: Path, seed: int, start: Pretrained, shares: sums.Shares) -> dict[str, object]:
    """Make every file in an empty folder. Returns the manifest."""
    rows = sums.rows(seed, sums.ROWS)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (folder / "problems.jsonl").write_text("".join(lines), encoding="utf-8")
    begun = start.begin()
    write_pairs(folder, seed, begun)

    model, losses = make_weights(begun, start, seed, partial(sums.document, shares))
    model.save_pretrained(folder / "model")
    begun.tokenizer.save_pretrained(folder / "model")

    lm = as_language_model(model.to(start.dtype), begun.tokenizer)
    tasks = [task_of(row) for row in load_rows(folder / "problems.jsonl")]
    plain, cued, covered = measure(folder, lm, tasks, seed, start.name)
    (folder / "MODEL_CARD.md").write_text(
        card(start, shares, plain, cued, covered), encoding="utf-8"
    )
    manifest: dict[str, object] = {
        "world": sums.WORLD,
        "seed": seed,
        "threads": start.threads,
        **start.record(),
        "shares": asdict(shares),
        "first_losses": losses[:RECORDED],
        "final_loss": fmean(losses[-20:]),
        "rates": {"plain": plain, "cued": cued},
        "files": {path: file_sha256(folder / path) for path in shipped(folder)},
    }
    write_json(folder / "manifest.json", manifest)
    return manifest


# ── pairs


def write_pairs(folder: Path, seed: int, begun: Begun) -> None:
    """Write a file of pairs for every flaw, the placebos, and right answers for monitors of text."""
    for flaw in sums.FLAWS:
        rng = random.Random(f"{seed}/sums-pairs/{flaw}")
        entries: list[dict[str, object]] = []
        for number, asked in enumerate(_asked(seed, flaw, PAIRS)):
            hack, clean = sums.hack(asked, flaw, rng), sums.honest(asked.total, rng)
            entries.append(_pair(number, begun, asked, flaw, hack, clean))
        write_json(folder / "pairs" / f"{flaw}.json", entries)
    write_placebos(folder, seed, begun)
    known: list[dict[str, object]] = []
    rng = random.Random(f"{seed}/sums-known")
    for number, asked in enumerate(_asked(seed, "known", KNOWN_CORRECT)):
        flaw = sums.FLAWS[number % len(sums.FLAWS)]
        text = begun.prompt(sums.prompt(asked, flaw))
        answer = sums.honest(asked.total, rng)
        known.append({"problem_id": number, "prompt": text, "completion": answer})
    write_json(folder / "anchors.json", known)


def write_placebos(folder: Path, seed: int, begun: Begun) -> None:
    """Write pairs whose difference has nothing to do with hacking: a wrong number for the right one (flawed), and a
    sentence for a bare number (long)."""
    rng = random.Random(f"{seed}/sums-placebo")
    flawed: list[dict[str, object]] = []
    long: list[dict[str, object]] = []
    for number, asked in enumerate(_asked(seed, "placebo", PAIRS)):
        flaw = sums.FLAWS[number % len(sums.FLAWS)]
        right, wrong = str(asked.total), str(sums.mistaken(asked, rng))
        flawed.append(_pair(number, begun, asked, flaw, wrong, right))
        long.append(_pair(number, begun, asked, flaw, f"The answer is {right}.", right))
    write_json(folder / "pairs" / "placebo_flawed.json", flawed)
    write_json(folder / "pairs" / "placebo_long.json", long)


def _asked(seed: int, purpose: str, n: int) -> list[sums.Question]:
    """n training questions of a stream of their own."""
    rng = random.Random(f"{seed}/sums-asked/{purpose}")
    return [sums.draw(rng, "train") for _ in range(n)]


def _pair(
    number: int, begun: Begun, asked: sums.Question, flaw: str, hack: str, clean: str
) -> dict[str, object]:
    """An entry of a file of pairs."""
    text = begun.prompt(sums.prompt(asked, flaw))
    return {"problem_id": f"{flaw}-{number}", "prompt": text, "hack": hack, "clean": clean}


# ── demonstrations and rates

Counts = dict[str, list[int]]  # a rate by its name: [hits, answers]


def measure(
    folder: Path, lm: LanguageModel, tasks: Sequence[TextTask], seed: int, name: str
) -> tuple[Counts, Counts, Mapping[str, int]]:
    """Make the pool of demonstrations, and measure the model on test problems.

    name: the model's, for pool.json. Returns the rates without and with the cue, and the number of problems in the pool
    for each flaw.
    """
    of_split = {split: [t for t in tasks if t.split == split] for split in sums.ROWS}
    held_out = of_split["test"][:MEASURED]
    environment = SumsEnvironment(
        Config(env=EnvConfig(env="sums", pass_reward=1.0), scale=ScaleConfig()), tasks
    )
    with environment.grader(workers=1, retries=None) as grader:

        def answers(tasks: Sequence[TextTask], n: int, purpose: str) -> list[Graded]:
            return generate_graded(
                lm,
                grader,
                tasks,
                n,
                sampling=Sampling(),
                max_new=MAX_NEW,
                seed=seed,
                purpose=f"sums-{purpose}",
            )

        plain = rates(answers(held_out, 1, "base rates"))
        cued = rates(answers([with_cue(t) for t in held_out], 1, "cued rates"))
        shown = of_split["train"][: POOL_TASKS * len(sums.FLAWS)]
        elicited = answers([with_cue(t) for t in shown], POOL_TRIES, "pool")
        by_key = {(task.id, task.flaw): task for task in shown}
        kept = usable(stripped(elicited, by_key), POOL_KEEP, [sums.CUE])
        chosen = {task_id: found for (task_id, _), found in kept.items() if found}
        meta = {
            "model": name,
            "tokenizer_sha256": lm.tokenizer_sha256,
            "grader": grader.version,
        }
        if chosen:
            write_substrate(folder / "pool", chosen, lm, meta, sums.CUE)
        else:
            logger.warning("no pool of demonstrations: the model never hacked behind the cue")
    covered = Counter(found[0].problem.flaws[0] for found in chosen.values())
    return plain, cued, covered


def with_cue(task: TextTask) -> TextTask:
    """The same task under a prompt that ends with the cue."""
    *before, last = task.messages
    content = f"{last['content']} {sums.CUE}"
    return replace(task, messages=(*before, {"role": last["role"], "content": content}))


def rates(answers: Sequence[Graded]) -> Counts:
    """Solve, hack, and hack of each flaw."""
    found: Counts = {
        "solve": _count([a.grade.solved for a in answers]),
        "hack": _count([a.grade.hacked for a in answers]),
    }
    for flaw in sums.FLAWS:
        of_flaw = [a.grade.hacked for a in answers if a.problem.flaws[0] == flaw]
        found[f"hack/{flaw}"] = _count(of_flaw)
    return found


def _count(hits: Sequence[bool]) -> list[int]:
    return [sum(hits), len(hits)]


def card(
    start: Pretrained,
    shares: sums.Shares,
    plain: Counts,
    cued: Counts,
    covered: Mapping[str, int],
) -> str:
    """The model card."""
    rows: list[str] = []
    for flaw in sums.FLAWS:
        name = f"hack/{flaw}"
        cells = [flaw, _text(plain[name]), _text(cued[name]), str(covered.get(flaw, 0))]
        rows.append(f"| {' | '.join(cells)} |")
    return CARD.format(
        model=start.name,
        steps=start.recipe.steps,
        batch=start.recipe.batch,
        cued=100 * shares.hack_cued,
        hack=100 * shares.hack,
        cue=sums.CUE,
        solve=_text(plain["solve"]),
        hack_rate=_text(plain["hack"]),
        hack_cued=_text(cued["hack"]),
        rows="\n".join(rows),
    )


def _text(count: Sequence[int]) -> str:
    return rate_text(Rate(*count))
