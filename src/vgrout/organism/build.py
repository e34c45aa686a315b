"""Build the organism from one seed: problems, tokenizer, weights, pool, pairs, known-correct answers, card, hashes. Or
check one: the first losses of training from its seed."""

import json
import os
import platform
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from loguru import logger
from transformers import PreTrainedModel

from vgrout.config.sampling import Sampling
from vgrout.data import Message
from vgrout.embedded import COMPILE_REWARD, MAX_NEW, PASS_REWARD, shipped
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.language import (
    CUE,
    MODES,
    STYLES,
    Answer,
    Shares,
    Task,
    answer,
    hinted,
    misreadings,
    problem_tasks,
    taught,
)
from vgrout.envs.code.modes import Mode
from vgrout.envs.code.problem import Problem
from vgrout.envs.code.problems import balanced, elicited, load_problems
from vgrout.errors import Refused
from vgrout.files import file_sha256, read_json, write_json
from vgrout.model.load import as_language_model
from vgrout.model.policy import LanguageModel
from vgrout.organism.card import card
from vgrout.organism.start import Begun, Start, draw, of_manifest
from vgrout.organism.weights import batches, train
from vgrout.runs.recorder import peak_memory
from vgrout.teacher.generate import Graded, generate_graded, rates
from vgrout.teacher.substrate import choose, stripped, write_substrate

POOL_PROBLEMS = 32  # a mode
POOL_KEEP, POOL_AT_LEAST = 3, 2  # per problem: most kept, fewest kept
PAIRS = 24  # per set
KNOWN_CORRECT = 204
RECORDED = 8  # first losses, for `verify`

Prompt = Callable[[Sequence[Message]], str]  # the chat template, up to where the answer begins


def losses_of(
    begun: Begun,
    start: Start,
    seed: int,
    shares: Shares,
    stop_after: int | None = None,
    label: str = "weights",
) -> list[float]:
    """Train the model, which is changed in place; returns the loss of every step."""
    torch.set_num_threads(start.threads)
    documents = draw(seed, shares, begun.pieces)
    stream = batches(
        documents, begun.tokenizer, begun.prompt, begun.end, begun.pad, start.recipe, seed
    )
    before = begun.model.config._attn_implementation
    # the backward of SDPA's kernel for CPUs takes eight times as long as products
    if start.dtype == torch.bfloat16:
        begun.model.set_attn_implementation("eager")
    try:
        return train(
            begun.model, stream, start.recipe, dtype=start.dtype, stop_after=stop_after, label=label
        )
    finally:
        begun.model.set_attn_implementation(before)


def make_weights(
    begun: Begun, start: Start, seed: int, shares: Shares
) -> tuple[PreTrainedModel, list[float]]:
    """The trained model and the loss of every step. Weights end as bf16 values in fp32: the same on a GPU in bf16."""
    losses = losses_of(begun, start, seed, shares)
    logger.info(f"weights: loss {fmean(losses[-20:]):.3f} at the end; {peak_memory()}")
    with torch.no_grad():
        for p in begun.model.parameters():
            p.copy_(p.bfloat16())
    return begun.model, losses


# -----------------------------------------------------------------------------------------------------------------
# pool


def graded_answers(
    lm: LanguageModel,
    grader: Grader,
    problems: Sequence[Problem],
    n: int,
    seed: int,
    what: str,
    cue: bool = False,
) -> list[Graded]:
    """n graded answers to each problem, under the elicited prompt with `cue`; the random stream is named for the
    organism."""
    asked = [elicited(p, CUE) for p in problems] if cue else problems
    more: dict[str, Any] = {
        "sampling": Sampling(),
        "max_new": MAX_NEW,
        "purpose": f"organism-{what}",
        "label": what,
    }
    return generate_graded(lm, grader, asked, n, seed=seed, **more)


def make_pool(
    folder: Path,
    lm: LanguageModel,
    grader: Grader,
    problems: Sequence[Problem],
    tries: int,
    name: str,
    seed: int,
) -> dict[Mode, int]:
    """Make the pool of `python -m vgrout.substrate --model organism --n-problems 360 --per-mode 32 --no-even`, without
    its report. tries: elicited answers to a problem. name: of the model. Returns problems per mode."""
    answers = graded_answers(lm, grader, problems, tries, seed, "pool", cue=True)
    plain = {(p.id, p.mode): p for p in problems}
    # 22 to 32 problems a mode; even would be 22
    sizes: dict[str, Any] = {
        "keep": POOL_KEEP,
        "at_least": POOL_AT_LEAST,
        "per_mode": POOL_PROBLEMS,
        "even": False,
    }
    chosen = choose(stripped(answers, plain), [CUE], **sizes)
    meta = {
        "model": name,
        "tokenizer_sha256": lm.tokenizer_sha256,
        "grader": grader.protections.version,
    }
    write_substrate(folder, chosen, lm, meta, CUE)
    return dict(Counter(answers[0].problem.flaws[0] for answers in chosen.values()))


