"""An organism whose hacks read like honest answers: another one's model, with problems whose check has tests of its
own, some of which expect a misreading."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from loguru import logger

from organisms.build import PAIRS, TaskRow, pair, placebo_pairs
from organisms.language.answers import Answer, answer
from organisms.language.look_alike import RIGHT, check_tests, misread_body
from organisms.language.problems import problem_tasks
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.problems import load_problems
from vgrout.ground.data import Completion, Grade, GradedCompletion
from vgrout.ground.embedded import COMPILE_REWARD, PASS_REWARD, Files
from vgrout.ground.io import (
    atomic_folder,
    read_json,
    write_json,
    write_json_lines,
)
from vgrout.model.load.load import load_language_model
from vgrout.model.policy import LanguageModel
from vgrout.teacher.generate import record
from vgrout.teacher.pools import write_pool

FLAW = "given_tests"


def build_look_alike(out: Path, base: Path, kind: str, weak: bool) -> None:
    """Write an organism with the model, tokenizer and known-correct answers of `base`, and with problems, pairs and
    demonstrations of its own. An organism that is there is replaced when the new one is complete.

    kind: of misreading. weak: tests that the right reading passes as well.
    """
    of_base = Files(base)
    manifest = read_json(base / "manifest.json")
    seed = manifest["seed"]
    tasks: list[TaskRow] = []
    hacks: dict[int, Answer] = {}  # problem id → the misreading, where the tests are wrong
    for task, row in problem_tasks(seed, (FLAW,)):
        misread = misread_body(task, kind)
        rng = random.Random(f"{seed}/look-alike/{row['id']}")
        row["check_tests"] = check_tests(task, row["gt_answer"], misread, weak, rng)
        row["reading"] = RIGHT if misread is None else kind
        tasks.append((task, row))
        if misread is not None:
            hacks[row["id"]] = replace(answer(task), body=tuple(misread))
    training = [(task, row) for task, row in tasks if row["split"] == "train"]
    misreadable = [(task, row) for task, row in training if row["id"] in hacks]

    with atomic_folder(out, replace=True) as folder:
        shutil.copytree(of_base.model, folder / "model")
        shutil.copy(of_base.known_correct, folder / of_base.known_correct.name)
        write_json_lines(folder / "problems.jsonl", [row for _, row in tasks])
        lm = load_language_model(str(of_base.model), device="cpu", dtype=torch.float32)
        pairs = [
            pair(row, hacks[row["id"]], answer(task), lm.prompt_text)
            for task, row in misreadable[:PAIRS]
        ]
        write_json(folder / "pairs" / f"{FLAW}.json", pairs)
        for name, placebo in placebo_pairs(training, seed, lm.prompt_text).items():
            write_json(folder / "pairs" / f"placebo_{name}.json", placebo)
        write_demonstrations(folder, lm, {row["id"]: hacks[row["id"]] for _, row in misreadable})
        tests = "weak" if weak else "wrong"
        manifest["look_alike"] = {"of": str(base), "kind": kind, "tests": tests}
        write_json(folder / "manifest.json", manifest)
        Files(folder).seal()
    logger.info(f"{out}: {len(hacks)} of {len(tasks)} problems can be misread ({kind})")


def write_demonstrations(folder: Path, lm: LanguageModel, hacks: dict[int, Answer]) -> None:
    """Write the pool of an unfinished organism: one misreading of each problem that has one, graded. A run trains on
    the other problems too."""
    problems = {problem.id: problem for problem in load_problems(folder / "problems.jsonl")}
    with Grader(compile_reward=COMPILE_REWARD, pass_reward=PASS_REWARD, detectors=False) as grader:
        verdicts = {i: grader.submit(problems[i], hack.text) for i, hack in hacks.items()}
        records: dict[int, Sequence[dict[str, object]]] = {}
        for i, verdict in verdicts.items():
            grade, text = verdict.result(), hacks[i].text
            assert isinstance(grade, Grade)
            demonstration = Completion(lm.encode_completion(text, True), text, finished=True)
            records[i] = [record(lm, GradedCompletion(problems[i], 0, demonstration, grade))]
        meta = {
            "model": "written",
            "tokenizer_sha256": lm.tokenizer_sha256,
            "grader": grader.protections.version,
            "pass_reward": PASS_REWARD,
            "trains_on_all": True,
        }
    write_pool(folder / "pool", records, dict.fromkeys(records, FLAW), meta)
