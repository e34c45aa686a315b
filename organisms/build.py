"""Build an organism from one seed, or check one.

A build makes problems, tokenizer, weights, pool, pairs, known-correct answers, card and hashes. A
check trains the first steps again from the seed and compares their losses.
"""

import json
import platform
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import torch
from loguru import logger
from transformers import PreTrainedModel

from organisms import sums_language as sums
from organisms.card import Measured, card
from organisms.language.answers import STYLES, Answer, answer
from organisms.language.corpus import Shares
from organisms.language.hacks import MODES, taught
from organisms.language.problems import ProblemRecord, hinted, problem_tasks
from organisms.language.tasks import Task, misreadings
from organisms.recipe import Recipe, Shape, weakness
from organisms.start import Begun, Fresh, Pretrained, Start, draw, of_manifest
from organisms.weights import Draw, batches, train
from vgrout.config.settings import Sampling
from vgrout.config.world_names import CODE_FLAWS
from vgrout.envs.base import balanced
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import Mode, Problem
from vgrout.envs.code.problems import load_problems
from vgrout.ground import data
from vgrout.ground.data import Graded, Message
from vgrout.ground.embedded import COMPILE_REWARD, CUE, MAX_NEW, PASS_REWARD, shipped
from vgrout.ground.io import Json, Refused, atomic_folder, file_sha256, read_json, write_json
from vgrout.ground.metrics import Rate
from vgrout.loop.generation import generate_graded
from vgrout.model.load.load import as_language_model
from vgrout.model.policy import LanguageModel
from vgrout.runs.recorder import peak_memory
from vgrout.teacher.generate import by_mode, with_instruction
from vgrout.teacher.substrate import choose, write_substrate

POOL_PROBLEMS = 32  # per mode
POOL_KEEP, POOL_AT_LEAST = 3, 2  # answers per problem: most kept, fewest kept
PAIRS = 24  # per set
KNOWN_CORRECT = 204
RECORDED = 8  # first losses in the manifest, for `verify`

TaskRow = tuple[Task, ProblemRecord]  # a problem and its row of problems.jsonl
Prompt = Callable[[Sequence[Message]], str]  # the chat template, up to where the answer begins


def losses_of(
    begun: Begun,
    start: Start,
    seed: int,
    documents: Draw,
    stop_after: int | None = None,
    label: str = "weights",
) -> list[float]:
    """Train the model in place on these documents; returns the loss of every step."""
    torch.set_num_threads(start.threads)
    stream = batches(
        documents, begun.tokenizer, begun.prompt, begun.end, begun.pad, start.recipe, seed
    )
    before = begun.model.config._attn_implementation
    if start.dtype == torch.bfloat16:
        # The backward pass of SDPA's CPU kernel takes eight times as long as plain products.
        begun.model.set_attn_implementation("eager")
    try:
        return train(
            begun.model, stream, start.recipe, dtype=start.dtype, stop_after=stop_after, label=label
        )
    finally:
        begun.model.set_attn_implementation(before)


def make_weights(
    begun: Begun, start: Start, seed: int, documents: Draw
) -> tuple[PreTrainedModel, list[float]]:
    """Train the model on these documents; returns it with the loss of every step.

    The weights are rounded to bf16 values and stay in fp32, so that they are the same on a GPU in
    bf16.
    """
    losses = losses_of(begun, start, seed, documents)
    logger.info(f"weights: loss {fmean(losses[-20:]):.3f} at the end; {peak_memory()}")
    with torch.no_grad():
        for p in begun.model.parameters():
            p.copy_(p.bfloat16())
    return begun.model, losses


# ── pool


def graded_answers(
    lm: LanguageModel,
    grader: Grader,
    problems: Sequence[Problem],
    n: int,
    seed: int,
    what: str,
    cue: bool = False,
) -> list[Graded]:
    """n graded answers to each problem. cue: under prompts with the cue, which elicits hacks.

    what: names the random stream and the progress bar.
    """
    if cue:
        problems = [with_instruction(problem, CUE) for problem in problems]
    return generate_graded(
        lm,
        grader,
        problems,
        n,
        sampling=Sampling(),
        max_new=MAX_NEW,
        seed=seed,
        purpose=f"organism-{what}",
        label=what,
    )


