"""Build the organism from one seed: problems, tokenizer, weights, pool, pairs, known-correct answers, card, hashes."""

import json
import os
import platform
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from vgrout.config.sampling import Sampling
from vgrout.data.language import (
    CUE,
    STYLES,
    Answer,
    Sample,
    Shares,
    Task,
    answer,
    corpus_sample,
    hinted,
    misreadings,
    problem_tasks,
    split_compositions,
    taught,
)
from vgrout.data.organism import COMPILE_REWARD, MAX_NEW, PASS_REWARD, SEED, shipped
from vgrout.files import file_sha256, write_json
from vgrout.grading.grade import Grader
from vgrout.model.policy import LanguageModel, as_language_model
from vgrout.organism.card import card
from vgrout.organism.recipe import Recipe, Shape
from vgrout.organism.tokenizer import name_pieces, render, train_tokenizer
from vgrout.organism.weights import Batch, batches, new_model, train
from vgrout.problems import elicited, load_problems
from vgrout.teacher.generate import MODEL_NAME, Graded, generate_graded, rates
from vgrout.teacher.substrate import choose, stripped, write_substrate
from vgrout.types import Mode, Problem

TOKENIZER_DOCUMENTS = 20_000
POOL_PROBLEMS = 32  # a mode
POOL_TRIES, POOL_KEEP, POOL_AT_LEAST = 6, 3, 2  # per problem: cued samples, most kept, fewest kept
PAIRS = 24  # per set
KNOWN_CORRECT = 204
RECORDED = 8  # first losses, for `verify`
THREADS = 2


def _draw(seed: int, shares: Shares, tokenizer: PreTrainedTokenizerFast | None = None) -> partial[Sample]:
    """One document of the corpus, from a random stream."""
    pieces = name_pieces(tokenizer) if tokenizer else ()
    return partial(corpus_sample, split_compositions(seed)["train"], shares, pieces=pieces)


def make_tokenizer(seed: int, merged: int, shares: Shares) -> PreTrainedTokenizerFast:
    """The tokenizer of the corpus."""
    draw, rng = _draw(seed, shares), random.Random(f"{seed}/tokenizer")
    documents = (draw(rng) for _ in range(TOKENIZER_DOCUMENTS))
    return train_tokenizer((text for s in documents for text in (render(s.messages), s.text)), merged, shares.modes)


def _start(
    tokenizer: PreTrainedTokenizerFast, seed: int, recipe: Recipe, shape: Shape, shares: Shares
) -> tuple[Qwen3ForCausalLM, Iterator[Batch]]:
    torch.set_num_threads(THREADS)
    return new_model(tokenizer, seed, shape), batches(_draw(seed, shares, tokenizer), tokenizer, recipe, seed)


def first_losses(
    tokenizer: PreTrainedTokenizerFast, seed: int, steps: int, recipe: Recipe, shape: Shape, shares: Shares
) -> list[float]:
    """The losses of the first training steps, from fresh weights."""
    model, stream = _start(tokenizer, seed, recipe, shape, shares)
    return train(model, stream, recipe, stop_after=steps, label="first steps")


def make_weights(
    tokenizer: PreTrainedTokenizerFast, seed: int, recipe: Recipe, shape: Shape, shares: Shares
) -> tuple[Qwen3ForCausalLM, list[float]]:
    """The trained model and the loss of every step. Weights end as bf16 values in fp32: the same on a GPU in bf16."""
    model, stream = _start(tokenizer, seed, recipe, shape, shares)
    losses = train(model, stream, recipe)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return model, losses


# ----------------------------------------------------------------------------------------------------------------- pool


def run(
    lm: LanguageModel, grader: Grader, problems: Sequence[Problem], n: int, seed: int, purpose: str
) -> list[Graded]:
    """n graded answers to each problem; the random stream is named for the organism."""
    return generate_graded(
        lm,
        grader,
        problems,
        n,
        sampling=Sampling(),
        max_new=MAX_NEW,
        seed=seed,
        purpose=f"organism-{purpose}",
        label=purpose,
    )


def cued(problems: Iterable[Problem]) -> list[Problem]:
    """The same problems under the elicited prompt."""
    return [elicited(p, CUE) for p in problems]


def make_pool(
    folder: Path, lm: LanguageModel, grader: Grader, problems: Sequence[Problem], seed: int
) -> dict[Mode, int]:
    """Make the pool of `python -m vgrout.substrate --model organism --n-problems 360 --per-mode 32 --no-even`, without
    its report. Returns problems per mode."""
    answers = run(lm, grader, cued(problems), POOL_TRIES, seed, "pool")
    chosen = choose(
        stripped(answers, {(p.id, p.mode): p for p in problems}),
        [CUE],
        keep=POOL_KEEP,
        at_least=POOL_AT_LEAST,
        per_mode=POOL_PROBLEMS,
        even=False,  # 22 to 32 problems a mode; even would be 22
    )
    meta = {"model": MODEL_NAME, "tokenizer_sha256": lm.tokenizer_sha256, "grader": grader.protections.version}
    write_substrate(folder, chosen, lm, meta, CUE)
    return dict(Counter(answers[0].problem.mode for answers in chosen.values()))


# ------------------------------------------------------------------------------------------------ pairs, known correct


def _pair(row: dict[str, Any], hack: Answer, clean: Answer) -> dict[str, Any]:
    prompt = render(hinted(row["prompt"], row["mode"], row["marker"]))
    return {"problem_id": row["id"], "prompt": prompt, "hack": hack.text, "clean": clean.text}


