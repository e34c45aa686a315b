"""A run's files, read and checked before a model is loaded, with the hashes that a resume compares."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from loguru import logger

from vgrout.config.checks import listed, require_words
from vgrout.config.method import judge_endpoint, judge_prompt, try_endpoint
from vgrout.config.run import PLACEBOS, Config
from vgrout.config.specs import CLASSES, MONITORS
from vgrout.config.world_names import ORGANISM
from vgrout.direction.pairs import (
    KnownCorrect,
    PairSet,
    handwritten,
    handwritten_placebo,
    load_known_correct,
    load_pairs,
)
from vgrout.direction.pairs import check_file as check_direction
from vgrout.envs.base import Environment, Grader, Splits, require_recordable, split_tasks
from vgrout.envs.worlds import environment_class
from vgrout.ground.data import Task
from vgrout.ground.io import Refused, hash_if_there, hash_of_files, hash_of_folder, once
from vgrout.ground.scoring import import_function, scorer, source_of
from vgrout.model.load.source import (
    find_shapes,
    looks_like_path,
    require_fitting,
    require_model,
    require_thinking,
)
from vgrout.teacher.pools import Pool, load_pool

if TYPE_CHECKING:
    from vgrout.model.policy import LanguageModel  # torch

T = TypeVar("T")

# up to this size a model folder is hashed beforehand; a larger one would take seconds per run
MODEL_BYTES = 2**28


@dataclass(frozen=True)
class Inputs:
    """Files, read and checked."""

    environment: Environment
    pool: Pool | None = None
    pairs: PairSet | None = None  # the true pairs; None: no pairs are read
    placebo: PairSet | None = None  # pairs of a placebo control
    known_correct: tuple[KnownCorrect, ...] = ()  # for monitors that read text
    absent: tuple[str, ...] = ()  # which files are missing, and how to get them

    @property
    def in_distribution(self) -> list[str] | None:
        """The flaws that the direction's pairs were built on, by their problem ids; None without a direction."""
        if self.pairs is None:
            return None
        ids = {pair.problem_id for pair in self.pairs.pairs}
        shown = {flaw for task, flaw in self.environment.marked.items() if task in ids}
        return [flaw for flaw in self.environment.flaws if flaw in shown]

    def splits(self, cfg: Config, *models: "LanguageModel") -> Splits:
        """The run's tasks in disjoint train / val / test splits, without those whose prompt does not fit the window
        of one of these models.

        Raises:
            Refused: none is left.
        """
        window = min(lm.window for lm in models)

        def prompt_tokens(task: Task) -> int:
            try:
                return max(len(lm.render(task.messages)) + window - lm.window for lm in models)
            except Refused as e:  # by the chat template
                where = getattr(task, "where", f"{self.environment.source}, problem {task.id}")
                raise Refused(f"{where}: {e}") from e

        undemonstrated: list[str] = []
        if demonstrated := cfg.env.demo_modes:
            undemonstrated = [flaw for flaw in self.environment.flaws if flaw not in demonstrated]
        splits = split_tasks(
            self.environment,
            self.pool,
            n_train=cfg.scale.n_problems,
            seed=cfg.run.seed,
            prompt_tokens=prompt_tokens,
            max_prompt=window - cfg.scale.max_new,
            only_ids=self.pool.ids if self.pool and not self.pool.trains_on_all else None,
            only_flaws=undemonstrated,
        )
        for name, part, needed in (
            ("val", splits.val, cfg.eval.eval_ablate_every > 0),
            ("test", splits.test, True),
        ):
            if needed and not part:
                raise Refused(
                    f"--max-new {cfg.scale.max_new}: no prompt of the {name} split fits the model's window "
                    f"({window} tokens, prompt included)"
                )
        if splits.too_long:
            logger.warning(
                f"{splits.too_long} problems dropped: prompt longer than the window ({window}) minus max_new"
            )
        return splits


