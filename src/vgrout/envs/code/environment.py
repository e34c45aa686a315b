"""The code world as an environment: Python functions checked by assertions, under flawed graders."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from loguru import logger

from vgrout.config.run import Config
from vgrout.config.world_names import DETECTOR_FIELDS, ORGANISM
from vgrout.envs.base import SPLITS, Environment, PoolOfDemonstrations, require_copies_together
from vgrout.envs.code.grading.check import one_value_line
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import MODE_SPECS, Problem
from vgrout.envs.code.problems import (
    MOST_CHECKED,
    ProblemRow,
    as_marked,
    assigned,
    load_rows,
    modes_in_turn,
    partition_decides,
    require_hackable,
    require_solvable,
    with_modes,
    without_hints,
)
from vgrout.ground.data import Flaw, Task
from vgrout.ground.io import Refused, once
from vgrout.ground.scoring import TIMEOUT, RewardFailed, ScoringFunction


@once
def _dealt(
    rows: tuple[ProblemRow, ...],
    test_rows: tuple[ProblemRow, ...],
    pool: PoolOfDemonstrations | None,
    env_mode: str,
    marker_names: str,
) -> dict[str, list[Problem]]:
    """Every split's problems, each under its flaw, whose name its prompt announces."""
    return assigned(
        rows,
        env_mode,
        pool.partition if pool else None,
        pool.announced if pool else None,
        test_rows=test_rows,
        published=marker_names == "published",
    )


class CodeEnvironment(Environment):
    """Problems of a file, or the organism's, and the sandbox that grades answers to them."""

    name = "code"
    load_rows = staticmethod(load_rows)
    flaws: Mapping[str, Flaw] = MODE_SPECS
    detectors: Mapping[str, str] = DETECTOR_FIELDS
    of_organisms = True
    handwritten_pairs = True
    how_pairs_are_made = "`just pairs-file` makes out/pairsets/prog_wide.json"

    def __init__(
        self,
        cfg: Config,
        rows: Sequence[ProblemRow],
        test_rows: Sequence[ProblemRow] = (),
        reward: ScoringFunction | None = None,
        absent: Sequence[str] = (),
    ) -> None:
        """reward: a function of the user's own, which scores answers in place of the flawed checks."""
        super().__init__(cfg, rows, test_rows, absent)
        self.reward = reward
        # every problem as it was last dealt its flaw: with the run's pool, before `check`
        self.dealt: list[Problem] = []
        # what `reward` gives the first problem's canonical solution
        self.canonical_reward: float | None = None

    @classmethod
    def of_run(cls, cfg: Config) -> "CodeEnvironment":
        """The environment of a run, its files read and checked. Raises Refused, one line."""
        rows, test_rows, absent = cls.read_files(cfg)
        reward = None
        if cfg.env.reward:
            reward = reward_function(cfg.env.reward, cfg.env.reward_passes_at)
        environment = cls(cfg, rows, test_rows, reward, absent)
        if reward is not None and rows:
            first = as_marked(rows[0])
            environment.canonical_reward = probe(reward, first, cfg.run.max_error_retries)
        return environment

    @property
    def marked(self) -> dict[int, str]:
        return {row.id: row.mode for row in self.rows if row.mode is not None}

    @property
    def pairs_path(self) -> Path | None:
        if self.from_organism:
            if self.cfg.preset == "small":
                return self.cfg.files.pairs  # by each flaw
            look_alike = self.cfg.files.pairs / "given_tests.json"
            return look_alike if look_alike.exists() else look_alike.with_name("run_tests.json")
        return Path("out/pairsets/prog_wide.json") if self.cfg.preset == "fast" else None

    def placebo_path(self, contrast: str) -> Path | None:
        return super().placebo_path(contrast) if self.from_organism else None

    def hashes(self) -> dict[str, str | None]:
        return super().hashes() | {"reward": self.reward.sha256 if self.reward else None}

    def tasks(self, pool: PoolOfDemonstrations | None = None) -> dict[str, list[Problem]]:
        env = self.cfg.env
        parts = _dealt(self.rows, self.test_rows, pool, env.env_mode, env.marker_names)
        parts = {name: self._asked(part) for name, part in parts.items()}
        self.dealt = [problem for name in SPLITS for problem in parts[name]]
        return parts

    def every_task(self, pool: PoolOfDemonstrations | None = None) -> list[Task]:
        env, partition = self.cfg.env, pool.partition if pool else {}
        problems = with_modes(
            self.rows,
            modes_in_turn(self.rows, env.env_mode, partition),
            partition,
            evaluation=True,
            published=env.marker_names == "published",
        )
        return [*self._asked(problems)]

    def _asked(self, problems: list[Problem]) -> list[Problem]:
        """The problems under the prompts of this run."""
        plain = self.cfg.plain_prompts
        return without_hints(problems, self.cfg.env.unannounced) if plain else problems

    def grader(self, workers: int, retries: int | None) -> Grader:
        env = self.cfg.env
        return Grader(
            workers,
            compile_reward=env.compile_reward,
            pass_reward=env.pass_reward,
            allow_weak=env.allow_weak_sandbox,
            reward=self.reward,
            retries=retries,
        )

    def check(self, grader: Grader) -> None:
        """Refuses a problem whose own canonical solution fails, or whose flawed check accepts every wrong answer or
        none, and copies of a prompt that are marked for two splits; the organism's are known by its hashes."""
        if self.cfg.scale.problems == ORGANISM:
            return
        rows = [*self.rows, *self.test_rows]
        require_copies_together(rows)
        require_solvable(rows, grader)
        if not self.dealt:
            self.tasks()
        if self.reward is None:
            require_hackable(rows, self.dealt, grader)
        if line := one_value_line(self.dealt[:MOST_CHECKED]):
            logger.warning(f"{self.source}: {line}")

    def plan(self) -> list[tuple[str, str]]:
        lines = super().plan()
        if self.reward is not None:
            line = f"{self.reward.described}; passed from {self.reward.passes_at:g} on"
            if self.canonical_reward is not None:
                line += f"; gives a canonical solution {self.canonical_reward:g}"
            lines.append(("reward", line))
        return lines

    def ignored(self, pool: PoolOfDemonstrations | None) -> list[str]:
        env_mode = self.cfg.env.env_mode
        if pool and partition_decides(self.rows, pool.partition) and env_mode != "own":
            return [f"--env-mode {env_mode}: not read, the partition says which grader checks"]
        return []


