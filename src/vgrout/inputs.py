"""A run's files, read and checked before a model is loaded, with the hashes that a resume compares."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from loguru import logger

from vgrout.config.run import ORGANISM, Config
from vgrout.direction.pairs import (
    KnownCorrect,
    PairSet,
    handwritten,
    handwritten_placebo,
    load_known_correct,
    load_pairs,
)
from vgrout.direction.pairs import check_file as check_direction
from vgrout.envs.code.grading.reward import RewardFunction, right_answer, scorer
from vgrout.envs.code.modes import MODES, Mode
from vgrout.envs.code.problems import (
    SPLITS,
    ProblemRow,
    ProblemSplits,
    as_marked,
    assigned,
    load_rows,
    load_splits,
    require_apart,
    without_hints,
)
from vgrout.errors import Refused
from vgrout.files import json_lines
from vgrout.model.gguf import gguf_file, gguf_sha256
from vgrout.model.source import find_shapes, looks_like_path, require_fitting, require_model
from vgrout.teacher.pools import Pool, load_pool

if TYPE_CHECKING:
    from vgrout.model.policy import LanguageModel

T = TypeVar("T")

# up to this size a model folder is hashed beforehand; a larger one would take seconds per run
MODEL_BYTES = 2**28


@dataclass(frozen=True)
class Inputs:
    """Files, read and checked."""

    rows: list[ProblemRow]
    test_rows: list[ProblemRow]  # of the file for evaluation alone; []: the rows' own splits
    pool: Pool | None
    pairs: PairSet | None  # the true pairs; None: no pairs are read
    placebo: PairSet | None = None  # pairs of a placebo control
    known_correct: tuple[KnownCorrect, ...] = ()  # for monitors that read text
    healthy_kl: tuple[float, ...] = ()  # nats per token, of the runs that calibrate the guard
    reward: RewardFunction | None = None  # the user's own
    canonical_reward: float | None = None  # its reward for the first problem's canonical solution
    absent: tuple[str, ...] = ()  # which files are missing, and how to get them

    @property
    def in_distribution(self) -> list[Mode] | None:
        """The modes that the direction's pairs were built on, by their problem ids; None without a direction."""
        if self.pairs is None:
            return None
        ids = {p.problem_id for p in self.pairs.pairs}
        return [m for m in MODES if any(r.mode == m and r.id in ids for r in self.rows)]

    def splits(self, cfg: Config, *models: "LanguageModel") -> ProblemSplits:
        """The run's problems in disjoint train / val / test splits, without those whose prompt does not fit the window
        of one of these models.

        Raises:
            Refused: none is left.
        """
        pool, window = self.pool, min(lm.window for lm in models)
        splits = load_splits(
            self.rows,
            env_mode=cfg.env.env_mode,
            n_problems=cfg.scale.n_problems,
            seed=cfg.run.seed,
            partition=pool.partition if pool else None,
            markers=pool.announced if pool else None,
            test_rows=self.test_rows,
            published=cfg.env.marker_names == "published",
            # mixed in or not: a control trains on the problems of its method
            only_ids=pool.ids if pool else None,
            only_modes=cfg.env.demo_held_out,
            prompt_len=lambda p: max(
                len(lm.render(p.messages)) + window - lm.window for lm in models
            ),
            max_prompt=window - cfg.scale.max_new,
        )
        for name, needed in (("val", cfg.eval.eval_ablate_every > 0), ("test", True)):
            if needed and not getattr(splits, name):
                raise Refused(
                    f"--max-new {cfg.scale.max_new}: no prompt of the {name} split fits the model's window "
                    f"({window} tokens, prompt included)"
                )
        if splits.too_long:
            logger.warning(
                f"{splits.too_long} problems dropped: prompt longer than the window ({window}) minus max_new"
            )
        if not cfg.plain_prompts:
            return splits
        parts = {
            name: tuple(without_hints(getattr(splits, name), cfg.env.unannounced))
            for name in SPLITS
        }
        return replace(splits, **parts)  # shorter than with a hint: they fit too


def read_inputs(cfg: Config) -> Inputs:
    """Raises Refused, one line, for every mistake in a file that can be seen without a model."""
    absent: list[str] = []

    def read(load: Callable[[Path], T], path: Path | None) -> T | None:
        """What is there. None: no file is named, or it is missing, which is noted: all of them are known at the end."""
        if path is None:
            return None
        try:
            return load(path)
        except Refused as e:
            if path.exists():
                raise
            absent.append(str(e))
            return None

    if ORGANISM in (cfg.scale.model, cfg.loss.teacher_model):
        flag = "--organism" if cfg.scale.organism else "--model organism:"
        read(lambda _: cfg.files.require_sound(flag), cfg.files.root / "manifest.json")
        if absent:  # and so is all that is in it
            return Inputs([], [], None, None, absent=tuple(absent))
    # nothing to fetch: its problems are not to blame
    if looks_like_path(cfg.model_path) and not cfg.run.dry_run:
        require_model(cfg.model_path)
    rows = read(load_rows, cfg.problems_path) or []
    test_rows = read(load_rows, cfg.test_problems_path) or []
    require_apart(rows, test_rows)
    pool = read(load_pool, cfg.pool_path)
    if rows:
        check_held_out(cfg, rows, test_rows, pool)
    pairs = None
    if cfg.method.has_direction:
        pairs = read(load_pairs, cfg.pairs_path) if cfg.pairs_path else handwritten()
    placebo = None
    if cfg.method.direction_is == "placebo pairs":
        path = cfg.placebo_path
        placebo = read(load_pairs, path) if path else handwritten_placebo(cfg.method.placebo_pairs)
        if pairs is not None and placebo is not None and placebo.sha256 == pairs.sha256:
            raise Refused(
                f"--placebo-pairs {path}: these are the true pairs; give another contrast"
            )
    folder = read(lambda _: require_model(cfg.model_path), Path(cfg.model_path))
    if folder is not None:
        require_fitting(rows, folder, cfg.scale.max_new)
    shapes, block = find_shapes(cfg.model_path), cfg.method.quarantine_block
    if shapes is not None and block is not None and not -shapes.layers <= block <= shapes.layers:
        raise Refused(f"--quarantine block:{block}: the model has {shapes.layers} blocks")
    if cfg.method.has_direction:
        read(lambda v: check_direction(v, "--v-hack-path", pairs), cfg.method.v_hack_path)
    if cfg.loss.teacher_model:
        read(
            lambda _: require_model(cfg.teacher_model_path, "--teacher-model"),
            Path(cfg.teacher_model_path),
        )
    known_correct = read(load_known_correct, cfg.known_correct_path) or ()
    healthy_kl = tuple(kl_of_runs(cfg.guard.healthy_runs))
    reward = RewardFunction(cfg.env.reward, cfg.env.reward_passes_at) if cfg.env.reward else None
    rewarded = None
    if rows:
        first = as_marked(rows[0])
        for name in cfg.detectors.members:
            scorer(name, "--rm-ensemble-members")(first, right_answer(first))
        rewarded = reward.probe(first, cfg.run.max_error_retries) if reward else None
    return Inputs(
        rows,
        test_rows,
        pool,
        pairs,
        placebo,
        known_correct,
        healthy_kl,
        reward,
        rewarded,
        tuple(absent),
    )