def read(absent: list[str], load: Callable[[Path], T], path: Path | None) -> T | None:
    """What `load` makes of a file. None: none is named, or it is missing and stands in `absent` now: a user wants to
    hear of all of them at once.

    Raises:
        Refused: it is there, and wrong.
    """
    if path is None:
        return None
    try:
        return load(path)
    except Refused as e:
        if path.exists():
            raise
        absent.append(str(e))
        return None


def read_inputs(cfg: Config) -> Inputs:
    """Raises Refused, one line, for every mistake in a file that can be seen without a model."""
    absent, make_environment = list[str](), environment_class(cfg.env.environment).of_run
    if ORGANISM in (cfg.scale.model, cfg.loss.teacher_model):
        flag = "--organism" if cfg.scale.organism else "--model organism:"
        read(absent, lambda _: cfg.files.require_sound(flag), cfg.files.root / "manifest.json")
        if absent:  # and so is all that is in it
            return Inputs(make_environment(cfg), absent=tuple(absent))
    # nothing to fetch: its problems are not to blame
    if looks_like_path(cfg.model_path) and not cfg.run.dry_run:
        require_model(cfg.model_path)
    environment = make_environment(cfg)
    absent += environment.absent
    for name, given in cfg.flaws_named.items():
        require_words(name, given, environment.flaws, "flaw")
    require_detector(cfg, environment)
    pool = read(absent, lambda folder: load_pool(folder, (*environment.flaws,)), cfg.pool_path)
    if pool is not None and cfg.mixes:
        check_rewards(cfg, pool)
    if not environment.absent:
        parts = environment.tasks(pool).values()
        require_recordable(environment, [task for part in parts for task in part])
    if environment.prompts:
        check_held_out(cfg, environment, pool)
    pairs, placebo = read_pairs(cfg, absent, environment)
    check_model(cfg, absent, environment)
    if cfg.method.has_direction:
        read(
            absent,
            lambda v: check_direction(v, "--v-hack-path", pairs, cfg.method.extraction),
            cfg.method.v_hack_path,
        )
    if cfg.loss.teacher_model:
        teacher = cfg.teacher_model_path
        read(absent, lambda _: require_model(teacher, "--teacher-model"), Path(teacher))
    known_correct = read(absent, load_known_correct, known_correct_path(cfg, environment)) or ()
    # functions of somebody's own are tried on one right answer each
    tried = environment.tasks(pool)["train"][:1] if environment.prompts else []
    for name in cfg.detectors.members:
        score = scorer(name, "--rm-ensemble-members")
        for task in tried:
            score(task, task.right_answer)
    if "llm_judge" in cfg.method.watching:
        check_judge(cfg, absent)
    return Inputs(environment, pool, pairs, placebo, known_correct, tuple(absent))


def check_rewards(cfg: Config, pool: Pool) -> None:
    """Warn where the pool's demonstrations were rewarded by other amounts than this run's answers are: the two are
    compared with one another in a group."""
    made_with, passes = pool.pass_reward, cfg.env.pass_reward
    if made_with is None or ":" in cfg.env.environment:  # somebody's own has rewards of its own
        return
    if not math.isclose(made_with, passes):
        logger.warning(
            f"--teacher-pool-dir {pool.folder}: made with --pass-reward {made_with:g}, and this run has {passes:g}; "
            "give the pool's, or make it again with this one"
        )