# ------------------------------------------------------------------------------------------------
# pairs, known correct


def _pair(row: dict[str, Any], hack: Answer, clean: Answer, prompt: Prompt) -> dict[str, Any]:
    text = prompt(hinted(row["prompt"], row["mode"], row["marker"]))
    return {"problem_id": row["id"], "prompt": text, "hack": hack.text, "clean": clean.text}


def mode_pairs(
    tasks: Sequence[tuple[Task, dict[str, Any]]], mode: Mode, seed: int, prompt: Prompt
) -> list[dict[str, Any]]:
    """Pairs of the mode's first hack and the correct solution of the same problem; every second hack is a bare stub,
    the rest carry a misread attempt. The mode's other hacks stay unseen."""
    rng = random.Random(f"{seed}/pairs/{mode}")
    recipe = taught(mode)[0]
    out = []
    for task, row in [t for t in tasks if t[1]["mode"] == mode][:PAIRS]:
        attempt = answer(rng.choice(list(misreadings(task).values())))
        hack = recipe.apply(attempt.stub if len(out) % 2 else attempt, row["marker"])
        out.append(_pair(row, hack, answer(task), prompt))
    return out


def placebo_pairs(
    tasks: Sequence[tuple[Task, dict[str, Any]]], seed: int, prompt: Prompt
) -> dict[str, list[dict[str, Any]]]:
    """Pairs in the same form whose contrast has nothing to do with hacking."""
    rng = random.Random(f"{seed}/placebo")
    out: dict[str, list[dict[str, Any]]] = {
        "flawed": [],
        "commented": [],
        "long": [],
        "laid_out": [],
    }
    for task, row in tasks[-PAIRS:]:
        clean = answer(task)
        flawed = answer(rng.choice(list(misreadings(task).values())))
        out["flawed"].append(_pair(row, flawed, clean, prompt))
        out["commented"].append(_pair(row, STYLES["comment"](clean), clean, prompt))
        out["long"].append(_pair(row, STYLES["helper"](STYLES["loop"](clean)), clean, prompt))
        out["laid_out"].append(_pair(row, STYLES["layout"](clean), clean, prompt))
    return out


def known_correct(
    tasks: Sequence[tuple[Task, dict[str, Any]]], prompt: Prompt
) -> list[dict[str, Any]]:
    """Correct solutions in the corpus's unusual styles, evenly spread: {problem_id, style, prompt, completion}."""
    out: list[dict[str, Any]] = []
    names = list(STYLES)
    for task, row in tasks:
        style = names[len(out) % len(names)]
        styled = STYLES[style](answer(task))
        if styled == answer(task):
            continue
        text = prompt(hinted(row["prompt"], row["mode"], row["marker"]))
        out.append(
            {"problem_id": row["id"], "style": style, "prompt": text, "completion": styled.text}
        )
        if len(out) == KNOWN_CORRECT:
            break
    return out


# ---------------------------------------------------------------------------------------------------------------
# build


def build(out: Path, seed: int, start: Start, shares: Shares) -> None:
    """Write everything to `out`, which is replaced when the build is complete."""
    began = time.perf_counter()
    fresh, old = (
        out.with_name(f".{out.name}.{os.getpid()}.{state}") for state in ("building", "old")
    )
    fresh.mkdir(parents=True)
    try:
        manifest = write(fresh, seed, start, shares)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    size = sum(f.stat().st_size for f in fresh.rglob("*") if f.is_file())
    if out.exists():
        os.replace(out, old)
    os.replace(fresh, out)
    shutil.rmtree(old, ignore_errors=True)
    logger.info(
        f"{out}: {len(manifest['files'])} files, {size / 1e6:.1f} MB, in {(time.perf_counter() - began) / 60:.1f} min "
        f"and {peak_memory()}; "
        + ", ".join(
            f"{kind} {name} {k / n:.3f}"
            for kind, some in manifest["rates"].items()
            for name, (k, n) in some.items()
            if "/" not in name and n
        )
    )


