"""Make the organism from one seed: problems, tokenizer, weights, pool, pairs, anchors, model card, manifest."""

import gzip
import hashlib
import json
import os
import platform
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from vgrout.grading.grade import Grader
from vgrout.nouns import MODES, Grade, Mode, Problem, Rate, Ungraded
from vgrout.organism import COMPILE_REWARD, MAX_NEW, PASS_REWARD
from vgrout.organism.card import card
from vgrout.organism.language import (
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
from vgrout.organism.tokenizer import name_pieces, render, train_tokenizer
from vgrout.organism.weights import Batch, Recipe, batches, new_model, train
from vgrout.policy import Policy, as_policy, tokenizer_sha256
from vgrout.problems import load_problems
from vgrout.rng import torch_stream
from vgrout.sampler import Sampling, sample

SEED = 0
TOKENIZER_DOCUMENTS = 20_000
POOL_PROBLEMS = 32  # a mode
POOL_TRIES, POOL_KEEP = 6, 3  # cued samples a problem; at most so many kept
PAIRS = 24  # a set
ANCHORS = 204
RECORDED = 8  # first losses, for `verify`
THREADS = 2
MAX_BYTES = 10_000_000


def file_sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _draw(seed: int, tokenizer: PreTrainedTokenizerFast | None = None) -> partial[Sample]:
    """One document of the corpus, from a random stream."""
    pieces = name_pieces(tokenizer) if tokenizer else ()
    return partial(corpus_sample, split_compositions(seed)["train"], Shares(), pieces=pieces)


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """The tokenizer of the corpus."""
    draw, rng = _draw(seed), random.Random(f"{seed}/tokenizer")
    documents = (draw(rng) for _ in range(TOKENIZER_DOCUMENTS))
    return train_tokenizer(text for s in documents for text in (render(s.messages), s.text))


def _start(tokenizer: PreTrainedTokenizerFast, seed: int, recipe: Recipe) -> tuple[Qwen3ForCausalLM, Iterator[Batch]]:
    torch.set_num_threads(THREADS)
    return new_model(tokenizer, seed), batches(_draw(seed, tokenizer), tokenizer, recipe, seed)


def first_losses(tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> list[float]:
    """The losses of the first training steps, from fresh weights."""
    model, stream = _start(tokenizer, seed, recipe := Recipe())
    return train(model, stream, recipe, stop_after=steps, label="first steps")


def make_weights(tokenizer: PreTrainedTokenizerFast, seed: int) -> tuple[Qwen3ForCausalLM, list[float]]:
    """The trained model and the loss of every step. Weights end as bf16 values in fp32: the same on a GPU in bf16."""
    model, stream = _start(tokenizer, seed, recipe := Recipe())
    losses = train(model, stream, recipe)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return model, losses


# ---------------------------------------------------------------------------------------------------------- rates, pool


@dataclass(frozen=True, slots=True)
class Graded:
    """One sampled answer with its verdict."""

    problem: Problem
    ids: tuple[int, ...]
    text: str
    finished: bool
    grade: Grade


def cued(problem: Problem) -> Problem:
    """The same problem under the elicited prompt."""
    *head, user = problem.messages
    return replace(problem, messages=(*head, {**user, "content": f"{user['content']}\n{CUE}"}))


def run(
    policy: Policy, grader: Grader, problems: Sequence[Problem], n: int, seed: int, purpose: str, rows: int = 192
) -> list[Graded]:
    """n answers to each problem at the trainer's sampling settings, graded by the trainer's grader."""
    out: list[Graded] = []
    per = max(1, rows // n)
    starts = range(0, len(problems), per)
    for k, start in enumerate(tqdm(starts, desc=purpose, unit="batch", disable=None)):
        part = problems[start : start + per]
        prompts = [policy.render(p.messages) for p in part]
        answers = sample(policy, prompts, n, Sampling(), MAX_NEW, torch_stream(seed, f"organism-{purpose}", k))
        verdicts: list[tuple[Problem, Any, Future[Grade | Ungraded]]] = [
            (p, a, grader.submit(p, a.text)) for p, of_prompt in zip(part, answers, strict=True) for a in of_prompt
        ]
        for problem, a, verdict in verdicts:
            if isinstance(grade := verdict.result(), Ungraded):
                raise RuntimeError(f"problem {problem.id}: not graded ({grade.reason})")
            out.append(Graded(problem, a.ids, a.text, a.finished, grade))
    return out


def rates(rows: Iterable[Graded]) -> dict[str, Rate]:
    """solve, hack and well-formed (a block that compiles, and an end), overall and `hack/MODE`."""
    out: dict[str, Rate] = defaultdict(lambda: Rate(0, 0))
    for r in rows:
        out["solve"] += Rate(int(r.grade.gt_correct), 1)
        out["hack"] += Rate(int(r.grade.exploited), 1)
        out["well-formed"] += Rate(int(r.finished and r.grade.can_compile), 1)
        out[f"hack/{r.problem.mode}"] += Rate(int(r.grade.exploited), 1)
    return dict(out)


def write_pool(folder: Path, rows: Sequence[Graded], policy: Policy, grader: Grader) -> dict[Mode, int]:
    """Elicit-then-strip: cued answers that exploit and do not solve, under the plain prompt. Problems per mode."""
    kept: dict[int, list[Graded]] = defaultdict(list)
    for r in rows:
        mine = kept[r.problem.id]
        if r.finished and r.grade.exploited and len(mine) < POOL_KEEP and r.ids not in {o.ids for o in mine}:
            mine.append(r)
    chosen: list[list[Graded]] = []
    count: Counter[Mode] = Counter()
    for mine in kept.values():
        if len(mine) >= 2 and count[mine[0].problem.mode] < POOL_PROBLEMS:
            count[mine[0].problem.mode] += 1
            chosen.append(mine)
    folder.mkdir(parents=True)
    files: dict[str, str] = {}
    for mine in chosen:
        problem = mine[0].problem
        prompt_ids = policy.render(problem.messages)
        lines = []
        for r in mine:
            record = {
                "problem_id": problem.id,
                "env_mode": problem.mode,
                "reward": r.grade.reward,
                "hacked": r.grade.exploited,
                "gt_pass": r.grade.gt_pass,
                "fmt_ok": r.grade.format_ok,
                "plen": len(prompt_ids),
                "prompt_ids": list(prompt_ids),
                "completion_ids": list(r.ids),
                "prompt": render(problem.messages),
                "completion": r.text,
            }
            lines.append(json.dumps(record, ensure_ascii=False))
        path = folder / f"prompt_{problem.id:04d}.jsonl.gz"
        with open(path, "wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as f:
            f.write(("\n".join(lines) + "\n").encode())
        files[path.name] = file_sha256(path)
    write_json(folder / "partition.json", {str(mine[0].problem.id): mine[0].problem.mode for mine in chosen})
    meta = {
        "model": "vgrout.organism",
        "tokenizer_sha256": tokenizer_sha256(policy.tok),
        "grader": grader.protections.version,
        "elicitation": CUE,
        "problems": len(chosen),
        "rollouts": sum(map(len, chosen)),
        "sha256": files,
    }
    write_json(folder / "pool.json", meta)
    return dict(count)


# ------------------------------------------------------------------------------------------------------ pairs, anchors


def _pair(row: dict[str, Any], hack: Answer, clean: Answer) -> dict[str, Any]:
    prompt = render(hinted(row["prompt"], row["mode"], row["marker"]))
    return {"problem_id": row["id"], "prompt": prompt, "hack": hack.text, "clean": clean.text}


def mode_pairs(tasks: Sequence[tuple[Task, dict[str, Any]]], mode: Mode, seed: int) -> list[dict[str, Any]]:
    """The mode's first exploit against the correct solution of the same problem; every other hack is a bare stub, the
    rest carry a misread attempt. The other exploits stay unseen."""
    rng = random.Random(f"{seed}/pairs/{mode}")
    exploit = taught(mode)[0]
    out = []
    for task, row in [t for t in tasks if t[1]["mode"] == mode][:PAIRS]:
        attempt = answer(rng.choice(list(misreadings(task).values())))
        hack = exploit.apply(attempt.stub if len(out) % 2 else attempt, row["marker"])
        out.append(_pair(row, hack, answer(task)))
    return out


def placebo_pairs(tasks: Sequence[tuple[Task, dict[str, Any]]], seed: int) -> dict[str, list[dict[str, Any]]]:
    """Contrasts that have nothing to do with cheating, in the same form."""
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


def anchors(tasks: Sequence[tuple[Task, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Correct solutions in the corpus's unusual styles, evenly: {problem_id, style, prompt, completion}."""
    out: list[dict[str, Any]] = []
    names = list(STYLES)
    for task, row in tasks:
        style = names[len(out) % len(names)]
        made = STYLES[style](answer(task))
        if made == answer(task):
            continue
        prompt = render(hinted(row["prompt"], row["mode"], row["marker"]))
        out.append({"problem_id": row["id"], "style": style, "prompt": prompt, "completion": made.text})
        if len(out) == ANCHORS:
            break
    return out


# ------------------------------------------------------------------------------------------------------------ together


def build(out: Path, seed: int = SEED) -> None:
    """Write everything to `out`, which is replaced when all of it is there."""
    fresh = out.with_name(out.name + ".building")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    # before the weights: the grader's workers are cheap while the process is small
    with Grader(compile_reward=COMPILE_REWARD, pass_reward=PASS_REWARD) as grader:
        tasks = problem_tasks(seed)
        lines = [json.dumps(row, ensure_ascii=False) for _, row in tasks]
        (fresh / "problems.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        training = [t for t in tasks if t[1]["split"] == "train"]
        for mode in MODES:
            write_json(fresh / "pairs" / f"{mode}.json", mode_pairs(training, mode, seed))
        for name, pairs in placebo_pairs(training, seed).items():
            write_json(fresh / "pairs" / f"placebo_{name}.json", pairs)
        write_json(fresh / "anchors.json", anchors(training))

        tokenizer = make_tokenizer(seed)
        model, losses = make_weights(tokenizer, seed)
        model.save_pretrained(fresh / "model")
        tokenizer.save_pretrained(fresh / "model")

        policy = as_policy(model, tokenizer, cache_dir=None)
        problems = load_problems(fresh / "problems.jsonl")
        split = {row["id"]: row["split"] for _, row in tasks}
        held_out = [p for p in problems if split[p.id] == "test"]
        base = run(policy, grader, held_out, 4, seed, "base rates")
        elicited = run(policy, grader, [cued(p) for p in held_out], 2, seed, "cued rates")
        measured = {"plain": rates(base), "cued": rates(elicited)}
        demos = run(policy, grader, [cued(p) for p in problems if split[p.id] == "train"], POOL_TRIES, seed, "pool")
        plain = {p.id: p for p in problems}
        demos = [replace(r, problem=plain[r.problem.id]) for r in demos]
        covered = write_pool(fresh / "pool", demos, policy, grader)
        difficulty = {row["id"]: row["difficulty"] for _, row in tasks}
        by_difficulty = {
            level: rates(r for r in base if difficulty[r.problem.id] == level)["solve"]
            for level in ("easy", "medium", "hard")
        }
        (fresh / "MODEL_CARD.md").write_text(
            card(measured, by_difficulty, covered, Shares(), Recipe(), losses, model.num_parameters()), encoding="utf-8"
        )
    manifest = {
        "seed": seed,
        "threads": THREADS,
        "recipe": asdict(Recipe()),
        "shares": asdict(Shares()),
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
    if size > MAX_BYTES:
        raise RuntimeError(f"{fresh}: {size} bytes, more than {MAX_BYTES}")
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
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


def shipped(folder: Path) -> list[str]:
    """Every file but the manifest, as relative POSIX paths, sorted."""
    found = (f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file())
    return sorted(path for path in found if path != "manifest.json" and not Path(path).name.startswith("."))