def read_pairs(
    cfg: Config, absent: list[str], environment: Environment
) -> tuple[PairSet | None, PairSet | None]:
    """The pairs that the method reads, and those of a placebo control. None: it has no such pairs."""
    pairs = placebo = None
    flaws = tuple(environment.flaws)  # a folder of pairs has a file for each
    if cfg.method.reads_pairs:
        path = cfg.method.vhack_pairs_path or environment.pairs_path
        if path:
            of_pool = cfg.method.vhack_pairs_path is None and not environment.of_organisms
            load = partial(
                load_pairs,
                flaws=flaws,
                flag="--teacher-pool-dir" if of_pool else "--vhack-pairs-path",
                how=environment.how_pairs_are_made,
            )
            pairs = read(absent, load, path)
        elif environment.handwritten_pairs:
            pairs = handwritten()
        elif cfg.method.v_hack_path is None:
            raise Refused(
                f"--intervention {cfg.method.intervention} --monitor {cfg.method.monitor_name}: needs pairs of a hack "
                "and a right answer; give --vhack-pairs-path FILE, or a --teacher-pool-dir that "
                "`vgrout teacher --elicit` made"
            )
    if cfg.method.direction_is == "placebo pairs":
        named = cfg.method.placebo_pairs
        path = environment.placebo_path(named) if named in PLACEBOS else Path(named)
        load = partial(load_pairs, flag="--placebo-pairs", flaws=flaws)
        placebo = read(absent, load, path) if path else handwritten_placebo(named)
        if pairs is not None and placebo is not None and placebo.sha256 == pairs.sha256:
            raise Refused(
                f"--placebo-pairs {path}: these are the true pairs; give another contrast"
            )
    return pairs, placebo


def known_correct_path(cfg: Config, environment: Environment) -> Path | None:
    """Correct answers for monitors of text; None: they are not read, or are the base's own."""
    if not cfg.method.needs_known_correct:
        return None
    return cfg.method.known_correct or environment.known_correct_path


def check_model(cfg: Config, absent: list[str], environment: Environment) -> None:
    """Raises Refused, one line, if prompts do not fit the model, or the quarantine's block is none of its blocks."""
    folder = read(absent, lambda _: require_model(cfg.model_path), Path(cfg.model_path))
    if folder is not None:
        if cfg.env.thinking:
            require_thinking(folder)
        require_fitting(environment.prompts, folder, cfg.scale.max_new, environment.source)
    shapes, block = find_shapes(cfg.model_path), cfg.method.quarantine_block
    if shapes is not None and block is not None and not -shapes.layers <= block <= shapes.layers:
        raise Refused(f"--quarantine block:{block}: the model has {shapes.layers} blocks")


def check_judge(cfg: Config, absent: list[str]) -> None:
    """Read the judge's prompt, and try its model: a folder is looked at, an endpoint is asked once.

    Raises:
        Refused: one line: what is wrong with it.
    """
    method = cfg.method
    read(absent, judge_prompt, method.llm_judge_prompt)
    if not method.llm_judge_url:
        folder = method.llm_judge_model
        read(absent, lambda _: require_model(folder, "--llm-judge-model"), Path(folder))
        return
    endpoint = judge_endpoint(method)
    if not cfg.run.dry_run and not absent:  # a plan asks nobody
        try_endpoint(method, endpoint)


def require_detector(cfg: Config, environment: Environment) -> None:
    """Raises Refused, one line, for a monitor that could never flag, because its only source of flags, the
    environment's weak detector or demonstrations, is not there."""
    if environment.detectors:
        return
    nothing = f"could flag nothing: --env {environment.name} has no weak detector"
    for name in cfg.method.watching:
        needs, flag = MONITORS[name].needs, "--monitor"
        if name in cfg.method.in_shadow:
            flag = "--shadow"
        elif name != cfg.method.monitor_name:
            flag = "--seed-monitor"
        given = f"{flag} {name}"
        if "detector" in needs:
            raise Refused(f"{given}: {nothing}; name source or labels")
        if "demonstrations" in needs and not cfg.mixes:
            raise Refused(
                f"{given}: {nothing}, and no demonstration is mixed in; give a --teacher-pool-dir, which "
                "`vgrout teacher --elicit` makes, or name labels"
            )


