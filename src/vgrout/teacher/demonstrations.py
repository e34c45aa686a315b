"""Demonstrations: a pool's rollouts mixed into the groups.

On its own a model needs thousands of answers to find a flaw; a few cached rollouts of a model that already hacks it
bring the same dynamics within tens of steps. Labels are used as cached and stay typed as such.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from loguru import logger

from vgrout.config.run import Config
from vgrout.data import CachedGrade, Rollout, Task
from vgrout.errors import Refused
from vgrout.rng import py_stream
from vgrout.teacher.pools import Demo, Pool

if TYPE_CHECKING:
    from vgrout.model.policy import LanguageModel


class Teacher:
    """A source of demonstrations, drawn from a pool; there are none with `pool=None`."""

    @classmethod
    def of_run(
        cls, cfg: Config, pool: Pool | None, lm: "LanguageModel", problems: Sequence[Task]
    ) -> "Teacher":
        """The run's, for these training problems. Raises Refused as below."""
        return cls(
            pool if cfg.mixes else None,
            lm,
            problems,
            per_group=cfg.n_teacher,
            seed=cfg.run.seed,
            off_step=cfg.env.teacher_off_step,
            modes=cfg.env.demo_modes,
            max_new=cfg.scale.max_new,
        )

    def __init__(
        self,
        pool: Pool | None,
        lm: "LanguageModel",
        problems: Sequence[Task],
        *,
        per_group: int,
        seed: int,
        off_step: int | None,
        modes: Sequence[str],
        max_new: int,
    ):
        """lm: of it tokenizer and chat template. per_group: G_t. problems: those in training. modes: the only ones
        demonstrated; none: all.

        Cached ids are used only with the tokenizer that made them; else the completion's text is tokenised again.

        Raises:
            Refused: a pool that demonstrates none of these problems, or under other modes, or has no usable tokens.
        """
        self.pool, self.lm, self.per_group, self.seed, self.off_step = (
            pool,
            lm,
            per_group,
            seed,
            off_step,
        )
        self.modes, self.max_new = set(modes), max_new
        self.retokenised = self._off_logged = False
        # prompts then and now: how many, and whose are not the same
        self.compared, self.differ = 0, list[int]()
        self._tokens: dict[tuple[int, int], tuple[tuple[int, ...], bool]] = {}
        if pool is None or not per_group:
            return
        covered = [
            p
            for p in problems
            if p.id in pool.demos and (not self.modes or p.flaws[0] in self.modes)
        ]
        self.retokenised = pool.tokenizer_sha256 != lm.tokenizer_sha256
        if fault := next(self._faults(pool, covered, len(problems)), ""):
            raise Refused(fault)
        if self.retokenised:
            logger.warning(
                f"{pool.folder}: not made with this tokenizer; completions are tokenised again"
            )
        self._compare(pool, covered)
        if self.differ:
            logger.warning(
                f"{pool.folder}: {len(self.differ)} of {self.compared} prompts are not what the pool has, first "
                f"that of problem {self.differ[0]}; rendered live all the same, recorded in run.json"
            )

    def _faults(self, pool: Pool, covered: Sequence[Task], n: int) -> Iterator[str]:
        where = f"--teacher-pool-dir {pool.folder}"
        if not covered:
            yield f"{where}: demonstrates none of the {n} training problems"
        for mode in sorted(self.modes - {p.flaws[0] for p in covered}):
            yield f"--teacher-modes {mode}: {pool.folder} demonstrates no training problem of it"
        for p in covered:
            for mode in {d.mode for d in pool.demos[p.id]} - {p.flaws[0], None}:
                yield (
                    f"{where}: problem {p.id} was graded as {mode}, this run checks it as {p.flaws[0]}; "
                    "use --env-mode own, or make the pool again"
                )
        if self.retokenised and any(
            d.completion is None for rows in pool.demos.values() for d in rows
        ):
            yield f"{where}: made with another tokenizer and without completion texts; make it again with this model"

    def _compare(self, pool: Pool, covered: Sequence[Task]) -> None:
        """Today's prompts with those under which the pool's rollouts were sampled, or stored."""
        for p in covered:
            demo = pool.demos[p.id][0]
            now: Sequence[object] = self.lm.prompt_text(p.messages)
            then: Sequence[object] | None = demo.prompt
            if demo.prompt_ids is not None and not self.retokenised:
                now, then = self.lm.render(p.messages), demo.prompt_ids
            self.compared += then is not None
            if then not in (None, now):
                self.differ.append(p.id)

    def record(self) -> dict[str, Any] | None:
        """The source of labels, tokens and prompts, for run.json; None without demonstrations."""
        if self.pool is None or not self.per_group:
            return None
        return {
            "folder": str(self.pool.folder),
            "labels": f"cached, grader {self.pool.grader}",
            "retokenised": self.retokenised,
            "prompts_compared": self.compared,
            "prompts_differ": self.differ,
        }

    def count(self, problem: Task, step: int) -> int:
        """G_t for this problem at this step: 0 when off, held out, or not covered."""
        if self.pool is None:
            return 0
        if self.off_step is not None and step >= self.off_step:
            if not self._off_logged:
                self._off_logged = True
                logger.info(
                    f"step {step}: no demonstrations from step {self.off_step} on; every row is a live rollout"
                )
            return 0
        if self.modes and problem.flaws[0] not in self.modes:
            return 0
        return self.per_group if problem.id in self.pool.demos else 0

    def demos(self, problem: Task, step: int) -> list[tuple[Rollout, CachedGrade]]:
        """G_t rollouts with their cached grades, drawn without replacement while there are enough; a function of (seed,
        step, problem)."""
        if not (n := self.count(problem, step)):
            return []
        assert self.pool is not None
        rows = self.pool.demos[problem.id]
        rng = py_stream(self.seed, "demos", step, problem.id)
        picks: list[int] = []
        while len(picks) < n:
            picks += rng.sample(range(len(rows)), min(n - len(picks), len(rows)))
        prompt_ids = self.lm.render(problem.messages)
        return [(self._rollout(problem, rows[i], i, prompt_ids), rows[i].grade) for i in picks]

    def _rollout(
        self, problem: Task, demo: Demo, index: int, prompt_ids: tuple[int, ...]
    ) -> Rollout:
        key = (problem.id, index)
        if key not in self._tokens:
            self._tokens[key] = self._ids(demo)
        ids, finished = self._tokens[key]
        return Rollout(
            problem=problem,
            source="teacher",
            deployed=False,
            prompt_ids=prompt_ids,
            completion_ids=ids,
            text=demo.completion or "",
            finished=finished,
            logp_full=demo.logp[: len(ids)] if demo.logp and not self.retokenised else None,
        )

    def _ids(self, demo: Demo) -> tuple[tuple[int, ...], bool]:
        """Tokens up to the EOS and at most max_new, and whether they end with it."""
        if self.retokenised:
            ids, finished = (
                self.lm.encode_completion(demo.completion or "", demo.finished),
                demo.finished,
            )
        else:  # older pools pad behind the EOS
            end = next(
                (i for i, token in enumerate(demo.completion_ids) if token in self.lm.eos_ids), None
            )
            ids, finished = demo.completion_ids[: None if end is None else end + 1], end is not None
        return ids[: self.max_new], finished and len(ids) <= self.max_new