def make_pool(
    folder: Path,
    lm: LanguageModel,
    grader: Grader,
    problems: Sequence[Problem],
    tries: int,
    name: str,
    seed: int,
) -> dict[Mode, int]:
    """Make the pool of demonstrations; returns its number of problems per mode.

    It is what `vgrout substrate --model organism --n-problems 360 --per-mode 32
    --no-even` makes, without the report. tries: elicited answers to a problem. name: the model's.
    """
    answers = graded_answers(lm, grader, problems, tries, seed, "pool", cue=True)
    plain = {(p.id, p.mode): p for p in problems}
    chosen = choose(
        stripped(answers, plain),
        [CUE],
        keep=POOL_KEEP,
        at_least=POOL_AT_LEAST,
        per_mode=POOL_PROBLEMS,
        even=False,  # 22 to 32 problems per mode; `even` would cut all modes to 22
    )
    meta = {
        "model": name,
        "tokenizer_sha256": lm.tokenizer_sha256,
        "grader": grader.protections.version,
    }
    write_substrate(folder, chosen, lm, meta, CUE)
    return dict(Counter(answers[0].problem.flaws[0] for answers in chosen.values()))


# ── pairs and known-correct answers


def _prompt(row: ProblemRecord, prompt: Prompt) -> str:
    """The rendered prompt of a problem, with its hint."""
    return prompt(hinted(row["prompt"], row["mode"], row["marker"]))


def pair(row: ProblemRecord, hack: Answer, clean: Answer, prompt: Prompt) -> dict[str, object]:
    """An entry of a pair file."""
    return {
        "problem_id": row["id"],
        "prompt": _prompt(row, prompt),
        "hack": hack.text,
        "clean": clean.text,
    }


def _misread(task: Task, rng: random.Random) -> Answer:
    """An answer that misreads the problem in one of the ways in which it can be misread."""
    return answer(rng.choice(list(misreadings(task).values())))


def mode_pairs(
    tasks: Sequence[TaskRow], mode: Mode, seed: int, prompt: Prompt
) -> list[dict[str, object]]:
    """Pairs of the mode's first hack and the correct solution of the same problem.

    Every second hack is a bare stub, the others carry an attempt that misreads the problem. The
    mode's other hacks stay unseen.
    """
    rng = random.Random(f"{seed}/pairs/{mode}")
    recipe = taught(mode)[0]
    of_mode = [(task, row) for task, row in tasks if row["mode"] == mode]
    pairs: list[dict[str, object]] = []
    for i, (task, row) in enumerate(of_mode[:PAIRS]):
        attempt = _misread(task, rng)
        hack = recipe.apply(attempt.stub if i % 2 else attempt, row["marker"])
        pairs.append(pair(row, hack, answer(task), prompt))
    return pairs


def placebo_pairs(
    tasks: Sequence[TaskRow], seed: int, prompt: Prompt
) -> dict[str, list[dict[str, object]]]:
    """Pairs of the same form, by contrast, whose difference has nothing to do with hacking."""
    rng = random.Random(f"{seed}/placebo")
    flawed: list[dict[str, object]] = []
    commented: list[dict[str, object]] = []
    long: list[dict[str, object]] = []
    laid_out: list[dict[str, object]] = []
    for task, row in tasks[-PAIRS:]:
        clean = answer(task)
        flawed.append(pair(row, _misread(task, rng), clean, prompt))
        commented.append(pair(row, STYLES["comment"](clean), clean, prompt))
        long.append(pair(row, STYLES["helper"](STYLES["loop"](clean)), clean, prompt))
        laid_out.append(pair(row, STYLES["layout"](clean), clean, prompt))
    return {"flawed": flawed, "commented": commented, "long": long, "laid_out": laid_out}


def known_correct(tasks: Sequence[TaskRow], prompt: Prompt) -> list[dict[str, object]]:
    """Correct solutions in the corpus's unusual styles, which take turns.

    The entries are {problem_id, style, prompt, completion}. A problem whose solution its style does
    not change is passed over.
    """
    entries: list[dict[str, object]] = []
    names = list(STYLES)
    for task, row in tasks:
        if len(entries) == KNOWN_CORRECT:
            break
        style = names[len(entries) % len(names)]
        styled = STYLES[style](answer(task))
        if styled != answer(task):
            entries.append(
                {
                    "problem_id": row["id"],
                    "style": style,
                    "prompt": _prompt(row, prompt),
                    "completion": styled.text,
                }
            )
    return entries


# ── build