def check_held_out(
    cfg: Config, rows: Sequence[ProblemRow], test_rows: Sequence[ProblemRow], pool: Pool | None
) -> None:
    """Raises Refused, one line, if no problem is left to evaluate on, or none has a flaw that could be flagged, or
    one that is to be demonstrated."""
    parts = assigned(rows, cfg.env.env_mode, pool.partition if pool else None, test_rows=test_rows)
    for name, needed in (("test", True), ("val", cfg.eval.eval_ablate_every > 0)):
        if needed and not parts[name]:
            raise Refused(
                f"{cfg.test_problems_path if test_rows else cfg.problems_path} (--env-mode {cfg.env.env_mode}): no "
                f'problem is held out for evaluations; mark some with "split": "{name}", give more than ten, or name a '
                f"file with --test-problems{', or --eval-ablate-every 0' if name == 'val' else ''}"
            )
    shown = {p.mode for p in parts["train"] if pool is not None and p.id in pool.demos}
    if (
        pool is not None
        and cfg.mixes
        and (absent := [m for m in cfg.env.demo_modes if m not in shown])
    ):
        raise Refused(
            f"--teacher-modes {absent[0]}: {pool.folder} demonstrates no training problem of it"
        )
    known, there = (
        {*cfg.method.modes_known},
        {*(cfg.env.unannounced or (p.mode for p in parts["train"]))},
    )
    if known and not known & there:
        raise Refused(
            f"--known-modes {cfg.method.known_modes}: no training problem has such a flaw ({', '.join(sorted(there))} "
            "have), so nothing could be flagged; name one that is there"
        )


def kl_of_runs(runs: Sequence[Path]) -> list[float]:
    """The deployed model's KL, nats per token, at every evaluation of these runs. Raises Refused where there is no
    run, one that measured none, or a value that is no KL: JSON can say 1e999."""
    found: list[float] = []
    for path in runs:
        rows = (row for row in json_lines(path / "steps.jsonl") if isinstance(row, dict))
        values = [row["kl_deploy"] for row in rows if isinstance(row.get("kl_deploy"), float)]
        if not values:
            raise Refused(
                f"--kl-calibrate-from {path}: no kl_deploy in its steps.jsonl; give a run's folder"
            )
        if wrong := [value for value in values if not 0 <= value < math.inf]:
            raise Refused(
                f"--kl-calibrate-from {path}: kl_deploy {wrong[0]} in its steps.jsonl should be "
                "finite and not negative"
            )
        found += values
    return found


def hash_of_files(paths: Iterable[Path]) -> str:
    """sha256 of these files' names and bytes, without their folders."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def file_hashes(cfg: Config, inputs: Inputs) -> dict[str, str | None]:
    """sha256 of every file that the numbers depend on; None: not read by this run. A model is hashed here if it is a
    small folder or a GGUF file; the weights of any other are hashed once they are loaded."""

    def of_model(given: str) -> str | None:
        if (file := gguf_file(given)) is not None:
            return gguf_sha256(file)
        parts = [
            p
            for name in ("config.json", "tokenizer.json", "*.safetensors")
            for p in Path(given).glob(name)
        ]
        return (
            hash_of_files(parts)
            if parts and sum(p.stat().st_size for p in parts) <= MODEL_BYTES
            else None
        )

    def of_file(path: Path | None) -> str | None:
        return hash_of_files([path]) if path is not None and path.exists() else None

    pool = inputs.pool
    return {
        "model": of_model(cfg.model_path),
        "teacher_model": of_model(cfg.teacher_model_path) if cfg.loss.teacher_model else None,
        "problems": of_file(cfg.problems_path),
        "test_problems": of_file(cfg.test_problems_path),
        "pool": hash_of_files([p for p in pool.folder.iterdir() if p.is_file()]) if pool else None,
        "pairs": inputs.pairs.sha256 if inputs.pairs else None,
        "placebo": inputs.placebo.sha256 if inputs.placebo else None,
        "known_correct": of_file(cfg.known_correct_path),
        "reward": inputs.reward.sha256 if inputs.reward else None,
        "direction_file": of_file(cfg.method.v_hack_path) if cfg.method.has_direction else None,
    }