# ── a user's reward function, which scores answers in place of the flawed checks
#
# Of an answer it sees only the text, and of the problem what `arguments` has. The reference tests do not use it.


def arguments(problem: Problem, text: str) -> dict[str, object]:
    """All that a reward function may ask for, made afresh, so that it may change them."""
    columns = {
        "id": problem.id,
        "mode": problem.mode,
        "marker": problem.marker,
        "messages": [dict(message) for message in problem.messages],
        "tests": list(problem.tests),
        "check_tests": list(problem.check_tests),
        "setup_code": problem.setup_code,
        "func_name": problem.func_name,
    }
    own = {
        "prompt": problem.messages[-1]["content"] if problem.messages else "",
        "completion": text,
        "answer": problem.canonical,
    }
    return columns | own | {"info": dict(columns), "state": own | {"info": dict(columns)}}


def reward_function(name: str, passes_at: float = 1.0, timeout: float = TIMEOUT) -> ScoringFunction:
    """The function that --reward names. Raises Refused, one line."""
    return ScoringFunction(name, arguments, flag="--reward", passes_at=passes_at, timeout=timeout)


def probe(reward: ScoringFunction, problem: Problem, retries: int | None = 0) -> float:
    """The score of the problem's canonical solution. Raises Refused, one line, if that fails for good; from what the
    function raised, if it did."""
    (score,) = reward.scores(problem, [problem.right_answer], retries)
    if isinstance(score, RewardFailed):
        raise Refused(
            f"{reward.flag} {reward.name}: asked about the canonical solution of problem {problem.id}, it {score}"
        ) from score.__cause__
    return score