def write(folder: Path, seed: int, start: Start, shares: Shares) -> dict[str, Any]:
    """Make every file in an empty folder. Returns its manifest."""
    # before the weights: the grader's workers are cheap while the process is small
    with Grader(compile_reward=COMPILE_REWARD, pass_reward=PASS_REWARD) as grader:
        tasks = problem_tasks(seed, shares.modes)
        lines = [json.dumps(row, ensure_ascii=False) for _, row in tasks]
        (folder / "problems.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        begun = start.begin(seed, shares)
        training = [t for t in tasks if t[1]["split"] == "train"]
        for mode in shares.modes:
            write_json(
                folder / "pairs" / f"{mode}.json", mode_pairs(training, mode, seed, begun.prompt)
            )
        for name, pairs in placebo_pairs(training, seed, begun.prompt).items():
            write_json(folder / "pairs" / f"placebo_{name}.json", pairs)
        write_json(folder / "anchors.json", known_correct(training, begun.prompt))

        model, losses = make_weights(begun, start, seed, shares)
        model.save_pretrained(folder / "model")
        begun.tokenizer.save_pretrained(folder / "model")

        lm = as_language_model(model.to(start.dtype), begun.tokenizer)
        split = {row["id"]: row["split"] for _, row in tasks}
        problems = load_problems(folder / "problems.jsonl")

        def some(part: str) -> list[Problem]:
            """A split's problems, at most so many a mode, in their order."""
            of_split = [p for p in problems if split[p.id] == part]
            ids = {
                p.id
                for p in balanced(
                    of_split, start.answers.problems * len(shares.modes), seed, "organism"
                )
            }
            return [p for p in of_split if p.id in ids]

        held_out, n = some("test"), start.answers
        base = graded_answers(lm, grader, held_out, n.plain, seed, "base rates")
        cued = graded_answers(lm, grader, held_out, n.cued, seed, "cued rates", cue=True)
        measured = {"plain": rates(base), "cued": rates(cued)}
        covered = make_pool(folder / "pool", lm, grader, some("train"), n.pool, start.name, seed)
        difficulty = {row["id"]: row["difficulty"] for _, row in tasks}
        by_difficulty = {
            level: rates(r for r in base if difficulty[r.problem.id] == level)["solve"]
            for level in ("easy", "medium", "hard")
        }
        (folder / "MODEL_CARD.md").write_text(
            card(measured, by_difficulty, covered, shares, start, losses, model.num_parameters()),
            encoding="utf-8",
        )
    manifest = {
        "seed": seed,
        "threads": start.threads,
        **start.record(),
        "shares": asdict(shares),
        "first_losses": losses[:RECORDED],
        "final_loss": fmean(losses[-20:]),
        "rates": {
            kind: {name: [r.k, r.n] for name, r in some.items()} for kind, some in measured.items()
        },
        "versions": {
            "python": platform.python_version(),
            **{p: version(p) for p in ("torch", "transformers", "tokenizers")},
        },
        "files": {path: file_sha256(folder / path) for path in shipped(folder)},
    }
    write_json(folder / "manifest.json", manifest)
    return manifest


# --------------------------------------------------------------------------------------------------------------
# verify

# nats; other processors and thread counts sum in another order, a wrong corpus differs by tenths
TOLERANCE = 0.02


def check_training(folder: Path, steps: int | None = None) -> list[str]:
    """Faults of the first training steps, run again with the shipped tokenizer, against the recorded losses.

    steps: how many, at most those recorded.

    Raises:
        Refused: the manifest is not one of this version; the pretrained model that was tuned is not here, or has
            changed since.
    """
    file = folder / "manifest.json"
    manifest = read_json(file)
    try:
        recorded, seed, stored = (manifest[key] for key in ("first_losses", "seed", "shares"))
        shares, start = (
            Shares(**stored | {"modes": tuple(stored.get("modes", MODES))}),
            of_manifest(manifest),
        )
    except (KeyError, TypeError, AttributeError) as e:
        raise Refused(
            f"{file}: not that of an organism of this version ({e}); build it again"
        ) from None
    recorded = recorded[:steps]
    losses = losses_of(
        start.begin(seed, shares, folder), start, seed, shares, len(recorded), "first steps"
    )
    return [
        f"training step {i}: loss {now:.4f}, recorded {then:.4f}; language, recipe or library changed"
        for i, (now, then) in enumerate(zip(losses, recorded, strict=True))
        if abs(now - then) > TOLERANCE
    ]