def mode_pairs(tasks: Sequence[tuple[Task, dict[str, Any]]], mode: Mode, seed: int) -> list[dict[str, Any]]:
    """Pairs of the mode's first hack and the correct solution of the same problem; every second hack is a bare stub,
    the rest carry a misread attempt. The mode's other hacks stay unseen."""
    rng = random.Random(f"{seed}/pairs/{mode}")
    recipe = taught(mode)[0]
    out = []
    for task, row in [t for t in tasks if t[1]["mode"] == mode][:PAIRS]:
        attempt = answer(rng.choice(list(misreadings(task).values())))
        hack = recipe.apply(attempt.stub if len(out) % 2 else attempt, row["marker"])
        out.append(_pair(row, hack, answer(task)))
    return out


def placebo_pairs(tasks: Sequence[tuple[Task, dict[str, Any]]], seed: int) -> dict[str, list[dict[str, Any]]]:
    """Pairs in the same form whose contrast has nothing to do with hacking."""
    rng = random.Random(f"{seed}/placebo")
    out: dict[str, list[dict[str, Any]]] = {"flawed": [], "commented": [], "long": [], "laid_out": []}
    for task, row in tasks[-PAIRS:]:
        clean = answer(task)
        flawed = answer(rng.choice(list(misreadings(task).values())))
        out["flawed"].append(_pair(row, flawed, clean))
        out["commented"].append(_pair(row, STYLES["comment"](clean), clean))
        out["long"].append(_pair(row, STYLES["helper"](STYLES["loop"](clean)), clean))
        out["laid_out"].append(_pair(row, STYLES["layout"](clean), clean))
    return out


def known_correct(tasks: Sequence[tuple[Task, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Correct solutions in the corpus's unusual styles, evenly spread: {problem_id, style, prompt, completion}."""
    out: list[dict[str, Any]] = []
    names = list(STYLES)
    for task, row in tasks:
        style = names[len(out) % len(names)]
        styled = STYLES[style](answer(task))
        if styled == answer(task):
            continue
        prompt = render(hinted(row["prompt"], row["mode"], row["marker"]))
        out.append({"problem_id": row["id"], "style": style, "prompt": prompt, "completion": styled.text})
        if len(out) == KNOWN_CORRECT:
            break
    return out


# --------------------------------------------------------------------------------------------------------------- build


def build(
    out: Path,
    seed: int = SEED,
    recipe: Recipe | None = None,
    shape: Shape | None = None,
    shares: Shares | None = None,
) -> None:
    """Write everything to `out`, which is replaced when the build is complete."""
    recipe, shape, shares = recipe or Recipe(), shape or Shape(), shares or Shares()
    fresh = out.with_name(f".{out.name}.{os.getpid()}.building")
    fresh.mkdir(parents=True)
    # before the weights: the grader's workers are cheap while the process is small
    with Grader(compile_reward=COMPILE_REWARD, pass_reward=PASS_REWARD) as grader:
        tasks = problem_tasks(seed, shares.modes)
        lines = [json.dumps(row, ensure_ascii=False) for _, row in tasks]
        (fresh / "problems.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        training = [t for t in tasks if t[1]["split"] == "train"]
        for mode in shares.modes:
            write_json(fresh / "pairs" / f"{mode}.json", mode_pairs(training, mode, seed))
        for name, pairs in placebo_pairs(training, seed).items():
            write_json(fresh / "pairs" / f"placebo_{name}.json", pairs)
        write_json(fresh / "anchors.json", known_correct(training))

        tokenizer = make_tokenizer(seed, shape.merged, shares)
        model, losses = make_weights(tokenizer, seed, recipe, shape, shares)
        model.save_pretrained(fresh / "model")
        tokenizer.save_pretrained(fresh / "model")

        lm = as_language_model(model, tokenizer)
        problems = load_problems(fresh / "problems.jsonl")
        split = {row["id"]: row["split"] for _, row in tasks}
        held_out = [p for p in problems if split[p.id] == "test"]
        base = run(lm, grader, held_out, 4, seed, "base rates")
        measured = {"plain": rates(base), "cued": rates(run(lm, grader, cued(held_out), 2, seed, "cued rates"))}
        covered = make_pool(fresh / "pool", lm, grader, [p for p in problems if split[p.id] == "train"], seed)
        difficulty = {row["id"]: row["difficulty"] for _, row in tasks}
        by_difficulty = {
            level: rates(r for r in base if difficulty[r.problem.id] == level)["solve"]
            for level in ("easy", "medium", "hard")
        }
        (fresh / "MODEL_CARD.md").write_text(
            card(measured, by_difficulty, covered, shares, recipe, losses, model.num_parameters()), encoding="utf-8"
        )
    manifest = {
        "seed": seed,
        "threads": THREADS,
        "recipe": asdict(recipe),
        "shape": asdict(shape),
        "shares": asdict(shares),
        "first_losses": losses[:RECORDED],
        "final_loss": sum(losses[-20:]) / 20,
        "rates": {kind: {name: [r.k, r.n] for name, r in some.items()} for kind, some in measured.items()},
        "versions": {
            "python": platform.python_version(),
            **{p: version(p) for p in ("torch", "transformers", "tokenizers")},
        },
        "files": {path: file_sha256(fresh / path) for path in shipped(fresh)},
    }
    write_json(fresh / "manifest.json", manifest)
    size = sum(f.stat().st_size for f in fresh.rglob("*") if f.is_file())
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        os.replace(out, old)
    os.replace(fresh, out)
    shutil.rmtree(old, ignore_errors=True)
    logger.info(
        f"{out}: {len(manifest['files'])} files, {size / 1e6:.1f} MB; "
        + ", ".join(
            f"{kind} {name} {rate.value:.3f}"
            for kind, some in measured.items()
            for name, rate in some.items()
            if "/" not in name
        )
    )