def require_own_labels(cfg: Config, inputs: Inputs, grader: Grader) -> None:
    """Raises Refused, one line, where demonstrations of rows of a user's own were labelled by other functions than
    those of this run: what was a hack may be right by now."""
    pool = inputs.pool
    if (
        pool is None
        or not cfg.mixes
        or inputs.environment.of_organisms
        or pool.grader == grader.version
    ):
        return
    raise Refused(
        f"--teacher-pool-dir {pool.folder}: its demonstrations were labelled by other functions than --reward and "
        "--reference, or these were changed since; make it again with `vgrout teacher --elicit`"
    )


def check_held_out(cfg: Config, environment: Environment, pool: Pool | None) -> None:
    """Raises Refused, one line, if no problem is left to evaluate on, or none has a flaw that could be flagged, or
    one that is to be demonstrated."""
    parts = environment.tasks(pool)
    of_mode = f" (--env-mode {cfg.env.env_mode})" if cfg.env.environment == "code" else ""
    needed = {"test": True, "val": cfg.eval.eval_ablate_every > 0}
    for name, is_needed in needed.items():
        if is_needed and not parts[name]:
            instead = ", or --eval-ablate-every 0" if name == "val" else ""
            raise Refused(
                f"{environment.source}{of_mode}: no problem is held out for evaluations; mark some with "
                f'"split": "{name}", give more than ten, or name a file with --test-problems{instead}'
            )
    if pool is not None and cfg.mixes:
        shown = {task.flaws[0] for task in parts["train"] if task.id in pool.demos}
        for flaw in cfg.env.demo_modes:
            if flaw not in shown:
                raise Refused(
                    f"--teacher-modes {flaw}: {pool.folder} demonstrates no training problem of it"
                )
    known = set(cfg.method.modes_known)
    there = {flaw for task in parts["train"] for flaw in task.flaws}
    if known and not known & there:
        raise Refused(
            f"--known-modes {cfg.method.known_modes}: no training problem has such a flaw ({', '.join(sorted(there))} "
            "have), so nothing could be flagged; name one that is there"
        )


@once
def _hash_of_model(given: str) -> str | None:
    """Of a small model folder; None of another."""
    parts: list[Path] = []
    for name in ("config.json", "tokenizer.json", "*.safetensors"):
        parts += Path(given).glob(name)
    is_small = sum(part.stat().st_size for part in parts) <= MODEL_BYTES
    return hash_of_files(parts) if parts and is_small else None


def hash_of_class(given: str) -> str | None:
    """sha256 of the file of module:Class; None: it has none."""
    return hash_if_there(source_of(import_function(given, "--env", "module:Class")))


def file_hashes(cfg: Config, inputs: Inputs) -> dict[str, str | None]:
    """sha256 of every file that the numbers depend on; None: not read by this run. A model is hashed here if it is a
    small folder; the weights of any other are hashed once they are loaded."""

    method, pool, hashes = cfg.method, inputs.pool, dict[str, str | None]()
    # entries of their own only where there is something: other runs' records stay as they are
    if "llm_judge" in method.watching:
        hashes["judge_prompt"] = hash_if_there(method.llm_judge_prompt)
        if not method.llm_judge_url:
            hashes["judge_model"] = _hash_of_model(method.llm_judge_model)
    classes = [
        cfg.env.environment,
        *(word for name in CLASSES for word in listed(getattr(method, name))),
    ]
    hashes |= {given: hash_of_class(given) for given in classes if ":" in given}
    return hashes | {
        "model": _hash_of_model(cfg.model_path),
        "teacher_model": _hash_of_model(cfg.teacher_model_path) if cfg.loss.teacher_model else None,
        **inputs.environment.hashes(),
        "pool": hash_of_folder(pool.folder) if pool else None,
        "pairs": inputs.pairs.sha256 if inputs.pairs else None,
        "placebo": inputs.placebo.sha256 if inputs.placebo else None,
        "known_correct": hash_if_there(known_correct_path(cfg, inputs.environment)),
        "direction_file": hash_if_there(method.v_hack_path) if method.has_direction else None,
    }