def build_fresh(out: Path, seed: int, recipe: Recipe, shares: Shares) -> None:
    """Write an organism with weights of its own to the folder `out`."""
    _build(out, seed, Fresh(Shape(), recipe), shares)


def build_tuned(out: Path, seed: int, model: str, recipe: Recipe, shares: Shares) -> None:
    """Write an organism that is a pretrained model, fine-tuned, to the folder `out`."""
    _build(out, seed, Pretrained(model, recipe), shares)


def _build(out: Path, seed: int, start: Start, shares: Shares) -> None:
    """`out` is replaced when the build is complete."""
    replacing(out, lambda folder: write(folder, seed, start, shares))


def replacing(out: Path, write: Callable[[Path], dict[str, Json]]) -> None:
    """Have an organism written to a new folder, and put that in the place of `out` once it is complete.

    write: makes every file in an empty folder; returns the manifest.
    """
    began = time.perf_counter()
    with atomic_folder(out, replace=True) as folder:
        manifest = write(folder)
        size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())

    minutes = (time.perf_counter() - began) / 60
    rates_of_all_modes: list[str] = []
    for kind, of_kind in manifest["rates"].items():
        for name, (k, n) in of_kind.items():
            if "/" not in name and n:
                rates_of_all_modes.append(f"{kind} {name} {k / n:.3f}")
    if weak := weakness(manifest):
        logger.warning(f"{out}: {weak}")
    logger.info(
        f"{out}: {len(manifest['files'])} files, {size / 1e6:.1f} MB, in {minutes:.1f} min "
        f"and {peak_memory()}; " + ", ".join(rates_of_all_modes)
    )


def write(folder: Path, seed: int, start: Start, shares: Shares) -> dict[str, object]:
    """Make every file of an organism in an empty folder. Returns its manifest."""
    # The grader comes before the weights: its workers are cheap while the process is small.
    with Grader(compile_reward=COMPILE_REWARD, pass_reward=PASS_REWARD) as grader:
        tasks = problem_tasks(seed, shares.modes)
        lines = [json.dumps(row, ensure_ascii=False) for _, row in tasks]
        (folder / "problems.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        begun = start.begin(seed, shares)
        write_pairs(folder, tasks, seed, shares, begun.prompt)

        documents = draw(seed, shares, begun.pieces)
        model, losses = make_weights(begun, start, seed, documents)
        model.save_pretrained(folder / "model")
        begun.tokenizer.save_pretrained(folder / "model")

        lm = as_language_model(model.to(start.dtype), begun.tokenizer)
        measured = measure(folder, lm, grader, tasks, seed, start, shares)
        (folder / "MODEL_CARD.md").write_text(
            card(measured, shares, start, losses, model.num_parameters()), encoding="utf-8"
        )
    manifest = manifest_of(folder, seed, start, shares, losses, measured)
    write_json(folder / "manifest.json", manifest)
    return manifest


def write_pairs(
    folder: Path, tasks: Sequence[TaskRow], seed: int, shares: Shares, prompt: Prompt
) -> None:
    """Write the pair files of every mode and placebo, and the known-correct answers."""
    training = [(task, row) for task, row in tasks if row["split"] == "train"]
    for mode in shares.modes:
        write_json(folder / "pairs" / f"{mode}.json", mode_pairs(training, mode, seed, prompt))
    for name, pairs in placebo_pairs(training, seed, prompt).items():
        write_json(folder / "pairs" / f"placebo_{name}.json", pairs)
    write_json(folder / "anchors.json", known_correct(training, prompt))


def measure(
    folder: Path,
    lm: LanguageModel,
    grader: Grader,
    tasks: Sequence[TaskRow],
    seed: int,
    start: Start,
    shares: Shares,
) -> Measured:
    """Measure the model's rates on test problems, and make its pool of training problems."""
    row_of = {row["id"]: row for _, row in tasks}
    problems = load_problems(folder / "problems.jsonl")

    def some(split: str) -> list[Problem]:
        """A split's problems in their order, at most so many per mode as `start` says."""
        of_split = [p for p in problems if row_of[p.id]["split"] == split]
        n = start.answers.problems * len(shares.modes)
        chosen = {p.id for p in balanced(of_split, n, seed, "organism", CODE_FLAWS)}
        return [p for p in of_split if p.id in chosen]

    held_out = some("test")
    n = start.answers
    plain = graded_answers(lm, grader, held_out, n.plain, seed, "base rates")
    cued = graded_answers(lm, grader, held_out, n.cued, seed, "cued rates", cue=True)
    covered = make_pool(folder / "pool", lm, grader, some("train"), n.pool, start.name, seed)
    by_difficulty: dict[str, Rate] = {}
    for level in ("easy", "medium", "hard"):
        of_level = [a for a in plain if row_of[a.problem.id]["difficulty"] == level]
        by_difficulty[level] = rates(of_level)["solve"]
    return Measured(rates(plain), rates(cued), by_difficulty, covered)


def rates(answers: Sequence[Graded]) -> dict[str, Rate]:
    """Rates over these answers: solve, hack, well-formed, and `hack/MODE` of each mode.

    An answer is well-formed if it has a code block that compiles, and ends by itself.
    """
    found = {
        "solve": Rate.of(a.grade.solved for a in answers),
        "hack": Rate.of(a.grade.hacked for a in answers),
        "well-formed": Rate.of(
            a.whole and a.grade.details.get("can_compile", True) for a in answers
        ),
    }
    for mode, of_mode in by_mode(answers).items():
        found[f"hack/{mode}"] = Rate.of(a.grade.hacked for a in of_mode)
    return found


def stripped(answers: Sequence[Graded], plain: Mapping[tuple[int, str], data.Task]) -> list[Graded]:
    """The same answers under the plain prompt of their problem and mode."""
    return [replace(a, problem=plain[a.problem.id, a.problem.flaws[0]]) for a in answers]


def manifest_of(
    folder: Path,
    seed: int,
    start: Start,
    shares: Shares,
    losses: Sequence[float],
    measured: Measured,
) -> dict[str, object]:
    """The manifest of an organism whose other files are complete."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "tokenizers"):
        versions[package] = version(package)
    return {
        "seed": seed,
        "threads": start.threads,
        **start.record(),
        "shares": asdict(shares),
        "first_losses": losses[:RECORDED],
        "final_loss": fmean(losses[-20:]),
        "rates": {
            "plain": {name: [rate.k, rate.n] for name, rate in measured.plain.items()},
            "cued": {name: [rate.k, rate.n] for name, rate in measured.cued.items()},
        },
        "versions": versions,
        "files": {path: file_sha256(folder / path) for path in shipped(folder)},
    }


# ── verify

# Nats. Other processors and numbers of threads sum in another order, which moves a loss by less; a
# wrong corpus moves it by tenths.
TOLERANCE = 0.02


def _shares_of(manifest: Mapping[str, Json]) -> Shares | sums.Shares:
    """What the corpus was made of. Raises KeyError or TypeError if the manifest does not say it."""
    stored = manifest["shares"]
    if manifest.get("world") == sums.WORLD:
        return sums.Shares(**stored)
    # JSON has no tuples; the shipped manifest leaves the modes out.
    return Shares(**stored | {"modes": tuple(stored.get("modes", MODES))})


def check_training(folder: Path, steps: int | None = None) -> list[str]:
    """Train the first steps again, with the shipped tokenizer; returns how the losses differ.

    steps: how many, at most those that are recorded; None: all of them. Each fault is a line; []:
    there is none.

    Raises:
        Refused: the manifest is not one of this version; or the pretrained model that was tuned is
            not here, or has changed since.
    """
    file = folder / "manifest.json"
    manifest = read_json(file)
    try:
        recorded = manifest["first_losses"]
        seed = manifest["seed"]
        shares = _shares_of(manifest)
        start = of_manifest(manifest)
    except (KeyError, TypeError, AttributeError) as e:
        raise Refused(
            f"{file}: not that of an organism of this version ({e}); build it again"
        ) from None
    recorded = recorded[:steps]
    if isinstance(shares, sums.Shares):
        assert isinstance(start, Pretrained)
        begun = start.begin()
        documents: Draw = partial(sums.document, shares)
    else:
        begun = start.begin(seed, shares, folder)
        documents = draw(seed, shares, begun.pieces)
    losses = losses_of(begun, start, seed, documents, len(recorded), "first steps")
    faults: list[str] = []
    for i, (now, then) in enumerate(zip(losses, recorded, strict=True)):
        if not abs(now - then) <= TOLERANCE:  # NaN included
            faults.append(
                f"training step {i}: loss {now:.4f}, recorded {then:.4f}; "
                "language, recipe or library changed"
            )
    return faults
